package scheduler

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// dice is where a history's choices come from: a seeded generator, rapid, or the
// bytes of a fuzzer. It gives 0 to n-1.
type dice func(n int) int

func seeded(seed uint64) dice { return rand.New(rand.NewPCG(seed, 1)).IntN }

func drawn(t *rapid.T) dice {
	return func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "choice") }
}

// world does to a core whatever can happen to one, in any order, and asks an
// observer and CheckInvariants after every step.
type world struct {
	roll     dice
	core     *Core
	observer *observer
	now      Time
	lastID   LeaseID
	stale    []Event // results already given once
	// unanswered are the Attach and Detach actions that have not come back.
	unanswered []Action

	// calm lets the work go on undisturbed for longer: other states are reached.
	calm bool
	// taken is called with every event that goes in.
	taken func(now Time, ev Event, actions []Action)
}

var worldLimits = Limits{LeasesPerClient: 6, LeasesPerUser: 9, LeasesTotal: 24}

func newWorld(p Policy, roll dice) *world {
	return &world{roll: roll, core: New(p, worldLimits), observer: newObserver(p), taken: func(Time, Event, []Action) {}}
}

func (w *world) step(ev Event) error {
	actions := w.core.Step(w.now, ev)
	w.taken(w.now, ev, actions)
	if err := w.observer.watch(w.now, ev, actions); err != nil {
		return err
	}
	if err := w.core.CheckInvariants(); err != nil {
		return fmt.Errorf("at %v, after %T: invariant: %w", w.now, ev, err)
	}
	if err := w.checkViews(); err != nil {
		return err
	}
	for _, a := range slices.Clone(actions) {
		if a.Kind == ActAttach || a.Kind == ActDetach {
			w.unanswered = append(w.unanswered, a)
		}
	}
	return nil
}

// answer gives the result of an Attach or Detach.
func (w *world) answer(n int, result Outcome) error {
	a := w.unanswered[n]
	w.unanswered = slices.Delete(w.unanswered, n, n+1)
	if a.Kind == ActAttach {
		return w.step(Attached{Target: a.Target, Result: result, ReportsBirths: w.roll(2) == 0})
	}
	return w.step(Detached{Target: a.Target, Result: result})
}

// answerAll has every Attach and Detach succeed.
func (w *world) answerAll() error {
	for len(w.unanswered) > 0 {
		if err := w.answer(0, OutcomeOK); err != nil {
			return err
		}
	}
	return nil
}

// sessionResult is the result of one Attach or Detach, or, mostly, of all.
func (w *world) sessionResult() error {
	if len(w.unanswered) == 0 {
		return w.wait()
	}
	switch w.roll(8) {
	case 0:
		return w.answer(w.roll(len(w.unanswered)), Outcome(w.roll(6)))
	case 1:
		return w.answer(w.roll(len(w.unanswered)), OutcomeOK)
	}
	return w.answerAll()
}

// lost is a session that ends by itself.
func (w *world) lost() error {
	return w.step(Lost{Target: w.anyKey(), Result: []Outcome{OutcomeFailed, OutcomeHardware, OutcomeReplaced, OutcomeDebugged}[w.roll(4)]})
}

// checkViews compares what readers are told with what the observer knows.
func (w *world) checkViews() error {
	for _, t := range w.core.Targets() {
		seen := w.observer.targets[t.Key]
		switch {
		case seen == nil || seen.state != t.State || seen.Class != t.Class || seen.Priority != t.Priority:
			return fmt.Errorf("at %v: readers see %+v", w.now, t)
		case away(t.State) && t.RunsBy < w.observer.now:
			return fmt.Errorf("at %v: target %v runs by %v, which is past", w.now, t.Key, t.RunsBy)
		case t.State == TargetSuspended && t.RunsBy > seen.awaySince+w.observer.policy.MaxSuspend:
			return fmt.Errorf("at %v: target %v runs by %v, max_suspend is over before", w.now, t.Key, t.RunsBy)
		}
	}
	if err := w.checkExplanation(); err != nil {
		return err
	}
	if got, want := len(w.core.Targets()), len(w.observer.targets); got != want {
		return fmt.Errorf("at %v: readers see %d targets of %d", w.now, got, want)
	}
	if got, want := len(w.core.Leases()), len(w.observer.leases); got != want {
		return fmt.Errorf("at %v: readers see %d leases of %d", w.now, got, want)
	}
	return nil
}

