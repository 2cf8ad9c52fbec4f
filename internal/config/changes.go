package config

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
)

// Change is one difference between two configurations.
type Change struct {
	// Key is the dotted key.
	Key string
	// From and To are the values as text. Of rules, jobs and rows they are the names of those that
	// are not the same in both, or of all if only their order differs.
	From, To string
	// Live reports whether a running daemon can apply it; else it needs a restart.
	Live bool
}

// Changes returns the differences in the order of the default file.
func Changes(from, to Config) (changes []Change) {
	was, is := yamlfile.Keys(&from), yamlfile.Keys(&to)
	for i, key := range was {
		from, to := key.Value, is[i].Value
		if reflect.DeepEqual(from.Interface(), to.Interface()) {
			continue
		}
		a, b := text(key), text(is[i])
		if t := from.Type(); t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct {
			was, is := differing(from, to), differing(to, from)
			if len(was)+len(is) == 0 {
				was, is = differing(from, reflect.Zero(t)), differing(to, reflect.Zero(t))
			}
			a, b = strings.Join(was, ", "), strings.Join(is, ", ")
		}
		changes = append(changes, Change{Key: key.Name, From: a, To: b, Live: live(key)})
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
	return strings.NewReplacer("h0m0s", "h", "m0s", "m").Replace(d.String())
}

// differing returns the names of the entries of a list that another does not have, or not with the
// same content.
func differing(list, other reflect.Value) (names []string) {
	for i := range list.Len() {
		entry, same := list.Index(i), false
		for j := range other.Len() {
			same = same || reflect.DeepEqual(entry.Interface(), other.Index(j).Interface())
		}
		if !same {
			names = append(names, entry.Field(0).String())
		}
	}
	return names
}
