package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestEveryRequirementHasARowWithACommandAndAnAssertion(t *testing.T) {
	t.Parallel()
	var want []string
	for n := 1; n <= 69; n++ {
		want = append(want, fmt.Sprint("R", n))
	}
	var got []string
	for i, r := range table {
		got = append(got, r.id)
		if r.asks == "" || r.command == "" || len(r.shows) == 0 {
			t.Errorf("%s lacks what it asks for, its command or its assertion", r.id)
		}
		if _, known := machines[r.on]; r.on != "" && !known {
			t.Errorf("%s runs on %q, which is no machine", r.id, r.on)
		}
		for _, name := range r.needs {
			if _, known := needs[name]; !known {
				t.Errorf("%s needs %q, which nothing checks", r.id, name)
			}
		}
		if r.after != "" && !slices.ContainsFunc(table[:i], func(other row) bool { return other.id == r.after && other.on == r.on }) {
			t.Errorf("%s is after %s, which is not before it on its machine", r.id, r.after)
		}
		if r.refused != "" && r.partly != "" {
			t.Errorf("%s is refused and partly done", r.id)
		}
		for _, p := range slices.Concat(r.shows, r.hides) {
			if _, err := regexp.Compile(p); err != nil {
				t.Errorf("%s: %v", r.id, err)
			}
			if matches(p, "") {
				t.Errorf("%s: %q matches an empty output", r.id, p)
			}
		}
	}
	slices.SortFunc(got, func(a, b string) int { return result{Row: a}.number() - result{Row: b}.number() })
	if !slices.Equal(got, want) {
		t.Errorf("the table has %v, want R1 to R69, each once", got)
	}
}

func TestRowsAreJudgedByWhatTheirCommandsPrint(t *testing.T) {
	t.Parallel()
	const out = "#  ADDRESS    PID  ACTIVE\n1  0x7f00     12  yes\n\ntotal  1 queue\n"
	right := row{shows: []string{`^1 0x7f00 {JOB} yes$`, `^total 1 queue$`}, hides: []string{`unknown`}}
	with := func(change func(*row)) row {
		r := right
		change(&r)
		return r
	}
	for name, test := range map[string]struct {
		r    row
		out  string
		want verdict
		why  string
	}{
		"all is shown":             {right, out, works, ""},
		"something is not shown":   {right, strings.ReplaceAll(out, "yes", "no"), failed, `does not show "^1 0x7f00 12 yes$"`},
		"something else is shown":  {right, out + "unknown\n", failed, `shows "unknown"`},
		"nothing is printed":       {right, "", failed, "does not show \"^1 0x7f00 12 yes$\"\ndoes not show \"^total 1 queue$\""},
		"nothing is asserted":      {row{}, out, failed, "nothing is asserted"},
		"a refusal":                {with(func(r *row) { r.refused = "the firmware does" }), out, refused, "the firmware does"},
		"a refusal without reason": {with(func(r *row) { r.refused = "the firmware does" }), "", failed, "does not show \"^1 0x7f00 12 yes$\"\ndoes not show \"^total 1 queue$\""},
		"a part":                   {with(func(r *row) { r.partly = "no GPU" }), out, partly, "no GPU"},
	} {
		got, why := judge(test.r, test.out, (&machine{vars: map[string]string{"JOB": "12"}}).expand)
		if got != test.want || why != test.why {
			t.Errorf("%s: %v, %q, want %v, %q", name, got, why, test.want, test.why)
		}
	}
}

func TestRowsAreSelectedWithThoseThatTheyFollow(t *testing.T) {
	t.Parallel()
	rows := []row{{id: "R1"}, {id: "R2", after: "R1"}, {id: "R3"}, {id: "R4", after: "R2"}}
	var got []string
	for _, r := range needed(rows, func(r row) bool { return r.id == "R4" }) {
		got = append(got, r.id)
	}
	if want := []string{"R1", "R2", "R4"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestARowThatFailedFailsTheRun(t *testing.T) {
	t.Parallel()
	if err := failures([]result{{Row: "R1", Verdict: works}, {Row: "R2", Verdict: skipped}, {Row: "R3", Verdict: partly}, {Row: "R4", Verdict: refused}}); err != nil {
		t.Errorf("%v, want no error", err)
	}
	if err := failures([]result{{Row: "R5", Verdict: failed}, {Row: "R6", Verdict: works}}); err == nil || !strings.Contains(err.Error(), "R5") {
		t.Errorf("%v, want an error that names R5", err)
	}
}
