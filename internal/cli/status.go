package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
)

func statusCommand(a *term.App) *cobra.Command {
	var check, sick bool
	cmd := showing(a, &cobra.Command{
		Use:   "status",
		Short: "Show the state of the daemon, and warnings",
		Args:  term.Operands(),
	}, func(ctx context.Context, _ *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error) {
		st, err := admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
		if err == nil {
			sick = !healthy(st)
		}
		return st, func(p *term.Printer) { printStatus(a, p, st) }, err
	})
	show := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		err := show(cmd, args)
		if err == nil && check && sick {
			err = &term.Failure{Code: term.ExitNotReady}
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

func printStatus(a *term.App, p *term.Printer, st *gpreemptv1.GetStatusResponse) {
	p.Line(fmt.Sprintf("gpreemptd %s on %s, up %s: ", st.GetVersion(), st.GetBackend(), a.Age(st.GetStartedAt())), health(st))
	p.Linef("")

	field := func(name string, value any, style term.Style, notes ...string) {
		c := term.CellOf(value)
		c.Style = style
		if len(notes) > 0 {
			c.Text = fmt.Sprintf("%-4s", c.Text) + " " + strings.Join(notes, ", ")
		}
		p.Line(fmt.Sprintf("  %-9s  ", name), c)
	}
	field("GPUs", st.GetGpuCount(), term.StyleNone)
	ofThese := []string{fmt.Sprintf("%d offline", st.GetOfflineCount()), fmt.Sprintf("%d suspended now", st.GetSuspendedCount())}
	if n := st.GetShareCappedCount(); n > 0 {
		ofThese = append(ofThese, fmt.Sprintf("%d by the share cap", n))
	}
	if n := st.GetCannotSuspendCount(); n > 0 {
		ofThese = append(ofThese, fmt.Sprintf("%d cannot be suspended", n))
	}
	field("targets", st.GetTargetCount(), term.StyleNone, ofThese...)
	field("queues", st.GetQueueCount(), term.StyleNone)
	field("leases", st.GetLeaseCount(), term.StyleNone)
	field("policy", st.GetPolicy(), term.StyleNone)
	if st.GetDraining() {
		field("draining", "yes: nothing is suspended", term.StyleNote)
	} else {
		field("draining", "no", term.StyleNone)
	}
	if p.Wide {
		field("revisions", fmt.Sprintf("inventory %d, events %d", st.GetInventoryRevision(), st.GetEventRevision()), term.StyleNone)
		field("daemon", a.DaemonAt(), term.StyleNone)
		field("boot id", term.Or(st.GetBootId(), "-"), term.StyleNone)
		field("gpctl", api.VersionString(), term.StyleNone)
		if len(st.GetSources()) > 0 {
			p.Linef("")
			printSources(a, p, st.GetSources())
		}
	}

	if len(st.GetWarnings()) > 0 {
		p.Linef("")
		printWarnings(p, st.GetWarnings())
	}
}

// printWarnings lists warnings with their remedies.
func printWarnings(p *term.Printer, list []*gpreemptv1.Warning) {
	if len(list) == 0 {
		p.Linef("no warnings")
	}
	for i, w := range list {
		if i > 0 {
			p.Linef("")
		}
		p.Line(term.Cell{Text: w.GetSeverity(), Style: severity(w)}, " "+w.GetCode()+": "+w.GetText())
		if w.GetRemedy() != "" {
			p.Linef("  try: %s", w.GetRemedy())
		}
	}
}

// printSources lists the sources of the daemon's inventory.
func printSources(a *term.App, p *term.Printer, list []*gpreemptv1.Source) {
	t := p.Table("  ", term.Columns{"SOURCE", "WORKS", ">EVERY", ">TOOK", ">LAST", ">READINGS", "NOTE"})
	for _, s := range list {
		works := term.Cell{Text: "yes", Style: term.StyleGood}
		switch {
		case !s.GetAvailable() && s.GetName() == "events" && s.GetReadings() == 0:
			works = term.Cell{Text: "-"} // no target has sent one
		case !s.GetAvailable():
			works = term.Cell{Text: "no", Style: term.StyleNote}
		}
		every := term.Took(s.GetEvery())
		if s.GetEvery().AsDuration() == 0 {
			every = "-"
		}
		t.Row(s.GetName(), works, every, term.Took(s.GetTook()), a.Age(s.GetReadAt()), s.GetReadings(),
			term.Or(s.GetNote(), "-"))
	}
	t.Flush()
}

// health counts the warnings.
func health(st *gpreemptv1.GetStatusResponse) term.Cell {
	var errs, warnings int
	for _, w := range st.GetWarnings() {
		if severity(w) == term.StyleBad {
			errs++
		} else {
			warnings++
		}
	}
	var counts []string
	if errs > 0 {
		counts = append(counts, term.Count(errs, "error"))
	}
	if warnings > 0 {
		counts = append(counts, term.Count(warnings, "warning"))
	}
	switch {
	case errs > 0:
		return term.Cell{Text: strings.Join(counts, ", "), Style: term.StyleBad}
	case warnings > 0:
		return term.Cell{Text: strings.Join(counts, ", "), Style: term.StyleNote}
	}
	return term.Cell{Text: "no warnings", Style: term.StyleGood}
}

func severity(w *gpreemptv1.Warning) term.Style {
	if w.GetSeverity() == "error" {
		return term.StyleBad
	}
	return term.StyleNote
}

func statsCommand(a *term.App) *cobra.Command {
	return showing(a, &cobra.Command{
		Use:   "stats",
		Short: "Show counters and latencies since the daemon started",
		Args:  term.Operands(),
	}, func(ctx context.Context, _ *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error) {
		resp, err := admin.GetStatistics(ctx, &gpreemptv1.GetStatisticsRequest{})
		return resp, func(p *term.Printer) { printStats(p, resp.GetStatistics()) }, err
	})
}

// printShadow answers what the shadow policy would have done.
func printShadow(p *term.Printer, r *gpreemptv1.ShadowReport) {
	if r == nil {
		return
	}
	lasted := term.Took(r.GetLasted())
	var suspends uint64
	var total time.Duration
	for _, row := range r.GetRows() {
		suspends, total = suspends+row.GetSuspends(), total+row.GetTotal().AsDuration()
	}
	tense := "was shadow for " + lasted
	if r.GetInForce() {
		tense = "is shadow, for " + lasted + " now"
	}
	if suspends == 0 {
		p.Linef("The policy %s: it would have suspended nothing.", tense)
		return
	}
	p.Linef("The policy %s: it would have made %s, for %s in total.", tense, term.Count(suspends, "suspension"), term.Took(durationpb.New(total)))
	t := p.Table("", term.Columns{"WOULD SUSPEND", "COMMAND", "BY", ">TIMES", ">TOTAL", ">SHARE", ">LONGEST", ">GPU TIME", "FOR"})
	for _, row := range r.GetRows() {
		took := row.GetTotal().AsDuration()
		share := 100 * took.Seconds() / max(r.GetLasted().AsDuration(), time.Nanosecond).Seconds()
		t.Row(term.Or(row.GetTargetId(), "others"), term.Or(row.GetComm(), "-"), term.Or(row.GetClassifiedBy(), "-"), row.GetSuspends(), term.Took(row.GetTotal()),
			fmt.Sprintf("%.1f %%", share), term.Took(row.GetLongest()), term.Took(durationpb.New(took*time.Duration(max(1, row.GetGpuCount())))), term.Or(row.GetOwner(), "-"))
	}
	t.Flush()
}

func printStats(p *term.Printer, s *gpreemptv1.Statistics) {
	// What a shadow policy would have done comes first only while it is in force.
	if s.GetShadow().GetInForce() {
		printShadow(p, s.GetShadow())
		p.Linef("")
	} else if s.GetShadow() != nil {
		defer func() {
			p.Linef("")
			printShadow(p, s.GetShadow())
		}()
	}
	t := p.Table("", term.Columns{"SINCE START", ">COUNT", "NOTE"})
	share := func(part, whole uint64) string {
		if whole == 0 {
			return ""
		}
		return fmt.Sprintf("%.1f %% of announcements", 100*float64(part)/float64(whole))
	}
	counter := func(name string, n uint64, note string, bad bool) {
		c := term.Cell{Text: name}
		if bad && n > 0 {
			c.Style = term.StyleBad
		}
		t.Row(c, n, note)
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
	t.Flush()
	p.Linef("")

	t = p.Table("", term.Columns{"LATENCY", ">COUNT", ">MEAN", ">P50", ">P95", ">P99", ">MAX", "NOTE"})
	latency := func(name string, l *gpreemptv1.LatencySummary, note string) {
		row := []any{name, l.GetCount()}
		if l.GetCount() == 0 {
			row = append(row, "-", "-", "-", "-", "-")
		} else {
			row = append(row, term.Took(l.GetMean()), term.Took(l.GetP50()), term.Took(l.GetP95()),
				term.Took(l.GetP99()), term.Took(l.GetMax()))
		}
		t.Row(append(row, note)...)
	}
	latency("quiet", s.GetQuiesceLatency(), "from announcement to quiet GPUs")
	latency("suspend", s.GetSuspendLatency(), "of one target")
	latency("resume", s.GetResumeLatency(), "of one target")
	latency("lease", s.GetLeaseDuration(), "from announcement to end")
	t.Flush()

	if len(s.GetRefusals()) > 0 {
		p.Linef("")
		t = p.Table("", term.Columns{"REFUSED", ">COUNT"})
		for _, r := range s.GetRefusals() {
			t.Row(r.GetReason(), r.GetCount())
		}
		t.Flush()
	}
	if len(s.GetRules()) > 0 {
		p.Linef("")
		printRules(p, s.GetRules())
	}
}

// printRules lists how often each rule matched and decided. A rule that never does may be
// wrong.
func printRules(p *term.Printer, list []*gpreemptv1.RuleCount) {
	t := p.Table("", term.Columns{"RULE", "CLASS", ">MATCHED", ">DECIDED", ">MATCHES NOW", ">DECIDES NOW"})
	for _, r := range list {
		t.Row(r.GetRule(), term.Or(api.EnumName(r.GetClass()), "-"), r.GetMatched(), r.GetDecided(), r.GetMatchesNow(),
			r.GetDecidesNow())
	}
	t.Flush()
}

func drainCommand(a *term.App) *cobra.Command {
	var wait bool
	set := func(cmd *cobra.Command, on bool) error {
		return term.Ask(cmd, a, term.AdminClient.SetDrain, &gpreemptv1.SetDrainRequest{Drain: on, Wait: wait}, func(p *term.Printer, resp *gpreemptv1.SetDrainResponse) {
			switch {
			case !resp.GetDraining():
				p.Linef("not draining: leases suspend offline work again")
			case resp.GetSuspendedCount() == 0:
				p.Linef("draining: nothing is suspended")
			default:
				p.Linef("draining: %s still suspended", term.Count(resp.GetSuspendedCount(), "target"))
			}
		})
	}
	on := &cobra.Command{
		Use:   "on",
		Short: "Resume all targets and suspend none",
		Args:  term.Operands(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return set(cmd, true) },
	}
	on.Flags().BoolVar(&wait, "wait", false, "reply when nothing is suspended any more, after at most 10s")
	off := &cobra.Command{
		Use:   "off",
		Short: "Suspend offline work for leases again",
		Args:  term.Operands(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return set(cmd, false) },
	}
	return term.Noun("drain", "Resume all targets, before maintenance", on, off)
}
