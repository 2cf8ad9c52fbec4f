package scheduler

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// finishAll drains, checks that everything runs, then lets everybody leave and
// looks for what stayed behind.
func (w *world) finishAll() error {
	if err := w.step(Drain{true}); err != nil {
		return err
	}
	if err := w.settle(w.now + RetryAction.Last); err != nil {
		return err
	}
	for key, t := range w.observer.targets {
		if t.state != TargetRunning && t.state != TargetQuarantined {
			return fmt.Errorf("drained, and target %v is %v", key, t.state)
		}
	}
	if err := w.step(Drain{false}); err != nil {
		return err
	}
	for c := range ClientID(5) {
		if err := w.step(ClientGone{c, EndDisconnected}); err != nil {
			return err
		}
	}
	for key := range w.observer.targets {
		if err := w.step(TargetGone{key}); err != nil {
			return err
		}
	}
	if err := w.settle(w.now + time.Hour); err != nil {
		return err
	}
	return w.core.leftovers()
}

// leftovers says what a core still holds although nobody is there any more.
func (c *Core) leftovers() error {
	var errs []error
	for what, n := range map[string]int{
		"targets": len(c.targets), "targets in order": len(c.order), "jobs": len(c.jobs), "leases": len(c.leases), "clients": len(c.clients), "users": len(c.perUser),
		"attachments": len(c.attachments), "dirty attachments": len(c.dirtyAttachments), "timers": len(c.timers.items), "dirty gangs": len(c.dirty), "pending leases": len(c.pending),
	} {
		if n != 0 {
			errs = append(errs, fmt.Errorf("%d %s left", n, what))
		}
	}
	for _, u := range c.gpuOrder {
		if len(u.gangs) != 0 || len(u.leases) != 0 || u.started != [gpreempt.MaxPriority + 1]int{} || u.top != -1 || u.breakerOpen {
			errs = append(errs, fmt.Errorf("GPU %v keeps %d gangs, %d leases, counts %v, top %d, breaker %v", u.id, len(u.gangs), len(u.leases), u.started, u.top, u.breakerOpen))
		}
	}
	if n := len(c.free); n > worldLimits.LeasesTotal+1 {
		errs = append(errs, fmt.Errorf("%d leases on the free list, more than ever lived at once", n))
	}
	free := map[*lease]bool{}
	for _, l := range c.free {
		if free[l] {
			errs = append(errs, fmt.Errorf("lease %d is free twice", l.id))
		}
		free[l] = true
		if l.timer.index != 0 {
			errs = append(errs, fmt.Errorf("free lease %d has a timer", l.id))
		}
	}
	if len(c.ended) > endedKept || len(c.endedByID) != len(c.ended) || len(c.requests) > len(c.ended) {
		errs = append(errs, fmt.Errorf("%d ended leases kept, %d by id, %d request ids", len(c.ended), len(c.endedByID), len(c.requests)))
	}
	return errors.Join(errs...)
}

// TestRandomHistories is the fast one: seeded, long, the same on every machine.
func TestRandomHistories(t *testing.T) {
	const seeds, steps = 200, 1000
	total := counts{}
	for seed := range uint64(seeds) {
		w := newWorld(DefaultPolicy(), seeded(seed))
		w.calm = seed%2 == 0
		for id := range gpreempt.GPUID(4) {
			if err := w.step(GPUAdded{id + 1}); err != nil {
				t.Fatal(err)
			}
		}
		for w.observer.counts["Steps"] < steps {
			if err := w.any(); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, w.observer.counts["Steps"], err)
			}
		}
		if err := w.finishAll(); err != nil {
			t.Fatalf("seed %d, at the end: %v", seed, err)
		}
		total.add(w.observer.counts)
	}
	t.Logf("%+v", total)
	if total["Steps"] < 100_000 {
		t.Errorf("%d steps, want at least 100000", total["Steps"])
	}
	// A history in which nothing happens proves nothing.
	atLeast := counts{
		"Suspends": 1000, "NewQueueSuspends": 100, "Resumes": 1000, "Retries": 50, "Failures": 100, "Quarantines": 50, "Answers": 5000, "Quiesced": 500,
		"MaxWaits": 100, "Deferred": 100, "Ended": 5000, "Expired": 500, "Idle": 20, "Coalesced": 20, "Forced": 100, "Lingered": 50, "Breakers": 100, "Stuck": 20,
		"ShadowRecords": 100, "ByHand": 50, "Drains": 100, "Deadlines": 5000,
		"Attaches": 1000, "Detaches": 500, "AttachFailures": 100, "DetachFailures": 50, "Lost": 100, "Births": 100, "Replaced": 20,
	}
	for what, least := range atLeast {
		if total[what] < least {
			t.Errorf("the histories contain %s %d times only, want %d", what, total[what], least)
		}
	}
}

// TestStateMachine is the thorough one: rapid chooses, and shrinks what fails.
func TestStateMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(DefaultPolicy(), drawn(t))
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		for id := range gpreempt.GPUID(4) {
			must(w.step(GPUAdded{id + 1}))
		}
		actions := map[string]func(*rapid.T){"": func(*rapid.T) { must(w.step(Tick{})) }}
		for _, o := range ops {
			actions[o.name] = func(*rapid.T) { must(o.do(w)) }
		}
		t.Repeat(actions)
		must(w.finishAll())
	})
}
