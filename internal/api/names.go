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
func EnumName[E Enum](e E) string {
	v := e.Descriptor().Values().ByNumber(e.Number())
	switch {
	case v == nil:
		return strconv.Itoa(int(e))
	case e == 0:
		return ""
	}
	return enumName(v)
}

// EnumNames returns the names of E in the API's order, without UNSPECIFIED.
func EnumNames[E Enum]() (names []string) {
	for _, v := range values[E]() {
		names = append(names, enumName(v))
	}
	return names
}

// values returns the values of E in the API's order, without UNSPECIFIED.
func values[E Enum]() (all []protoreflect.EnumValueDescriptor) {
	var zero E
	d := zero.Descriptor().Values()
	for i := range d.Len() {
		if v := d.Get(i); v.Number() != 0 {
			all = append(all, v)
		}
	}
	return all
}

// ParseEnum returns the value with the name s, in any letter case; the API's own
// name of a value is accepted as well. The error lists the names.
func ParseEnum[E Enum](s string) (E, error) {
	for _, v := range values[E]() {
		if strings.EqualFold(s, enumName(v)) || s == string(v.Name()) {
			return E(v.Number()), nil
		}
	}
	return 0, fmt.Errorf("invalid value %q: use one of %s", s, strings.Join(EnumNames[E](), ", "))
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
