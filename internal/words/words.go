// Package words hides how the API's enums are spelled for people: in the config
// file, on the command line and in what gpctl prints.
//
// The words come from the API itself, SUSPEND_WHEN_AT_ONCE is "at-once", so a
// value added there has its word everywhere. The scheduler's enums have the
// API's numbers: convert, as in gpreemptv1.Linger(policy.Linger).
package words

import (
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Enum is a generated enum type of the API.
type Enum interface {
	~int32
	protoreflect.Enum
}

// Of returns the word of e: "" for UNSPECIFIED, the number for a value this build
// does not know.
func Of[E Enum](e E) string { return OfNumber(e.Descriptor(), e.Number()) }

// OfNumber is Of for an enum known by its descriptor only.
func OfNumber(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := d.Values().ByNumber(n)
	switch {
	case v == nil:
		return strconv.Itoa(int(n))
	case n == 0:
		return ""
	}
	return word(v)
}

// All returns the words of E in the API's order, without UNSPECIFIED.
func All[E Enum]() []string {
	var zero E
	return all(zero.Descriptor())
}

func all(d protoreflect.EnumDescriptor) []string {
	var words []string
	for i := range d.Values().Len() {
		if v := d.Values().Get(i); v.Number() != 0 {
			words = append(words, word(v))
		}
	}
	return words
}

// Parse reads a word as Of gives it, in any letter case, or the API's own name
// of the value. The error names the choices.
func Parse[E Enum](s string) (E, error) {
	var zero E
	n, err := ParseNumber(zero.Descriptor(), s)
	return E(n), err
}

// ParseNumber is Parse for an enum known by its descriptor only.
func ParseNumber(d protoreflect.EnumDescriptor, s string) (protoreflect.EnumNumber, error) {
	for i := range d.Values().Len() {
		v := d.Values().Get(i)
		if v.Number() != 0 && (strings.EqualFold(s, word(v)) || s == string(v.Name())) {
			return v.Number(), nil
		}
	}
	return 0, fmt.Errorf("%q is none of %s", s, strings.Join(all(d), ", "))
}

// word turns CLASS_OFFLINE of the enum Class into "offline".
func word(v protoreflect.EnumValueDescriptor) string {
	var prefix strings.Builder
	for i, r := range string(v.Parent().Name()) {
		if i > 0 && r >= 'A' && r <= 'Z' {
			prefix.WriteByte('_')
		}
		prefix.WriteRune(r)
	}
	prefix.WriteByte('_')
	w := strings.TrimPrefix(string(v.Name()), strings.ToUpper(prefix.String()))
	return strings.ReplaceAll(strings.ToLower(w), "_", "-")
}