// checkExplanation compares the checks a person is shown with the decision, for
// one target after the other.
func (w *world) checkExplanation() error {
	if len(w.core.order) == 0 {
		return nil
	}
	t := w.core.order[w.observer.counts["Steps"]%len(w.core.order)]
	e, _ := w.core.Explain(t.key)
	decides, result := 0, CheckPass
	for _, check := range e.Checks {
		if check.Decides {
			decides, result = decides+1, check.Result
		}
	}
	if suspend := w.core.decide(t.gang).suspend; decides != 1 || suspend != (result == CheckSuspend) {
		return fmt.Errorf("at %v: target %v, suspend %v, is explained by %+v", w.now, t.key, suspend, e)
	}
	return nil
}

// op is one kind of thing that happens.
type op struct {
	name     string
	weight   int
	do       func(*world) error
	disturbs bool
}

var ops = []op{
	{"seen", 8, (*world).seen, false},
	{"changed", 8, (*world).changed, false},
	{"gone", 2, (*world).gone, false},
	{"gpu", 1, func(w *world) error { return w.step(GPUAdded{w.gpuID()}) }, false},
	{"announce", 20, (*world).announce, false},
	{"order", 3, (*world).order, false},
	{"renew", 3, (*world).renew, false},
	{"finish", 12, (*world).finish, false},
	{"client gone", 1, func(w *world) error {
		return w.step(ClientGone{w.client(), []LeaseEnd{EndDisconnected, EndClientDied}[w.roll(2)]})
	}, true},
	{"backlog", 6, (*world).backlog, false},
	{"result", 40, (*world).result, false},
	{"session result", 40, (*world).sessionResult, false},
	{"lost", 1, (*world).lost, true},
	{"born", 6, func(w *world) error { return w.step(QueueBorn{w.anyKey()}) }, false},
	{"stray result", 4, (*world).strayResult, false},
	{"alarm", 1, (*world).alarm, true},
	{"hold", 1, func(w *world) error { return w.step(Hold{w.anyKey(), w.span(10)}) }, true},
	{"policy", 2, func(w *world) error { return w.step(PolicyChanged{w.policy()}) }, true},
	{"drain", 1, func(w *world) error { return w.step(Drain{true}) }, true},
	{"deadline", 30, (*world).deadline, false},
	{"wait", 24, (*world).wait, false},
	{"leap", 2, func(w *world) error { w.now += w.span(13); return w.step(Tick{}) }, true},
	{"back in time", 1, (*world).backInTime, true},
}

var opWeights = func() (sum int) {
	for _, o := range ops {
		sum += o.weight
	}
	return sum
}()

// any does one thing.
func (w *world) any() error {
	if w.observer.draining && w.roll(10) == 0 {
		return w.step(Drain{false})
	}
	n := w.roll(opWeights)
	for _, o := range ops {
		if n -= o.weight; n < 0 {
			if w.calm && o.disturbs && w.roll(20) != 0 {
				return w.announce()
			}
			if err := o.do(w); err != nil {
				return fmt.Errorf("%s: %w", o.name, err)
			}
			return nil
		}
	}
	panic("unreachable")
}

// span is a duration from 1 us up to about 4^most us: 12 gives 16 s and more.
func (w *world) span(most int) time.Duration {
	unit := time.Microsecond << (2 * w.roll(most+1))
	return unit + unit*time.Duration(w.roll(16))/8
}

func (w *world) gpuID() gpreempt.GPUID   { return gpreempt.GPUID(1 + w.roll(4)) }
func (w *world) client() ClientID        { return ClientID(w.roll(5)) }
func (w *world) prio() gpreempt.Priority { return gpreempt.Priority(w.roll(16)) }

// gpuIDs returns none to four GPUs, ascending.
func (w *world) gpuIDs() []gpreempt.GPUID {
	var ids []gpreempt.GPUID
	mask := w.roll(16)
	for i := range 4 {
		if mask>>i&1 != 0 {
			ids = append(ids, gpreempt.GPUID(i+1))
		}
	}
	return ids
}

func (w *world) key() gpreempt.ProcessKey {
	return gpreempt.ProcessKey{PID: int32(100 + w.roll(8)), Start: 1}
}

// anyKey is also a process nobody saw, now and then.
func (w *world) anyKey() gpreempt.ProcessKey {
	k := w.key()
	if w.roll(10) == 0 {
		k.Start = 99
	}
	return k
}

// backlog polls a client with a lease that ends by idleness, if there is one.
func (w *world) backlog() error {
	ids := w.core.IdleWatched()
	if len(ids) == 0 || w.roll(10) == 0 {
		ids = []ClientID{w.client()}
	}
	return w.step(ClientBacklog{ids[w.roll(len(ids))], w.roll(3) == 0})
}

func (w *world) anyLease() LeaseID {
	live := slices.Sorted(maps.Keys(w.observer.leases))
	if len(live) == 0 || w.roll(12) == 0 {
		return LeaseID(w.roll(int(w.lastID) + 2)) // ended, or never heard of
	}
	return live[w.roll(len(live))]
}

