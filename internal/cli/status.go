package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) statusCommand() *cobra.Command {
	var check, sick bool
	cmd := a.watchable(&cobra.Command{
		Use:   "status",
		Short: "Show the state of the daemon, and warnings",
		Args:  operands(),
	}, onEvents, func(ctx context.Context, _ *cobra.Command, admin adminClient) (proto.Message, func(*printer), error) {
		st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
		if err == nil {
			sick = !healthy(st)
		}
		return st, func(p *printer) { a.printStatus(p, st) }, err
	})
	show := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if check && cmd.Flags().Changed("watch") {
			return usage(cmd, "--check and --watch are mutually exclusive")
		}
		err := show(cmd, args)
		if err == nil && check && sick {
			err = &failure{code: ExitNotReady}
		}
		return err
	}
	cmd.Flags().BoolVar(&check, "check", false, "exit with 7 when nothing can be suspended or the daemon reports an error")
	return cmd
}

// healthy reports whether the daemon can suspend work and reports no error.
func healthy(st *gpreemptv1.GetStatusResponse) bool {
	return !slices.ContainsFunc(st.GetWarnings(), func(w *gpreemptv1.Warning) bool {
		return w.GetSeverity() == "error" || w.GetCode() == "NO_KFD" || w.GetCode() == "NO_MECHANISM"
	})
}

func (a *app) printStatus(p *printer, st *gpreemptv1.GetStatusResponse) {
	p.line(fmt.Sprintf("gpreemptd %s on %s, up %s: ", st.GetVersion(), st.GetBackend(), a.age(st.GetStartedAt())), health(st))
	p.linef("")

	field := func(name string, value any, style style, notes ...string) {
		c := cellOf(value)
		c.style = style
		if len(notes) > 0 {
			c.text = fmt.Sprintf("%-4s", c.text) + " " + strings.Join(notes, ", ")
		}
		p.line(fmt.Sprintf("  %-9s  ", name), c)
	}
	field("GPUs", st.GetGpuCount(), styleNone)
	ofThese := []string{fmt.Sprintf("%d offline", st.GetOfflineCount()), fmt.Sprintf("%d suspended now", st.GetSuspendedCount())}
	if n := st.GetCannotSuspendCount(); n > 0 {
		ofThese = append(ofThese, fmt.Sprintf("%d cannot be suspended", n))
	}
	field("targets", st.GetTargetCount(), styleNone, ofThese...)
	field("queues", st.GetQueueCount(), styleNone)
	field("leases", st.GetLeaseCount(), styleNone)
	field("policy", st.GetPolicy(), styleNone)
	if st.GetDraining() {
		field("draining", "yes: nothing is suspended", styleNote)
	} else {
		field("draining", "no", styleNone)
	}
	if p.wide {
		field("revisions", fmt.Sprintf("inventory %d, events %d", st.GetInventoryRevision(), st.GetEventRevision()), styleNone)
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
		p.line(cell{w.GetSeverity(), severity(w)}, " "+w.GetCode()+": "+w.GetText())
		if w.GetRemedy() != "" {
			p.linef("  try: %s", w.GetRemedy())
		}
	}
}

// printSources lists the sources of the daemon's inventory.
func (a *app) printSources(p *printer, list []*gpreemptv1.Source) {
	t := p.table("  ", columns{"SOURCE", "WORKS", ">EVERY", ">TOOK", ">LAST", ">READINGS", "NOTE"})
	for _, s := range list {
		works := cell{"yes", styleGood}
		switch {
		case !s.GetAvailable() && s.GetName() == "events" && s.GetReadings() == 0:
			works = cell{text: "-"} // no target has sent one
		case !s.GetAvailable():
			works = cell{"no", styleNote}
		}
		every := took(s.GetEvery())
		if s.GetEvery().AsDuration() == 0 {
			every = "-"
		}
		t.row(s.GetName(), works, every, took(s.GetTook()), a.age(s.GetReadAt()), s.GetReadings(),
			or(s.GetNote(), "-"))
	}
	t.flush()
}

// health counts the warnings.
func health(st *gpreemptv1.GetStatusResponse) cell {
	var errs, warnings int
	for _, w := range st.GetWarnings() {
		if severity(w) == styleBad {
			errs++
		} else {
			warnings++
		}
	}
	var counts []string
	if errs > 0 {
		counts = append(counts, count(errs, "error"))
	}
	if warnings > 0 {
		counts = append(counts, count(warnings, "warning"))
	}
	switch {
	case errs > 0:
		return cell{strings.Join(counts, ", "), styleBad}
	case warnings > 0:
		return cell{strings.Join(counts, ", "), styleNote}
	}
	return cell{"no warnings", styleGood}
}

func severity(w *gpreemptv1.Warning) style {
	if w.GetSeverity() == "error" {
		return styleBad
	}
	return styleNote
}

