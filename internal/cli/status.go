package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show what the daemon does and what is wrong",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
				if err != nil {
					return err
				}
				return a.show(st, func(p *printer) { a.printStatus(p, st) })
			})
		},
	}
}

func (a *app) printStatus(p *printer, st *gpreemptv1.GetStatusResponse) {
	p.line(text(fmt.Sprintf("gpreemptd %s on %s, up %s: ", st.GetVersion(), st.GetBackend(), a.age(st.GetStartedAt()))), health(st))
	p.linef("")

	field := func(name string, value any, style style, notes ...string) {
		c := text(value)
		c.style = style
		if len(notes) > 0 {
			c.text = fmt.Sprintf("%-4s", c.text) + " " + strings.Join(notes, ", ")
		}
		p.line(text(fmt.Sprintf("  %-9s  ", name)), c)
	}
	field("GPUs", st.GetGpuCount(), styleNone)
	field("targets", st.GetTargetCount(), styleNone,
		fmt.Sprintf("%d offline", st.GetOfflineCount()), fmt.Sprintf("%d suspended now", st.GetSuspendedCount()))
	field("queues", st.GetQueueCount(), styleNone)
	field("leases", st.GetLeaseCount(), styleNone)
	field("policy", st.GetPolicy(), styleNone)
	if st.GetDraining() {
		field("draining", "yes: everything runs, nothing is suspended", styleNote)
	} else {
		field("draining", "no", styleNone)
	}
	if p.wide {
		field("inventory", fmt.Sprintf("revision %d", st.GetInventoryRevision()), styleNone)
		field("events", fmt.Sprintf("revision %d", st.GetEventRevision()), styleNone)
		field("daemon", a.daemonAt(), styleNone)
		field("boot id", or(st.GetBootId(), "-"), styleNone)
		field("gpctl", api.VersionString(), styleNone)
		if len(st.GetSources()) > 0 {
			p.linef("")
			a.printSources(p, st.GetSources())
		}
	}

	for _, w := range st.GetWarnings() {
		p.linef("")
		p.line(cell{w.GetSeverity(), severity(w)}, text(" "+w.GetCode()+": "+w.GetText()))
		if w.GetRemedy() != "" {
			p.linef("  try: %s", w.GetRemedy())
		}
	}
}

// printSources lists where the daemon learns of queues.
func (a *app) printSources(p *printer, list []*gpreemptv1.Source) {
	t := p.table("  ", columns{"SOURCE", "WORKS", ">EVERY", ">TOOK", ">LAST", ">READINGS", "NOTE"})
	for _, s := range list {
		works := cell{"yes", styleGood}
		if !s.GetAvailable() {
			works = cell{"no", styleNote}
		}
		every := took(s.GetEvery())
		if s.GetEvery().AsDuration() == 0 {
			every = "-"
		}
		t.row(text(s.GetName()), works, text(every), text(took(s.GetTook())), text(a.age(s.GetReadAt())), text(s.GetReadings()),
			text(or(s.GetNote(), "-")))
	}
	t.flush()
}

// health says in a few words whether someone has to act.
func health(st *gpreemptv1.GetStatusResponse) cell {
	var errs, warnings int
	for _, w := range st.GetWarnings() {
		if severity(w) == styleBad {
			errs++
		} else {
			warnings++
		}
	}
	var said []string
	if errs > 0 {
		said = append(said, count(errs, "error"))
	}
	if warnings > 0 {
		said = append(said, count(warnings, "warning"))
	}
	switch {
	case errs > 0:
		return cell{strings.Join(said, ", "), styleBad}
	case warnings > 0:
		return cell{strings.Join(said, ", "), styleNote}
	}
	return cell{"all is well", styleGood}
}

func severity(w *gpreemptv1.Warning) style {
	if w.GetSeverity() == "error" {
		return styleBad
	}
	return styleNote
}

func (a *app) statsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "stats",
		Short: "Show counters and latencies since the daemon started",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				resp, err := admin.GetStatistics(ctx, &gpreemptv1.GetStatisticsRequest{})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) { printStats(p, resp.GetStatistics()) })
			})
		},
	}
}

