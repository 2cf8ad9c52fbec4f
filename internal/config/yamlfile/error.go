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

// Nearest returns the candidate that is most similar to word, or "" if none is similar.
func Nearest(word string, candidates []string) string {
	best, least := "", 1+max(1, len(word)/3)
	for _, c := range candidates {
		if d := distance(word, c); d < least {
			best, least = c, d
		}
	}
	return best
}

// distance returns the number of letters to insert, delete, replace or swap with their
// neighbour to turn a into b.
func distance(a, b string) int {
	before, row := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next := make([]int, len(b)+1)
		next[0] = i + 1
		for j := range len(b) {
			change := 0
			if a[i] != b[j] {
				change = 1
			}
			next[j+1] = min(row[j+1]+1, next[j]+1, row[j]+change)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row = row, next
	}
	return row[len(b)]
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
