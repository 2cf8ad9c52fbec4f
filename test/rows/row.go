package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// row is a requirement with the command that shows it.
type row struct {
	id string // R1 to R69
	// asks is what the design document asks for, as the driver permits it.
	asks string
	// on is the machine that the command runs on, see machines; "" is this host without a daemon.
	on string
	// after is the row whose command must have run before.
	after string
	// needs are things that a host may lack: see world.lacks.
	needs []string
	// command is a shell line, in the root of a clone, with the variables of the machine.
	command string
	// waits repeats the command until its output is right: what it shows takes time to appear.
	waits bool
	// shows are patterns of lines or of parts of what it prints, in any order; {NAME} is a variable of the machine.
	shows []string
	// hides are patterns that nothing matches.
	hides []string
	// refused is why the product does not do it as written; then shows proves refusal or replacement.
	refused string
	// partly is what is missing of it.
	partly string
}

// verdict is the result of a row.
type verdict string

const (
	works   verdict = "WORKS"
	refused verdict = "REFUSED"
	partly  verdict = "PARTLY"
	skipped verdict = "SKIPPED"
	failed  verdict = "FAILED"
)

// result is what became of a row.
type result struct {
	Row     string  `json:"row"`
	Asks    string  `json:"asks"`
	Machine string  `json:"machine"`
	Command string  `json:"command"`
	Verdict verdict `json:"verdict"`
	Why     string  `json:"why,omitempty"`
	Seconds float64 `json:"seconds"`
	Output  string  `json:"output"`
}

// number is that of the row.
func (r result) number() int {
	n, err := strconv.Atoi(strings.TrimPrefix(r.Row, "R"))
	if err != nil {
		return 0
	}
	return n
}

// judge compares what a row's command printed with what it must and must not. expand replaces {NAME} in patterns.
func judge(r row, output string, expand func(string) string) (verdict, string) {
	var wrong []string
	for _, p := range r.shows {
		if !matches(expand(p), output) {
			wrong = append(wrong, fmt.Sprintf("does not show %q", expand(p)))
		}
	}
	for _, p := range r.hides {
		if matches(expand(p), output) {
			wrong = append(wrong, fmt.Sprintf("shows %q", expand(p)))
		}
	}
	switch {
	case len(r.shows) == 0:
		return failed, "nothing is asserted"
	case len(wrong) > 0:
		return failed, strings.Join(wrong, "\n")
	case r.refused != "":
		return refused, r.refused
	case r.partly != "":
		return partly, r.partly
	}
	return works, ""
}

// matches reports whether a pattern matches, in which ^ and $ are those of a line, that begins and ends without
// spaces, and a run of spaces is one.
func matches(pattern, output string) bool {
	return regexp.MustCompile("(?m)" + pattern).MatchString(around.ReplaceAllString(spaces.ReplaceAllString(output, " "), ""))
}

var (
	spaces = regexp.MustCompile(` +`)
	around = regexp.MustCompile(`(?m)^ | $`)
)
