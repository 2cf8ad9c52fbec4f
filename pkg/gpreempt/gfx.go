package gpreempt

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

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

// ParseGFX is the inverse of GFXName: it parses gfx, the major version in decimal, and one hexadecimal digit each
// for minor and step.
func ParseGFX(s string) (uint32, error) {
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
