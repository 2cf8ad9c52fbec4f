package clitest

import (
	"context"

	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (m *Machine) GetPolicy(context.Context, *gpreemptv1.GetPolicyRequest) (*gpreemptv1.GetPolicyResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	return &gpreemptv1.GetPolicyResponse{Policy: proto.CloneOf(m.policy), Presets: []string{"balanced", "strict", "shadow"}}, nil
}

func (m *Machine) SetPolicy(_ context.Context, req *gpreemptv1.SetPolicyRequest) (*gpreemptv1.SetPolicyResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	next := proto.CloneOf(m.policy)
	switch req.GetPreset() {
	case "":
	case "balanced":
		next = balanced()
	case "shadow":
		next = balanced()
		next.Preset, next.Shadow = "shadow", new(true)
		m.events = append(m.events, &gpreemptv1.Event{
			Revision: 7, At: Ago(0), Kind: gpreemptv1.EventKind_EVENT_KIND_SHADOW, TargetId: "4242@1001", FromTarget: gpreemptv1.TargetState_TARGET_STATE_RUNNING,
			ToTarget: gpreemptv1.TargetState_TARGET_STATE_SUSPENDED, LeaseId: "k3-1", Cause: "lease", Message: `python3, by rule training, for "llama" of process 5001`, Clock: Dur(uptime),
		})
	default:
		return nil, Refuse(gpreempt.CodeInvalidArgument, gpreempt.ReasonBadPolicy, "unknown preset "+req.GetPreset(), "choose balanced, strict or shadow")
	}
	from, to := req.GetPolicy().ProtoReflect(), next.ProtoReflect()
	for _, k := range term.Knobs() {
		if k.Name() != term.PresetKnob && from.Has(k) {
			to.Set(k, from.Get(k))
			next.Preset = "custom"
		}
	}
	if next.GetShareFloor() > 0.95 {
		return nil, Refuse(gpreempt.CodeInvalidArgument, gpreempt.ReasonBadPolicy, "share_floor: 2 is outside 0 to 0.95", "choose a value in that range")
	}
	if named := balanced(); next.GetPreset() == "custom" {
		next.Preset = "balanced"
		if !proto.Equal(next, named) {
			next.Preset = "custom"
		}
	}
	if !req.GetDryRun() {
		m.policy = next
	}
	return &gpreemptv1.SetPolicyResponse{Policy: next}, nil
}
