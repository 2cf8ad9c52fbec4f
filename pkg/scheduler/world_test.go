package scheduler_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Dice makes the choices of a history: a seeded generator, rapid, or the bytes of a fuzzer.
// It returns 0 to n-1.
type Dice func(n int) int

// Seeded returns dice that are the same for the same seed.
func Seeded(seed uint64) Dice { return rand.New(rand.NewPCG(seed, 1)).IntN }

// Drawn returns the dice of rapid.
func Drawn(t *rapid.T) Dice {
	return func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "choice") }
}

// World does to a core what can happen to one, in any order, and asks an observer and a
// check after every step.
type World struct {
	Roll     Dice
	Core     *scheduler.Core
	Observer *Observer
	Now      scheduler.Time
	LastID   scheduler.LeaseID
	stale    []scheduler.Event // results already given once
	// unanswered are the Attach and Detach actions that have not come back.
	unanswered []scheduler.Action
	// inspections are the Inspect actions that have not come back.
	inspections []scheduler.Action

	// Calm makes disturbing events rare, so that other states are reached.
	Calm bool
	// check is called after every step.
	check func(*scheduler.Core) error
	// Taken is called with every event that goes in.
	Taken func(now scheduler.Time, ev scheduler.Event, actions []scheduler.Action)
}

// WorldLimits are the limits of the core of a World.
var WorldLimits = scheduler.Limits{LeasesPerClient: 6, LeasesPerUser: 9, LeasesTotal: 24}

// NewWorld returns a world with a new core; check is called after every step.
func NewWorld(p scheduler.Policy, roll Dice, check func(*scheduler.Core) error) *World {
	return &World{Roll: roll, check: check, Core: scheduler.New(p, WorldLimits), Observer: NewObserver(p), Taken: func(scheduler.Time, scheduler.Event, []scheduler.Action) {}}
}

// Step has the core handle an event, and checks the result.
func (w *World) Step(ev scheduler.Event) error {
	actions := w.Core.Step(w.Now, ev)
	w.Taken(w.Now, ev, actions)
	if err := w.Observer.Watch(w.Now, ev, actions); err != nil {
		return err
	}
	if err := w.check(w.Core); err != nil {
		return fmt.Errorf("at %v, after %T: invariant: %w", w.Now, ev, err)
	}
	if err := w.checkViews(); err != nil {
		return err
	}
	asked := false
	for _, a := range slices.Clone(actions) {
		if a.Kind == scheduler.ActAttach || a.Kind == scheduler.ActDetach {
			w.unanswered = append(w.unanswered, a)
		}
		if a.Kind == scheduler.ActInspect {
			w.inspections = append(w.inspections[max(0, len(w.inspections)-20):], a)
			asked = true
		}
	}
	if asked && w.Roll(2) == 0 {
		return w.inspected()
	}
	return nil
}

// answer posts the result of an Attach or Detach.
func (w *World) answer(n int, result scheduler.Cause) error {
	a := w.unanswered[n]
	w.unanswered = slices.Delete(w.unanswered, n, n+1)
	if a.Kind == scheduler.ActAttach {
		return w.Step(scheduler.Attached{Target: a.Target, Result: result, ReportsBirths: w.Roll(2) == 0})
	}
	return w.Step(scheduler.Detached{Target: a.Target, Result: result})
}

// answerAll has every Attach and Detach succeed.
func (w *World) answerAll() error {
	for len(w.unanswered) > 0 {
		if err := w.answer(0, ""); err != nil {
			return err
		}
	}
	return nil
}

// sessionResult is the result of one Attach or Detach, or, mostly, of all.
func (w *World) sessionResult() error {
	if len(w.unanswered) == 0 {
		return w.wait()
	}
	switch w.Roll(8) {
	case 0:
		return w.answer(w.Roll(len(w.unanswered)), results[w.Roll(len(results))])
	case 1:
		return w.answer(w.Roll(len(w.unanswered)), "")
	}
	return w.answerAll()
}

// inspected is the result of an Inspect, mostly of the last one: some come late, and some
// never or for another target.
func (w *World) inspected() error {
	n := len(w.inspections)
	if n == 0 {
		return w.wait()
	}
	a := w.inspections[n-1]
	if w.Roll(4) == 0 {
		a = w.inspections[w.Roll(n)]
	}
	if w.Roll(20) == 0 {
		a.Target = w.anyKey()
	}
	return w.Step(scheduler.Inspected{Target: a.Target, Seq: a.Seq, Stuck: w.Roll(2) == 0})
}

// lost is a session that ends by itself.
func (w *World) lost() error {
	return w.Step(scheduler.Lost{Target: w.anyKey(), Result: []scheduler.Cause{scheduler.CauseFailed, scheduler.CauseHardware, scheduler.CauseReplaced, gpreempt.ReasonResisted}[w.Roll(4)]})
}

