package scheduler

import (
	"fmt"
	"strings"
	"time"
)

// Policy is what decides when offline work is suspended, and for how long. Preset, Linger, ShareFloor,
// ShareCap, MaxSuspend, MaxWait and Shadow are the knobs; a preset sets the rest.
type Policy struct {
	// Preset is the name of the preset whose values these are, or "custom".
	Preset string `json:"preset" yaml:"preset"`
	// Linger is how long a job stays suspended after the last lease, 0 to 1 s, or LingerLearned.
	Linger time.Duration `json:"linger" yaml:"linger" minus:"learned"`
	// ShareFloor is the share of time an offline job runs at least, 0 to 0.95.
	// Over any stretch of time T the time it is away is at most
	// (1-floor)*T + floor*(1-floor)*ShareWindow + floor*late, where late is how
	// long the last resume of the stretch took, and the suspend before it if that
	// was still on its way when the resume was due. Pins of an admin do not count.
	ShareFloor float64 `json:"share_floor" yaml:"share_floor"`
	// ShareCap is the share of time an offline job runs at most, 0.05 to 1, which is no cap.
	// Over any stretch of time T it runs at most cap*T + (1-cap)*(cap*ShareWindow + MinRun),
	// and as long as it must not or cannot be suspended.
	ShareCap float64 `json:"share_cap" yaml:"share_cap"`
	// ShareWindow is the stretch over which the floor and the cap may be borrowed
	// against, 100 ms to 10 min.
	ShareWindow time.Duration `json:"share_window"`
	// MaxSuspend bounds one suspension, 10 ms to 10 min.
	MaxSuspend time.Duration `json:"max_suspend" yaml:"max_suspend"`
	// MinRun is how long a job runs at least after MaxSuspend or the floor
	// resumed it, 1 ms to 1 min.
	MinRun time.Duration `json:"min_run"`
	// AttachAfter is how long a target has had queues before a mechanism is attached to
	// it although no lease covers its GPUs, 0 to 1 h.
	AttachAfter time.Duration `json:"attach_after" yaml:"attach_after"`
	// Shadow decides and records, and suspends nothing.
	Shadow bool `json:"shadow"`
	// MaxWait is the longest wait of an announcement that sets none, 0 to 10 s.
	MaxWait time.Duration `json:"max_wait" yaml:"max_wait"`
	// DefaultTTL is the time to live of a lease whose announcement sets none.
	DefaultTTL time.Duration `json:"default_ttl"`
	// MaxTTL is the longest a client may ask for, up to 10 min.
	MaxTTL time.Duration `json:"max_ttl"`
}

// LingerLearned is the Linger of a policy that learns when the next announcement is due: a job stays
// suspended until it is overdue, if it is expected sooner than a resume and a suspend would cost.
const LingerLearned time.Duration = -1

// LongestLearned bounds a learned linger: more would be a pause of the online work.
const LongestLearned = 100 * time.Millisecond

// longestLinger is a bound of every linger.
func (p Policy) longestLinger() time.Duration {
	if p.Linger == LingerLearned {
		return LongestLearned
	}
	return p.Linger
}

// MaxBudget is the longest time that the share floor permits a job to be suspended, if it ran before.
func (p Policy) MaxBudget() time.Duration {
	return p.ShareWindow / whole * time.Duration(whole-millionths(p.ShareFloor))
}

// maxCredit is the longest time that the share cap permits a job to run, if it was suspended before.
func (p Policy) maxCredit() time.Duration {
	return p.ShareWindow / whole * time.Duration(millionths(p.ShareCap))
}

// PresetCustom is the Preset of a policy whose knobs are no preset's.
const PresetCustom = "custom"

