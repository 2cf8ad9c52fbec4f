package scheduler

import (
	"fmt"
	"slices"
	"time"
)

// SuspendWhen is when targets are suspended for a new lease; the numbers are those of
// the API.
type SuspendWhen uint8

// The choices.
const (
	// SuspendAtOnce suspends on announcement.
	SuspendAtOnce SuspendWhen = iota + 1
	// SuspendETA suspends at the announced eta minus the learned suspend time.
	SuspendETA
	// SuspendSlack suspends at the last moment that still meets the SLO: when the
	// slack left is no more than the learned quiet duration of such a lease and
	// the learned suspend time.
	SuspendSlack
)

// Linger is how long a gang stays suspended after the last lease; the numbers are those
// of the API.
type Linger uint8

// The choices.
const (
	LingerNone Linger = iota + 1
	LingerFixed
	// LingerAdaptive stays suspended until the next announcement is overdue, if
	// it is expected sooner than a resume and suspend would cost.
	LingerAdaptive
)

// GangScope is what is suspended together; the numbers are those of the API.
type GangScope uint8

// The choices.
const (
	GangProcess GangScope = iota + 1
	// GangJob is all offline processes of one job, and each process without a job alone.
	GangJob
)

// Policy is everything that can be tuned.
type Policy struct {
	// Preset is the name of the preset whose knobs these are, or "custom".
	Preset      string      `json:"preset"`
	SuspendWhen SuspendWhen `json:"suspend_when"`
	Linger      Linger      `json:"linger"`
	// LingerMax bounds the linger, 0 to 1 s.
	LingerMax time.Duration `json:"linger_max"`
	// ShareFloor is the share of time an offline gang runs at least, 0 to 0.95.
	// Over any stretch of time T the time it is away is at most
	// (1-floor)*T + floor*(1-floor)*ShareWindow + floor*late, where late is how
	// long the last resume of the stretch took, and the suspend before it if that
	// was still on its way when the resume was due. Orders by hand do not count.
	ShareFloor float64 `json:"share_floor"`
	// ShareWindow is the stretch over which the floor may be borrowed against,
	// 100 ms to 10 min.
	ShareWindow time.Duration `json:"share_window"`
	// MaxSuspend bounds one suspension, 10 ms to 10 min.
	MaxSuspend time.Duration `json:"max_suspend"`
	// MinRun is how long a gang runs at least after MaxSuspend or the floor
	// resumed it, 1 ms to 1 min.
	MinRun time.Duration `json:"min_run"`
	Gang   GangScope     `json:"gang"`
	// AttachAfter is how long a target has had queues before a mechanism is attached to
	// it although no lease covers its GPUs, 0 to 1 h.
	AttachAfter time.Duration `json:"attach_after"`
	// Shadow decides and records, and suspends nothing.
	Shadow bool `json:"shadow"`
	// MaxWait is the longest wait of an announcement that sets none, 0 to 10 s.
	MaxWait time.Duration `json:"max_wait"`
	// DefaultTTL is the time to live of a lease whose announcement sets none.
	DefaultTTL time.Duration `json:"default_ttl"`
	// MaxTTL is the longest a client may ask for, up to 10 min.
	MaxTTL time.Duration `json:"max_ttl"`
}

// PresetCustom is the Preset of a policy whose knobs are no preset's.
const PresetCustom = "custom"

