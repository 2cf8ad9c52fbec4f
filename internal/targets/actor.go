package targets

import (
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

type kind uint8

const (
	attach kind = iota
	detach
	suspend
	resume
)

// order is an action of the scheduler.
type order struct {
	target gpreempt.ProcessKey
	kind   kind
	seq    uint64 // of a suspend or a resume
	// batch is what carries it out with those of other targets, nil for the actor alone.
	batch *batch
}

// actor is the goroutine that owns the session with one target. It begins with an Attach
// and ends when that fails or a Detach succeeds.
type actor struct {
	s      *Sessions
	target gpreempt.ProcessKey
	// orders has room for the one action the scheduler has in flight for a target, and
	// for the Detach that may follow when the process leaves.
	orders chan order
	// batcher is the mechanism that is attached, if it is one; guarded by s.mu.
	batcher mechanism.Batcher

	// What follows belongs to the goroutine.
	held      *holding // nil before Attach
	suspended bool
	// found takes whether a search has found a better mechanism; nil while no search is under way.
	found chan bool
	// better: there is one, which is used once the target runs.
	better   bool
	searched time.Duration
}

func newActor(s *Sessions, target gpreempt.ProcessKey) *actor {
	return &actor{s: s, target: target, orders: make(chan order, 2)}
}

func (a *actor) run() {
	for {
		select { // first: a target that causes events all the time is suspended all the same
		case o := <-a.orders:
			if a.do(o) {
				return
			}
			continue
		default:
		}
		var events <-chan struct{}
		if a.held != nil {
			events = a.held.session.Events()
		}
		select {
		case o := <-a.orders:
			if a.do(o) {
				return
			}
		case <-events:
			a.handleEvents()
		case a.better = <-a.found:
			a.found = nil
			a.replace()
		case <-a.s.ctx.Done():
			a.abandon()
			return
		}
	}
}

// do carries out an order and reports whether the actor has ended.
func (a *actor) do(o order) (ended bool) {
	switch o.kind {
	case attach:
		return a.attach()
	case detach:
		return a.detach()
	case suspend, resume:
		switch {
		case a.together(o):
		case o.kind == suspend:
			a.suspend(o.seq)
		default:
			a.resume(o.seq)
		}
	}
	return false
}

// attach tries all mechanisms.
func (a *actor) attach() (ended bool) {
	held, choice, err := a.s.attach(a.s.ctx, a.target, len(a.s.cfg.Mechanisms))
	if held == nil && err == nil {
		err = &NotSuspendable{choice.Rejected}
	}
	a.noteAttach(choice, err)
	switch {
	case held == nil && a.held != nil: // it was replaced, and the scheduler orders a Detach now
		a.s.lost(a.target, err)
		return false
	case held == nil:
		result, gpus := a.s.result(a.target, err)
		a.end()
		a.s.cfg.Post(scheduler.Attached{Target: a.target, Result: result, FailedGPUs: gpus})
		return true
	}
	a.searched, a.held = a.s.cfg.Now(), held
	a.s.mu.Lock()
	a.batcher = held.batcher
	a.s.mu.Unlock()
	a.s.cfg.Post(scheduler.Attached{Target: a.target, ReportsBirths: held.reportsBirths})
	if err != nil { // the session can only be closed, which the scheduler orders now
		a.s.history.fail(a.s.cfg.Now(), held.name, a.target, err)
		a.s.lost(a.target, err)
		return false
	}
	a.s.reassess(a.target) // it may have been ruled out meanwhile
	return false
}

// noteAttach records the result of an Attach. The log has the first failure of several.
func (a *actor) noteAttach(choice Choice, err error) {
	a.s.mu.Lock()
	st := a.s.state(a.target)
	st.Choice, st.Err = choice, err
	level := zap.WarnLevel
	if st.warned {
		level = zap.DebugLevel
	}
	gone := errors.Is(err, mechanism.ErrGone)
	if gone {
		st.Err = nil // discovery reports that
	}
	st.warned = err != nil && !gone
	a.s.mu.Unlock()
	if err != nil && !gone {
		a.s.cfg.Log.Log(level, "target cannot be suspended", log.Target(a.target), log.Err(err))
	}
}

// suspend posts the result as soon as it is known, from the goroutine that knows it: on
// drivers that answer to the tracing thread only, that is the tracing thread.
func (a *actor) suspend(seq uint64) {
	begin := a.s.cfg.Now()
	posted := false
	post := func(err error) {
		posted = true
		a.post(suspend, seq, err, a.s.cfg.Now()-begin)
	}
	err := mechanism.Guard(func() error {
		return a.held.session.Suspend(a.s.ctx, func() { post(nil) })
	})
	a.suspended = err == nil
	a.noteAction(true, err)
	switch {
	case !posted:
		post(err)
	case err != nil:
		a.s.lost(a.target, err)
	}
}

func (a *actor) resume(seq uint64) {
	begin := a.s.cfg.Now()
	err := mechanism.Guard(func() error { return a.held.session.Resume(a.s.ctx) })
	a.suspended = a.suspended && err != nil
	a.noteAction(false, err)
	a.post(resume, seq, err, a.s.cfg.Now()-begin)
	a.afterResume(err)
}

// afterResume looks for a better mechanism.
func (a *actor) afterResume(err error) {
	if err == nil {
		a.replace()
		a.search()
	}
}

// noteAction records the result of an action. An action that fails repeatedly is one
// failure of its mechanism. The end of the process, and of Sessions, is not a failure.
func (a *actor) noteAction(isSuspend bool, err error) {
	if err == nil {
		a.held.failed = false
		return
	}
	if errors.Is(err, mechanism.ErrGone) || a.s.ctx.Err() != nil {
		return
	}
	a.s.cfg.Log.Warn("action on target failed", log.Target(a.target), log.Suspend(isSuspend),
		log.Mechanism(a.held.name), log.Err(err))
	if !a.held.failed {
		a.held.failed = true
		a.s.history.fail(a.s.cfg.Now(), a.held.name, a.target, err)
	}
	a.s.mu.Lock()
	st := a.s.state(a.target)
	st.Choice, st.Err = Choice{}, err
	a.s.mu.Unlock()
}

// causes has those of the scheduler.
var causes = map[mechanism.Running]scheduler.Cause{
	mechanism.NewQueue: scheduler.CauseNewQueue, mechanism.ResumedByAnother: scheduler.CauseResumedByAnother, mechanism.Lapsed: scheduler.CauseLapsed,
}

// handleEvents has the session take in what the driver reports.
func (a *actor) handleEvents() {
	var r mechanism.Report
	err := mechanism.Guard(func() (err error) {
		r, err = a.held.session.Handle(a.s.ctx)
		return err
	})
	if r.Born > 0 {
		a.s.cfg.Post(scheduler.Running{Target: a.target, Cause: scheduler.CauseNewQueue, Suspended: r.Born})
	}
	if cause := causes[r.Running]; cause != "" {
		a.s.cfg.Post(scheduler.Running{Target: a.target, Cause: cause})
	}
	gone := errors.Is(err, mechanism.ErrGone)
	if err != nil && !gone {
		a.s.history.fail(a.s.cfg.Now(), a.held.name, a.target, err)
		a.s.lost(a.target, err)
	}
	if r.Changed || gone {
		a.s.cfg.Look(a.target)
	}
}

// detach releases the target.
func (a *actor) detach() (ended bool) {
	begin := a.s.cfg.Now()
	err := a.close(a.held)
	if err != nil {
		a.s.cfg.Log.Error("target could not be released and may be suspended", log.Target(a.target),
			log.Mechanism(a.held.name), log.Err(err))
	} else {
		a.end()
	}
	result, gpus := a.s.result(a.target, err)
	a.s.cfg.Post(scheduler.Detached{Target: a.target, Result: result, FailedGPUs: gpus, Took: a.s.cfg.Now() - begin})
	return err == nil
}

// close closes a session. It may be called again after an error.
func (a *actor) close(h *holding) error {
	if err := mechanism.Guard(h.session.Close); err != nil {
		return err
	}
	a.s.history.free(h.name, a.target, h.gpus)
	a.s.disturb(a.target, h, releaseCycles)
	return nil
}

// abandon tries once to release the target, after Close has given up waiting.
func (a *actor) abandon() {
	defer a.end()
	if a.held == nil {
		return
	}
	if err := a.close(a.held); err != nil {
		a.s.cfg.Log.Error("target could not be released and may be suspended", log.Target(a.target), log.Err(err))
	}
}

// end takes the actor off the list: from here on a new one may attach.
func (a *actor) end() {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	delete(a.s.actors, a.target)
	st := a.s.state(a.target)
	if a.held != nil && st.Err == nil {
		st.Choice = Choice{}
	}
	if st.forgotten {
		a.s.drop(a.target)
	}
}

// search looks for a better mechanism than the one that is attached, in the background
// and not more often than scheduler.SearchInterval.
func (a *actor) search() {
	now := a.s.cfg.Now()
	if a.held.index == 0 || a.found != nil || now-a.searched < scheduler.SearchInterval {
		return
	}
	a.searched = now
	found, n := make(chan bool, 1), a.held.index
	a.found = found
	go func() { found <- a.s.preview(a.s.ctx, a.target, n).Mechanism != "" }()
}

// replace replaces the session of a target that runs, if there is a better mechanism. An Attach that fails
// comes back to the old one.
func (a *actor) replace() {
	if !a.better || a.suspended {
		return
	}
	a.better = false
	if err := a.close(a.held); err != nil {
		a.s.cfg.Log.Warn("mechanism of a running target could not be replaced by a better one", log.Target(a.target),
			log.Mechanism(a.held.name), log.Err(err))
		return
	}
	a.held = &holding{session: a.held.session} // closed, until the next is attached
	a.attach()
}