// Presets returns the named policies, the default first.
func Presets() []Policy {
	balanced := Policy{
		Preset:     "balanced",
		Linger:     LingerLearned,
		ShareFloor: 0.10,
		ShareCap:   1,
		// A window as long as two suspensions of MaxSuspend does not break up the batch of a
		// busy language model (docs/adr/0044).
		ShareWindow: 20 * time.Second,
		MaxSuspend:  10 * time.Second,
		// A hundred times what a suspend and a resume take: less is lost to them than 1 %.
		MinRun: 50 * time.Millisecond,
		// Most processes that end soon end before, and attaching interrupts every process on
		// every GPU that the target can see (docs/adr/0020).
		AttachAfter: 30 * time.Second,
		MaxWait:     20 * time.Millisecond,
		// Clients renew at half of it, so that one that hangs keeps a GPU quiet for a second.
		DefaultTTL: time.Second,
		MaxTTL:     time.Minute,
	}
	strict := balanced
	strict.Preset = "strict"
	strict.ShareFloor = 0
	strict.MaxSuspend = time.Minute
	share := balanced
	share.Preset = "share"
	share.ShareFloor = 0.50
	share.Linger = 0
	share.ShareWindow = 2 * time.Second
	share.MaxSuspend = 500 * time.Millisecond
	shadow := balanced
	shadow.Preset = "shadow"
	shadow.Shadow = true
	return []Policy{balanced, strict, share, shadow}
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
	return Policy{}, fmt.Errorf("unknown policy preset %q; use one of %s", name, strings.Join(PresetNames(), ", "))
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
	// Problem says what is wrong and which values are valid, Remedy what to do, "" for another value.
	Problem, Remedy string
}

func (e *KnobError) Error() string { return e.Knob + ": " + e.Problem }

// Validate checks every range. The error is a *KnobError.
func (p Policy) Validate() error {
	durations := []struct {
		knob     string
		value    time.Duration
		min, max time.Duration
	}{
		{"linger", p.Linger, 0, time.Second},
		{"share_window", p.ShareWindow, 100 * time.Millisecond, 10 * time.Minute},
		{"max_suspend", p.MaxSuspend, 10 * time.Millisecond, 10 * time.Minute},
		{"min_run", p.MinRun, time.Millisecond, time.Minute},
		{"attach_after", p.AttachAfter, 0, time.Hour},
		{"max_wait", p.MaxWait, 0, 10 * time.Second},
		{"max_ttl", p.MaxTTL, time.Millisecond, 10 * time.Minute},
		{"default_ttl", p.DefaultTTL, time.Millisecond, p.MaxTTL},
	}
	for _, d := range durations {
		if (d.value < d.min || d.value > d.max) && (d.knob != "linger" || d.value != LingerLearned) {
			return &KnobError{d.knob, fmt.Sprintf("%v is outside %v to %v", d.value, d.min, d.max), ""}
		}
	}
	if !(p.ShareFloor >= 0 && p.ShareFloor <= 0.95) {
		percent := ""
		if p.ShareFloor > 1 && p.ShareFloor <= 95 {
			percent = fmt.Sprintf("; %v %% is %v", p.ShareFloor, p.ShareFloor/100)
		}
		return &KnobError{"share_floor", fmt.Sprintf("%v is outside 0 to 0.95%s", p.ShareFloor, percent), ""}
	}
	if !(p.ShareCap >= 0.05 && p.ShareCap <= 1) {
		return &KnobError{"share_cap", fmt.Sprintf("%v is outside 0.05 to 1, which is no cap", p.ShareCap), ""}
	}
	if p.ShareCap < p.ShareFloor {
		return &KnobError{"share_cap", fmt.Sprintf("%v is less than share_floor, %v", p.ShareCap, p.ShareFloor), fmt.Sprintf("raise share_cap, or set share_floor to at most %v", p.ShareCap)}
	}
	// A job runs for MinRun after a suspension of MaxSuspend, whatever its cap.
	longest := min(p.MaxSuspend, p.ShareWindow-p.MinRun)
	if least := float64(p.MinRun) / float64(p.MinRun+longest); p.ShareCap < min(1, least) {
		return &KnobError{"share_cap", fmt.Sprintf("%v is less than %.2g: max_suspend ends each suspension after %v, and a job runs for %v then", p.ShareCap, least, longest, p.MinRun), ""}
	}
	return nil
}
