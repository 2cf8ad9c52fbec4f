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
	return a.ofTarget(&cobra.Command{
		Use:   "explain TARGET",
		Short: "Show why a process is suspended or runs",
	}, func(cmd *cobra.Command, target string) error {
		return a.call(cmd, func(ctx context.Context, admin adminClient) error {
			resp, err := admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: target})
			if err != nil {
				return err
			}
			names := a.nameGPUs(ctx, admin)
			return a.show(resp, func(p *printer) { a.printExplanation(p, resp, names) })
		})
	})
}

func (a *app) printExplanation(p *printer, e *gpreemptv1.ExplainTargetResponse, names gpuNames) {
	p.line(cell{e.GetVerdict(), styleBold})
	p.linef("")
	a.printTarget(p, e.GetTarget(), names)

	if steps := e.GetClassification(); len(steps) > 0 {
		p.linef("")
		printClassification(p, steps)
	}
	if checks := e.GetChecks(); len(checks) > 0 {
		p.linef("")
		t := p.table("", columns{">#", "CHECK", "RESULT", "DETAIL"})
		for i, c := range checks {
			result := cell{text: api.EnumName(c.GetResult())}
			if c.GetDecides() {
				result = cell{result.text + " (decides)", styleNote}
			}
			t.row(i+1, c.GetCheck(), result, c.GetDetail())
		}
		t.flush()
	}

	p.linef("")
	if len(e.GetLeases()) == 0 {
		p.linef("No lease covers its GPUs.")
		return
	}
	a.printLeases(p, e.GetLeases(), names)
}

// printClassification lists the sources of a target's class. The first that matches
// decides.
func printClassification(p *printer, steps []*gpreemptv1.ClassifyStep) {
	t := p.table("", columns{">#", "MATCHES", "BY", "CLASS", "DETAIL"})
	for i, s := range steps {
		matches := cell{text: "no"}
		switch {
		case s.GetDecides():
			matches = cell{"decides", styleGood}
		case s.GetMatches():
			matches = cell{"yes", styleNote}
		}
		t.row(i+1, matches, s.GetBy(), or(api.EnumName(s.GetClass()), "-"), s.GetDetail())
	}
	t.flush()
}

// printTarget writes the properties of one target, in groups of a line each.
func (a *app) printTarget(p *printer, g *gpreemptv1.Target, names gpuNames) {
	field := func(name string, value ...any) {
		p.line(append([]any{fmt.Sprintf("  %-11s  ", name)}, value...)...)
	}
	user := fmt.Sprintf("uid %d", g.GetUid())
	if p.wide {
		user += fmt.Sprintf(", gid %d", g.GetGid())
	}
	field("process", fmt.Sprintf("%d %s, %s", g.GetPid(), g.GetComm(), user))
	if g.GetCmdline() != "" {
		length := 100
		if p.wide {
			length = 4096
		}
		field("command", cut(g.GetCmdline(), length))
	}
	if g.GetExe() != "" {
		field("program", g.GetExe())
	}
	if p.wide {
		field("target", g.GetTargetId())
		field("cgroup", or(g.GetCgroup(), "-"))
	}
	if g.GetUnit() != "" || p.wide && g.GetSlice() != "" {
		field("unit", or(g.GetUnit(), "-")+in(g.GetSlice()))
	}
	if g.GetUserUnit() != "" {
		field("user unit", g.GetUserUnit())
	}
	if g.GetIdConflict() != "" {
		field("ids refused", cell{g.GetIdConflict(), styleBad})
	}
	printContainer(field, g, p.wide)
	if p.wide {
		printMap(field, "variable", g.GetEnvironment())
	}
	field("class", fmt.Sprintf("%s, priority %d, by %s", api.EnumName(g.GetClass()), g.GetPriority(), or(g.GetDecidedBy(), "default")))

	printJob(field, g.GetJob())
	since := " for " + took(g.GetInState())
	if g.GetRunsWithin() != nil {
		since += ", resumes within " + took(g.GetRunsWithin())
	}
	field("state", state(g.GetState()), since)
	field("queues", fmt.Sprintf("%d on GPU %s", g.GetQueueCount(), names.full(g.GetGpuIds())))
	if g.GetSuspends() > 0 {
		field("suspensions", fmt.Sprintf("%d (%s total)", g.GetSuspends(), took(g.GetSuspendedTotal())))
	}
	switch {
	case g.GetAttachError() != "":
		field("mechanism", cell{"none: " + g.GetAttachError(), styleBad})
	case g.GetMechanism() == "":
		field("mechanism", "not attached")
	case g.GetLearnedSuspend() != nil:
		field("mechanism", fmt.Sprintf("%s (suspend about %s, resume about %s)", g.GetMechanism(),
			took(g.GetLearnedSuspend()), took(g.GetLearnedResume())))
	default:
		field("mechanism", g.GetMechanism())
	}
	if g.GetOnResist() != "" || g.GetRefusedSuspensions() > 0 {
		field("on_resist", or(g.GetOnResist(), "report")+refusals(g))
	}
	if n := g.GetAttachCycles(); n > 0 {
		field("attach cycles", fmt.Sprintf("%d runlist cycles on GPUs that it does not use", n))
	}
	if p.wide && g.GetMechanismWhy() != "" {
		field("", g.GetMechanismWhy())
	}
}

// printJob writes the job of a process, and its progress.
func printJob(field func(string, ...any), j *gpreemptv1.Job) {
	if j == nil {
		return
	}
	text := j.GetName()
	switch n := j.GetTargetCount(); {
	case n == 1:
		text += ": 1 process"
	case n > 1:
		text += fmt.Sprintf(": %d processes", n)
	}
	if j.RunningRatio != nil {
		text += fmt.Sprintf(", all running %s of the last %s", jobRan(j), took(j.GetMeasuredOver()))
	}
	field("job", text)
	if j.GetWhy() != "" {
		field("", j.GetWhy())
	}
}

// printContainer writes the container and the pod of a process, and its pid there.
func printContainer(field func(string, ...any), g *gpreemptv1.Target, wide bool) {
	if c := g.GetContainer(); c != nil {
		name := containerName(c)
		if wide {
			name = strings.TrimSpace(c.GetName() + " " + c.GetContainerId())
		}
		if c.GetRuntime() != "" {
			name += " (" + c.GetRuntime() + ")"
		}
		field("container", name)
		if c.GetImage() != "" {
			field("image", c.GetImage())
		}
		if pod := podName(c); pod != "-" {
			if c.GetPriorityClass() != "" {
				pod += ", priority class " + c.GetPriorityClass()
			}
			field("pod", pod)
		}
		if wide {
			printMap(field, "label", c.GetLabels())
			printMap(field, "pod label", c.GetPodLabels())
		}
	}
	if len(g.GetNamespacePids()) > 0 {
		field("own pid", ownPID(g)+" in its pid namespace")
	}
}

func printMap(field func(string, ...any), name string, m map[string]string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		field(name, k+"="+m[k])
	}
}

// in formats the slice of a unit.
func in(slice string) string {
	if slice == "" {
		return ""
	}
	return " in " + slice
}
