package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// policyMessage returns the API's form of a policy.
func policyMessage(p scheduler.Policy) *gpreemptv1.Policy {
	return &gpreemptv1.Policy{
		Preset: p.Preset, Linger: durationpb.New(p.Linger), ShareFloor: p.ShareFloor,
		MaxSuspend: durationpb.New(p.MaxSuspend), Shadow: p.Shadow, MaxWait: durationpb.New(p.MaxWait),
		AttachAfter: durationpb.New(p.AttachAfter),
	}
}

// mergePolicy returns the policy of a request when base is in force. It ignores the
// preset name in the request's policy: the knobs determine the name. The error is
// INVALID_POLICY and names the knob.
func mergePolicy(base scheduler.Policy, req *gpreemptv1.SetPolicyRequest) (scheduler.Policy, error) {
	p := base
	if req.GetPreset() != "" {
		var err error
		if p, err = scheduler.PresetByName(req.GetPreset()); err != nil {
			return p, badPolicy(err.Error(), "use one of "+strings.Join(scheduler.PresetNames(), ", "))
		}
	}
	knobs := (*gpreemptv1.Policy)(nil).ProtoReflect().Descriptor().Fields()
	for _, name := range req.GetFields() {
		if knobs.ByName(protoreflect.Name(name)) == nil || name == "preset" {
			return p, badPolicy(fmt.Sprintf("fields: unknown knob %.64q", name), "use names of fields of the policy, such as share_floor")
		}
	}
	m := req.GetPolicy().ProtoReflect()
	for i := range knobs.Len() {
		knob := knobs.Get(i)
		if !m.Has(knob) && !slices.Contains(req.GetFields(), string(knob.Name())) {
			continue
		}
		if err := setKnob(&p, knob, m.Get(knob)); err != nil {
			return p, err
		}
	}
	if err := p.Validate(); err != nil {
		next := "gpctl policy get shows what is in force"
		if k, ok := errors.AsType[*scheduler.KnobError](err); ok {
			next = fmt.Sprintf("change %s, or the knob that contradicts it", k.Knob)
		}
		return p, badPolicy(err.Error(), next)
	}
	return p.Normalize(), nil
}

func setKnob(p *scheduler.Policy, knob protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch name := string(knob.Name()); name {
	case "linger":
		return setTime(&p.Linger, name, v)
	case "max_suspend":
		return setTime(&p.MaxSuspend, name, v)
	case "attach_after":
		return setTime(&p.AttachAfter, name, v)
	case "max_wait":
		return setTime(&p.MaxWait, name, v)
	case "share_floor":
		p.ShareFloor = v.Float()
	case "shadow":
		p.Shadow = v.Bool()
	}
	return nil
}

func setTime(to *time.Duration, name string, v protoreflect.Value) error {
	d := v.Message().Interface().(*durationpb.Duration)
	if d == nil {
		d = &durationpb.Duration{}
	}
	if err := d.CheckValid(); err != nil {
		return badPolicy(name+": "+err.Error(), "use seconds and nanos of the same sign, as google.protobuf.Duration requires")
	}
	*to = d.AsDuration()
	return nil
}

func badPolicy(message, next string) error {
	return refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonBadPolicy, message, next)
}

func (s *Server) policy() (p scheduler.Policy) {
	s.cfg.Scheduler.View(func(c *scheduler.Core) { p = c.Policy() })
	return p
}

// GetPolicy returns the policy in force.
func (a adminService) GetPolicy(context.Context, *gpreemptv1.GetPolicyRequest) (*gpreemptv1.GetPolicyResponse, error) {
	return &gpreemptv1.GetPolicyResponse{Policy: policyMessage(a.s.policy()), Presets: scheduler.PresetNames()}, nil
}

// SetPolicy replaces the policy until the next reload or restart.
func (a adminService) SetPolicy(ctx context.Context, req *gpreemptv1.SetPolicyRequest) (*gpreemptv1.SetPolicyResponse, error) {
	s := a.s
	s.policyMu.Lock()
	defer s.policyMu.Unlock()
	p, err := mergePolicy(s.policy(), req)
	if err != nil {
		return nil, err
	}
	if !req.GetDryRun() {
		s.adminEvent(ctx, scheduler.Record{}, "policy set: %s", p.Preset)
		s.cfg.Scheduler.Post(scheduler.PolicyChanged{Policy: p})
	}
	return &gpreemptv1.SetPolicyResponse{Policy: policyMessage(p)}, nil
}
