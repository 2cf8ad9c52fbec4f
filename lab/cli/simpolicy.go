package cli

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

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
	req := &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{}}
	for _, s := range assignments {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return p, fmt.Errorf("invalid knob %q; use NAME=VALUE", s)
		}
		if err := term.SetKnob(req, name, value); err != nil {
			return p, fmt.Errorf("knob %s: %w", name, err)
		}
	}
	for _, name := range req.GetFields() {
		adopt(&p, name, req.GetPolicy())
	}
	if err := p.Validate(); err != nil {
		return p, fmt.Errorf("policy %s: %w", preset, err)
	}
	return p.Normalize(), nil
}

// adopt sets one knob to that of the API's policy. Enums have the API's numbers.
func adopt(p *scheduler.Policy, name string, m *gpreemptv1.Policy) {
	durations := map[string]struct {
		to   *time.Duration
		from *durationpb.Duration
	}{
		"linger_max": {&p.LingerMax, m.GetLingerMax()}, "share_window": {&p.ShareWindow, m.GetShareWindow()},
		"max_suspend": {&p.MaxSuspend, m.GetMaxSuspend()}, "min_run": {&p.MinRun, m.GetMinRun()}, "attach_after": {&p.AttachAfter, m.GetAttachAfter()},
		"max_wait": {&p.MaxWait, m.GetMaxWait()}, "default_ttl": {&p.DefaultTTL, m.GetDefaultTtl()}, "max_ttl": {&p.MaxTTL, m.GetMaxTtl()},
	}
	switch name {
	case "suspend_when":
		p.SuspendWhen = scheduler.SuspendWhen(m.GetSuspendWhen())
	case "linger":
		p.Linger = scheduler.Linger(m.GetLinger())
	case "gang":
		p.Gang = scheduler.GangScope(m.GetGang())
	case "share_floor":
		p.ShareFloor = m.GetShareFloor()
	case "shadow":
		p.Shadow = m.GetShadow()
	default:
		d := durations[name]
		*d.to = d.from.AsDuration()
	}
}
