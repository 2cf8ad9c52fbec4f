// Package classify assigns class, priority and job to a process by rules and tags.
package classify

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Rule assigns a class to the processes that it matches.
type Rule struct {
	// Name is unique and not empty.
	Name  string         `yaml:"name"`
	Match Match          `yaml:"match" filled:"write a condition, such as comm: \"*\" for any value, or remove the key"`
	Class gpreempt.Class `yaml:"class" words:"unmanaged,online,offline" need:"write online, offline or unmanaged"`
	// Priority is 0 to gpreempt.MaxPriority; nil is DefaultPriority of the class.
	Priority *gpreempt.Priority `yaml:"priority" range:"0 15"`
	// NeverDebug is that of the Decision.
	NeverDebug bool `yaml:"never_debug"`
	// OnResist is that of the Decision.
	OnResist gpreempt.Resistance `yaml:"on_resist"`
}

// Subject is a process and all that is known of it.
type Subject struct {
	gpreempt.Process
	// Container is what the runtime reported of its container; zero before it has, and for
	// a process outside containers.
	Container gpreempt.Container
	// ContainerKnown reports whether the runtime has answered.
	ContainerKnown bool
	// GPUs are those of the host, or at least those that have its queues.
	GPUs []gpreempt.GPU
	// Queues are its queues, in any order.
	Queues []gpreempt.QueueEntry
}

// SetContainer takes in what the runtime says. What contradicts the control group is refused.
func (s *Subject) SetContainer(c gpreempt.Container, known bool) {
	s.Container, s.ContainerKnown = c, known
	if c.Conflict != "" {
		s.Container = gpreempt.Container{}
		s.Cgroup.Refuse(c.Conflict)
	}
}

// Decision is class and priority of a process, and why.
type Decision struct {
	Class    gpreempt.Class
	Priority gpreempt.Priority
	// By is "rule NAME", ByTag, ByDefault, or ByAdmin for an admin override.
	By string
	// NeverDebug forbids every mechanism that attaches to the process as a debugger.
	NeverDebug bool
	// OnResist is what is done when the process resists being suspended.
	OnResist gpreempt.Resistance
	// Mechanism is the only one that may be used, by an admin override; "" leaves the choice.
	Mechanism string
	// Waits reports that a rule would make the process offline, and that an earlier one,
	// which By names, may match once more is known: until then it is unmanaged.
	Waits bool
}

// Values of Decision.By besides rules.
const (
	ByTag     = "tag"
	ByDefault = "default"
	ByAdmin   = "admin"
)

// DefaultPriority returns the priority of a class without an explicit one.
func DefaultPriority(c gpreempt.Class) gpreempt.Priority {
	switch c {
	case gpreempt.Online:
		return gpreempt.PriorityHigh
	case gpreempt.Offline:
		return gpreempt.PriorityLow
	case gpreempt.Unmanaged:
	}
	return gpreempt.PriorityNormal
}

// RuleError is an error in a Rule or a JobRule.
type RuleError struct {
	// Of is "rule" or "job rule".
	Of string
	// Index counts the rules from 0.
	Index int
	Name  string
	// Field is the name of the field in the config file, below match for fields of a
	// Match: "class", "comm", "gpu[1]", or as Member returns it.
	Field string
	// Remedy says what to do; "" if Problem is enough.
	Problem, Remedy string
}

func (e *RuleError) Error() string {
	text := fmt.Sprintf("%s %d %q: %s: %s", e.Of, e.Index+1, e.Name, e.Field, e.Problem)
	if e.Remedy != "" {
		text += ": " + e.Remedy
	}
	return text
}

// Classifier classifies by fixed lists of rules. It is safe for concurrent use.
type Classifier struct {
	rules []rule
	jobs  []jobRule
}

// rule is a compiled Rule.
type rule struct {
	name       string
	conditions []condition
	decision   Decision
	// waiting is the decision while it is unknown whether the rule matches.
	waiting Decision
}

// reject adds an error in a field of a rule.
type reject func(field, problem, remedy string)

// New checks and compiles rules. The error joins a *RuleError for every error in them.
func New(rules []Rule, jobs []JobRule) (*Classifier, error) {
	c := &Classifier{rules: make([]rule, 0, len(rules)), jobs: make([]jobRule, 0, len(jobs))}
	var problems []error
	names := map[string]int{}
	failing := func(of string, n int, name string) reject {
		fail := func(field, problem, remedy string) {
			problems = append(problems, &RuleError{Of: of, Index: n, Name: name, Field: field, Problem: problem, Remedy: remedy})
		}
		if name == "" {
			fail("name", "it is empty", "write a name; decisions show it")
		} else if first, taken := names[of+name]; taken {
			fail("name", fmt.Sprintf("%s %d has the same", of, first+1), "write a unique name for each rule")
		} else {
			names[of+name] = n
		}
		return fail
	}
	for n := range rules {
		c.rules = append(c.rules, compileRule(&rules[n], failing("rule", n, rules[n].Name)))
	}
	for n := range jobs {
		c.jobs = append(c.jobs, compileJob(&jobs[n], failing("job rule", n, jobs[n].Name)))
	}
	if problems != nil {
		return nil, errors.Join(problems...)
	}
	return c, nil
}

