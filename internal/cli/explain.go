package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/words"
)

func (a *app) targetExplain() *cobra.Command {
	return &cobra.Command{
		Use:   "explain TARGET",
		Short: "Tell why a process is, or is not, suspended",
		Long: `Tells what holds for one process now, then the checks in the order the scheduler
makes them: the first "no" is what decides.`,
		Example:           "  gpctl target explain 4242",
		Args:              operands("TARGET"),
		ValidArgsFunction: a.named,
		RunE: a.onTarget(func(ctx context.Context, admin gpreemptv1.AdminServiceClient, target string) error {
			resp, err := admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: target})
			if err != nil {
				return err
			}
			return a.show(resp, func(p *printer) { a.printExplanation(p, resp) })
		}),
	}
}

func (a *app) printExplanation(p *printer, e *gpreemptv1.ExplainTargetResponse) {
	p.line(cell{e.GetVerdict(), styleBold})
	p.linef("")
	a.printTarget(p, e.GetTarget())

	if steps := e.GetSteps(); len(steps) > 0 {
		p.linef("")
		t := p.table("", columns{">#", "HOLDS", "CHECK", "FACTS"})
		for i, s := range steps {
			holds := cell{"no", styleNote}
			if s.GetHolds() {
				holds = cell{"yes", styleGood}
			}
			t.row(text(i+1), holds, text(s.GetQuestion()), text(s.GetDetail()))
		}
		t.flush()
	}

	p.linef("")
	if len(e.GetLeases()) == 0 {
		p.linef("No lease covers its GPUs.")
		return
	}
	a.printLeases(p, e.GetLeases())
}

// printTarget writes what is known of one target, a line for each group of facts.
func (a *app) printTarget(p *printer, g *gpreemptv1.Target) {
	field := func(name string, value ...cell) {
		p.line(append([]cell{text(fmt.Sprintf("  %-9s  ", name))}, value...)...)
	}
	field("process", text(fmt.Sprintf("%d %s, uid %d", g.GetPid(), g.GetComm(), g.GetUid())))
	if g.GetCmdline() != "" {
		length := 100
		if p.wide {
			length = 4096
		}
		field("command", text(cut(g.GetCmdline(), length)))
	}
	if p.wide {
		field("target", text(g.GetTargetId()))
		field("cgroup", text(or(g.GetCgroup(), "-")))
	}
	field("class", text(fmt.Sprintf("%s, priority %d, by %s", words.Of(g.GetClass()), g.GetPriority(), or(g.GetDecidedBy(), "default"))))

	since := " for " + took(g.GetInState())
	if g.GetRunsWithin() != nil {
		since += ", runs again within " + took(g.GetRunsWithin())
	}
	field("state", state(g.GetState()), text(since))
	field("queues", text(fmt.Sprintf("%d on GPU %s", g.GetQueueCount(), gpus(g.GetGpuIds(), true))))
	if g.GetSuspends() > 0 {
		field("so far", text(fmt.Sprintf("suspended %s, for %s in all", times(g.GetSuspends()), took(g.GetSuspendedTotal()))))
	}
	switch {
	case g.GetAttachError() != "":
		field("mechanism", cell{"none: " + g.GetAttachError(), styleBad})
	case g.GetMechanism() == "":
		field("mechanism", text("none attached"))
	case g.GetLearnedSuspend() != nil:
		field("mechanism", text(fmt.Sprintf("%s, suspends in about %s, resumes in about %s", g.GetMechanism(),
			took(g.GetLearnedSuspend()), took(g.GetLearnedResume()))))
	default:
		field("mechanism", text(g.GetMechanism()))
	}
	if p.wide && g.GetMechanismWhy() != "" {
		field("", text(g.GetMechanismWhy()))
	}
}

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}
