package api

import (
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
