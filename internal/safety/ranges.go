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

// GFXRange is a range of gfx_target_version, both bounds included.
type GFXRange struct{ First, Last uint32 }

// everyGFX also contains unknown GPUs.
var everyGFX = GFXRange{0, math.MaxUint32}

// Contains reports whether a GPU is in range.
func (x GFXRange) Contains(gfx uint32) bool { return x.First <= gfx && gfx <= x.Last }

// String returns gfx942, gfx11xx, gfx1100-gfx1103 or gfx*.
func (x GFXRange) String() string {
	first, last := gpreempt.GFXName(x.First), gpreempt.GFXName(x.Last)
	switch {
	case x == everyGFX:
		return "gfx*"
	case x.First == x.Last:
		return first
	}
	for _, wild := range []string{"xx", "x"} {
		zeros, fs := strings.Repeat("0", len(wild)), strings.Repeat("f", len(wild))
		if stem, ok := strings.CutSuffix(first, zeros); ok && stem+fs == last {
			return stem + wild
		}
	}
	return first + "-" + last
}

// parseGFX parses a name (gfx90a), a family (gfx11xx), a span of names
// (gfx1100-gfx1103) or gfx*.
func parseGFX(s string) (GFXRange, error) {
	if s == "gfx*" {
		return everyGFX, nil
	}
	from, to, span := strings.Cut(s, "-")
	if span {
		first, err1 := gpreempt.ParseGFX(from)
		last, err2 := gpreempt.ParseGFX(to)
		if err := errors.Join(err1, err2); err != nil || first > last {
			return GFXRange{}, fmt.Errorf("%q is not a span of GPUs", s)
		}
		return GFXRange{first, last}, nil
	}
	stem := strings.TrimRight(s, "x")
	if wild := len(s) - len(stem); wild > 0 && wild <= 2 {
		first, err1 := gpreempt.ParseGFX(stem + strings.Repeat("0", wild))
		last, err2 := gpreempt.ParseGFX(stem + strings.Repeat("f", wild))
		if err := errors.Join(err1, err2); err != nil {
			return GFXRange{}, fmt.Errorf("%q is not a family of GPUs", s)
		}
		return GFXRange{first, last}, nil
	}
	gfx, err := gpreempt.ParseGFX(s)
	return GFXRange{gfx, gfx}, err
}

// Comparator is a comparison operator.
type Comparator string

// comparators has the longer ones first, because <= begins with <.
var comparators = []Comparator{"<=", ">=", "<", ">", "="}

// holds reports whether a comparison with the result c is in range.
func (o Comparator) holds(c int) bool {
	switch o {
	case "<=":
		return c <= 0
	case ">=":
		return c >= 0
	case "<":
		return c < 0
	case ">":
		return c > 0
	default:
		return c == 0
	}
}

// Bound is one comparison with a version.
type Bound struct {
	Op Comparator
	// Version is a kernel such as 7.0 or 6.8.0-137, or a firmware such as 0x83.
	Version string
}

// Range is bounds that must all hold.
type Range []Bound

func (r Range) String() string {
	parts := make([]string, len(r))
	for i, b := range r {
		parts[i] = string(b.Op) + b.Version
	}
	return strings.Join(parts, " ")
}

// hasKernel reports whether a release, such as 6.12.43+deb13-amd64, is in range. Only the
// parts that the bound has are compared: 6.12.43 is =6.12.
func (r Range) hasKernel(release string) bool {
	return !slices.ContainsFunc(r, func(b Bound) bool { return !b.Op.holds(compareToBound(release, b.Version)) })
}

// hasFirmware reports whether a version is in range. Without bounds every version is,
// also an unknown one (0), which is in no other range.
func (r Range) hasFirmware(version uint32) bool {
	return !slices.ContainsFunc(r, func(b Bound) bool {
		bound, err := strconv.ParseUint(b.Version, 0, 32)
		return err != nil || version == 0 || !b.Op.holds(cmp.Compare(uint64(version), bound))
	})
}

func parseFirmware(s string) (Range, error) {
	return parseRange(s, func(value string) (string, error) {
		version, err := strconv.ParseUint(value, 0, 32)
		if err != nil || version == 0 {
			return "", fmt.Errorf("%q is not a firmware version", value)
		}
		return fmt.Sprintf("%#x", version), nil
	})
}

func parseKernel(s string) (Range, error) {
	return parseRange(s, func(value string) (string, error) {
		if !isDigit(value[0]) {
			return "", fmt.Errorf("%q is not a kernel version", value)
		}
		return value, nil
	})
}

// parseRange parses comparisons such as ">=6.5 <7.0".
func parseRange(s string, parse func(value string) (string, error)) (r Range, err error) {
	for part := range strings.FieldsSeq(s) {
		var b Bound
		for _, op := range comparators {
			if value, ok := strings.CutPrefix(part, string(op)); ok {
				b = Bound{op, value}
				break
			}
		}
		if b.Version == "" {
			return nil, fmt.Errorf("%q is not a comparison", s)
		}
		if b.Version, err = parse(b.Version); err != nil {
			return nil, err
		}
		r = append(r, b)
	}
	if len(r) == 0 {
		return nil, errors.New("the range is empty")
	}
	return r, nil
}
