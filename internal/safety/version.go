package safety

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
)

// release is a parsed kernel release: 7.0.0-rc3, 6.8.0-137-generic,
// 5.14.0-503.11.1.el9_5.x86_64.
type release struct {
	// numbers are the dotted ones at the beginning.
	numbers []uint64
	// candidate is N of -rcN or ~rcN; final without one, which is later than any
	// candidate.
	candidate uint64
	// suffix is the distribution's part, split between digits and letters.
	suffix []string
}

const final = math.MaxUint64

func parseRelease(s string) release {
	r := release{candidate: final}
	for {
		n := len(s) - len(strings.TrimLeft(s, "0123456789"))
		if n == 0 {
			break
		}
		r.numbers = append(r.numbers, number(s[:n]))
		s = s[n:]
		if len(s) < 2 || s[0] != '.' || !isDigit(s[1]) {
			break
		}
		s = s[1:]
	}
	segments := segmentsOf(s)
	for i := 0; i < len(segments); i++ {
		if segments[i] == "rc" && i+1 < len(segments) && isDigit(segments[i+1][0]) && r.candidate == final {
			i++
			r.candidate = number(segments[i])
			continue
		}
		r.suffix = append(r.suffix, segments[i])
	}
	return r
}

// number parses digits; on overflow it returns the largest number.
func number(digits string) uint64 {
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return math.MaxUint64
	}
	return n
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func isLetter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

// segmentsOf returns the runs of digits and of letters; other characters separate them.
func segmentsOf(s string) []string {
	var segments []string
	for i := 0; i < len(s); {
		in := isDigit
		if isLetter(s[i]) {
			in = isLetter
		} else if !isDigit(s[i]) {
			i++
			continue
		}
		j := i
		for j < len(s) && in(s[j]) {
			j++
		}
		segments = append(segments, s[i:j])
		i = j
	}
	return segments
}

// compare orders releases: by numbers, where a missing one is 0; then candidates before
// the final release; then by the distribution's part, where a number is later than a
// word, and longer is later.
func (r release) compare(o release) int {
	for i := range max(len(r.numbers), len(o.numbers)) {
		if c := cmp.Compare(at(r.numbers, i), at(o.numbers, i)); c != 0 {
			return c
		}
	}
	return cmp.Or(cmp.Compare(r.candidate, o.candidate), slices.CompareFunc(r.suffix, o.suffix, compareSegments))
}

func at(numbers []uint64, i int) uint64 {
	if i < len(numbers) {
		return numbers[i]
	}
	return 0
}

func compareSegments(a, b string) int {
	if isDigit(a[0]) && isDigit(b[0]) {
		return cmp.Compare(number(a), number(b))
	}
	if isDigit(a[0]) != isDigit(b[0]) {
		if isDigit(a[0]) {
			return 1
		}
		return -1
	}
	return strings.Compare(a, b)
}

// as returns r reduced to the parts that bound has.
func (r release) as(bound release) release {
	if n := len(bound.numbers); len(r.numbers) > n {
		if slices.ContainsFunc(r.numbers[n:], func(number uint64) bool { return number != 0 }) {
			r.candidate = final // 7.0.5-rc1 comes after 7.0
		}
		r.numbers = r.numbers[:n]
	}
	r.suffix = r.suffix[:min(len(r.suffix), len(bound.suffix))]
	return r
}

// compareToBound compares the parts of a release that the bound has. The distribution's
// part is compared only if the bound has one, and is meaningful only against a bound of
// the same distribution.
func compareToBound(s, bound string) int {
	b := parseRelease(bound)
	return parseRelease(s).as(b).compare(b)
}
