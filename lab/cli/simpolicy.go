package cli

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// policyOf returns a preset with knobs changed, each NAME=VALUE as in the configuration file.
// Without a daemon, gplab checks the ranges itself, as the daemon does.
func policyOf(preset string, assignments []string) (scheduler.Policy, error) {
	p, err := scheduler.PresetByName(preset)
	if err != nil {
		return p, err
	}
	var m gpreemptv1.Policy
	for _, s := range assignments {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return p, fmt.Errorf("invalid knob %q; use NAME=VALUE", s)
		}
		if err := term.SetKnob(&m, name, value); err != nil {
			return p, fmt.Errorf("knob %s: %w", name, err)
		}
	}
	m.ProtoReflect().Range(func(knob protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		adopt(&p, string(knob.Name()), &m)
		return true
	})
	if err := p.Validate(); err != nil {
		return p, fmt.Errorf("policy %s: %w", preset, err)
	}
	return p.Normalize(), nil
}

// adopt sets one knob to that of the API's policy.
func adopt(p *scheduler.Policy, name string, m *gpreemptv1.Policy) {
	switch name {
	case "linger":
		p.Linger = m.GetLinger().AsDuration()
	case "max_suspend":
		p.MaxSuspend = m.GetMaxSuspend().AsDuration()
	case "attach_after":
		p.AttachAfter = m.GetAttachAfter().AsDuration()
	case "max_wait":
		p.MaxWait = m.GetMaxWait().AsDuration()
	case "share_floor":
		p.ShareFloor = m.GetShareFloor()
	case "share_cap":
		p.ShareCap = m.GetShareCap()
	case "shadow":
		p.Shadow = m.GetShadow()
	}
}
