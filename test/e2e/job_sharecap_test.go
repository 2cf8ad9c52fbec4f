package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// A job with a cap is suspended although nobody announces anything, a lease that comes then finds it
// suspended, and by the daemon's own clock each time that it ran is followed by the time that it has to
// be away for that: its share of the time is at most the cap, however late a busy host is.
func TestJobWithAShareCapIsSuspendedWithoutALease(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	// It may run for 1s of 20s.
	d := m.start(strings.Replace(attachLater, "linger: 0s", "linger: 0s\n  share_cap: 0.05", 1))
	const by = "share-cap"
	d.events.await("the cap suspends the job", 0, func(e *gpreemptv1.Event) bool {
		return pidOf(e.GetTargetId()) == job.PID && e.GetToTarget() == suspended
	})
	m.checkFrozen(job)
	d.check(0, "the share cap of 5% is reached; ends in", "target", "explain", fmt.Sprint(job.PID))
	d.check(0, "1 suspended now, 1 by the share cap", "status")
	lease, answer := d.ask(10 * time.Second)
	checkSaid(t, "a lease meanwhile", said{true, done, 1}, answer)
	d.complete(lease)
	m.checkFrozen(job)

	// With the window of the preset share it may run for 500ms of 2s.
	since := d.revision()
	d.check(0, "share_cap", "policy", "set", "share", "--knob", "share_floor=0", "--knob", "share_cap=0.25", "--knob", "max_suspend=10s")
	var moves []*gpreemptv1.Event // turns of running and being suspended
	for len(moves) < 7 {
		e := d.events.await("the job is suspended, or runs again", since, func(e *gpreemptv1.Event) bool {
			running := e.GetToTarget() == gpreemptv1.TargetState_TARGET_STATE_RUNNING
			begins := e.GetFromTarget() == gpreemptv1.TargetState_TARGET_STATE_RUNNING
			return pidOf(e.GetTargetId()) == job.PID && (running || begins && len(moves) > 0)
		})
		since, moves = e.GetRevision(), append(moves, e)
	}
	const run, away = 500 * time.Millisecond, 1500 * time.Millisecond
	for i := 2; i < len(moves); i += 2 {
		ran := moves[i-1].GetClock().AsDuration() - moves[i-2].GetClock().AsDuration()
		was := moves[i].GetClock().AsDuration() - moves[i-1].GetClock().AsDuration()
		if cause := moves[i-1].GetCause(); cause != by || ran < run || was < away {
			t.Errorf("turn %d: it ran for %v and was away for %v because of %s, want at least %v and %v because of %s", i/2, ran, was, cause, run, away, by)
		}
	}
	target := d.target(job.PID)
	if least := 3 * away; target.GetSuspendedTotal().AsDuration() < least || target.GetSuspends() < 4 {
		t.Errorf("the daemon has suspended it %d times, for %v, want at least 4 times and %v", target.GetSuspends(), target.GetSuspendedTotal().AsDuration(), least)
	}

	d.check(0, "share_cap", "policy", "set", "--knob", "share_cap=1")
	m.awaitEach(job, 2, onGPU)
	job.stop()
}
