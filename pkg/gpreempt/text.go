package gpreempt

import (
	"strings"
	"unicode"
)

// Printable returns s with ? in place of characters that would move the cursor or control
// a terminal, and of invalid ones: users choose command names and labels.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
