package classify

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Step is one rule or other source of the class of a process.
type Step struct {
	// By is as in Decision.
	By string
	// Class and Priority are zero without an override, and for a process without a tag.
	Class    gpreempt.Class
	Priority gpreempt.Priority
	// Matches reports whether it applies to the process, Decides whether it is the first
	// that does.
	Matches, Decides bool
	// Detail describes the parts that match or do not, with the facts.
	Detail string
}

// Explain returns everything that could decide, in the order of precedence: the admin
// override, nil for none, the rules, the tag, the default. The override decides, or else
// the result of Decide. Of the environment only variables of rules and tags are shown.
func (c *Classifier) Explain(s *Subject, override *Decision) []Step {
	steps := make([]Step, 0, len(c.rules)+3)
	admin := Step{By: ByAdmin, Detail: "no admin override"}
	if override != nil {
		admin = Step{By: ByAdmin, Class: override.Class, Priority: override.Priority, Matches: true, Detail: "admin override"}
		if override.Mechanism != "" {
			admin.Detail += ", suspended by " + override.Mechanism + " only"
		}
	}
	steps = append(steps, admin)
	for n := range c.rules {
		r := &c.rules[n]
		matches, detail := r.explain(s)
		if r.decision.NeverDebug && matches {
			detail += "; never_debug: no debugger attaches to it"
		}
		if r.decision.OnResist.Enforced() && matches {
			detail += fmt.Sprintf("; on_resist: %v", r.decision.OnResist)
		}
		steps = append(steps, Step{
			By: r.decision.By, Class: r.decision.Class, Priority: r.decision.Priority, Matches: matches, Detail: detail,
		})
	}
	_, d, found := tagOf(s.Env)
	steps = append(steps,
		Step{By: ByTag, Class: d.Class, Priority: d.Priority, Matches: found, Detail: tagDetail(s.Env)},
		Step{
			By: ByDefault, Class: byDefault.Class, Priority: byDefault.Priority, Matches: true,
			Detail: "without override, rule or tag a process is unmanaged",
		})
	first := slices.IndexFunc(steps, func(step Step) bool { return step.Matches })
	if d := c.Decide(s); d.Waits && override == nil {
		first = slices.IndexFunc(steps, func(step Step) bool { return step.By+" may match" == d.By })
		steps[first].Detail += "; it may match once that is known: until then the process is not offline"
	}
	steps[first].Decides = true
	return steps
}

// explain describes every field if all hold, else those that do not.
func (r *rule) explain(s *Subject) (matches bool, detail string) {
	var yes, no []string
	for n := range r.conditions {
		c := &r.conditions[n]
		if c.holds(s) {
			yes = append(yes, c.explain(s, true))
		} else {
			no = append(no, c.explain(s, false))
		}
	}
	if no != nil {
		return false, strings.Join(no, "; ")
	}
	return true, strings.Join(yes, "; ")
}

// explain describes the fact and the value of the rule.
func (c *condition) explain(s *Subject, holds bool) string {
	is := "is not"
	if holds {
		is = "is"
	}
	switch c.field {
	case uid:
		return fmt.Sprintf("uid %d %s %d", s.UID, is, c.id)
	case gid:
		return fmt.Sprintf("gid %d %s %d", s.GID, is, c.id)
	case gpu:
		return c.explainGPU(s)
	case queuePriority:
		return c.explainPriority(s, is)
	case ringAddress:
		return c.explainRing(s)
	default:
		text, known := c.text(s)
		if !known {
			return c.name() + ": " + c.explainUnknown(s)
		}
		return fmt.Sprintf("%s %s %s %s", c.name(), quoted(text), is, quoted(c.pattern))
	}
}

