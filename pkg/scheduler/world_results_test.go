package scheduler_test

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func (w *World) inFlight() []*seenTarget {
	var flying []*seenTarget
	for _, key := range slices.SortedFunc(maps.Keys(w.Observer.Targets), gpreempt.ProcessKey.Compare) {
		if t := w.Observer.Targets[key]; t.Flight != 0 {
			flying = append(flying, t)
		}
	}
	return flying
}

// results are those of actions; one without an obstacle of its own stands for all of these.
var results = []scheduler.Cause{"", scheduler.CauseGone, scheduler.CauseFailed, scheduler.CauseHardware, scheduler.CauseReplaced, gpreempt.ReasonResisted}

func (w *World) result() error {
	flying := w.inFlight()
	if len(flying) == 0 {
		return w.wait()
	}
	t := flying[w.Roll(len(flying))]
	outcome, gpus := scheduler.Cause(""), []gpreempt.GPUID(nil)
	switch w.Roll(60) {
	case 0:
		outcome = scheduler.CauseGone
	case 1, 2:
		outcome = scheduler.CauseFailed
	case 4:
		outcome = scheduler.CauseReplaced
	case 5:
		outcome = gpreempt.ReasonResisted
	case 3:
		outcome = scheduler.CauseHardware
		if w.Roll(2) == 0 {
			gpus = w.gpuIDs()
		}
	}
	return w.giveResult(t, outcome, gpus)
}

func (w *World) giveResult(t *seenTarget, outcome scheduler.Cause, gpus []gpreempt.GPUID) error {
	took := w.Now - t.sentAt
	var ev scheduler.Event = scheduler.Suspended{Target: t.TargetSeen.Target, Seq: t.Flight, Result: outcome, FailedGPUs: gpus, Took: took}
	if t.kind == scheduler.ActResume {
		ev = scheduler.Resumed{Target: t.TargetSeen.Target, Seq: t.Flight, Result: outcome, FailedGPUs: gpus, Took: took}
	}
	w.stale = append(w.stale[max(0, len(w.stale)-20):], ev)
	return w.Step(ev)
}

// strayResult is late, doubled, of the wrong kind, or about nobody.
func (w *World) strayResult() error {
	if len(w.stale) > 0 && w.Roll(2) == 0 {
		return w.Step(w.stale[w.Roll(len(w.stale))])
	}
	key, seq, outcome := w.anyKey(), uint64(w.Roll(int(w.Observer.lastSeq)+1)), results[w.Roll(len(results))]
	if t := w.Observer.Targets[key]; t != nil && t.Flight != 0 {
		seq = t.Flight + uint64(w.Roll(3)) - 1
		if seq == t.Flight { // right number, wrong kind
			if t.kind == scheduler.ActSuspend {
				return w.Step(scheduler.Resumed{Target: key, Seq: seq, Result: outcome})
			}
			return w.Step(scheduler.Suspended{Target: key, Seq: seq, Result: outcome})
		}
	}
	if w.Roll(2) == 0 {
		return w.Step(scheduler.Suspended{Target: key, Seq: seq, Result: outcome})
	}
	return w.Step(scheduler.Resumed{Target: key, Seq: seq, Result: outcome})
}

// deadline goes to the next one, as a punctual runner does.
func (w *World) deadline() error {
	due, ok := w.Core.NextDeadline()
	if !ok {
		return w.wait()
	}
	if due > w.Now+time.Second && w.Roll(10) != 0 {
		return w.result()
	}
	w.Observer.Counts["Deadlines"]++
	w.Now = max(w.Now, due)
	return w.Step(scheduler.Tick{})
}

// wait lets a little time pass, and half of the time nobody looks at the clock.
func (w *World) wait() error {
	w.Now += w.Span(7)
	if w.Roll(2) == 0 {
		return nil
	}
	return w.Step(scheduler.Tick{})
}

func (w *World) backInTime() error {
	was := w.Now
	w.Now = max(0, w.Now-w.Span(11))
	err := w.Step(scheduler.Tick{})
	w.Now = was
	return err
}

// maxSteps is how many steps may be due until a moment: a core that sets its deadlines closer and closer
// never gets there.
const maxSteps = 200_000

// settle answers everything in flight and fires every deadline up to a time.
func (w *World) settle(until scheduler.Time) error {
	for steps := 0; ; steps++ {
		if steps == maxSteps {
			return fmt.Errorf("%d deadlines have only led to %v, on the way to %v", steps, w.Now, until)
		}
		if err := w.answerAll(); err != nil {
			return err
		}
		for flying := w.inFlight(); len(flying) > 0; flying = w.inFlight() {
			if err := w.giveResult(flying[0], "", nil); err != nil {
				return err
			}
			if err := w.answerAll(); err != nil {
				return err
			}
		}
		due, ok := w.Core.NextDeadline()
		if !ok || due > until {
			w.Now = max(w.Now, until)
			return w.Step(scheduler.Tick{})
		}
		w.Now = max(w.Now, due)
		if err := w.Step(scheduler.Tick{}); err != nil {
			return err
		}
	}
}

// FinishAll drains, checks that everything runs, then ends all clients and targets.
func (w *World) FinishAll() error {
	if err := w.Step(scheduler.Drain{On: true}); err != nil {
		return err
	}
	if err := w.settle(w.Now + scheduler.RetryAction.Last); err != nil {
		return err
	}
	for key, t := range w.Observer.Targets {
		if t.state != scheduler.TargetRunning && t.state != scheduler.TargetQuarantined {
			return fmt.Errorf("drained, and target %v is %v", key, t.state)
		}
	}
	if err := w.Step(scheduler.Drain{On: false}); err != nil {
		return err
	}
	for c := range int32(5) {
		if err := w.Step(scheduler.ClientGone{Client: scheduler.ClientID{PID: c}, End: scheduler.EndDisconnected}); err != nil {
			return err
		}
	}
	for key := range w.Observer.Targets {
		if err := w.Step(scheduler.TargetGone{Target: key}); err != nil {
			return err
		}
	}
	return w.settle(w.Now + time.Hour)
}
