package safety

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// GFXRange is a range of gfx_target_version, both bounds included.
type GFXRange struct{ First, Last uint32 }

// everyGFX also contains unknown GPUs.
var everyGFX = GFXRange{0, math.MaxUint32}

// Contains reports whether a GPU is in range.
func (x GFXRange) Contains(gfx uint32) bool { return x.First <= gfx && gfx <= x.Last }

// String returns gfx942, gfx11xx, gfx1100-gfx1103 or gfx*.
func (x GFXRange) String() string {
	first, last := GFXName(x.First), GFXName(x.Last)
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

// GFXName returns the name that compilers use for a gfx_target_version: 90010 is gfx90a.
func GFXName(version uint32) string {
	major, minor, step := version/10000, version/100%100, version%100
	switch {
	case version == 0:
		return "a GPU of unknown architecture"
	case minor > 15 || step > 15:
		return fmt.Sprintf("gfx_target_version %d", version)
	}
	return fmt.Sprintf("gfx%d%x%x", major, minor, step)
}

// parseGFX parses a name (gfx90a), a family (gfx11xx), a span of names
// (gfx1100-gfx1103) or gfx*.
func parseGFX(s string) (GFXRange, error) {
	if s == "gfx*" {
		return everyGFX, nil
	}
	from, to, span := strings.Cut(s, "-")
	if span {
		first, err1 := parseGFXName(from)
		last, err2 := parseGFXName(to)
		if err := errors.Join(err1, err2); err != nil || first > last {
			return GFXRange{}, fmt.Errorf("%q is not a span of GPUs", s)
		}
		return GFXRange{first, last}, nil
	}
	stem := strings.TrimRight(s, "x")
	if wild := len(s) - len(stem); wild > 0 && wild <= 2 {
		first, err1 := parseGFXName(stem + strings.Repeat("0", wild))
		last, err2 := parseGFXName(stem + strings.Repeat("f", wild))
		if err := errors.Join(err1, err2); err != nil {
			return GFXRange{}, fmt.Errorf("%q is not a family of GPUs", s)
		}
		return GFXRange{first, last}, nil
	}
	gfx, err := parseGFXName(s)
	return GFXRange{gfx, gfx}, err
}

// parseGFXName parses gfx, the major version in decimal, and one hexadecimal digit each
// for minor and step.
func parseGFXName(s string) (uint32, error) {
	digits, ok := strings.CutPrefix(s, "gfx")
	if ok && len(digits) >= 3 && len(digits) <= 4 && strings.ToLower(digits) == digits {
		n := len(digits) - 2
		major, err1 := strconv.ParseUint(digits[:n], 10, 8)
		minor, err2 := strconv.ParseUint(digits[n:n+1], 16, 8)
		step, err3 := strconv.ParseUint(digits[n+1:], 16, 8)
		if errors.Join(err1, err2, err3) == nil && major > 0 && digits[0] != '0' {
			return uint32(major*10000 + minor*100 + step), nil
		}
	}
	return 0, fmt.Errorf("%q is not the name of a GPU architecture", s)
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

// bounds splits ">=6.5 <7.0" into comparators and values.
func bounds(s string) (ops []Comparator, values []string, err error) {
	for part := range strings.FieldsSeq(s) {
		var op Comparator
		for _, o := range comparators {
			if value, ok := strings.CutPrefix(part, string(o)); ok {
				op, part = o, value
				break
			}
		}
		if op == "" || part == "" {
			return nil, nil, fmt.Errorf("%q is not a comparison", s)
		}
		ops, values = append(ops, op), append(values, part)
	}
	if len(ops) == 0 {
		return nil, nil, errors.New("the range is empty")
	}
	return ops, values, nil
}

// FirmwareRange is bounds that must all hold. Without bounds every version is in range,
// also an unknown one (0), which is in no other range.
type FirmwareRange []FirmwareBound

// FirmwareBound is one comparison with a version.
type FirmwareBound struct {
	Op      Comparator
	Version uint32
}

// Contains reports whether the version is in range.
func (r FirmwareRange) Contains(version uint32) bool {
	for _, b := range r {
		if version == 0 || !b.Op.holds(cmp.Compare(version, b.Version)) {
			return false
		}
	}
	return true
}

func (r FirmwareRange) String() string {
	parts := make([]string, len(r))
	for i, b := range r {
		parts[i] = fmt.Sprintf("%s%#x", b.Op, b.Version)
	}
	return strings.Join(parts, " ")
}

func parseFirmware(s string) (FirmwareRange, error) {
	ops, values, err := bounds(s)
	if err != nil {
		return nil, err
	}
	var r FirmwareRange
	for i, value := range values {
		version, err := strconv.ParseUint(value, 0, 32)
		if err != nil || version == 0 {
			return nil, fmt.Errorf("%q is not a firmware version", value)
		}
		r = append(r, FirmwareBound{ops[i], uint32(version)})
	}
	return r, nil
}

// KernelRange is bounds that must all hold.
type KernelRange []KernelBound

// KernelBound is one comparison with a version such as 7.0 or 6.8.0-137.
type KernelBound struct {
	Op      Comparator
	Version string
}

// Contains reports whether a release, such as 6.12.43+deb13-amd64, is in range. Only the
// parts that the bound has are compared: 6.12.43 is =6.12.
func (r KernelRange) Contains(release string) bool {
	for _, b := range r {
		if !b.Op.holds(compareToBound(release, b.Version)) {
			return false
		}
	}
	return true
}

func (r KernelRange) String() string {
	parts := make([]string, len(r))
	for i, b := range r {
		parts[i] = string(b.Op) + b.Version
	}
	return strings.Join(parts, " ")
}

func parseKernel(s string) (KernelRange, error) {
	ops, values, err := bounds(s)
	if err != nil {
		return nil, err
	}
	var r KernelRange
	for i, value := range values {
		if value[0] < '0' || value[0] > '9' {
			return nil, fmt.Errorf("%q is not a kernel version", value)
		}
		r = append(r, KernelBound{ops[i], value})
	}
	return r, nil
}