// checkViews compares the views of the core with the state of the observer.
func (w *World) checkViews() error {
	for _, t := range w.Core.Targets() {
		seen := w.Observer.Targets[t.Key]
		switch {
		case seen == nil || seen.state != t.State || seen.Class != t.Class || seen.Priority != t.Priority:
			return fmt.Errorf("at %v: readers see %+v", w.Now, t)
		case Away(t.State) && t.RunsBy < w.Observer.now:
			return fmt.Errorf("at %v: target %v runs by %v, which is past", w.Now, t.Key, t.RunsBy)
		case t.State == scheduler.TargetSuspended && t.RunsBy > seen.awaySince+w.Observer.policy.MaxSuspend:
			return fmt.Errorf("at %v: target %v runs by %v, max_suspend is over before", w.Now, t.Key, t.RunsBy)
		}
	}
	if err := w.Observer.checkJobs(w.Core.Jobs()); err != nil {
		return err
	}
	if got, want := len(w.Core.Targets()), len(w.Observer.Targets); got != want {
		return fmt.Errorf("at %v: readers see %d targets of %d", w.Now, got, want)
	}
	if got, want := len(w.Core.Leases()), len(w.Observer.leases); got != want {
		return fmt.Errorf("at %v: readers see %d leases of %d", w.Now, got, want)
	}
	return nil
}

// op is one kind of thing that happens.
type op struct {
	Name     string
	weight   int
	Do       func(*World) error
	disturbs bool
}

// Ops are the things that happen, with their weights.
var Ops = []op{
	{"seen", 8, (*World).seen, false},
	{"changed", 8, (*World).changed, false},
	{"gone", 2, (*World).gone, false},
	{"gpu", 1, func(w *World) error { return w.Step(scheduler.GPUAdded{GPU: w.gpuID()}) }, false},
	{"park", 6, (*World).park, false},
	{"announce", 20, (*World).announce, false},
	{"by hand", 3, (*World).byHand, false},
	{"renew", 3, (*World).renew, false},
	{"finish", 12, (*World).Finish, false},
	{"client gone", 1, func(w *World) error {
		return w.Step(scheduler.ClientGone{Client: w.client(), End: []scheduler.LeaseEnd{scheduler.EndDisconnected, scheduler.EndClientDied}[w.Roll(2)]})
	}, true},
	{"backlog", 8, (*World).backlog, false},
	{"result", 40, (*World).result, false},
	{"session result", 40, (*World).sessionResult, false},
	{"inspected", 1, (*World).inspected, false},
	{"lost", 2, (*World).lost, true},
	{"born", 6, func(w *World) error {
		return w.Step(scheduler.Running{Target: w.anyKey(), Cause: scheduler.CauseNewQueue, Suspended: w.Roll(2)})
	}, false},
	{"ran", 4, func(w *World) error {
		return w.Step(scheduler.Running{Target: w.anyKey(), Cause: []scheduler.Cause{scheduler.CauseResumedByAnother, scheduler.CauseLapsed}[w.Roll(2)]})
	}, false},
	{"stray result", 4, (*World).strayResult, false},
	{"alarm", 1, (*World).alarm, true},
	{"hold", 1, func(w *World) error {
		return w.Step(scheduler.Pin{Target: w.anyKey(), Cause: scheduler.CauseHold, For: w.Span(10)})
	}, true},
	{"policy", 2, func(w *World) error { return w.Step(scheduler.PolicyChanged{Policy: w.policy()}) }, true},
	{"drain", 1, func(w *World) error { return w.Step(scheduler.Drain{On: true}) }, true},
	{"deadline", 30, (*World).deadline, false},
	{"wait", 24, (*World).wait, false},
	{"leap", 2, func(w *World) error { w.Now += w.Span(13); return w.Step(scheduler.Tick{}) }, true},
	{"back in time", 1, (*World).backInTime, true},
}

var opWeights = func() (sum int) {
	for _, o := range Ops {
		sum += o.weight
	}
	return sum
}()

// Any does one thing.
func (w *World) Any() error {
	if w.Observer.draining && w.Roll(10) == 0 {
		return w.Step(scheduler.Drain{On: false})
	}
	n := w.Roll(opWeights)
	for _, o := range Ops {
		if n -= o.weight; n < 0 {
			if w.Calm && o.disturbs && w.Roll(20) != 0 {
				return w.announce()
			}
			if err := o.Do(w); err != nil {
				return fmt.Errorf("%s: %w", o.Name, err)
			}
			return nil
		}
	}
	panic("unreachable")
}

