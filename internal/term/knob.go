package term

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

// PresetKnob is the field of Policy that is the name of the preset, not a knob.
const PresetKnob = "preset"

// KnobMeaning describes each knob in wide output.
var KnobMeaning = map[string]string{
	"preset":       "the preset of the knobs, or custom",
	"suspend_when": "when offline work is suspended for a lease",
	"linger":       "how long it stays suspended after the last lease",
	"linger_max":   "upper bound of the linger",
	"share_floor":  "minimum share of time that offline work runs despite leases",
	"share_window": "time window of the share floor",
	"max_suspend":  "longest duration of one suspension",
	"min_run":      "shortest run after max_suspend or the share floor resumed it",
	"attach_after": "how long a process has queues before a mechanism is attached without a lease",
	"gang":         "what is suspended together",
	"shadow":       "decide and report, do not act",
	"max_wait":     "longest wait of an announcement without max_wait",
	"default_ttl":  "time to live of a lease without ttl",
	"max_ttl":      "longest time to live that a client may request",
}

// Knobs returns the fields of Policy in the API's order. Fields added to the API need no
// change here.
func Knobs() []protoreflect.FieldDescriptor {
	fields := (*gpreemptv1.Policy)(nil).ProtoReflect().Descriptor().Fields()
	all := make([]protoreflect.FieldDescriptor, fields.Len())
	for i := range all {
		all[i] = fields.Get(i)
	}
	return all
}

// KnobNames returns the names of the knobs, without the preset.
func KnobNames() []string {
	var names []string
	for _, k := range Knobs() {
		if k.Name() != PresetKnob {
			names = append(names, string(k.Name()))
		}
	}
	return names
}

// KnobText formats the value of a knob as in the configuration file.
func KnobText(p *gpreemptv1.Policy, k protoreflect.FieldDescriptor) string {
	v := p.ProtoReflect().Get(k)
	switch k.Kind() {
	case protoreflect.EnumKind:
		return Or(api.EnumNumberName(k.Enum(), v.Enum()), "-")
	case protoreflect.MessageKind:
		if d, ok := v.Message().Interface().(*durationpb.Duration); ok {
			return Duration(d.AsDuration())
		}
	case protoreflect.DoubleKind:
		return strconv.FormatFloat(v.Float(), 'g', -1, 64)
	default:
	}
	return v.String()
}

// SetKnob sets one knob of a request. The daemon checks its range.
func SetKnob(req *gpreemptv1.SetPolicyRequest, name, value string) error {
	all := Knobs()
	i := slices.IndexFunc(all, func(k protoreflect.FieldDescriptor) bool { return string(k.Name()) == name && name != PresetKnob })
	if i < 0 {
		return fmt.Errorf("unknown knob; use %s", strings.Join(KnobNames(), ", "))
	}
	k, m := all[i], req.GetPolicy().ProtoReflect()
	switch k.Kind() {
	case protoreflect.EnumKind:
		n, err := api.ParseEnumNumber(k.Enum(), value)
		if err != nil {
			return err
		}
		m.Set(k, protoreflect.ValueOfEnum(n))
	case protoreflect.BoolKind:
		b, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("invalid value %q; use true or false", value)
		}
		m.Set(k, protoreflect.ValueOfBool(b))
	case protoreflect.DoubleKind:
		f, err := strconv.ParseFloat(value, 64)
		if err != nil || math.IsNaN(f) {
			return fmt.Errorf("invalid number %q", value)
		}
		m.Set(k, protoreflect.ValueOfFloat64(f))
	case protoreflect.MessageKind:
		d, err := time.ParseDuration(value)
		if err != nil {
			return fmt.Errorf("invalid duration %q; use a number with its unit, such as 20ms", value)
		}
		m.Set(k, protoreflect.ValueOfMessage(durationpb.New(d).ProtoReflect()))
	default:
		return fmt.Errorf("cannot set a knob of kind %s", k.Kind())
	}
	if !slices.Contains(req.GetFields(), name) {
		req.Fields = append(req.Fields, name)
	}
	return nil
}