func printStats(p *printer, s *gpreemptv1.Statistics) {
	t := p.table("", columns{"SINCE START", ">COUNT", "NOTE"})
	share := func(part, whole uint64) string {
		if whole == 0 {
			return ""
		}
		return fmt.Sprintf("%.1f %% of the announcements", 100*float64(part)/float64(whole))
	}
	counter := func(name string, n uint64, note string, bad bool) {
		c := cell{text: name}
		if bad && n > 0 {
			c.style = styleBad
		}
		t.row(c, text(n), text(note))
	}
	counter("announcements", s.GetAnnouncements(), "", false)
	counter("quiet at the answer", s.GetQuiesced(), share(s.GetQuiesced(), s.GetAnnouncements()), false)
	counter("max_wait passed", s.GetMaxWaitPassed(), share(s.GetMaxWaitPassed(), s.GetAnnouncements()), false)
	counter("suspends", s.GetSuspends(), "", false)
	counter("resumes", s.GetResumes(), "", false)
	counter("failures", s.GetFailures(), "suspends and resumes that failed", true)
	counter("coalesced", s.GetCoalesced(), "suspends saved by the linger", false)
	counter("forced resumes", s.GetForcedResumes(), "by the share floor or max_suspend", false)
	counter("shadow suspends", s.GetShadowSuspends(), "what the shadow policy would have done", false)
	t.flush()
	p.linef("")

	t = p.table("", columns{"LATENCY", ">COUNT", ">MEAN", ">P50", ">P95", ">P99", ">MAX", "NOTE"})
	latency := func(name string, l *gpreemptv1.LatencySummary, note string) {
		row := []cell{text(name), text(l.GetCount())}
		if l.GetCount() == 0 {
			row = append(row, text("-"), text("-"), text("-"), text("-"), text("-"))
		} else {
			row = append(row, text(took(l.GetMean())), text(took(l.GetP50())), text(took(l.GetP95())),
				text(took(l.GetP99())), text(took(l.GetMax())))
		}
		t.row(append(row, text(note))...)
	}
	latency("quiesce", s.GetQuiesceLatency(), "announcement to quiet GPUs")
	latency("suspend", s.GetSuspendLatency(), "one target")
	latency("resume", s.GetResumeLatency(), "one target")
	latency("lease", s.GetLeaseDuration(), "from announcement to end")
	t.flush()

	if len(s.GetRefusals()) > 0 {
		p.linef("")
		t = p.table("", columns{"REFUSED", ">COUNT"})
		for _, r := range s.GetRefusals() {
			t.row(text(r.GetReason()), text(r.GetCount()))
		}
		t.flush()
	}
	if len(s.GetRules()) > 0 {
		p.linef("")
		printRules(p, s.GetRules())
	}
}

// printRules says how often each rule matched: one that never does, or that never
// decides, is worth a look.
func printRules(p *printer, list []*gpreemptv1.RuleCount) {
	t := p.table("", columns{"RULE", "CLASS", ">MATCHED", ">DECIDED", ">MATCHES NOW", ">DECIDES NOW"})
	for _, r := range list {
		t.row(text(r.GetRule()), text(or(api.EnumName(r.GetClass()), "-")), text(r.GetMatched()), text(r.GetDecided()), text(r.GetMatchesNow()),
			text(r.GetDecidesNow()))
	}
	t.flush()
}

func (a *app) drainCommand() *cobra.Command {
	var wait bool
	set := func(cmd *cobra.Command, on bool) error {
		return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
			resp, err := admin.SetDrain(ctx, &gpreemptv1.SetDrainRequest{Drain: on, Wait: wait})
			if err != nil {
				return err
			}
			return a.show(resp, func(p *printer) {
				switch {
				case !resp.GetDraining():
					p.linef("not draining: leases suspend offline work again")
				case resp.GetSuspendedCount() == 0:
					p.linef("draining: everything runs, nothing is suspended")
				default:
					p.linef("draining: %s not running yet", count(resp.GetSuspendedCount(), "target"))
				}
			})
		})
	}
	on := &cobra.Command{
		Use:   "on",
		Short: "Let everything run and suspend nothing more",
		Args:  operands(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return set(cmd, true) },
	}
	on.Flags().BoolVar(&wait, "wait", false, "answer when nothing is suspended any more, after 10s at most")
	off := &cobra.Command{
		Use:   "off",
		Short: "Suspend offline work for leases again",
		Args:  operands(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return set(cmd, false) },
	}
	return noun("drain", "Let everything run, before maintenance", on, off)
}
