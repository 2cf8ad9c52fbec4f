package api

import (
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// SimulatedHeader is the header that the daemon adds to each answer to an admin
// while no hardware is involved. Its value is the name of the backend.
const SimulatedHeader = "gpreempt-simulated"

// Enum is a generated enum type of the API.
type Enum interface {
	~int32
	protoreflect.Enum
}

// EnumName returns the name of e as people read and write it: in the config file,
// on the command line and in what gpctl prints. The names come from the API:
// QUIESCE_REASON_MAX_WAIT is "max-wait". UNSPECIFIED has the name "", and a value that
// this build does not know has its number.
//
// The scheduler's enums have the API's numbers: convert them, as in
// gpreemptv1.TargetState(info.State).
func EnumName[E Enum](e E) string { return EnumNumberName(e.Descriptor(), e.Number()) }

// EnumNumberName is EnumName for an enum of which only the descriptor is known.
func EnumNumberName(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := d.Values().ByNumber(n)
	switch {
	case v == nil:
		return strconv.Itoa(int(n))
	case n == 0:
		return ""
	}
	return enumName(v)
}

// EnumNames returns the names of E in the API's order, without UNSPECIFIED.
func EnumNames[E Enum]() []string {
	var zero E
	return enumNames(zero.Descriptor())
}

func enumNames(d protoreflect.EnumDescriptor) []string {
	var names []string
	for i := range d.Values().Len() {
		if v := d.Values().Get(i); v.Number() != 0 {
			names = append(names, enumName(v))
		}
	}
	return names
}

// ParseEnum returns the value with the name s, in any letter case; the API's own
// name of a value is accepted as well. The error lists the names.
func ParseEnum[E Enum](s string) (E, error) {
	var zero E
	n, err := ParseEnumNumber(zero.Descriptor(), s)
	return E(n), err
}

// ParseEnumNumber is ParseEnum for an enum of which only the descriptor is known.
func ParseEnumNumber(d protoreflect.EnumDescriptor, s string) (protoreflect.EnumNumber, error) {
	for i := range d.Values().Len() {
		v := d.Values().Get(i)
		if v.Number() != 0 && (strings.EqualFold(s, enumName(v)) || s == string(v.Name())) {
			return v.Number(), nil
		}
	}
	return 0, fmt.Errorf("invalid value %q: use one of %s", s, strings.Join(enumNames(d), ", "))
}

// enumName turns CLASS_OFFLINE of the enum Class into "offline".
func enumName(v protoreflect.EnumValueDescriptor) string {
	var prefix strings.Builder
	for i, r := range string(v.Parent().Name()) {
		if i > 0 && r >= 'A' && r <= 'Z' {
			prefix.WriteByte('_')
		}
		prefix.WriteRune(r)
	}
	prefix.WriteByte('_')
	name := strings.TrimPrefix(string(v.Name()), strings.ToUpper(prefix.String()))
	return strings.ReplaceAll(strings.ToLower(name), "_", "-")
}
