package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/safety"
)

// Change is one difference between two configurations.
type Change struct {
	// Key is the dotted key; "rules.NAME" for a rule, or "rules" for their order; likewise
	// "jobs.NAME", and "safety.hazards.ID" for a row.
	Key string
	// From and To are the values as text; "" for a rule or a row that does not exist.
	From, To string
	// Live reports whether a running daemon can apply it; else it needs a restart.
	Live bool
}

// Changes returns the differences in the order of the default file, the lists of rules,
// jobs and hazards last.
func Changes(from, to Config) []Change {
	var changes []Change
	for _, f := range fields {
		if was, is := text(f.at(&from)), text(f.at(&to)); was != is {
			changes = append(changes, Change{Key: f.key, From: was, To: is, Live: f.live != nil})
		}
	}
	changes = append(changes, listChanges("rules", ruleEntries(from.Rules), ruleEntries(to.Rules))...)
	changes = append(changes, listChanges("jobs", jobEntries(from.Jobs), jobEntries(to.Jobs))...)
	return append(changes, listChanges("safety.hazards", hazardEntries(from.Safety.Hazards), hazardEntries(to.Safety.Hazards))...)
}

// WithRestartKeys returns to with the values of from for all keys that need a restart:
// the configuration that a running daemon has after a reload.
func WithRestartKeys(from, to Config) Config {
	for _, f := range fields {
		if f.live == nil {
			reflect.ValueOf(f.at(&to)).Elem().Set(reflect.ValueOf(f.at(&from)).Elem())
		}
	}
	return to
}

// listEntry is an entry of a list in which the first match decides: its name, and all of
// it in one line.
type listEntry struct{ name, text string }

func ruleEntries(rules []classify.Rule) []listEntry {
	var entries []listEntry
	for _, r := range rules {
		entries = append(entries, listEntry{r.Name, ruleText(r)})
	}
	return entries
}

func jobEntries(rules []classify.JobRule) []listEntry {
	var entries []listEntry
	for _, r := range rules {
		text := "by " + strings.Join(r.By, ", ")
		if r.Cgroup != "" {
			text = strings.TrimSuffix(fmt.Sprintf("cgroup %q %s", r.Cgroup, text), " by ")
		}
		entries = append(entries, listEntry{r.Name, text})
	}
	return entries
}

func hazardEntries(rows []safety.Row) []listEntry {
	var entries []listEntry
	for _, r := range rows {
		entries = append(entries, listEntry{r.ID, r.String()})
	}
	return entries
}

// listChanges returns the differences of a list that a running daemon can apply.
func listChanges(key string, from, to []listEntry) []Change {
	var changes []Change
	for _, was := range from {
		is := ""
		if i := indexEntry(to, was.name); i >= 0 {
			is = to[i].text
		}
		if was.text != is {
			changes = append(changes, Change{Key: key + "." + was.name, From: was.text, To: is, Live: true})
		}
	}
	for _, is := range to {
		if indexEntry(from, is.name) < 0 {
			changes = append(changes, Change{Key: key + "." + is.name, To: is.text, Live: true})
		}
	}
	// The first match decides, so the order matters. Added and removed entries are in
	// changes already.
	if was, is := order(from, to), order(to, from); was != is {
		changes = append(changes, Change{Key: key, From: was, To: is, Live: true})
	}
	return changes
}

func indexEntry(entries []listEntry, name string) int {
	return slices.IndexFunc(entries, func(e listEntry) bool { return e.name == name })
}

// order returns the names of the entries that are also in others.
func order(entries, others []listEntry) string {
	var names []string
	for _, e := range entries {
		if indexEntry(others, e.name) >= 0 {
			names = append(names, e.name)
		}
	}
	return strings.Join(names, ", ")
}

// ruleText returns a rule in one line.
func ruleText(r classify.Rule) string {
	text := r.Class.String()
	if r.Priority != nil {
		text += fmt.Sprintf(" priority %d", *r.Priority)
	}
	return text + " if " + r.Match.String()
}
