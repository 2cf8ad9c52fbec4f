package safety

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// GFXRange names GPUs by gfx_target_version: a name (gfx90a), a family (gfx11xx), a span of names
// (gfx1100-gfx1103), or gfx* for all, also unknown ones.
type GFXRange string

// UnmarshalText returns an error if the text is no such range.
func (x *GFXRange) UnmarshalText(text []byte) error {
	*x = GFXRange(text)
	_, _, err := x.bounds()
	return err
}

// Contains reports whether a GPU is in range.
func (x GFXRange) Contains(gfx uint32) bool {
	first, last, err := x.bounds()
	return err == nil && first <= gfx && gfx <= last
}

func (x GFXRange) bounds() (first, last uint32, err error) {
	from, to, span := strings.Cut(string(x), "-")
	stem := strings.TrimRight(from, "x")
	switch wild := len(from) - len(stem); {
	case x == "gfx*":
		return 0, math.MaxUint32, nil
	case !span && (wild == 1 || wild == 2):
		from, to = stem+strings.Repeat("0", wild), stem+strings.Repeat("f", wild)
	case !span:
		to = from
	}
	first, err1 := gpreempt.ParseGFX(from)
	last, err2 := gpreempt.ParseGFX(to)
	if err1 != nil || err2 != nil || first > last {
		return 0, 0, fmt.Errorf("%q is not the name of a GPU architecture, a family or a span", string(x))
	}
	return first, last, nil
}

// KernelRange is comparisons with a kernel release or the version of a driver that must all hold,
// such as ">=6.5 <7.0"; "" is every release.
type KernelRange string

// UnmarshalText returns an error if the text is no such range.
func (r *KernelRange) UnmarshalText(text []byte) error {
	*r = KernelRange(text)
	return comparisons(string(text), func(_, version string) error {
		if version[0] < '0' || version[0] > '9' {
			return fmt.Errorf("%q is not a kernel version", version)
		}
		return nil
	})
}

// Contains reports whether a release, such as 6.12.43+deb13-amd64, is in range. Only the
// parts that the bound has are compared: 6.12.43 is =6.12.
func (r KernelRange) Contains(release string) bool {
	return r == "" || comparisons(string(r), func(op, version string) error {
		return checkComparison(op, compareToBound(release, version))
	}) == nil
}

// FirmwareRange is comparisons with a firmware version that must all hold, such as ">=0x40 <0x80"; ""
// is every version, also an unknown one (0), which is in no other range.
type FirmwareRange string

// UnmarshalText returns an error if the text is no such range.
func (r *FirmwareRange) UnmarshalText(text []byte) error {
	*r = FirmwareRange(text)
	return comparisons(string(text), func(_, version string) error {
		if v, err := strconv.ParseUint(version, 0, 32); err != nil || v == 0 {
			return fmt.Errorf("%q is not a firmware version", version)
		}
		return nil
	})
}

// Contains reports whether a version is in range.
func (r FirmwareRange) Contains(version uint32) bool {
	return r == "" || version != 0 && comparisons(string(r), func(op, bound string) error {
		b, err := strconv.ParseUint(bound, 0, 32)
		return errors.Join(err, checkComparison(op, cmp.Compare(uint64(version), b)))
	}) == nil
}

// comparisons calls f with the parts of each comparison in a range, until it returns an error.
func comparisons(s string, f func(op, version string) error) error {
	parts := strings.Fields(s)
	for _, part := range parts {
		version := strings.TrimLeft(part, "<>=")
		op := strings.TrimSuffix(part, version)
		if version == "" || !slices.Contains([]string{"<=", ">=", "<", ">", "="}, op) {
			return fmt.Errorf("%q is not a comparison", s)
		}
		if err := f(op, version); err != nil {
			return err
		}
	}
	if len(parts) == 0 {
		return errors.New("the range is empty")
	}
	return nil
}

var errOutside = errors.New("outside of the range")

// checkComparison returns an error unless a comparison has the result c.
func checkComparison(op string, c int) error {
	if c < 0 && op[0] == '<' || c > 0 && op[0] == '>' || c == 0 && strings.HasSuffix(op, "=") {
		return nil
	}
	return errOutside
}

// release is a parsed kernel release: 7.0.0-rc3, 6.8.0-137-generic,
// 5.14.0-503.11.1.el9_5.x86_64.
type release struct {
	// numbers are the dotted ones at the beginning.
	numbers []uint64
	// candidate is N of -rcN or ~rcN; final without one, which is later than any candidate.
	candidate uint64
	// build are the other numbers, those of the distribution.
	build []uint64
}

const final = math.MaxUint64

func parseRelease(s string) release {
	main := s[:len(s)-len(strings.TrimLeft(s, "0123456789."))]
	r := release{numbers: numbers(main), candidate: final}
	rest := s[len(main):]
	before, after, found := strings.Cut(rest, "rc")
	if n := len(after) - len(strings.TrimLeft(after, "0123456789")); found && n > 0 {
		r.candidate, rest = numbers(after[:n])[0], before+" "+after[n:]
	}
	r.build = numbers(rest)
	return r
}

// numbers returns the runs of digits in s. One that is too large is the largest number.
func numbers(s string) (all []uint64) {
	for digits := range strings.FieldsFuncSeq(s, func(c rune) bool { return c < '0' || c > '9' }) {
		n, err := strconv.ParseUint(digits, 10, 64)
		if err != nil {
			n = math.MaxUint64
		}
		all = append(all, n)
	}
	return all
}

// compareToBound compares the parts of a release that the bound has: the dotted numbers, of which a
// missing one is 0, then candidates before the final release, then the distribution's numbers, which
// mean something only against a bound of the same distribution.
func compareToBound(s, bound string) int {
	r, b := parseRelease(s), parseRelease(bound)
	if n := len(b.numbers); len(r.numbers) > n {
		if slices.ContainsFunc(r.numbers[n:], func(number uint64) bool { return number != 0 }) {
			r.candidate = final // 7.0.5-rc1 comes after 7.0
		}
		r.numbers = r.numbers[:n]
	}
	for len(r.numbers) < len(b.numbers) {
		r.numbers = append(r.numbers, 0)
	}
	r.build = r.build[:min(len(r.build), len(b.build))]
	return cmp.Or(slices.Compare(r.numbers, b.numbers), cmp.Compare(r.candidate, b.candidate), slices.Compare(r.build, b.build))
}