// Presets returns the named policies, the default first.
func Presets() []Policy {
	balanced := Policy{
		Preset:      "balanced",
		SuspendWhen: SuspendETA,
		Linger:      LingerAdaptive,
		LingerMax:   20 * time.Millisecond,
		ShareFloor:  0.10,
		ShareWindow: 20 * time.Second,
		MaxSuspend:  10 * time.Second,
		MinRun:      50 * time.Millisecond,
		Gang:        GangJob,
		AttachAfter: 30 * time.Second,
		MaxWait:     20 * time.Millisecond,
		DefaultTTL:  time.Second,
		MaxTTL:      time.Minute,
	}
	strict := balanced
	strict.Preset = "strict"
	strict.SuspendWhen = SuspendAtOnce
	strict.ShareFloor = 0
	strict.MaxSuspend = time.Minute
	strict.LingerMax = 100 * time.Millisecond
	slo := balanced
	slo.Preset = "slo"
	slo.SuspendWhen = SuspendSlack
	share := balanced
	share.Preset = "share"
	share.ShareFloor = 0.50
	share.ShareWindow = 2 * time.Second
	share.MaxSuspend = 500 * time.Millisecond
	share.Linger = LingerNone
	shadow := balanced
	shadow.Preset = "shadow"
	shadow.Shadow = true
	return []Policy{balanced, strict, slo, share, shadow}
}

// DefaultPolicy returns the preset "balanced".
func DefaultPolicy() Policy { return Presets()[0] }

// PresetNames returns the names that SetPolicy and the config file accept.
func PresetNames() []string {
	var names []string
	for _, p := range Presets() {
		names = append(names, p.Preset)
	}
	return names
}

// PresetByName returns a preset, or an error that names them all.
func PresetByName(name string) (Policy, error) {
	for _, p := range Presets() {
		if p.Preset == name {
			return p, nil
		}
	}
	return Policy{}, fmt.Errorf("unknown policy preset %q: use one of %v", name, PresetNames())
}

// Normalize sets Preset to the name of the preset whose knobs p has, or to
// "custom".
func (p Policy) Normalize() Policy {
	for _, q := range Presets() {
		p.Preset = q.Preset
		if p == q {
			return p
		}
	}
	p.Preset = PresetCustom
	return p
}

// KnobError reports which knob of a policy is out of range.
type KnobError struct {
	// Knob is the knob's name in the config file and the API.
	Knob string
	// Problem says what is wrong and which values are valid.
	Problem string
}

func (e *KnobError) Error() string { return e.Knob + ": " + e.Problem }

// Validate checks every range. The error is a *KnobError.
func (p Policy) Validate() error {
	durations := []struct {
		knob     string
		value    time.Duration
		min, max time.Duration
	}{
		{"linger_max", p.LingerMax, 0, time.Second},
		{"share_window", p.ShareWindow, 100 * time.Millisecond, 10 * time.Minute},
		{"max_suspend", p.MaxSuspend, 10 * time.Millisecond, 10 * time.Minute},
		{"min_run", p.MinRun, time.Millisecond, time.Minute},
		{"attach_after", p.AttachAfter, 0, time.Hour},
		{"max_wait", p.MaxWait, 0, 10 * time.Second},
		{"max_ttl", p.MaxTTL, time.Millisecond, 10 * time.Minute},
		{"default_ttl", p.DefaultTTL, time.Millisecond, p.MaxTTL},
	}
	for _, d := range durations {
		if d.value < d.min || d.value > d.max {
			return &KnobError{d.knob, fmt.Sprintf("%v is outside %v to %v", d.value, d.min, d.max)}
		}
	}
	if !(p.ShareFloor >= 0 && p.ShareFloor <= 0.95) {
		return &KnobError{"share_floor", fmt.Sprintf("%v is outside 0 to 0.95", p.ShareFloor)}
	}
	if !slices.Contains([]SuspendWhen{SuspendAtOnce, SuspendETA, SuspendSlack}, p.SuspendWhen) {
		return &KnobError{"suspend_when", "want at-once, eta or slack"}
	}
	if !slices.Contains([]Linger{LingerNone, LingerFixed, LingerAdaptive}, p.Linger) {
		return &KnobError{"linger", "want none, fixed or adaptive"}
	}
	if !slices.Contains([]GangScope{GangProcess, GangJob}, p.Gang) {
		return &KnobError{"gang", "want process or job"}
	}
	return nil
}