// Span is a duration from 1 us up to about 4^most us: 12 gives 16 s and more.
func (w *World) Span(most int) time.Duration {
	unit := time.Microsecond << (2 * w.Roll(most+1))
	return unit + unit*time.Duration(w.Roll(16))/8
}

func (w *World) gpuID() gpreempt.GPUID      { return gpreempt.GPUID(1 + w.Roll(4)) }
func (w *World) client() scheduler.ClientID { return scheduler.ClientID{PID: int32(w.Roll(5))} }
func (w *World) prio() gpreempt.Priority    { return gpreempt.Priority(w.Roll(16)) }

// gpuIDs returns none to four GPUs, ascending.
func (w *World) gpuIDs() []gpreempt.GPUID {
	var ids []gpreempt.GPUID
	mask := w.Roll(16)
	for i := range 4 {
		if mask>>i&1 != 0 {
			ids = append(ids, gpreempt.GPUID(i+1))
		}
	}
	return ids
}

func (w *World) key() gpreempt.ProcessKey {
	return gpreempt.ProcessKey{PID: int32(100 + w.Roll(8)), Start: 1}
}

// anyKey is also a process nobody saw, now and then.
func (w *World) anyKey() gpreempt.ProcessKey {
	k := w.key()
	if w.Roll(10) == 0 {
		k.Start = 99
	}
	return k
}

// backlog polls a client with a lease that ends by idleness, if there is one.
func (w *World) backlog() error {
	ids := w.Core.IdleWatched()
	if len(ids) == 0 || w.Roll(10) == 0 {
		ids = []scheduler.ClientID{w.client()}
	}
	return w.Step(scheduler.ClientBacklog{Client: ids[w.Roll(len(ids))], Busy: w.Roll(3) == 0})
}

func (w *World) anyLease() scheduler.LeaseID {
	live := slices.Sorted(maps.Keys(w.Observer.leases))
	if len(live) == 0 || w.Roll(12) == 0 {
		return scheduler.LeaseID(w.Roll(int(w.LastID) + 2)) // ended, or never heard of
	}
	return live[w.Roll(len(live))]
}

// policy is a preset, or valid knobs at random.
func (w *World) policy() scheduler.Policy {
	presets := scheduler.Presets()
	if i := w.Roll(2 * len(presets)); i < len(presets) {
		return presets[i]
	}
	p := scheduler.Policy{
		Linger:      []time.Duration{0, scheduler.LingerLearned, min(w.Span(9), time.Second)}[w.Roll(3)],
		ShareFloor:  []float64{0, 0, 0.001, 0.1, 0.333, 0.5, 0.9, 0.95}[w.Roll(8)],
		ShareWindow: 100*time.Millisecond + w.Span(12),
		MaxSuspend:  10*time.Millisecond + w.Span(12),
		MinRun:      time.Millisecond + w.Span(8),
		AttachAfter: []time.Duration{0, 0, w.Span(10), time.Minute}[w.Roll(4)],
		Shadow:      w.Roll(8) == 0,
		MaxWait:     min(w.Span(9), 10*time.Second),
		MaxTTL:      time.Millisecond + w.Span(12),
	}
	p.DefaultTTL = min(time.Millisecond+w.Span(9), p.MaxTTL)
	if p.ShareCap = []float64{1, 1, 0.05, 0.3, 0.5, 0.98}[w.Roll(6)]; p.Validate() != nil {
		p.ShareCap = 1
	}
	p = p.Normalize()
	if err := p.Validate(); err != nil {
		panic(err)
	}
	return p
}

func (w *World) seen() error {
	return w.Step(scheduler.TargetSeen{
		Target: w.key(), Job: []string{"", "a", "b"}[w.Roll(3)], Class: []gpreempt.Class{gpreempt.Unmanaged, gpreempt.Online, gpreempt.Offline, gpreempt.Offline, gpreempt.Offline, gpreempt.Offline}[w.Roll(6)],
		Priority: gpreempt.Priority(w.Roll(12)), GPUs: w.gpuIDs(), Kin: w.kin(), Queues: uint64(1 + w.Roll(3)), OnResist: w.onResist(),
	})
}

// kin returns nothing, mostly, or two processes, targets or not.
func (w *World) kin() []gpreempt.ProcessKey {
	if w.Roll(4) != 0 {
		return nil
	}
	return []gpreempt.ProcessKey{w.key(), w.anyKey()}
}

func (w *World) onResist() gpreempt.Resistance {
	return []gpreempt.Resistance{{}, {Stop: true}, {KillAfter: 1}, {KillAfter: 2}}[w.Roll(4)]
}

