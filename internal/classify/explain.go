package classify

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Step is one thing that could give a process its class.
type Step struct {
	// By is as in Decision.
	By string
	// Class and Priority are what it gives; zero for an admin who said nothing and
	// for a process without a tag.
	Class    gpreempt.Class
	Priority gpreempt.Priority
	// Matches tells that it is for this process, Decides that nothing before it is.
	Matches, Decides bool
	// Detail says for people which part matched or did not, and the facts.
	Detail string
}

// Explain tells of everything that could decide, in the order it is asked: an
// admin's override, nil for none, the rules, the tag, the default. The one that
// decides is the override, or what Decide gives. Of the environment it shows the
// variables of rules and tags only.
func (c *Classifier) Explain(s *Subject, override *Decision) []Step {
	steps := make([]Step, 0, len(c.rules)+3)
	admin := Step{By: ByAdmin, Detail: "no admin has said anything of it"}
	if override != nil {
		admin = Step{By: ByAdmin, Class: override.Class, Priority: override.Priority, Matches: true, Detail: "an admin said so"}
	}
	steps = append(steps, admin)
	for n := range c.rules {
		r := &c.rules[n]
		matches, detail := r.explain(s)
		steps = append(steps, Step{
			By: r.decision.By, Class: r.decision.Class, Priority: r.decision.Priority, Matches: matches, Detail: detail,
		})
	}
	_, d, found := tagOf(s.Env)
	steps = append(steps,
		Step{By: ByTag, Class: d.Class, Priority: d.Priority, Matches: found, Detail: tagDetail(s.Env)},
		Step{
			By: ByDefault, Class: byDefault.Class, Priority: byDefault.Priority, Matches: true,
			Detail: "what no admin, rule or tag classifies is unmanaged",
		})
	first := slices.IndexFunc(steps, func(step Step) bool { return step.Matches })
	if d := c.Decide(s); d.Waits && override == nil {
		first = slices.IndexFunc(steps, func(step Step) bool { return step.By+" may match" == d.By })
		steps[first].Detail += "; it may match once that is known: until then nothing makes the process offline"
	}
	steps[first].Decides = true
	return steps
}

// explain tells of every field when all hold, else of those that do not.
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

// explain sets the fact beside what the rule wants.
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

// explainUnknown reports why there is nothing to compare a glob with.
func (c *condition) explainUnknown(s *Subject) string {
	f, told := c.field, !s.Container.Equal(gpreempt.Container{})
	inPod := s.Cgroup.PodUID != "" || s.Container.Pod != ""
	switch {
	case f == cmdline, f == exe, f == env && s.Unread:
		return "it is not known"
	case f == env:
		return "it is not set"
	case (f == unit || f == slice) && s.Cgroup.Path == "":
		return "the control group is not known"
	case f == unit:
		return "it is in no unit of systemd"
	case f == slice:
		return "it is in no slice of systemd"
	case f.ofContainer() && s.Cgroup.ContainerID == "" && !told:
		return "it is in no container"
	case f.ofPod() && !inPod:
		return "it is in no Kubernetes pod"
	case f == containerID, f == containerRuntime:
		return "the control group does not tell it"
	case f == containerLabels && told:
		return "the container has no such label"
	case f == podLabels && s.Container.Pod != "":
		return "the pod has no such label"
	case f == podPriorityClass && s.Container.Pod != "":
		return "the pod has none, or the kubelet has not told it"
	}
	return "the runtime has not told it"
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
		return "gpu: it has no queues"
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

// gpuText names a GPU in every way a rule can.
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
		return "queue_priority: it has no compute queues"
	}
	highest, known, all := highestPriority(s)
	if !known {
		return "queue_priority: it is not known of any of its compute queues"
	}
	text := fmt.Sprintf("queue_priority %d %s in %d to %d", highest.Priority, is, c.first, c.last)
	if !all {
		text = fmt.Sprintf("queue_priority: of some queues it is not known, of the others %d at most", highest.Priority)
	}
	if !highest.PriorityExact {
		text += " (this kernel tells only 0, 7 and 11 apart)"
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
		return "ring_address: it has no queues"
	case addresses == nil:
		return "ring_address: it is not known of any of its queues"
	}
	slices.Sort(addresses)
	texts := make([]string, len(addresses))
	for n, address := range addresses {
		texts[n] = fmt.Sprintf("%#x", address)
	}
	return fmt.Sprintf("ring_address %s is not in %#x to %#x", listed(texts), c.first, c.last)
}

// listed joins the first few of a list and counts the rest.
func listed(texts []string) string {
	const most = 4
	if more := len(texts) - most; more > 0 {
		return strings.Join(texts[:most], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(texts, ", ")
}

// quoted, cut and shorten keep what a process or a file says short and printable.
func quoted(s string) string { return strconv.Quote(shorten(s)) }

func cut(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, shorten(s))
}

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