func compileRule(r *Rule, fail reject) rule {
	conditions := r.Match.conditions(fail)
	if len(conditions) == 0 {
		fail("match", "it is empty and would match every process",
			`set a field of it, such as comm, cgroup or uid, or comm: "*" for every process`)
	}
	if r.Class > gpreempt.Offline {
		fail("class", fmt.Sprintf("%v is not online, offline or unmanaged", r.Class), "")
	}
	priority := DefaultPriority(r.Class)
	if r.Priority != nil {
		priority = *r.Priority
	}
	if priority > gpreempt.MaxPriority {
		fail("priority", fmt.Sprintf("%d is outside 0 to %d", priority, gpreempt.MaxPriority), "")
	}
	return rule{
		name: r.Name, conditions: conditions,
		decision: Decision{Class: r.Class, Priority: priority, By: "rule " + r.Name, NeverDebug: r.NeverDebug, OnResist: r.OnResist},
		waiting:  Decision{Class: gpreempt.Unmanaged, Priority: DefaultPriority(gpreempt.Unmanaged), By: "rule " + r.Name + " may match", Waits: true},
	}
}

// Decide returns the decision of the first rule that matches s, else that of its tag,
// else unmanaged. It does not allocate: package regexp keeps what it needs.
//
// Missing facts make no process preemptible: while an earlier rule that protects it more, by
// another class, by NeverDebug, or by another OnResist where the decision is to stop or kill, may match
// once more is known, no rule and no tag makes the process offline.
func (c *Classifier) Decide(s *Subject) Decision {
	d := byDefault
	n := slices.IndexFunc(c.rules, func(r rule) bool { return r.matches(s) })
	if n >= 0 {
		d = c.rules[n].decision
	} else {
		n = len(c.rules)
		if _, tag, found := tagOf(s.Env); found {
			d = tag
		}
	}
	if d.Class != gpreempt.Offline {
		return d
	}
	for i := range c.rules[:n] {
		r := &c.rules[i]
		if r.decision.protectsMore(d) && r.mayMatch(s) {
			return r.waiting
		}
	}
	return d
}

// protectsMore reports whether d protects a process more than another decision.
func (d Decision) protectsMore(other Decision) bool {
	return d.Class != gpreempt.Offline || d.NeverDebug && !other.NeverDebug || other.OnResist.Enforced() && d.OnResist != other.OnResist
}

// mayMatch reports whether a rule that does not match s may match once more is known.
func (r *rule) mayMatch(s *Subject) bool {
	for n := range r.conditions {
		if c := &r.conditions[n]; !c.holds(s) && !c.mayHold(s) {
			return false
		}
	}
	return true
}

var byDefault = Decision{Class: gpreempt.Unmanaged, Priority: DefaultPriority(gpreempt.Unmanaged), By: ByDefault}

func (r *rule) matches(s *Subject) bool {
	for n := range r.conditions {
		if !r.conditions[n].holds(s) {
			return false
		}
	}
	return true
}

// Matching returns for each rule whether it matches s, regardless of the rules before
// it, and last whether s has a tag. It overwrites dst and reuses its array.
func (c *Classifier) Matching(s *Subject, dst []bool) []bool {
	dst = dst[:0]
	for n := range c.rules {
		dst = append(dst, c.rules[n].matches(s))
	}
	_, _, found := tagOf(s.Env)
	return append(dst, found)
}

// Names returns the names of the rules and ByTag, in the order of Matching.
func (c *Classifier) Names() []string {
	names := make([]string, 0, len(c.rules)+1)
	for n := range c.rules {
		names = append(names, c.rules[n].name)
	}
	return append(names, ByTag)
}

// Classes returns the classes of the rules, in the order of Matching. The last, of the
// tag, is Unmanaged, because each process has its own.
func (c *Classifier) Classes() []gpreempt.Class {
	classes := make([]gpreempt.Class, 0, len(c.rules)+1)
	for n := range c.rules {
		classes = append(classes, c.rules[n].decision.Class)
	}
	return append(classes, gpreempt.Unmanaged)
}

// Env returns the variables that rules of both kinds and tags use, sorted, each once.
func (c *Classifier) Env() []string {
	var names []string
	for _, t := range tags {
		names = append(names, t.class, t.priority)
	}
	for n := range c.rules {
		for _, condition := range c.rules[n].conditions {
			if condition.field == env {
				names = append(names, condition.key)
			}
		}
	}
	for n := range c.jobs {
		for _, property := range c.jobs[n].by {
			if property.field == env {
				names = append(names, property.key)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
