package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) targetExplain() *cobra.Command {
	return &cobra.Command{
		Use:   "explain TARGET",
		Short: "Tell why a process is, or is not, suspended",
		Long: `Tells what holds for one process now, then what could give it its class, in order:
the first that matches decides. Then the checks in the order the scheduler makes them:
the first "no" is what decides.`,
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

	if steps := e.GetClassification(); len(steps) > 0 {
		p.linef("")
		printClassification(p, steps)
	}
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

// printClassification lists what could give a target its class; the first that
// matches decides.
func printClassification(p *printer, steps []*gpreemptv1.ClassifyStep) {
	t := p.table("", columns{">#", "MATCHES", "BY", "CLASS", "FACTS"})
	for i, s := range steps {
		matches := cell{text: "no"}
		switch {
		case s.GetDecides():
			matches = cell{"decides", styleGood}
		case s.GetMatches():
			matches = cell{"yes", styleNote}
		}
		t.row(text(i+1), matches, text(s.GetBy()), text(or(api.EnumName(s.GetClass()), "-")), text(s.GetDetail()))
	}
	t.flush()
}

// printTarget writes what is known of one target, a line for each group of facts.
func (a *app) printTarget(p *printer, g *gpreemptv1.Target) {
	field := func(name string, value ...cell) {
		p.line(append([]cell{text(fmt.Sprintf("  %-9s  ", name))}, value...)...)
	}
	user := fmt.Sprintf("uid %d", g.GetUid())
	if p.wide {
		user += fmt.Sprintf(", gid %d", g.GetGid())
	}
	field("process", text(fmt.Sprintf("%d %s, %s", g.GetPid(), g.GetComm(), user)))
	if g.GetCmdline() != "" {
		length := 100
		if p.wide {
			length = 4096
		}
		field("command", text(cut(g.GetCmdline(), length)))
	}
	if g.GetExe() != "" {
		field("program", text(g.GetExe()))
	}
	if p.wide {
		field("target", text(g.GetTargetId()))
		field("cgroup", text(or(g.GetCgroup(), "-")))
	}
	if g.GetUnit() != "" || p.wide && g.GetSlice() != "" {
		field("unit", text(or(g.GetUnit(), "-")+in(g.GetSlice())))
	}
	printContainer(field, g, p.wide)
	if p.wide {
		printMap(field, "variable", g.GetEnvironment())
	}
	field("class", text(fmt.Sprintf("%s, priority %d, by %s", api.EnumName(g.GetClass()), g.GetPriority(), or(g.GetDecidedBy(), "default"))))

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

// printContainer says which container and pod a process is in, and what it calls
// itself there.
func printContainer(field func(string, ...cell), g *gpreemptv1.Target, wide bool) {
	if c := g.GetContainer(); c != nil {
		name := containerName(c)
		if wide {
			name = strings.TrimSpace(c.GetName() + " " + c.GetContainerId())
		}
		if c.GetRuntime() != "" {
			name += " of " + c.GetRuntime()
		}
		field("container", text(name))
		if c.GetImage() != "" {
			field("image", text(c.GetImage()))
		}
		if pod := podName(c); pod != "-" {
			if c.GetPriorityClass() != "" {
				pod += ", priority class " + c.GetPriorityClass()
			}
			field("pod", text(pod))
		}
		if wide {
			printMap(field, "label", c.GetLabels())
			printMap(field, "pod label", c.GetPodLabels())
		}
	}
	if len(g.GetNamespacePids()) > 0 {
		field("own pid", text(ownPID(g)+", as it sees itself"))
	}
}

func printMap(field func(string, ...cell), name string, m map[string]string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		field(name, text(k+"="+m[k]))
	}
}

// in writes the slice of a unit.
func in(slice string) string {
	if slice == "" {
		return ""
	}
	return " in " + slice
}

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}
