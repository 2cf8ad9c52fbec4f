package scheduler_test

import (
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// checked returns a check of a core after every step.
func checked() func(*scheduler.Core) error {
	steps := 0
	return func(c *scheduler.Core) error {
		steps++
		return errors.Join(c.CheckInvariants(), c.CheckExplanation(steps))
	}
}

// finish ends a history, and returns what the core still holds then.
func finish(w *World) error {
	if err := w.FinishAll(); err != nil {
		return err
	}
	return w.Core.Leftovers(WorldLimits)
}

// TestRandomHistories is the fast one: seeded, long, the same on every machine.
func TestRandomHistories(t *testing.T) {
	t.Parallel()
	const seeds, steps = 120, 1000
	total := Counts{}
	for seed := range uint64(seeds) {
		w := NewWorld(scheduler.DefaultPolicy(), Seeded(seed), checked())
		w.Calm = seed%2 == 0
		for id := range gpreempt.GPUID(4) {
			if err := w.Step(scheduler.GPUAdded{GPU: id + 1}); err != nil {
				t.Fatal(err)
			}
		}
		for w.Observer.Counts["Steps"] < steps {
			if err := w.Any(); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, w.Observer.Counts["Steps"], err)
			}
		}
		if err := finish(w); err != nil {
			t.Fatalf("seed %d, at the end: %v", seed, err)
		}
		total.Add(w.Observer.Counts)
	}
	t.Logf("%+v", total)
	if total["Steps"] < 100_000 {
		t.Errorf("%d steps, want at least 100000", total["Steps"])
	}
	// A history in which nothing happens proves nothing.
	atLeast := Counts{
		"Suspends": 1000, "NewQueueSuspends": 100, "Resumes": 1000, "Retries": 50, "Failures": 100, "Quarantines": 50, "Answers": 5000, "Quiesced": 500,
		"MaxWaits": 100, "Deferred": 100, "Ended": 5000, "Expired": 500, "Idle": 20, "Coalesced": 10, "Forced": 100, "Lingered": 50, "Breakers": 100, "Stuck": 20, "Hung": 20, "StuckRecords": 10, "StuckAttaches": 10, "Overslept": 50,
		"ShadowRecords": 100, "ByHand": 50, "Drains": 100, "Deadlines": 5000,
		"SlowJobs": 100, "AwayJobs": 1000, "Attaches": 1000, "Detaches": 500, "AttachFailures": 100, "DetachFailures": 50, "Lost": 100, "OwnersChanged": 500, "Spared": 1000, "Births": 100, "Reruns": 100, "Replaced": 20, "Refusals": 100, "Kills": 5, "CannotSuspend": 100, "Parked": 100, "Capped": 100,
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
		w := NewWorld(scheduler.DefaultPolicy(), Drawn(t), checked())
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		for id := range gpreempt.GPUID(4) {
			must(w.Step(scheduler.GPUAdded{GPU: id + 1}))
		}
		actions := map[string]func(*rapid.T){"": func(*rapid.T) { must(w.Step(scheduler.Tick{})) }}
		for _, o := range Ops {
			actions[o.Name] = func(*rapid.T) { must(o.Do(w)) }
		}
		t.Repeat(actions)
		must(finish(w))
	})
}
