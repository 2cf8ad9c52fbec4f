package term

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/spell"
)

// PresetKnob is the field of Policy that is the name of the preset, not a knob.
const PresetKnob = "preset"

// learned is the linger that the daemon learns.
const learned = "learned"

// KnobMeaning describes each knob in wide output.
var KnobMeaning = map[string]string{
	"preset":       "the preset of the knobs, or custom",
	"linger":       "how long it stays suspended after the last lease",
	"share_floor":  "minimum share of time that offline work runs despite leases",
	"share_cap":    "largest share of time that an offline job runs, 1 for no cap",
	"max_suspend":  "longest duration of one suspension",
	"attach_after": "how long a process has queues before a mechanism is attached without a lease",
	"shadow":       "decide and report, do not act",
	"max_wait":     "longest wait of an announcement without max_wait",
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
	case protoreflect.MessageKind:
		d := v.Message().Interface().(*durationpb.Duration).AsDuration()
		if k.Name() == "linger" && d < 0 {
			return learned
		}
		return Duration(d)
	case protoreflect.DoubleKind:
		return strconv.FormatFloat(v.Float(), 'g', -1, 64)
	default:
	}
	return v.String()
}

// SetKnob sets one knob of a policy. The daemon checks its range.
func SetKnob(p *gpreemptv1.Policy, name, value string) error {
	all := Knobs()
	name = strings.TrimPrefix(name, "policy.")
	i := slices.IndexFunc(all, func(k protoreflect.FieldDescriptor) bool { return string(k.Name()) == name && name != PresetKnob })
	switch near := spell.Nearest(name, KnobNames()); {
	case i >= 0:
	case name == PresetKnob:
		return fmt.Errorf("it is no knob; use gpctl policy set %s", value)
	case near != "":
		return fmt.Errorf("unknown knob; use %s", near)
	default:
		return fmt.Errorf("unknown knob; use %s", strings.Join(KnobNames(), ", "))
	}
	k, m := all[i], p.ProtoReflect()
	switch k.Kind() {
	case protoreflect.BoolKind:
		b, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("invalid value %q; use true or false", value)
		}
		m.Set(k, protoreflect.ValueOfBool(b))
	case protoreflect.DoubleKind:
		f, err := strconv.ParseFloat(value, 64)
		if percent, ok := strings.CutSuffix(value, "%"); ok {
			f, err = strconv.ParseFloat(percent, 64)
			value = strconv.FormatFloat(f/100, 'g', -1, 64)
			return errors.Join(err, fmt.Errorf("it is a share, not a percentage; use %s", value))
		}
		if err != nil || math.IsNaN(f) {
			return fmt.Errorf("invalid number %q; use a share such as 0.3", value)
		}
		m.Set(k, protoreflect.ValueOfFloat64(f))
	case protoreflect.MessageKind:
		d, err := time.ParseDuration(value)
		if name == "linger" && value == learned {
			d, err = -1, nil
		}
		if err != nil {
			return fmt.Errorf("invalid duration %q; use a number with its unit, such as 20ms", value)
		}
		m.Set(k, protoreflect.ValueOfMessage(durationpb.New(d).ProtoReflect()))
	default:
		return fmt.Errorf("cannot set a knob of kind %s", k.Kind())
	}
	return nil
}
