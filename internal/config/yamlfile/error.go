// Package yamlfile parses YAML files strictly: every error has its line, its column, its
// key and what to do, unknown keys are errors, and types are not converted.
package yamlfile

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Error is one error in a file.
type Error struct {
	// File is the name of the file; "" if the values are not from a file.
	File string
	// Line and Column count from 1; 0 if unknown.
	Line, Column int
	// Key is the dotted key, such as "policy.share_floor" or "rules[0].class"; "" for the
	// file as a whole.
	Key     string
	Problem string
	// Remedy says what to do.
	Remedy string
}

// Error returns "FILE:LINE:COLUMN: KEY: PROBLEM: REMEDY", without the parts that are
// unknown.
func (e *Error) Error() string {
	var b strings.Builder
	if e.File != "" {
		b.WriteString(e.File)
		for _, n := range []int{e.Line, e.Column} {
			if n > 0 {
				b.WriteString(":" + strconv.Itoa(n))
			}
		}
		b.WriteString(": ")
	}
	if e.Key != "" {
		b.WriteString(e.Key + ": ")
	}
	b.WriteString(e.Problem)
	if e.Remedy != "" {
		b.WriteString(": " + e.Remedy)
	}
	return b.String()
}

// Errors are the errors of a file, in its order.
type Errors []*Error

// Error returns one line for each.
func (es Errors) Error() string {
	lines := make([]string, len(es))
	for i, e := range es {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// Sort puts them into the order of the file.
func (es Errors) Sort() {
	slices.SortStableFunc(es, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}

// Unwrap lets errors.As find an *Error.
func (es Errors) Unwrap() []error {
	errs := make([]error, len(es))
	for i, e := range es {
		errs[i] = e
	}
	return errs
}

// Quoted returns a text of the file, short and in quotes.
func Quoted(s string) string { return strconv.Quote(shorten(s)) }

// Cut returns a text of the file, short and printable.
func Cut(s string) string { return gpreempt.Printable(shorten(s)) }

func shorten(s string) string {
	const most = 60
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "..."
	}
	return s
}
