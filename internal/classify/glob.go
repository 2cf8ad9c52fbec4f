package classify

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// glob is a compiled pattern. The zero value matches everything.
type glob []element

// element is one part of a glob.
type element struct {
	kind elementKind
	// text is for literal; not empty.
	text string
	// ranges are for oneOf, first and last included; negated inverts them.
	ranges  [][2]rune
	negated bool
}

type elementKind uint8

const (
	literal elementKind = iota // these characters
	anyOne                     // any one character
	oneOf                      // one of a set of characters
	anyRun                     // any run of characters, also none
)

// begins reports whether text begins with a match of e, and the length of the match in
// bytes. It does not support anyRun.
func (e *element) begins(text string) (length int, ok bool) {
	if e.kind == literal {
		return len(e.text), strings.HasPrefix(text, e.text)
	}
	r, size := utf8.DecodeRuneInString(text)
	if size == 0 || e.kind == anyOne {
		return size, size > 0
	}
	for _, x := range e.ranges {
		if x[0] <= r && r <= x[1] {
			return size, !e.negated
		}
	}
	return size, e.negated
}

// globError is an error in a pattern.
type globError struct{ problem, remedy string }

// compileGlob compiles a pattern. The error has the number of the character, from 1.
func compileGlob(pattern string) (glob, *globError) {
	if !utf8.ValidString(pattern) {
		return nil, &globError{"is not UTF-8", "save the file as UTF-8, and write ? for other characters"}
	}
	chars := []rune(pattern)
	var g glob
	for n := 0; n < len(chars); n++ {
		last := len(g) - 1
		switch chars[n] {
		case '*':
			if last < 0 || g[last].kind != anyRun {
				g = append(g, element{kind: anyRun})
			}
		case '?':
			g = append(g, element{kind: anyOne})
		case '[':
			e, length, err := compileSet(chars[n:])
			if err != nil {
				return nil, &globError{fmt.Sprintf("the [ at character %d %s", n+1, err.problem), err.remedy}
			}
			g = append(g, e)
			n += length - 1
		case utf8.RuneError:
			// It also represents bytes that are not UTF-8, so it is not compared as text.
			g = append(g, element{kind: oneOf, ranges: [][2]rune{{utf8.RuneError, utf8.RuneError}}})
		default:
			if last < 0 || g[last].kind != literal {
				g = append(g, element{kind: literal})
				last++
			}
			g[last].text += string(chars[n])
		}
	}
	return g, nil
}

// compileSet compiles the set at the beginning of chars and returns its length. A ] that
// comes first is a member, and so is a - that comes first or last.
func compileSet(chars []rune) (e element, length int, err *globError) {
	e.kind = oneOf
	n := 1
	if n < len(chars) && (chars[n] == '!' || chars[n] == '^') {
		e.negated = true
		n++
	}
	for first := n; n < len(chars); n++ {
		if chars[n] == ']' && n > first {
			return e, n + 1, nil
		}
		low, high := chars[n], chars[n]
		if n+2 < len(chars) && chars[n+1] == '-' && chars[n+2] != ']' {
			high = chars[n+2]
			n += 2
		}
		if low > high {
			return e, 0, &globError{fmt.Sprintf("has the range %c-%c, which is empty", low, high), fmt.Sprintf("write %c-%c", high, low)}
		}
		e.ranges = append(e.ranges, [2]rune{low, high})
	}
	return e, 0, &globError{"is not closed", "add the ], or write [[] for the character itself"}
}

// shortest returns the number of characters in the shortest text that g matches.
func (g glob) shortest() int {
	n := 0
	for _, e := range g {
		switch e.kind {
		case anyRun:
		case literal:
			n += utf8.RuneCountInString(e.text)
		default:
			n++
		}
	}
	return n
}

// mayEndIn reports whether g may match a text with this end, according to its last
// literal.
func (g glob) mayEndIn(end string) bool {
	if len(g) == 0 || g[len(g)-1].kind != literal {
		return true
	}
	last := g[len(g)-1].text
	return strings.HasSuffix(last, end) || (len(g) > 1 && strings.HasSuffix(end, last))
}

// matches reports whether g matches all of text. A byte that is not UTF-8 counts as
// U+FFFD. The time is at most the product of both lengths: of several runs only the last
// one has to be retried.
func (g glob) matches(text string) bool {
	if len(g) == 0 {
		return true
	}
	// A literal consists of whole characters, so it can be searched as bytes.
	if last := &g[len(g)-1]; last.kind == literal && !strings.HasSuffix(text, last.text) {
		return false
	}
	at, pos := 0, 0            // next in g, next in text
	retryAt, retryPos := -1, 0 // after the last run, and the first byte that it does not match yet
	for {
		switch {
		case at < len(g) && g[at].kind == anyRun:
			at++
			if at == len(g) {
				return true
			}
			retryAt, retryPos = at, pos
		case pos == len(text):
			return at == len(g)
		case at < len(g):
			if length, ok := g[at].begins(text[pos:]); ok {
				at++
				pos += length
				continue
			}
			fallthrough
		default:
			if retryAt < 0 {
				return false
			}
			_, size := utf8.DecodeRuneInString(text[retryPos:])
			retryPos += size
		}
		if g[retryAt].kind == literal {
			skip := strings.Index(text[retryPos:], g[retryAt].text)
			if skip < 0 {
				return false
			}
			retryPos += skip
		}
		at, pos = retryAt, retryPos
	}
}
