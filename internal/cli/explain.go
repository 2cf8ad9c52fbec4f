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
	"github.com/gpreempt/gpreempt/internal/term"
)

func targetExplain(a *term.App) *cobra.Command {
	return ofTarget(a, &cobra.Command{
		Use:   "explain TARGET",
		Short: "Show why a process is suspended or runs",
	}, func(cmd *cobra.Command, target string) error {
		return a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
			resp, err := admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: target})
			if err != nil {
				return err
			}
			names := a.NameGPUs(ctx, admin)
			return a.Show(resp, func(p *term.Printer) { printExplanation(a, p, resp, names) })
		})
	})
}

func printExplanation(a *term.App, p *term.Printer, e *gpreemptv1.ExplainTargetResponse, names term.GPUNames) {
	p.Line(term.Cell{Text: e.GetVerdict(), Style: term.StyleBold})
	p.Linef("")
	printTarget(p, e.GetTarget(), names)

	if steps := e.GetClassification(); len(steps) > 0 {
		p.Linef("")
		printClassification(p, steps)
	}
	suspendedBy := ""
	if checks := e.GetChecks(); len(checks) > 0 {
		p.Linef("")
		t := p.Table("", term.Columns{">#", "CHECK", "RESULT", "DETAIL"})
		for i, c := range checks {
			result := term.Cell{Text: api.EnumName(c.GetResult())}
			if c.GetDecides() {
				result = term.Cell{Text: result.Text + " (decides)", Style: term.StyleNote}
				if c.GetResult() == gpreemptv1.CheckResult_CHECK_RESULT_SUSPEND {
					suspendedBy = fmt.Sprintf(": check %d, %s, has it suspended", i+1, c.GetCheck())
				}
			}
			t.Row(i+1, c.GetCheck(), result, c.GetDetail())
		}
		t.Flush()
	}

	p.Linef("")
	if len(e.GetLeases()) == 0 {
		p.Linef("No lease covers its GPUs%s.", suspendedBy)
		return
	}
	printLeases(a, p, e.GetLeases(), names)
}

// printClassification lists the sources of a target's class. The first that matches
// decides.
func printClassification(p *term.Printer, steps []*gpreemptv1.ClassifyStep) {
	t := p.Table("", term.Columns{">#", "MATCHES", "BY", "CLASS", "DETAIL"})
	for i, s := range steps {
		matches := term.Cell{Text: "no"}
		switch {
		case s.GetDecides():
			matches = term.Cell{Text: "decides", Style: term.StyleGood}
		case s.GetMatches():
			matches = term.Cell{Text: "yes", Style: term.StyleNote}
		}
		t.Row(i+1, matches, s.GetBy(), term.Or(api.EnumName(s.GetClass()), "-"), s.GetDetail())
	}
	t.Flush()
}

// printTarget writes the properties of one target, in groups of a line each.
func printTarget(p *term.Printer, g *gpreemptv1.Target, names term.GPUNames) {
	field := func(name string, value ...any) {
		p.Line(append([]any{fmt.Sprintf("  %-11s  ", name)}, value...)...)
	}
	user := fmt.Sprintf("uid %d", g.GetUid())
	if p.Wide {
		user += fmt.Sprintf(", gid %d", g.GetGid())
	}
	field("process", fmt.Sprintf("%d %s, %s", g.GetPid(), g.GetComm(), user))
	if g.GetCmdline() != "" {
		length := 100
		if p.Wide {
			length = 4096
		}
		field("command", term.Cut(g.GetCmdline(), length))
	}
	if g.GetExe() != "" {
		field("program", g.GetExe())
	}
	if p.Wide {
		field("target", g.GetTargetId())
		field("cgroup", term.Or(g.GetCgroup(), "-"))
	}
	if g.GetUnit() != "" || p.Wide && g.GetSlice() != "" {
		field("unit", term.Or(g.GetUnit(), "-")+in(g.GetSlice()))
	}
	if g.GetUserUnit() != "" {
		field("user unit", g.GetUserUnit())
	}
	if g.GetIdConflict() != "" {
		field("ids refused", term.Cell{Text: g.GetIdConflict(), Style: term.StyleBad})
	}
	printContainer(field, g, p.Wide)
	if p.Wide {
		printMap(field, "variable", g.GetEnvironment())
	}
	field("class", fmt.Sprintf("%s, priority %d, by %s", api.EnumName(g.GetClass()), g.GetPriority(), term.Or(g.GetDecidedBy(), "default")))

	printJob(field, g.GetJob())
	since := " for " + term.Took(g.GetInState())
	if g.GetRunsWithin() != nil {
		since += ", resumes within " + term.Took(g.GetRunsWithin())
	}
	field("state", term.State(g.GetState()), since)
	field("queues", fmt.Sprintf("%d on GPU %s", g.GetQueueCount(), names.Full(g.GetGpuIds())))
	if g.GetSuspends() > 0 {
		field("suspensions", fmt.Sprintf("%d (%s total)", g.GetSuspends(), term.Took(g.GetSuspendedTotal())))
	}
	switch {
	case g.GetAttachError() != "":
		field("mechanism", term.Cell{Text: "none: " + g.GetAttachError(), Style: term.StyleBad})
	case g.GetMechanism() == "":
		field("mechanism", "not attached")
	case g.GetLearnedSuspend() != nil:
		resume := "resume not measured yet"
		if g.GetLearnedResume() != nil {
			resume = "resume about " + term.Took(g.GetLearnedResume())
		}
		field("mechanism", fmt.Sprintf("%s (suspend about %s, %s)", g.GetMechanism(), term.Took(g.GetLearnedSuspend()), resume))
	default:
		field("mechanism", g.GetMechanism())
	}
	if g.GetOnResist() != "" || g.GetRefusedSuspensions() > 0 {
		field("on_resist", term.Or(g.GetOnResist(), "report")+refusals(g))
	}
	if n := g.GetAttachCycles(); n > 0 {
		field("attach cycles", fmt.Sprintf("%d runlist cycles on GPUs that it does not use", n))
	}
	if p.Wide && g.GetMechanismWhy() != "" {
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
		text += fmt.Sprintf(", all running %s of the last %s", jobRan(j), term.Took(j.GetMeasuredOver()))
	}
	field("job", text)
	if j.GetWhy() != "" {
		field("", j.GetWhy())
	}
}

// printContainer writes the container and the pod of a process, and its pid there.
func printContainer(field func(string, ...any), g *gpreemptv1.Target, wide bool) {
	if c := g.GetContainer(); c != nil {
		name := term.ContainerName(c)
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
			field("pod", pod)
		}
		if wide {
			printMap(field, "label", c.GetLabels())
			printMap(field, "pod label", c.GetPodLabels())
		}
	}
	if len(g.GetNamespacePids()) > 0 {
		field("own pid", term.OwnPID(g)+" in its pid namespace")
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