// policy is a preset, or valid knobs at random.
func (w *world) policy() Policy {
	presets := Presets()
	if i := w.roll(2 * len(presets)); i < len(presets) {
		return presets[i]
	}
	p := Policy{
		SuspendWhen: SuspendWhen(1 + w.roll(3)),
		Linger:      Linger(1 + w.roll(3)),
		LingerMax:   min(w.span(9), time.Second),
		ShareFloor:  []float64{0, 0, 0.001, 0.1, 0.333, 0.5, 0.9, 0.95}[w.roll(8)],
		ShareWindow: 100*time.Millisecond + w.span(12),
		MaxSuspend:  10*time.Millisecond + w.span(12),
		MinRun:      time.Millisecond + w.span(8),
		Gang:        GangScope(1 + w.roll(2)),
		Shadow:      w.roll(8) == 0,
		MaxWait:     min(w.span(9), 10*time.Second),
		MaxTTL:      time.Millisecond + w.span(12),
	}
	p.DefaultTTL = min(time.Millisecond+w.span(9), p.MaxTTL)
	p = p.Normalize()
	if err := p.Validate(); err != nil {
		panic(err)
	}
	return p
}

func (w *world) seen() error {
	return w.step(TargetSeen{
		Target: w.key(), Job: []string{"", "a", "b"}[w.roll(3)], Class: []gpreempt.Class{gpreempt.Unmanaged, gpreempt.Online, gpreempt.Offline, gpreempt.Offline, gpreempt.Offline, gpreempt.Offline}[w.roll(6)],
		Priority: gpreempt.Priority(w.roll(12)), GPUs: w.gpuIDs(), Queues: uint64(1 + w.roll(3)),
	})
}

// changed changes one thing of a target there is.
func (w *world) changed() error {
	t := w.observer.targets[w.key()]
	if t == nil {
		return w.seen()
	}
	ev := t.TargetSeen
	switch w.roll(6) {
	case 0, 1:
		ev.Queues++
	case 2:
		ev.Class = gpreempt.Class(w.roll(3))
	case 3:
		ev.Priority = w.prio()
	case 4:
		ev.GPUs = w.gpuIDs()
	case 5:
		ev.Job = []string{"", "a", "b"}[w.roll(3)]
	}
	return w.step(ev)
}

// alarm comes rarely: it keeps a GPU quiet for long.
func (w *world) alarm() error {
	if w.roll(3) != 0 {
		return w.wait()
	}
	return w.step(Alarm{gpreempt.GPUID(w.roll(5))})
}

func (w *world) gone() error { return w.step(TargetGone{w.anyKey()}) }

func (w *world) announce() error {
	req := LeaseRequested{
		Client: w.client(), GPUs: w.gpuIDs(), Priority: w.prio(), TTL: min(time.Millisecond+64*w.span(9), w.observer.policy.MaxTTL),
		MaxWait: w.maybe(w.span(8)), ETA: w.maybe(w.span(7)), SLO: w.maybe(w.span(8)), Expected: w.maybe(w.span(7)), OnIdle: w.roll(4) == 0,
	}
	req.User = UserID(fmt.Sprint("u", req.Client%3))
	if w.roll(4) == 0 {
		req.RequestID = fmt.Sprint("r", w.roll(6))
	}
	return w.request(req)
}

func (w *world) maybe(d time.Duration) time.Duration {
	if w.roll(2) == 0 {
		return 0
	}
	return d
}

// order is a suspension by hand, sometimes with GPUs that mean nothing.
func (w *world) order() error {
	return w.request(LeaseRequested{
		Target: w.anyKey(), Priority: gpreempt.PriorityAdmin, TTL: min(64*w.span(9), w.observer.policy.MaxSuspend),
		MaxWait: w.maybe(w.span(8)), GPUs: w.gpuIDs(),
	})
}

// request does what the runner does with an announcement.
func (w *world) request(req LeaseRequested) error {
	if due, ok := w.core.NextDeadline(); ok && due <= w.now {
		if err := w.step(Tick{}); err != nil {
			return err
		}
	}
	id, err := w.core.Admit(&req)
	switch {
	case err != nil:
		if gpreempt.ReasonOf(err) == "" {
			return fmt.Errorf("Admit: %w has no reason", err)
		}
		return nil
	case id != 0:
		if l := w.observer.leases[id]; l == nil {
			if _, _, ended := w.core.Ended(id); !ended {
				return fmt.Errorf("Admit gives lease %d, which is neither live nor ended", id)
			}
		} else if l.Client != req.Client && !l.order {
			return fmt.Errorf("Admit gives lease %d of client %d to client %d", id, l.Client, req.Client)
		}
		if !req.Target.IsZero() {
			return w.step(LeaseRenewed{id, req.TTL})
		}
		return nil
	}
	w.lastID++
	req.Lease = w.lastID
	if err := w.step(req); err != nil {
		return err
	}
	if w.roll(10) == 0 && w.observer.leases[req.Lease] != nil {
		return w.step(req) // the same once more
	}
	return nil
}

