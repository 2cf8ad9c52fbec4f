package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/classify"
)

// Change is one difference between two configurations.
type Change struct {
	// Key is the dotted key, "rules.NAME" for a rule, or "rules" for their order.
	Key string
	// From and To are the values as text; "" where a rule is not.
	From, To string
	// Live tells that a running daemon can take it over; else it needs a restart.
	Live bool
}

// String gives "KEY: FROM -> TO".
func (c Change) String() string {
	said := func(s string) string {
		if s == "" {
			return "none"
		}
		return s
	}
	return c.Key + ": " + said(c.From) + " -> " + said(c.To)
}

// Changes tells what differs, in the order of the default file, rules last.
func Changes(from, to Config) []Change {
	var changes []Change
	for _, f := range fields {
		if was, is := text(f.at(&from)), text(f.at(&to)); was != is {
			changes = append(changes, Change{Key: f.key, From: was, To: is, Live: f.live})
		}
	}
	for _, r := range from.Rules {
		is := ""
		if i := indexRule(to.Rules, r.Name); i >= 0 {
			is = ruleText(to.Rules[i])
		}
		if was := ruleText(r); was != is {
			changes = append(changes, Change{Key: "rules." + r.Name, From: was, To: is, Live: true})
		}
	}
	for _, r := range to.Rules {
		if indexRule(from.Rules, r.Name) < 0 {
			changes = append(changes, Change{Key: "rules." + r.Name, To: ruleText(r), Live: true})
		}
	}
	// The first rule that matches wins, so an order that changed is a change; what
	// was added or removed has been told.
	if was, is := order(from.Rules, to.Rules), order(to.Rules, from.Rules); was != is {
		changes = append(changes, Change{Key: "rules", From: was, To: is, Live: true})
	}
	return changes
}

func indexRule(rules []classify.Rule, name string) int {
	return slices.IndexFunc(rules, func(r classify.Rule) bool { return r.Name == name })
}

// order names those of rules that are also in others.
func order(rules, others []classify.Rule) string {
	var names []string
	for _, r := range rules {
		if indexRule(others, r.Name) >= 0 {
			names = append(names, r.Name)
		}
	}
	return strings.Join(names, ", ")
}

// text writes a rule in one line.
func ruleText(r classify.Rule) string {
	var b strings.Builder
	b.WriteString(r.Class.String())
	if r.Priority != nil {
		fmt.Fprintf(&b, " priority %d", *r.Priority)
	}
	b.WriteString(" if")
	for _, m := range []struct{ name, glob string }{{"comm", r.Match.Comm}, {"cmdline", r.Match.Cmdline}, {"cgroup", r.Match.Cgroup}} {
		if m.glob != "" {
			fmt.Fprintf(&b, " %s=%q", m.name, m.glob)
		}
	}
	if r.Match.UID != nil {
		fmt.Fprintf(&b, " uid=%d", *r.Match.UID)
	}
	return b.String()
}