// explainUnknown returns why there is no text to compare with.
func (c *condition) explainUnknown(s *Subject) string {
	f, answered := c.field, !s.Container.Equal(gpreempt.Container{})
	inPod := s.Cgroup.PodUID != "" || s.Container.Pod != ""
	switch {
	case f == cmdline, f == exe, f == env && s.Unread:
		return "unknown"
	case f == env:
		return "not set"
	case (f == unit || f == slice) && s.Cgroup.Path == "":
		return "the control group is unknown"
	case f == unit:
		return "not in a unit of systemd"
	case f == slice:
		return "not in a slice of systemd"
	case f == userUnit:
		return "not in a unit of a user's systemd"
	case s.Cgroup.Conflict != "":
		return "refused, because names contradict each other: " + gpreempt.Printable(s.Cgroup.Conflict)
	case f.ofContainer() && s.Cgroup.ContainerID == "" && !answered:
		return "not in a container"
	case f.ofSlurm() && s.Cgroup.SlurmJob == 0:
		return "not in a control group of a Slurm job"
	case f.ofSlurm() && s.Slurm == (gpreempt.SlurmJob{}):
		return fmt.Sprintf("there is no valid record of Slurm job %d: the prolog writes it", s.Cgroup.SlurmJob)
	case f.ofSlurm():
		return fmt.Sprintf("the record of Slurm job %d does not have it", s.Cgroup.SlurmJob)
	case f.ofPod() && !inPod:
		return "not in a Kubernetes pod"
	case f == containerID, f == containerRuntime:
		return "not part of the control group"
	case f == containerLabels && answered:
		return "the container has no such label"
	case f == podLabels && s.Container.Pod != "":
		return "the pod has no such label"
	}
	return "not reported by the runtime"
}

func (c *condition) explainGPU(s *Subject) string {
	if sel, on := c.selected(s); on {
		return "gpu: it has a queue on " + quoted(sel.text)
	}
	var ids []gpreempt.GPUID
	for n := range s.Queues {
		ids = append(ids, s.Queues[n].GPU)
	}
	if ids == nil {
		return "gpu: the process has no queues"
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	texts := make([]string, len(ids))
	for n, id := range ids {
		texts[n] = gpuText(gpuOf(s, id))
	}
	wanted := make([]string, len(c.gpus))
	for n := range c.gpus {
		wanted[n] = quoted(c.gpus[n].text)
	}
	return "gpu: it has queues on " + listed(texts) + " and not on " + strings.Join(wanted, ", ")
}

// gpuText returns all names of a GPU that rules can use.
func gpuText(g gpreempt.GPU) string {
	var names []string
	if g.Node >= 0 {
		names = append(names, fmt.Sprintf("node:%d", g.Node))
	}
	if g.BDF != "" {
		names = append(names, g.BDF)
	}
	if g.RenderMinor > 0 {
		names = append(names, fmt.Sprintf("renderD%d", g.RenderMinor))
	}
	if names == nil {
		return g.ID.String()
	}
	return g.ID.String() + " (" + strings.Join(names, ", ") + ")"
}

func (c *condition) explainPriority(s *Subject, is string) string {
	if !slices.ContainsFunc(s.Queues, func(q gpreempt.QueueEntry) bool { return q.Type == gpreempt.QueueCompute }) {
		return "queue_priority: the process has no compute queues"
	}
	highest, known, all := highestPriority(s)
	if !known {
		return "queue_priority: unknown for all its compute queues"
	}
	text := fmt.Sprintf("queue_priority %d %s in %d to %d", highest.Priority, is, c.first, c.last)
	if !all {
		text = fmt.Sprintf("queue_priority: unknown for some queues, at most %d for the others", highest.Priority)
	}
	if !highest.PriorityExact {
		text += " (this kernel distinguishes only 0, 7 and 11)"
	}
	return text
}

func (c *condition) explainRing(s *Subject) string {
	if address, inside := c.ring(s); inside {
		return fmt.Sprintf("ring_address %#x is in %#x to %#x", address, c.first, c.last)
	}
	var addresses []uint64
	for n := range s.Queues {
		if base := s.Queues[n].Info.RingBase; base != 0 {
			addresses = append(addresses, base)
		}
	}
	switch {
	case len(s.Queues) == 0:
		return "ring_address: the process has no queues"
	case addresses == nil:
		return "ring_address: unknown for all its queues"
	}
	slices.Sort(addresses)
	texts := make([]string, len(addresses))
	for n, address := range addresses {
		texts[n] = fmt.Sprintf("%#x", address)
	}
	return fmt.Sprintf("ring_address %s is not in %#x to %#x", listed(texts), c.first, c.last)
}

// listed joins the first few of a list and counts the others.
func listed(texts []string) string {
	const most = 4
	if more := len(texts) - most; more > 0 {
		return strings.Join(texts[:most], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(texts, ", ")
}

// quoted, cut and shorten make a text of a process or a file short and printable.
func quoted(s string) string { return strconv.Quote(shorten(s)) }

func cut(s string) string { return gpreempt.Printable(shorten(s)) }

func shorten(s string) string {
	const most = 80
	count := 0
	for at := range s {
		if count == most {
			return s[:at] + "..."
		}
		count++
	}
	return s
}
