package conformance

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

//go:embed table/*.txt
var tableFiles embed.FS

// expectation is one row of the table.
type expectation struct {
	name  string
	when  []string
	steps []step
}

// step is one line of an expectation.
type step struct {
	where  string // file and line
	text   string
	actor  string // T, or T.1
	verb   string
	args   []string          // words without a "="
	values map[string]string // and with one
	// answers are the alternatives, none if any success is accepted.
	answers []answer
}

// answer is the expected answer of a step.
type answer struct {
	when   []string
	result string
	values map[string]string
}

// tags are the conditions that hold of a host.
type tags map[string]bool

// hold reports whether all conditions do.
func (t tags) hold(conditions []string) bool {
	for _, c := range conditions {
		name, not := strings.CutPrefix(c, "!")
		if t[name] == not {
			return false
		}
	}
	return true
}

// isFor reports whether e is for a host. A host with a special tag plays only expectations
// that name one of its tags.
func (e expectation) isFor(t tags) bool {
	if t["only"] && !slices.ContainsFunc(e.when, func(c string) bool { return special[c] }) {
		return false
	}
	return t.hold(e.when)
}

// special are the tags of hosts that do not play the whole table.
var special = tags{"no-hws": true, "no-gpu-no-open": true, "no-gws-debug": true, "kmap": true}

// answer returns the alternative whose condition holds, nil if any success is accepted.
func (s step) answer(t tags) (*answer, error) {
	if len(s.answers) == 0 {
		return nil, nil
	}
	for i := range s.answers {
		if t.hold(s.answers[i].when) {
			return &s.answers[i], nil
		}
	}
	return nil, fmt.Errorf("%s: no answer for this host", s.where)
}

// loadTable reads the whole table.
func loadTable() ([]expectation, error) {
	names, err := fs.Glob(tableFiles, "table/*.txt")
	if err != nil {
		return nil, err
	}
	var table []expectation
	for _, name := range names {
		text, err := tableFiles.ReadFile(name)
		if err != nil {
			return nil, err
		}
		part, err := parseTable(strings.TrimPrefix(name, "table/"), string(text))
		if err != nil {
			return nil, err
		}
		table = append(table, part...)
	}
	seen := map[string]bool{}
	for _, e := range table {
		if seen[e.name] {
			return nil, fmt.Errorf("duplicate expectation %s", e.name)
		}
		seen[e.name] = true
	}
	return table, nil
}

func parseTable(file, text string) ([]expectation, error) {
	var table []expectation
	number := 0
	for line := range strings.Lines(text) {
		number++
		where := fmt.Sprintf("%s:%d", file, number)
		line, _, _ := strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if words[0] == "expect" {
			if len(words) != 2 {
				return nil, fmt.Errorf("%s: want expect NAME", where)
			}
			table = append(table, expectation{name: words[1]})
			continue
		}
		if len(table) == 0 {
			return nil, fmt.Errorf("%s: before the first expect", where)
		}
		e := &table[len(table)-1]
		if words[0] == "when" {
			e.when = append(e.when, words[1:]...)
			continue
		}
		s, err := parseStep(strings.TrimSpace(line))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
		s.where = where
		e.steps = append(e.steps, s)
	}
	for _, e := range table {
		if !slices.ContainsFunc(e.steps, func(s step) bool { return len(s.answers) > 0 }) {
			return nil, fmt.Errorf("%s: expectation %s is empty", file, e.name)
		}
	}
	return table, nil
}

func parseStep(text string) (step, error) {
	s := step{text: text, values: map[string]string{}}
	command, answers, expects := strings.Cut(text, "->")
	words := strings.Fields(command)
	if len(words) < 2 {
		return step{}, fmt.Errorf("%q: want an actor and a verb", text)
	}
	s.actor, s.verb = words[0], words[1]
	for _, word := range words[2:] {
		if key, value, ok := strings.Cut(word, "="); ok {
			s.values[key] = value
		} else {
			s.args = append(s.args, word)
		}
	}
	if !expects {
		return s, nil
	}
	for alternative := range strings.SplitSeq(answers, "|") {
		a, err := parseAnswer(alternative)
		if err != nil {
			return step{}, err
		}
		s.answers = append(s.answers, a)
	}
	return s, nil
}

func parseAnswer(text string) (answer, error) {
	a := answer{values: map[string]string{}}
	words := strings.Fields(text)
	if len(words) > 0 && strings.HasSuffix(words[0], ":") {
		a.when = strings.Split(strings.TrimSuffix(words[0], ":"), ",")
		words = words[1:]
	}
	if len(words) == 0 {
		return answer{}, fmt.Errorf("%q: no answer", text)
	}
	a.result = words[0]
	for _, word := range words[1:] {
		key, value, ok := strings.Cut(word, "=")
		if !ok {
			return answer{}, fmt.Errorf("%q: want NAME=VALUE after the result", word)
		}
		a.values[key] = value
	}
	return a, nil
}
