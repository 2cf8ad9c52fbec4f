// Package classify hides how rules and tags decide the class and priority of a
// process.
package classify

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Rule returns a class to the processes it matches.
type Rule struct {
	// Name is what decisions call it; unique and not empty.
	Name  string
	Match Match
	Class gpreempt.Class
	// Priority is 0 to gpreempt.MaxPriority; nil is DefaultPriority of the class.
	Priority *gpreempt.Priority
}

// Subject is what rules look at: a process and all that is known of it.
type Subject struct {
	gpreempt.Process
	// Container is what the runtime told of its container; zero when it has not, or
	// when there is none.
	Container gpreempt.Container
	// ContainerKnown tells that the runtime has answered.
	ContainerKnown bool
	// GPUs are those of the host, or at least those its queues are on.
	GPUs []gpreempt.GPU
	// Queues are its queues, in any order.
	Queues []gpreempt.QueueEntry
}

// Decision is what a process is, and why.
type Decision struct {
	Class    gpreempt.Class
	Priority gpreempt.Priority
	// By is "rule NAME", ByTag, ByDefault, or ByAdmin when an admin overrode all of
	// these.
	By string
	// Waits tells that a rule would make it offline, and that an earlier one, which By
	// names, may match once more is known: until then it is unmanaged.
	Waits bool
}

// What decides when no rule does.
const (
	ByTag     = "tag"
	ByDefault = "default"
	ByAdmin   = "admin"
)

// DefaultPriority is the priority of a class for which none is given.
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

// RuleError says what is wrong with one rule and what would be right.
type RuleError struct {
	// Index counts the rules from 0.
	Index int
	Name  string
	// Field is the name of the field in the config file, below match where it is one
	// of a Match: "class", "comm", "gpu[1]", or as Member gives it.
	Field string
	// Problem says what is wrong, Remedy what to do; Remedy is "" where Problem says
	// it all.
	Problem, Remedy string
}

func (e *RuleError) Error() string {
	text := fmt.Sprintf("rule %d %q: %s: %s", e.Index+1, e.Name, e.Field, e.Problem)
	if e.Remedy != "" {
		text += ": " + e.Remedy
	}
	return text
}

// Classifier decides by a fixed list of rules. It may be used by several
// goroutines.
type Classifier struct {
	rules []rule
}

// rule is a Rule made ready to match.
type rule struct {
	name       string
	conditions []condition
	decision   Decision
	// waiting is the decision while it is not known whether the rule matches.
	waiting Decision
}

// refusal takes a mistake in one field of a rule.
type refusal func(field, problem, remedy string)

// New checks and prepares rules. The error joins a *RuleError for everything
// that is wrong with them.
func New(rules []Rule) (*Classifier, error) {
	c := &Classifier{rules: make([]rule, 0, len(rules))}
	names := make(map[string]int, len(rules))
	var problems []error
	for n := range rules {
		r := &rules[n]
		refuse := func(field, problem, remedy string) {
			problems = append(problems, &RuleError{Index: n, Name: r.Name, Field: field, Problem: problem, Remedy: remedy})
		}
		if r.Name == "" {
			refuse("name", "it is empty", "give the rule a name, decisions show it")
		} else if first, taken := names[r.Name]; taken {
			refuse("name", fmt.Sprintf("rule %d has the same", first+1), "give each rule its own")
		} else {
			names[r.Name] = n
		}
		c.rules = append(c.rules, compileRule(r, refuse))
	}
	if problems != nil {
		return nil, errors.Join(problems...)
	}
	return c, nil
}

func compileRule(r *Rule, refuse refusal) rule {
	conditions := r.Match.conditions(refuse)
	if len(conditions) == 0 {
		refuse("match", "it is empty and would match every process",
			`set a field of it, such as comm, cgroup or uid, or comm: "*" if every process is meant`)
	}
	if r.Class > gpreempt.Offline {
		refuse("class", fmt.Sprintf("%v is none of online, offline, unmanaged", r.Class), "")
	}
	priority := DefaultPriority(r.Class)
	if r.Priority != nil {
		priority = *r.Priority
	}
	if priority > gpreempt.MaxPriority {
		refuse("priority", fmt.Sprintf("%d is outside 0 to %d", priority, gpreempt.MaxPriority), "")
	}
	return rule{
		name: r.Name, conditions: conditions,
		decision: Decision{Class: r.Class, Priority: priority, By: "rule " + r.Name},
		waiting:  Decision{Class: gpreempt.Unmanaged, Priority: DefaultPriority(gpreempt.Unmanaged), By: "rule " + r.Name + " may match", Waits: true},
	}
}

// Decide returns the decision of the first rule that matches s, else that of its
// tag, else unmanaged. It allocates nothing.
//
// What is not known yet makes nobody preemptible: while an earlier rule of another
// class may match once it is, no rule and no tag makes the process offline.
func (c *Classifier) Decide(s *Subject) Decision {
	d, waits := byDefault, -1
	n := 0
	for ; n < len(c.rules); n++ {
		r := &c.rules[n]
		if r.matches(s) {
			d = r.decision
			break
		}
		if waits < 0 && r.decision.Class != gpreempt.Offline && r.mayMatch(s) {
			waits = n
		}
	}
	if n == len(c.rules) {
		if _, tag, found := tagOf(s.Env); found {
			d = tag
		}
	}
	if d.Class == gpreempt.Offline && waits >= 0 {
		return c.rules[waits].waiting
	}
	return d
}

// mayMatch tells of a rule that does not match s that it may when more is known.
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

// Matching tells of each rule whether it matches s, whatever is before it, and
// then whether s has a tag. The answer is in dst's array where it fits, and what
// was in dst is gone.
func (c *Classifier) Matching(s *Subject, dst []bool) []bool {
	dst = dst[:0]
	for n := range c.rules {
		dst = append(dst, c.rules[n].matches(s))
	}
	_, _, found := tagOf(s.Env)
	return append(dst, found)
}

// Names are those of the rules and then ByTag: the order of Matching.
func (c *Classifier) Names() []string {
	names := make([]string, 0, len(c.rules)+1)
	for n := range c.rules {
		names = append(names, c.rules[n].name)
	}
	return append(names, ByTag)
}

// Classes are what the rules give, in the order of Matching. The last, of the
// tag, is Unmanaged: which class a tag gives is different for each process.
func (c *Classifier) Classes() []gpreempt.Class {
	classes := make([]gpreempt.Class, 0, len(c.rules)+1)
	for n := range c.rules {
		classes = append(classes, c.rules[n].decision.Class)
	}
	return append(classes, gpreempt.Unmanaged)
}

// Env names the variables that rules and tags look at, sorted, each once.
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
	slices.Sort(names)
	return slices.Compact(names)
}