func (a *app) statsCommand() *cobra.Command {
	return a.watchable(&cobra.Command{
		Use:   "stats",
		Short: "Show counters and latencies since the daemon started",
		Args:  operands(),
	}, onEvents, func(ctx context.Context, _ *cobra.Command, admin adminClient) (proto.Message, func(*printer), error) {
		resp, err := admin.GetStatistics(ctx, &gpreemptv1.GetStatisticsRequest{})
		return resp, func(p *printer) { printStats(p, resp.GetStatistics()) }, err
	})
}

func printStats(p *printer, s *gpreemptv1.Statistics) {
	t := p.table("", columns{"SINCE START", ">COUNT", "NOTE"})
	share := func(part, whole uint64) string {
		if whole == 0 {
			return ""
		}
		return fmt.Sprintf("%.1f %% of announcements", 100*float64(part)/float64(whole))
	}
	counter := func(name string, n uint64, note string, bad bool) {
		c := cell{text: name}
		if bad && n > 0 {
			c.style = styleBad
		}
		t.row(c, n, note)
	}
	counter("announcements", s.GetAnnouncements(), "", false)
	counter("GPUs quiet before reply", s.GetQuiesced(), share(s.GetQuiesced(), s.GetAnnouncements()), false)
	counter("max_wait passed", s.GetMaxWaitPassed(), share(s.GetMaxWaitPassed(), s.GetAnnouncements()), false)
	counter("suspends", s.GetSuspends(), "", false)
	counter("resumes", s.GetResumes(), "", false)
	counter("failures", s.GetFailures(), "failed suspends and resumes", true)
	counter("coalesced", s.GetCoalesced(), "suspends avoided by the linger", false)
	counter("forced resumes", s.GetForcedResumes(), "by the share floor or max_suspend", false)
	counter("attach cycles", s.GetAttachCycles(), "runlist cycles on GPUs that the targets do not use", false)
	counter("shadow suspends", s.GetShadowSuspends(), "decided by the shadow policy, not made", false)
	t.flush()
	p.linef("")

	t = p.table("", columns{"LATENCY", ">COUNT", ">MEAN", ">P50", ">P95", ">P99", ">MAX", "NOTE"})
	latency := func(name string, l *gpreemptv1.LatencySummary, note string) {
		row := []any{name, l.GetCount()}
		if l.GetCount() == 0 {
			row = append(row, "-", "-", "-", "-", "-")
		} else {
			row = append(row, took(l.GetMean()), took(l.GetP50()), took(l.GetP95()),
				took(l.GetP99()), took(l.GetMax()))
		}
		t.row(append(row, note)...)
	}
	latency("quiet", s.GetQuiesceLatency(), "from announcement to quiet GPUs")
	latency("suspend", s.GetSuspendLatency(), "of one target")
	latency("resume", s.GetResumeLatency(), "of one target")
	latency("lease", s.GetLeaseDuration(), "from announcement to end")
	t.flush()

	if len(s.GetRefusals()) > 0 {
		p.linef("")
		t = p.table("", columns{"REFUSED", ">COUNT"})
		for _, r := range s.GetRefusals() {
			t.row(r.GetReason(), r.GetCount())
		}
		t.flush()
	}
	if len(s.GetRules()) > 0 {
		p.linef("")
		printRules(p, s.GetRules())
	}
}

// printRules lists how often each rule matched and decided. A rule that never does may be
// wrong.
func printRules(p *printer, list []*gpreemptv1.RuleCount) {
	t := p.table("", columns{"RULE", "CLASS", ">MATCHED", ">DECIDED", ">MATCHES NOW", ">DECIDES NOW"})
	for _, r := range list {
		t.row(r.GetRule(), or(api.EnumName(r.GetClass()), "-"), r.GetMatched(), r.GetDecided(), r.GetMatchesNow(),
			r.GetDecidesNow())
	}
	t.flush()
}

func (a *app) drainCommand() *cobra.Command {
	var wait bool
	set := func(cmd *cobra.Command, on bool) error {
		return ask(cmd, a, adminClient.SetDrain, &gpreemptv1.SetDrainRequest{Drain: on, Wait: wait}, func(p *printer, resp *gpreemptv1.SetDrainResponse) {
			switch {
			case !resp.GetDraining():
				p.linef("not draining: leases suspend offline work again")
			case resp.GetSuspendedCount() == 0:
				p.linef("draining: nothing is suspended")
			default:
				p.linef("draining: %s still suspended", count(resp.GetSuspendedCount(), "target"))
			}
		})
	}
	on := &cobra.Command{
		Use:   "on",
		Short: "Resume all targets and suspend none",
		Args:  operands(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return set(cmd, true) },
	}
	on.Flags().BoolVar(&wait, "wait", false, "reply when nothing is suspended any more, after at most 10s")
	off := &cobra.Command{
		Use:   "off",
		Short: "Suspend offline work for leases again",
		Args:  operands(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return set(cmd, false) },
	}
	return noun("drain", "Resume all targets, before maintenance", on, off)
}
