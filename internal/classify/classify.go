// Package classify hides how rules decide the class and priority of a process.
package classify

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Rule gives a class to the processes it matches.
type Rule struct {
	// Name is what decisions call it; unique and not empty.
	Name  string
	Match Match
	Class gpreempt.Class
	// Priority is 0 to gpreempt.MaxPriority; nil is DefaultPriority of the class.
	Priority *gpreempt.Priority
}

// Match says which processes a rule is for: those for which every field that is
// set holds. At least one must be set.
//
// The texts are globs for the whole of what they are compared with: * is any
// run of characters, / and none included, ? is any one, [ab0-9] one of these
// and [!ab0-9] or [^ab0-9] one that is none of these. There is no escape: [*] is
// a star. A glob that is "" is not set.
type Match struct {
	// Comm is for the command name, of which the kernel keeps 15 bytes.
	Comm string
	// Cmdline is for the words of the command line with spaces between, of which
	// 4096 bytes are kept.
	Cmdline string
	// Cgroup is for the cgroup v2 path, which begins with /.
	Cgroup string
	// UID is the effective user id.
	UID *uint32
}

// maxComm is how many bytes the kernel keeps of a command name.
const maxComm = 15

// Decision is what a process is, and why.
type Decision struct {
	Class    gpreempt.Class
	Priority gpreempt.Priority
	// By is "rule NAME", ByDefault, or ByAdmin when an admin overrode the rules.
	By string
}

// What decides when no rule does.
const (
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
	// Field is the name of the field in the config file.
	Field string
	// Problem says what is wrong and what to do.
	Problem string
}

func (e *RuleError) Error() string {
	return fmt.Sprintf("rule %d %q: %s: %s", e.Index+1, e.Name, e.Field, e.Problem)
}

// Classifier decides by a fixed list of rules. It may be used by several
// goroutines.
type Classifier struct {
	rules []rule
}

// rule is a Rule made ready to match.
type rule struct {
	comm, cmdline, cgroup glob
	uid                   *uint32
	decision              Decision
}

// New checks and prepares rules. The error joins a *RuleError for everything
// that is wrong with them.
func New(rules []Rule) (*Classifier, error) {
	c := &Classifier{rules: make([]rule, 0, len(rules))}
	names := make(map[string]int, len(rules))
	var problems []error
	for n, r := range rules {
		refuse := func(field, format string, args ...any) {
			problems = append(problems, &RuleError{Index: n, Name: r.Name, Field: field, Problem: fmt.Sprintf(format, args...)})
		}
		if r.Name == "" {
			refuse("name", "it is empty: give the rule a name, decisions show it")
		} else if first, taken := names[r.Name]; taken {
			refuse("name", "rule %d has the same: give each rule its own", first+1)
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

func compileRule(r Rule, refuse func(field, format string, args ...any)) rule {
	if r.Match == (Match{}) {
		refuse("match", `it is empty and would match every process: set one of comm, cmdline, cgroup and uid, or comm: "*" if every process is meant`)
	}
	if r.Class > gpreempt.Offline {
		refuse("class", "%v is none of online, offline, unmanaged", r.Class)
	}
	priority := DefaultPriority(r.Class)
	if r.Priority != nil {
		priority = *r.Priority
	}
	if priority > gpreempt.MaxPriority {
		refuse("priority", "%d is outside 0 to %d", priority, gpreempt.MaxPriority)
	}
	compile := func(field, pattern string) glob {
		g, err := compileGlob(pattern)
		if err != nil {
			refuse(field, "%q: %v", pattern, err)
		}
		return g
	}
	out := rule{
		comm:     compile("comm", r.Match.Comm),
		cmdline:  compile("cmdline", r.Match.Cmdline),
		cgroup:   compile("cgroup", r.Match.Cgroup),
		uid:      r.Match.UID,
		decision: Decision{Class: r.Class, Priority: priority, By: "rule " + r.Name},
	}
	if out.comm.shortest() > maxComm {
		refuse("comm", "%q: it matches no name of %d bytes or less, and the kernel keeps no more: end it in * earlier, or match cmdline", r.Match.Comm, maxComm)
	}
	if first, _ := utf8.DecodeRuneInString(r.Match.Cgroup); r.Match.Cgroup != "" && first != '/' && first != '*' && first != '?' && first != '[' {
		refuse("cgroup", "%q: it matches no path, as they begin with /: begin it with / or *", r.Match.Cgroup)
	}
	return out
}

// Decide gives the decision of the first rule that matches p, or unmanaged.
func (c *Classifier) Decide(p gpreempt.Process) Decision {
	for n := range c.rules {
		if r := &c.rules[n]; r.matches(&p) {
			return r.decision
		}
	}
	return Decision{Class: gpreempt.Unmanaged, Priority: DefaultPriority(gpreempt.Unmanaged), By: ByDefault}
}

func (r *rule) matches(p *gpreempt.Process) bool {
	return (r.uid == nil || *r.uid == p.UID) &&
		r.comm.matches(p.Comm) && r.cgroup.matches(p.Cgroup.Path) && r.cmdline.matches(p.Cmdline)
}
