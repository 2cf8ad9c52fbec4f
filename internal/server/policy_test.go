package server

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func changed(p scheduler.Policy, change func(*scheduler.Policy)) scheduler.Policy {
	change(&p)
	return p.Normalize()
}

func TestMergePolicy(t *testing.T) {
	base := scheduler.DefaultPolicy()
	strict, err := scheduler.PresetByName("strict")
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		req  *gpreemptv1.SetPolicyRequest
		want scheduler.Policy
	}{
		{"nothing", &gpreemptv1.SetPolicyRequest{}, base},
		{"preset", &gpreemptv1.SetPolicyRequest{Preset: "strict"}, strict},
		{
			"knob after the present", &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{ShareFloor: new(0.3), Linger: durationpb.New(time.Millisecond)}},
			changed(base, func(p *scheduler.Policy) { p.ShareFloor, p.Linger = 0.3, time.Millisecond }),
		},
		{
			"knob after a preset", &gpreemptv1.SetPolicyRequest{Preset: "strict", Policy: &gpreemptv1.Policy{MaxWait: durationpb.New(time.Second)}},
			changed(strict, func(p *scheduler.Policy) { p.MaxWait = time.Second }),
		},
		{
			"zero values", &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{ShareFloor: new(0.0), MaxWait: durationpb.New(0), Shadow: new(false)}},
			changed(base, func(p *scheduler.Policy) { p.ShareFloor, p.MaxWait = 0, 0 }),
		},
		{
			"a duration of 0", &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{MaxWait: durationpb.New(0)}},
			changed(base, func(p *scheduler.Policy) { p.MaxWait = 0 }),
		},
		{
			"no linger", &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{Linger: durationpb.New(0)}},
			changed(base, func(p *scheduler.Policy) { p.Linger = 0 }),
		},
		{
			"a learned linger", &gpreemptv1.SetPolicyRequest{Preset: "share", Policy: &gpreemptv1.Policy{Linger: durationpb.New(scheduler.LingerLearned)}},
			changed(scheduler.Presets()[2], func(p *scheduler.Policy) { p.Linger = scheduler.LingerLearned }),
		},
		{"the policy in force", &gpreemptv1.SetPolicyRequest{Policy: policyMessage(base)}, base},
		{"all knobs of a preset", &gpreemptv1.SetPolicyRequest{Policy: policyMessage(strict)}, strict},
		{
			"every knob", &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{
				Linger: durationpb.New(1), ShareFloor: new(0.5), MaxSuspend: durationpb.New(time.Second), Shadow: new(true), MaxWait: durationpb.New(2),
				AttachAfter: durationpb.New(time.Hour), ShareCap: new(0.6),
			}},
			changed(base, func(p *scheduler.Policy) {
				p.Linger, p.ShareFloor, p.MaxSuspend, p.Shadow, p.MaxWait, p.AttachAfter = 1, 0.5, time.Second, true, 2, time.Hour
				p.ShareCap = 0.6
			}),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := mergePolicy(base, tc.req)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("policy (-want +got):\n%s", diff)
			}
		})
	}
}

func TestErrorOfAnInvalidPolicyNamesTheKnob(t *testing.T) {
	for knob, req := range map[string]*gpreemptv1.SetPolicyRequest{
		"bogus":       {Preset: "bogus"},
		"share_floor": {Policy: &gpreemptv1.Policy{ShareFloor: new(math.NaN())}},
		"share_cap: 0.05 is less than share_floor, 0.1":      {Policy: &gpreemptv1.Policy{ShareCap: new(0.05)}},
		"raise share_cap, or set share_floor to at most 0.3": {Policy: &gpreemptv1.Policy{ShareCap: new(0.3), ShareFloor: new(0.33)}},
		"linger":      {Policy: &gpreemptv1.Policy{Linger: durationpb.New(time.Minute)}},
		"max_suspend": {Policy: &gpreemptv1.Policy{MaxSuspend: &durationpb.Duration{Seconds: 1, Nanos: -1}}},
		"max_wait":    {Policy: &gpreemptv1.Policy{MaxWait: durationpb.New(time.Minute)}},
	} {
		_, err := mergePolicy(scheduler.DefaultPolicy(), req)
		if gpreempt.ReasonOf(err) != gpreempt.ReasonBadPolicy || !strings.Contains(err.Error(), knob) {
			t.Errorf("%v: %v; want INVALID_POLICY that names %s", req, err, knob)
		}
	}
}

func TestSetPolicyChangesThePolicyUnlessDryRun(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	before, err := admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(scheduler.PresetNames(), before.GetPresets()); diff != "" {
		t.Errorf("presets (-want +got):\n%s", diff)
	}
	share := policyMessage(scheduler.Presets()[2])
	dry, err := admin.SetPolicy(t.Context(), &gpreemptv1.SetPolicyRequest{Preset: "share", DryRun: true})
	if err != nil {
		t.Fatal(err)
	}
	between, err := admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	set, err := admin.SetPolicy(t.Context(), &gpreemptv1.SetPolicyRequest{Preset: "share"})
	if err != nil {
		t.Fatal(err)
	}
	after, err := admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := []*gpreemptv1.Policy{share, before.GetPolicy(), share, share}
	if diff := cmp.Diff(want, []*gpreemptv1.Policy{dry.GetPolicy(), between.GetPolicy(), set.GetPolicy(), after.GetPolicy()}, protocmp.Transform()); diff != "" {
		t.Errorf("dry run, policy after it, set, policy after it (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{by("policy set: share")}, h.verbs(t)); diff != "" {
		t.Errorf("admin events (-want +got):\n%s", diff)
	}
}
