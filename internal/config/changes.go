package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
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

// Changes returns the differences in the order of the default file.
func Changes(from, to Config) (changes []Change) {
	was, is := yamlfile.Keys(&from), yamlfile.Keys(&to)
	for i, key := range was {
		if lists, ok := entries(key.Value); ok {
			others, _ := entries(is[i].Value)
			changes = append(changes, listChanges(key.Name, lists, others)...)
		} else if a, b := text(key), text(is[i]); a != b {
			changes = append(changes, Change{Key: key.Name, From: a, To: b, Live: live(key)})
		}
	}
	return changes
}

// WithRestartKeys returns to with the values of from for all keys that need a restart:
// the configuration that a running daemon has after a reload.
func WithRestartKeys(from, to Config) Config {
	was := yamlfile.Keys(&from)
	for i, key := range yamlfile.Keys(&to) {
		if !live(key) {
			key.Value.Set(was[i].Value)
		}
	}
	return to
}

// LiveKeys returns the keys that a running daemon puts into force.
func LiveKeys() (names []string) {
	for _, key := range yamlfile.Keys(new(Config)) {
		if live(key) {
			names = append(names, key.Name)
		}
	}
	return names
}

func live(key yamlfile.Key) bool {
	_, ok := key.Tag.Lookup("live")
	return ok
}

// text returns a value in the form of the file.
func text(key yamlfile.Key) string {
	switch v := key.Value.Interface().(type) {
	case string:
		if v == "" {
			return `""`
		}
		return v
	case []string:
		return "[" + strings.Join(v, ", ") + "]"
	case time.Duration:
		if word := key.Tag.Get("minus"); word != "" && v == -1 {
			return word
		}
		return durationText(v)
	default:
		return fmt.Sprint(v)
	}
}

// durationText returns a duration in the form of the file: 1m0s is 1m.
func durationText(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// listEntry is an entry of a list in which the first match decides: its name, and all of
// it in one line.
type listEntry struct{ name, text string }

// entries returns those of a list in which the first match decides; false for another value.
func entries(v reflect.Value) (all []listEntry, ok bool) {
	switch list := v.Interface().(type) {
	case []classify.Rule:
		for _, r := range list {
			text := r.Class.String()
			if r.Priority != nil {
				text += fmt.Sprintf(" priority %d", *r.Priority)
			}
			if r.NeverDebug {
				text += " never_debug"
			}
			if r.OnResist.Enforced() {
				text += " on_resist " + r.OnResist.String()
			}
			all = append(all, listEntry{r.Name, text + " if " + r.Match.String()})
		}
	case []classify.JobRule:
		for _, r := range list {
			all = append(all, listEntry{r.Name, strings.Trim(fmt.Sprintf("%s %s", r.Cgroup, strings.Join(r.By, ", ")), " ")})
		}
	case []safety.Row:
		for _, r := range list {
			all = append(all, listEntry{r.ID, r.String()})
		}
	default:
		return nil, false
	}
	return all, true
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