func (w *world) renew() error {
	return w.step(LeaseRenewed{w.anyLease(), min(64*w.span(9), w.observer.policy.MaxTTL)})
}

func (w *world) finish() error {
	return w.step(LeaseFinished{w.anyLease(), []LeaseEnd{EndCompleted, EndCompleted, EndCompleted, EndReleased}[w.roll(4)]})
}

func (w *world) inFlight() []*seenTarget {
	var flying []*seenTarget
	for _, key := range slices.SortedFunc(maps.Keys(w.observer.targets), gpreempt.ProcessKey.Compare) {
		if t := w.observer.targets[key]; t.flight != 0 {
			flying = append(flying, t)
		}
	}
	return flying
}

func (w *world) result() error {
	flying := w.inFlight()
	if len(flying) == 0 {
		return w.wait()
	}
	t := flying[w.roll(len(flying))]
	outcome, gpus := OutcomeOK, []gpreempt.GPUID(nil)
	switch w.roll(60) {
	case 0:
		outcome = OutcomeGone
	case 1, 2:
		outcome = OutcomeFailed
	case 4:
		outcome = OutcomeReplaced
	case 5:
		outcome = OutcomeDebugged
	case 3:
		outcome = OutcomeHardware
		if w.roll(2) == 0 {
			gpus = w.gpuIDs()
		}
	}
	return w.giveResult(t, outcome, gpus)
}

func (w *world) giveResult(t *seenTarget, outcome Outcome, gpus []gpreempt.GPUID) error {
	took := w.now - t.sentAt
	var ev Event = Suspended{t.TargetSeen.Target, t.flight, outcome, gpus, took}
	if t.kind == ActResume {
		ev = Resumed{t.TargetSeen.Target, t.flight, outcome, gpus, took}
	}
	w.stale = append(w.stale[max(0, len(w.stale)-20):], ev)
	return w.step(ev)
}

// strayResult is late, doubled, of the wrong kind, or about nobody.
func (w *world) strayResult() error {
	if len(w.stale) > 0 && w.roll(2) == 0 {
		return w.step(w.stale[w.roll(len(w.stale))])
	}
	key, seq, outcome := w.anyKey(), uint64(w.roll(int(w.observer.lastSeq)+1)), Outcome(w.roll(6))
	if t := w.observer.targets[key]; t != nil && t.flight != 0 {
		seq = t.flight + uint64(w.roll(3)) - 1
		if seq == t.flight { // right number, wrong kind
			if t.kind == ActSuspend {
				return w.step(Resumed{Target: key, Seq: seq, Result: outcome})
			}
			return w.step(Suspended{Target: key, Seq: seq, Result: outcome})
		}
	}
	if w.roll(2) == 0 {
		return w.step(Suspended{Target: key, Seq: seq, Result: outcome})
	}
	return w.step(Resumed{Target: key, Seq: seq, Result: outcome})
}

// deadline goes to the next one, as a punctual runner does.
func (w *world) deadline() error {
	due, ok := w.core.NextDeadline()
	if !ok {
		return w.wait()
	}
	if due > w.now+time.Second && w.roll(10) != 0 {
		return w.result()
	}
	w.observer.counts["Deadlines"]++
	w.now = max(w.now, due)
	return w.step(Tick{})
}

// wait lets a little time pass, and half of the time nobody looks at the clock.
func (w *world) wait() error {
	w.now += w.span(7)
	if w.roll(2) == 0 {
		return nil
	}
	return w.step(Tick{})
}

func (w *world) backInTime() error {
	was := w.now
	w.now = max(0, w.now-w.span(11))
	err := w.step(Tick{})
	w.now = was
	return err
}

// settle answers everything in flight and fires every deadline up to a time.
func (w *world) settle(until Time) error {
	for {
		if err := w.answerAll(); err != nil {
			return err
		}
		for flying := w.inFlight(); len(flying) > 0; flying = w.inFlight() {
			if err := w.giveResult(flying[0], OutcomeOK, nil); err != nil {
				return err
			}
			if err := w.answerAll(); err != nil {
				return err
			}
		}
		due, ok := w.core.NextDeadline()
		if !ok || due > until {
			w.now = max(w.now, until)
			return w.step(Tick{})
		}
		w.now = max(w.now, due)
		if err := w.step(Tick{}); err != nil {
			return err
		}
	}
}