// changed changes one thing of a target there is.
func (w *World) changed() error {
	t := w.Observer.Targets[w.key()]
	if t == nil {
		return w.seen()
	}
	ev := t.TargetSeen
	switch w.Roll(8) {
	case 7:
		ev.OnResist = w.onResist()
	case 6:
		ev.Kin = w.kin()
	case 0, 1:
		ev.Queues++
	case 2:
		ev.Class = gpreempt.Class(w.Roll(3))
	case 3:
		ev.Priority = w.prio()
	case 4:
		ev.GPUs = w.gpuIDs()
	case 5:
		ev.Job = []string{"", "a", "b"}[w.Roll(3)]
	}
	return w.Step(ev)
}

// alarm comes rarely: it keeps a GPU quiet for long.
func (w *World) alarm() error {
	if w.Roll(3) != 0 {
		return w.wait()
	}
	if w.Roll(2) != 0 {
		return w.Step(scheduler.Alarm{GPU: gpreempt.GPUID(w.Roll(5)), Unmap: w.Roll(3) == 0})
	}
	reset := scheduler.QueueReset{GPU: gpreempt.GPUID(1 + w.Roll(4)), Process: w.anyKey()}
	reset.Suspects = []gpreempt.ProcessKey{reset.Process, w.anyKey()}
	return w.Step(reset)
}

func (w *World) gone() error { return w.Step(scheduler.TargetGone{Target: w.anyKey()}) }

func (w *World) announce() error {
	req := scheduler.LeaseRequested{
		Client: w.client(), GPUs: w.gpuIDs(), Priority: w.prio(), TTL: min(time.Millisecond+64*w.Span(9), w.Observer.policy.MaxTTL),
		MaxWait: w.maybe(w.Span(8)), ETA: w.maybe(w.Span(7)), OnIdle: w.Roll(4) == 0,
	}
	req.User = scheduler.UserID(fmt.Sprint("u", req.Client.PID%3))
	if w.Roll(3) == 0 {
		req.Owner = w.key()
	}
	if w.Roll(4) == 0 {
		req.RequestID = fmt.Sprint("r", w.Roll(6))
	}
	return w.Request(req)
}

func (w *World) maybe(d time.Duration) time.Duration {
	if w.Roll(2) == 0 {
		return 0
	}
	return d
}

// byHand is a suspension by an admin, which another one may replace or end.
func (w *World) byHand() error {
	return w.Step(scheduler.Pin{Target: w.anyKey(), Cause: scheduler.CauseByHand, For: w.maybe(min(64*w.Span(9), w.Observer.policy.MaxSuspend))})
}

// park is what keeps slots free: it pins and ends what it has pinned.
func (w *World) park() error {
	ev := scheduler.Pin{Target: w.anyKey(), Cause: []scheduler.Cause{scheduler.CauseHQDBusy, scheduler.CauseHQDRoom, scheduler.CauseHQDBudget, scheduler.CauseHQDBudget}[w.Roll(4)]}
	if ev.Cause == scheduler.CauseHQDBudget {
		ev.For = min(64*w.Span(9), w.Observer.policy.MaxSuspend)
	}
	return w.Step(ev)
}

// Request does what the runner does with an announcement.
func (w *World) Request(req scheduler.LeaseRequested) error {
	if due, ok := w.Core.NextDeadline(); ok && due <= w.Now {
		if err := w.Step(scheduler.Tick{}); err != nil {
			return err
		}
	}
	id, err := w.Core.Admit(&req)
	switch {
	case err != nil:
		if gpreempt.ReasonOf(err) == "" {
			return fmt.Errorf("Admit: %w has no reason", err)
		}
		return nil
	case id != 0:
		if l := w.Observer.leases[id]; l == nil {
			if _, _, ended := w.Core.Ended(id); !ended {
				return fmt.Errorf("Admit gives lease %d, which is neither live nor ended", id)
			}
		} else if l.Client != req.Client {
			return fmt.Errorf("Admit gives lease %d of client %v to client %v", id, l.Client, req.Client)
		}
		return nil
	}
	w.LastID++
	req.Lease = w.LastID
	if err := w.Step(req); err != nil {
		return err
	}
	if w.Roll(10) == 0 && w.Observer.leases[req.Lease] != nil {
		return w.Step(req) // the same once more
	}
	return nil
}

func (w *World) renew() error {
	return w.Step(scheduler.LeaseRenewed{Lease: w.anyLease(), TTL: min(64*w.Span(9), w.Observer.policy.MaxTTL)})
}

// Finish ends a lease.
func (w *World) Finish() error {
	return w.Step(scheduler.LeaseFinished{Lease: w.anyLease(), End: []scheduler.LeaseEnd{scheduler.EndCompleted, scheduler.EndCompleted, scheduler.EndCompleted, scheduler.EndReleased}[w.Roll(4)]})
}
