package classify

import (
	"fmt"
	"slices"
	"strings"
)

// Hidden returns the rules of both kinds that can never decide: an earlier one applies to every process
// to which they apply. Rules that only several earlier ones hide together are not found.
func (c *Classifier) Hidden() (all []RuleError) {
	for n := range c.rules {
		r := &c.rules[n]
		if by := slices.IndexFunc(c.rules[:n], func(before rule) bool { return hides(before.conditions, r.conditions) }); by >= 0 {
			all = append(all, hidden("rule", n, r.name, c.rules[by].name))
		}
	}
	for n := range c.jobs {
		j := &c.jobs[n]
		if by := slices.IndexFunc(c.jobs[:n], func(before jobRule) bool { return before.hides(j) }); by >= 0 {
			all = append(all, hidden("job rule", n, j.name, c.jobs[by].name))
		}
	}
	return all
}

func hidden(of string, n int, name, byName string) RuleError {
	return RuleError{
		Of: of, Index: n, Name: name, Field: "name",
		Problem: fmt.Sprintf("never decides: every process that it matches is matched by %s %s above", of, quoted(byName)),
		Remedy:  "move it above that rule, or remove it",
	}
}

// hides reports whether conditions hold wherever those of a later rule do.
func hides(before, later []condition) bool {
	return !slices.ContainsFunc(before, func(c condition) bool {
		return !c.always() && !slices.ContainsFunc(later, c.holdsWith)
	})
}

// always reports whether a condition holds for every process. That of cmdline does not until it has
// been read.
func (c condition) always() bool {
	return (c.field == comm || c.field == cgroup || c.field == cmdline) && anything(c.pattern)
}

// anything reports whether a glob matches every text.
func anything(pattern string) bool { return pattern != "" && strings.Trim(pattern, "*") == "" }

// holdsWith reports whether a condition holds wherever another one does. False also if that is not known.
func (c condition) holdsWith(other condition) bool {
	if c.field != other.field || c.key != other.key {
		return false
	}
	switch c.field {
	case uid, gid:
		return c.id == other.id
	case gpu:
		return !slices.ContainsFunc(other.gpus, func(sel selector) bool { return !slices.Contains(c.gpus, sel) })
	case queuePriority, ringAddress:
		return c.first <= other.first && other.last <= c.last
	default:
		return globIncludes(c, other)
	}
}

// globIncludes reports whether the glob of c matches what that of another one matches. Where neither has
// sets, and c no ?, only a * of c can stand for a wildcard of the other, which then is like any text.
func globIncludes(c, other condition) bool {
	simple := !strings.ContainsAny(c.pattern, "?[") && !strings.Contains(other.pattern, "[")
	return c.pattern == other.pattern || anything(c.pattern) || (simple || !other.glob.wildcard) && c.glob.matches(other.pattern)
}

// hides reports whether a job rule applies wherever a later one does.
func (r *jobRule) hides(later *jobRule) bool {
	return (r.cgroup == nil || later.cgroup != nil && (anything(r.path) || r.path == later.path)) &&
		!slices.ContainsFunc(r.by, func(c condition) bool {
			return !slices.ContainsFunc(later.by, func(other condition) bool { return c.field == other.field && c.key == other.key })
		})
}
