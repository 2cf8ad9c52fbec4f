package fleet

import (
	"fmt"
	"slices"
	"time"
)

// Plan is how a policy reaches a fleet.
type Plan struct {
	// Canary are the hosts that get it first, Rest the others.
	Canary, Rest []string
	// Batch is how many of the rest get it at a time, at least 1.
	Batch int
	// Shadow is how long the canary decides by it without acting, 0 for not at all. Observe is how long each
	// later stage is watched.
	Shadow, Observe time.Duration
	// Slower is the growth of the p99 of the time to quiet GPUs that is an alarm, such as 2; 0 for none.
	Slower float64
}

// Mode is a policy of a host during a rollout.
type Mode int

// The policies: the one before, the new one in shadow, and the new one.
const (
	Old Mode = iota
	Shadow
	New
)

func (m Mode) String() string { return [...]string{"old", "shadow", "new"}[m] }

// Order sets the policy of hosts.
type Order struct {
	Hosts []string
	Mode  Mode
}

// Reading is what is known of a host. The zero value is one that does not answer.
type Reading struct {
	Up bool
	// Started is when the daemon started: another value is another daemon, with the policy of its file.
	Started time.Time
	// Mode is the policy in force, -1 for one that the rollout does not know.
	Mode Mode
	// Alarms are the codes of its warnings that stop a rollout.
	Alarms []string
	// Failures counts suspends and resumes that failed.
	Failures uint64
	// P99 is that of the time to quiet GPUs, and Count the number of them.
	P99   time.Duration
	Count uint64
}

// Unknown is the Mode of a policy that the rollout does not know.
const Unknown Mode = -1

// fewQuiets is how many times to quiet must have been added before a p99 is compared, and slowest a p99 that is no alarm,
// however fast it was before.
const (
	fewQuiets = 100
	slowest   = time.Millisecond
)

// Rollout is the state of a rollout: a function of its inputs.
type Rollout struct {
	plan   Plan
	stages []stage
	at     int
	since  time.Duration
	// before are the readings of hosts when they were ordered to change; those without one are unchanged.
	before map[string]Reading
	// Stopped is why the rollout stopped, "" while it goes on or is done.
	Stopped string
	done    bool
}

type stage struct {
	name  string
	order Order
	watch time.Duration
}

// NewRollout returns a rollout that has not begun.
func NewRollout(p Plan) *Rollout {
	r := &Rollout{plan: p, at: -1, before: map[string]Reading{}}
	if p.Shadow > 0 {
		r.stages = append(r.stages, stage{"shadow", Order{p.Canary, Shadow}, p.Shadow})
	}
	r.stages = append(r.stages, stage{"canary", Order{p.Canary, New}, p.Observe})
	for part := range slices.Chunk(p.Rest, max(p.Batch, 1)) {
		r.stages = append(r.stages, stage{"rest", Order{part, New}, p.Observe})
	}
	return r
}

// Stages describes the plan for people, a line for each stage.
func (r *Rollout) Stages() (all []string) {
	for _, s := range r.stages {
		all = append(all, fmt.Sprintf("%s: %d hosts, watched for %v: %v", s.name, len(s.order.Hosts), s.watch, s.order.Hosts))
	}
	return all
}

// Done reports whether there is nothing left to do: the policy is in force everywhere, or the rollout stopped.
func (r *Rollout) Done() bool { return r.done }

// Now describes the stage, and how much time of it is left.
func (r *Rollout) Now(now time.Duration) (name string, number, of int, left time.Duration) {
	if r.at < 0 || r.done {
		return "", max(r.at, 0), len(r.stages), 0
	}
	s := r.stages[r.at]
	return s.name, r.at + 1, len(r.stages), max(r.since+s.watch-now, 0)
}

