package cli

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

// presetKnob is the field of Policy that is a name, not a knob to set.
const presetKnob = "preset"

// knobMeaning is the explanation of each knob in wide output.
var knobMeaning = map[string]string{
	"preset":       "where the knobs come from, or custom",
	"suspend_when": "when offline work leaves the GPUs of a new lease",
	"linger":       "how long it stays suspended after the last lease",
	"linger_max":   "bound of the linger",
	"share_floor":  "share of the time offline work runs whatever leases say",
	"share_window": "stretch of time the share floor is kept over",
	"max_suspend":  "longest time one suspension lasts",
	"min_run":      "shortest run once max_suspend or the share floor resumed it",
	"gang":         "what is suspended together",
	"shadow":       "decide and report, never act",
	"max_wait":     "longest wait of an announcement that names none",
	"default_ttl":  "time to live of a lease that names none",
	"max_ttl":      "longest time to live a client may ask for",
}

// knobs returns the fields of Policy in the API's order: a knob the API gains is
// shown and set without a change here.
func knobs() []protoreflect.FieldDescriptor {
	fields := (*gpreemptv1.Policy)(nil).ProtoReflect().Descriptor().Fields()
	all := make([]protoreflect.FieldDescriptor, fields.Len())
	for i := range all {
		all[i] = fields.Get(i)
	}
	return all
}

func knobNames() []string {
	var names []string
	for _, k := range knobs() {
		if k.Name() != presetKnob {
			names = append(names, string(k.Name()))
		}
	}
	return names
}

// knobText writes the value of a knob as the configuration file has it.
func knobText(p *gpreemptv1.Policy, k protoreflect.FieldDescriptor) string {
	v := p.ProtoReflect().Get(k)
	switch k.Kind() {
	case protoreflect.EnumKind:
		return or(api.EnumNumberName(k.Enum(), v.Enum()), "-")
	case protoreflect.MessageKind:
		if d, ok := v.Message().Interface().(*durationpb.Duration); ok {
			return duration(d.AsDuration())
		}
	case protoreflect.DoubleKind:
		return strconv.FormatFloat(v.Float(), 'g', -1, 64)
	default:
	}
	return v.String()
}

// setKnob puts one knob into a request. Ranges are the daemon's to check.
func setKnob(req *gpreemptv1.SetPolicyRequest, name, value string) error {
	all := knobs()
	i := slices.IndexFunc(all, func(k protoreflect.FieldDescriptor) bool { return string(k.Name()) == name && name != presetKnob })
	if i < 0 {
		return fmt.Errorf("there is no such knob: the knobs are %s", strings.Join(knobNames(), ", "))
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
			return fmt.Errorf("%q is neither true nor false", value)
		}
		m.Set(k, protoreflect.ValueOfBool(b))
	case protoreflect.DoubleKind:
		f, err := strconv.ParseFloat(value, 64)
		if err != nil || math.IsNaN(f) {
			return fmt.Errorf("%q is no number", value)
		}
		m.Set(k, protoreflect.ValueOfFloat64(f))
	case protoreflect.MessageKind:
		d, err := time.ParseDuration(value)
		if err != nil {
			return fmt.Errorf("%q is no duration: write a number with its unit, such as 20ms", value)
		}
		m.Set(k, protoreflect.ValueOfMessage(durationpb.New(d).ProtoReflect()))
	default:
		return fmt.Errorf("this gpctl cannot set a knob of kind %s", k.Kind())
	}
	if !slices.Contains(req.GetFields(), name) {
		req.Fields = append(req.Fields, name)
	}
	return nil
}
