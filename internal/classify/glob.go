package classify

import (
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"
)

// glob is a compiled pattern; the zero value matches everything, as a pattern
// that is not set does.
type glob []element

// element is one part of a glob.
type element struct {
	kind elementKind
	// char is for literal.
	char rune
	// ranges are for oneOf: first and last of each included; negated turns it round.
	ranges  [][2]rune
	negated bool
}

type elementKind uint8

const (
	literal elementKind = iota // one certain character
	anyOne                     // any one character
	oneOf                      // one of a set of characters
	anyRun                     // any run of characters, also none
)

func (e *element) matches(r rune) bool {
	switch e.kind {
	case literal:
		return r == e.char
	case anyOne:
		return true
	case oneOf:
		in := slices.ContainsFunc(e.ranges, func(x [2]rune) bool { return x[0] <= r && r <= x[1] })
		return in != e.negated
	case anyRun:
	}
	return false
}

// compileGlob reads a pattern. The error says at which character it is wrong,
// counted from 1, and what would be right.
func compileGlob(pattern string) (glob, error) {
	if !utf8.ValidString(pattern) {
		return nil, errors.New("it is not UTF-8: save the file as UTF-8, and write ? for a character that is not")
	}
	chars := []rune(pattern)
	var g glob
	for n := 0; n < len(chars); n++ {
		switch chars[n] {
		case '*':
			if len(g) == 0 || g[len(g)-1].kind != anyRun {
				g = append(g, element{kind: anyRun})
			}
		case '?':
			g = append(g, element{kind: anyOne})
		case '[':
			e, length, err := compileSet(chars[n:])
			if err != nil {
				return nil, fmt.Errorf("the [ at character %d %w", n+1, err)
			}
			g = append(g, e)
			n += length - 1
		default:
			g = append(g, element{kind: literal, char: chars[n]})
		}
	}
	return g, nil
}

// compileSet reads the set chars begins with and gives its length. In it, a ]
// that comes first is a member, and so is a - that comes first or last.
func compileSet(chars []rune) (e element, length int, err error) {
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
			return e, 0, fmt.Errorf("has the range %c-%c, which is empty: write %c-%c", low, high, high, low)
		}
		e.ranges = append(e.ranges, [2]rune{low, high})
	}
	return e, 0, errors.New("is not closed: add the ], or write [[] for the character itself")
}

// shortest is the number of characters in the shortest text g matches.
func (g glob) shortest() int {
	n := 0
	for _, e := range g {
		if e.kind != anyRun {
			n++
		}
	}
	return n
}

// matches tells whether all of text matches. What is not UTF-8 in it counts as
// one U+FFFD for each byte. The time is at most the product of both lengths: of
// several runs only the last one ever has to give way.
func (g glob) matches(text string) bool {
	if len(g) == 0 {
		return true
	}
	at, pos := 0, 0            // next in g, next in text
	retryAt, retryPos := -1, 0 // behind the last run, and what it has not eaten yet
	for {
		if at < len(g) && g[at].kind == anyRun {
			at++
			if at == len(g) {
				return true
			}
			retryAt, retryPos = at, pos
			continue
		}
		if pos == len(text) {
			return at == len(g)
		}
		r, size := utf8.DecodeRuneInString(text[pos:])
		if at < len(g) && g[at].matches(r) {
			at++
			pos += size
			continue
		}
		if retryAt < 0 {
			return false
		}
		_, size = utf8.DecodeRuneInString(text[retryPos:])
		retryPos += size
		at, pos = retryAt, retryPos
	}
}