// Step takes the readings of all hosts at a time, and returns what to order. An order that cannot be carried out is
// reported by Fail.
func (r *Rollout) Step(now time.Duration, readings map[string]Reading) []Order {
	if r.done {
		return nil
	}
	if r.at < 0 {
		for _, h := range slices.Concat(r.plan.Canary, r.plan.Rest) {
			if alarm := r.unfit(h, readings[h]); alarm != "" {
				r.Stopped, r.done = alarm, true
				return nil
			}
		}
		return r.next(now, readings)
	}
	for _, h := range slices.Concat(r.plan.Canary, r.plan.Rest) {
		if alarm := r.alarm(h, readings[h]); alarm != "" {
			return r.undo(alarm)
		}
	}
	if now-r.since < r.stages[r.at].watch {
		return nil
	}
	return r.next(now, readings)
}

// Fail reports that an order to a host failed, and returns what to order.
func (r *Rollout) Fail(host string, err error) []Order {
	if r.done {
		return nil
	}
	return r.undo(fmt.Sprintf("host %s: the policy cannot be set: %v", host, err))
}

// Abort stops the rollout, as when the user interrupts it.
func (r *Rollout) Abort(why string) []Order {
	if r.done {
		return nil
	}
	return r.undo(why)
}

func (r *Rollout) next(now time.Duration, readings map[string]Reading) []Order {
	r.at++
	if r.at == len(r.stages) {
		r.done = true
		return nil
	}
	r.since = now
	order := r.stages[r.at].order
	for _, h := range order.Hosts {
		if _, changed := r.before[h]; !changed {
			r.before[h] = readings[h]
		}
	}
	return []Order{order}
}

// undo stops the rollout and takes every change back.
func (r *Rollout) undo(why string) []Order {
	r.Stopped, r.done = why, true
	changed := r.Changed()
	if len(changed) == 0 {
		return nil
	}
	return []Order{{changed, Old}}
}

// unfit returns why a rollout must not begin on a host, or "".
func (r *Rollout) unfit(host string, is Reading) string {
	switch {
	case !is.Up:
		return fmt.Sprintf("host %s does not answer", host)
	case len(is.Alarms) > 0:
		return fmt.Sprintf("host %s has the alarm %s already", host, is.Alarms[0])
	}
	return ""
}

// alarm returns why the reading of a host stops the rollout, or "".
func (r *Rollout) alarm(host string, is Reading) string {
	was, changed := r.before[host]
	wanted := r.Wanted(host)
	switch {
	case !changed:
		return "" // what happens elsewhere has another reason
	case !is.Up:
		return fmt.Sprintf("host %s does not answer any more", host)
	case !is.Started.Equal(was.Started):
		return fmt.Sprintf("the daemon of host %s was restarted, and has the policy of its file again", host)
	case len(is.Alarms) > 0:
		return fmt.Sprintf("host %s raised %s", host, is.Alarms[0])
	case is.Failures > was.Failures:
		return fmt.Sprintf("host %s: %d suspends or resumes failed", host, is.Failures-was.Failures)
	case is.Mode != wanted:
		return fmt.Sprintf("the policy of host %s was changed by somebody else", host)
	case r.plan.Slower > 0 && wanted == New && is.Count >= was.Count+fewQuiets && was.Count >= fewQuiets && is.P99 > slowest &&
		float64(is.P99) > r.plan.Slower*float64(was.P99):
		return fmt.Sprintf("host %s: the p99 of the time to quiet GPUs is %v, %.1f times that before", host, is.P99, float64(is.P99)/float64(max(was.P99, 1)))
	}
	return ""
}

// Changed returns the hosts that have got another policy since the beginning.
func (r *Rollout) Changed() (all []string) {
	for _, h := range slices.Concat(r.plan.Canary, r.plan.Rest) {
		if _, ok := r.before[h]; ok {
			all = append(all, h)
		}
	}
	return all
}

// Wanted returns the policy that a host should have now.
func (r *Rollout) Wanted(host string) Mode {
	mode := Old
	if r.at < 0 || r.Stopped != "" {
		return mode
	}
	for _, s := range r.stages[:min(r.at+1, len(r.stages))] {
		if slices.Contains(s.order.Hosts, host) {
			mode = s.order.Mode
		}
	}
	return mode
}
