package evidence

import (
	"fmt"
	"slices"
	"strings"
)

// mostNames is how many settings, or values of a knob, are named one by one.
const mostNames = 6

// NameSettings returns one name for several arms or settings. What all begin or end with is said once;
// of policies with each the same values of a knob, as "balanced, share floor 0.10", both are listed.
func NameSettings(names []string) string {
	var heads, tails []string
	add := func(to *[]string, s string) {
		if !slices.Contains(*to, s) {
			*to = append(*to, s)
		}
	}
	for _, name := range names {
		if strings.Contains(name, "; ") { // several settings already
			return strings.Join(names, " and ")
		}
		head, tail, ok := strings.Cut(name, ", ")
		if !ok {
			return list(names)
		}
		add(&heads, head)
		add(&tails, tail)
	}
	if len(names) < 2 || len(names) != len(heads)*len(tails) {
		return list(names)
	}
	return list(heads) + "; " + list(tails)
}

// list joins names that are words, of which the common ones are said once.
func list(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	words := make([][]string, len(names))
	least := len(strings.Fields(names[0]))
	for i, name := range names {
		words[i] = strings.Fields(name)
		least = min(least, len(words[i])-1)
	}
	same := func(at func([]string) string) bool {
		return !slices.ContainsFunc(words, func(w []string) bool { return at(w) != at(words[0]) })
	}
	first, last := 0, 0
	for first < least && same(func(w []string) string { return w[first] }) {
		first++
	}
	for first+last < least && same(func(w []string) string { return w[len(w)-1-last] }) {
		last++
	}
	var middle []string
	for _, w := range words {
		middle = append(middle, strings.Join(w[first:len(w)-last], " "))
	}
	text := strings.Join(middle, ", ")
	if n := len(middle); n > mostNames {
		text = fmt.Sprintf("%s, ... %s (%d)", strings.Join(middle[:mostNames-2], ", "), middle[n-1], n)
	}
	return strings.TrimSpace(strings.Join(words[0][:first], " ") + " " + text + " " + strings.Join(words[0][len(words[0])-last:], " "))
}
