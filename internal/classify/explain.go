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
	fact, is, wanted := c.fact(s), "is ", c.wanted()
	if fact == "" {
		return c.name() + ": " + c.explainUnknown(s)
	}
	if !holds {
		is = "is not "
	}
	switch {
	case c.field.ofQueues():
		is += "in "
	case c.pattern != "":
		wanted = quoted(c.pattern)
	}
	return c.name() + " " + fact + " " + is + wanted
}

// fact returns what a process has, "" if that is not known.
func (c *condition) fact(s *Subject) string {
	var all []string
	switch c.field {
	case uid:
		return strconv.FormatUint(uint64(s.UID), 10)
	case gid:
		return strconv.FormatUint(uint64(s.GID), 10)
	case gpu:
		for n := range s.Queues {
			all = append(all, gpuText(gpuOf(s, s.Queues[n].GPU)))
		}
	case queuePriority:
		highest, known, every := highestPriority(s)
		if !known {
			return ""
		}
		text := strconv.Itoa(int(highest.Priority))
		if !every {
			text += " or more, as some are unknown,"
		}
		if !highest.PriorityExact {
			text += " (this kernel distinguishes only 0, 7 and 11)"
		}
		return text
	case ringAddress:
		for n := range s.Queues {
			if base := s.Queues[n].Info.RingBase; base != 0 {
				all = append(all, fmt.Sprintf("%#x", base))
			}
		}
	default:
		text, known := c.text(s)
		if !known {
			return ""
		}
		return quoted(text)
	}
	slices.Sort(all)
	return listed(slices.Compact(all))
}

// explainUnknown returns why there is nothing to compare with.
func (c *condition) explainUnknown(s *Subject) string {
	f, answered := c.field, !s.Container.Equal(gpreempt.Container{})
	switch {
	case f.ofQueues() && len(s.Queues) == 0:
		return "the process has no queues"
	case f == env && !s.Unread:
		return "not set"
	case f == unit, f == slice, f == userUnit:
		return "the control group has none"
	case s.Cgroup.Conflict != "" && (f.ofContainer() || f.ofPod() || f.ofSlurm()):
		return "refused, because names contradict each other: " + gpreempt.Printable(s.Cgroup.Conflict)
	case f.ofContainer() && s.Cgroup.ContainerID == "" && !answered:
		return "not in a container"
	case f.ofSlurm() && s.Cgroup.SlurmJob == 0:
		return "not in a control group of a Slurm job"
	case f.ofSlurm():
		return fmt.Sprintf("the prolog has not recorded it of Slurm job %d", s.Cgroup.SlurmJob)
	case f.ofPod() && s.Cgroup.PodUID == "" && s.Container.Pod == "":
		return "not in a Kubernetes pod"
	case f == containerID, f == containerRuntime:
		return "not part of the control group"
	case f == containerLabels && answered, f == podLabels && s.Container.Pod != "":
		return "there is no such label"
	case f.ofContainer(), f.ofPod():
		return "not reported by the runtime"
	}
	return "unknown"
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
