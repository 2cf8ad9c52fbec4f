package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// policyMessage returns the API's form of a policy.
func policyMessage(p scheduler.Policy) *gpreemptv1.Policy {
	return &gpreemptv1.Policy{
		Preset: p.Preset, ShareFloor: &p.ShareFloor, ShareCap: &p.ShareCap, Shadow: &p.Shadow, Linger: durationpb.New(p.Linger),
		MaxSuspend: durationpb.New(p.MaxSuspend), MaxWait: durationpb.New(p.MaxWait), AttachAfter: durationpb.New(p.AttachAfter),
	}
}

// mergePolicy returns the policy of a request when base is in force. It ignores the
// preset name in the request's policy: the knobs determine the name. The error is
// INVALID_POLICY and names the knob.
func mergePolicy(base scheduler.Policy, req *gpreemptv1.SetPolicyRequest) (scheduler.Policy, error) {
	p, m := base, req.GetPolicy()
	if req.GetPreset() != "" {
		var err error
		if p, err = scheduler.PresetByName(req.GetPreset()); err != nil {
			return p, badPolicy(fmt.Sprintf("unknown policy preset %q", req.GetPreset()), "use one of "+strings.Join(scheduler.PresetNames(), ", "))
		}
	}
	for _, knob := range []struct {
		name string
		from *durationpb.Duration
		to   *time.Duration
	}{
		{"linger", m.GetLinger(), &p.Linger},
		{"max_suspend", m.GetMaxSuspend(), &p.MaxSuspend},
		{"max_wait", m.GetMaxWait(), &p.MaxWait},
		{"attach_after", m.GetAttachAfter(), &p.AttachAfter},
	} {
		if knob.from == nil {
			continue
		}
		if err := knob.from.CheckValid(); err != nil {
			return p, badPolicy(knob.name+": "+err.Error(), "use seconds and nanos of the same sign, as google.protobuf.Duration requires")
		}
		*knob.to = knob.from.AsDuration()
	}
	if m != nil && m.ShareFloor != nil {
		p.ShareFloor = m.GetShareFloor()
	}
	if m != nil && m.ShareCap != nil {
		p.ShareCap = m.GetShareCap()
	}
	if m != nil && m.Shadow != nil {
		p.Shadow = m.GetShadow()
	}
	if err := p.Validate(); err != nil {
		next := "gpctl policy get shows what is in force"
		if k, ok := errors.AsType[*scheduler.KnobError](err); ok {
			next = cmp.Or(k.Remedy, "use another value of "+k.Knob)
		}
		return p, badPolicy(err.Error(), next)
	}
	return p.Normalize(), nil
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
