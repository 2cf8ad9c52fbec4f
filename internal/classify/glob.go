package classify

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// glob is a compiled pattern. The zero value matches everything.
type glob struct {
	// expression has a package that takes linear time, and counts a byte that is not UTF-8 as U+FFFD.
	expression *regexp.Regexp
	// shortest is the number of characters in the shortest text that it matches.
	shortest int
	// end is what every text that it matches ends with, and begins with, too, if there is no wildcard.
	end      string
	wildcard bool
}

// globError is an error in a pattern.
type globError struct{ problem, remedy string }

// compileGlob compiles a pattern. The error has the number of the character, from 1.
func compileGlob(pattern string) (glob, *globError) {
	if pattern == "" {
		return glob{}, nil
	}
	if !utf8.ValidString(pattern) {
		return glob{}, &globError{"is not UTF-8", "save the file as UTF-8, and write ? for other characters"}
	}
	chars := []rune(pattern)
	var g glob
	var text strings.Builder
	text.WriteString("(?s)")
	// Instead of a run at either end the expression is open there: what remains is often a plain
	// text, which is found much faster.
	if chars[0] != '*' {
		text.WriteString(`\A`)
	}
	for n := 0; n < len(chars); n++ {
		wildcard := true
		switch chars[n] {
		case '*':
			if g.shortest--; n > 0 && n < len(chars)-1 {
				text.WriteString(".*")
			}
		case '?':
			text.WriteString(".")
		case '[':
			set, length, err := compileSet(chars[n:])
			if err != nil {
				return glob{}, &globError{fmt.Sprintf("the [ at character %d %s", n+1, err.problem), err.remedy}
			}
			text.WriteString(set)
			n += length - 1
		default:
			wildcard = false
			g.end += string(chars[n])
			text.WriteString(regexp.QuoteMeta(string(chars[n])))
		}
		g.shortest++
		if wildcard {
			g.end, g.wildcard = "", true
		}
	}
	if chars[len(chars)-1] != '*' {
		text.WriteString(`\z`)
	}
	g.expression = regexp.MustCompile(text.String())
	return g, nil
}

// compileSet translates the set at the beginning of chars and returns its length. A ] that
// comes first is a member, and so is a - that comes first or last.
func compileSet(chars []rune) (set string, length int, err *globError) {
	set = "["
	n := 1
	if n < len(chars) && (chars[n] == '!' || chars[n] == '^') {
		set += "^"
		n++
	}
	for first := n; n < len(chars); n++ {
		if chars[n] == ']' && n > first {
			return set + "]", n + 1, nil
		}
		low, high := chars[n], chars[n]
		if n+2 < len(chars) && chars[n+1] == '-' && chars[n+2] != ']' {
			high = chars[n+2]
			n += 2
		}
		if low > high {
			return "", 0, &globError{fmt.Sprintf("has the range %c-%c, which is empty", low, high), fmt.Sprintf("write %c-%c", high, low)}
		}
		set += fmt.Sprintf(`\x{%x}-\x{%x}`, low, high)
	}
	return "", 0, &globError{"is not closed", "add the ], or write [[] for the character itself"}
}

// mayEndIn reports whether g may match a text with this end.
func (g glob) mayEndIn(end string) bool {
	return strings.HasSuffix(g.end, end) || g.wildcard && strings.HasSuffix(end, g.end)
}

// matches reports whether g matches all of text.
func (g glob) matches(text string) bool { return g.expression == nil || g.expression.MatchString(text) }
