package term

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpreempt/gpreempt/internal/api"
)

// EnumNames returns the names of E in the API's order, without UNSPECIFIED.
func EnumNames[E api.Enum]() (names []string) {
	for _, v := range values[E]() {
		names = append(names, api.EnumName(E(v.Number())))
	}
	return names
}

// values returns the values of E in the API's order, without UNSPECIFIED.
func values[E api.Enum]() (all []protoreflect.EnumValueDescriptor) {
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
func ParseEnum[E api.Enum](s string) (E, error) {
	for _, v := range values[E]() {
		if e := E(v.Number()); strings.EqualFold(s, api.EnumName(e)) || s == string(v.Name()) {
			return e, nil
		}
	}
	return 0, fmt.Errorf("invalid value %q: use one of %s", s, strings.Join(EnumNames[E](), ", "))
}
