package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// exploredStates returns how many states are to be explored in all layouts together.
func exploredStates(t *testing.T) int {
	t.Helper()
	states := 28_000
	if testing.Short() {
		states = 7_000
	}
	return testutil.Number(t, "GPREEMPT_EXPLORE", states)
}

func TestEveryHistoryUpToABoundKeepsThePromises(t *testing.T) {
	for i := range layouts {
		l := &layouts[i]
		t.Run(l.name, func(t *testing.T) {
			f, err := explore(l, nil, exploredStates(t)/len(layouts), func(f found) { t.Logf("%v, %d MiB", f, memory()) })
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("the end: %v", f)
			if f.violation != nil {
				t.Errorf("%v, after\n%s", f.violation, strings.Join(f.history, "\n"))
			}
		})
	}
}

// TestStatesWithOneFingerprintBehaveAlike follows two histories to the same fingerprint, and
// compares what the moves lead to from there.
func TestStatesWithOneFingerprintBehaveAlike(t *testing.T) {
	for i := range layouts {
		s, err := newSearch(&layouts[i], nil)
		if err != nil {
			t.Fatal(err)
		}
		states := exploredStates(t) / len(layouts)
		s.keep = max(2000, 90_000_000/states)
		if err := s.run(states, func(found) {}); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d pairs of histories", s.x.name, len(s.merged))
		if len(s.merged) < 5 {
			t.Errorf("%s: %d pairs of histories only", s.x.name, len(s.merged))
		}
		for _, m := range s.merged {
			if err := s.compare(m); err != nil {
				t.Errorf("%s: %v", s.x.name, err)
			}
		}
	}
}

// compare compares what follows after two histories that were merged.
func (s *search) compare(m merge) error {
	if err := s.enter(m.into); err != nil {
		return err
	}
	one := s.successors()
	if err := s.enter(m.from); err != nil {
		return err
	}
	text := s.x.text(m.move)
	if err := s.x.make(m.move); err != nil {
		return err
	}
	if diff := cmp.Diff(one, s.successors()); diff != "" {
		a, errA := s.describe(s.x.layout, nil, m.into)
		b, errB := s.describe(s.x.layout, nil, m.from)
		return fmt.Errorf("one fingerprint after\n%s\nand after\n%s\nand %s, but what follows differs (-first +second):\n%s\n%w",
			strings.Join(a, "\n"), strings.Join(b, "\n"), text, diff, errors.Join(errA, errB))
	}
	return nil
}

// successors returns the fingerprints of what every move leads to, sorted.
func (s *search) successors() []fingerprint {
	image, here := capture(s.x.core, notFollowed), s.x.situation
	var all []fingerprint
	for _, m := range slices.Clone(s.x.possible()) {
		err := s.x.make(m)
		f := s.fingerprint()
		if err != nil {
			f = fingerprint{}
		}
		all = append(all, f)
		image.restore()
		s.x.situation = here
	}
	slices.SortFunc(all, func(a, b fingerprint) int { return slices.Compare(a[:], b[:]) })
	return all
}

// seededBug breaks a core or the model of the driver: the explorer has to find out.
type seededBug struct {
	name string
	// layout is where it is searched for: the smallest that shows it.
	layout int
	// disturbances are those that are searched, beside ordinary moves: all would find the
	// bug as well, later.
	disturbances []moveKind
	event        func(Event) Event
	actions      func([]Action) []Action
	after        func(*Core)
	perform      func(*modelProcess)
	death        func(*modelProcess)
}

// needs reports whether a move is searched.
func (b *seededBug) needs(m move) bool {
	return m.ordinary() || slices.Contains(b.disturbances, m.kind)
}

// lose returns a hook that has the core miss the events of a type.
func lose[E Event]() func(Event) Event {
	return func(ev Event) Event {
		if _, is := ev.(E); is {
			return Tick{}
		}
		return ev
	}
}

// without returns a hook that drops actions.
func without(drop func(Action) bool) func([]Action) []Action {
	return func(actions []Action) []Action { return slices.DeleteFunc(actions, drop) }
}

// eachJob returns a hook that changes all jobs.
func eachJob(change func(*Core, *job)) func(*Core) {
	return func(c *Core) {
		for _, t := range c.order {
			change(c, t.job)
		}
	}
}

var seededBugs = []seededBug{
	{name: "a lease outlives its completion", event: lose[LeaseFinished]()},
	{name: "a lease outlives its connection", disturbances: []moveKind{moveClientGone}, event: lose[ClientGone]()},
	{name: "a lease does not expire", after: func(c *Core) {
		for _, l := range c.leases {
			if l.answered {
				c.timers.clear(&l.timer)
			}
		}
	}},
	{name: "a retry is a new announcement", after: func(c *Core) { clear(c.requests) }},
	{name: "max_suspend is forgotten", after: eachJob(func(c *Core, g *job) { g.suspendedSince = c.now })},
	{name: "the share floor is ignored", layout: 1, disturbances: []moveKind{moveReload}, after: eachJob(func(_ *Core, g *job) { g.budget = time.Hour })},
	{name: "the share cap is ignored", layout: 1, disturbances: []moveKind{moveReload}, after: eachJob(func(_ *Core, g *job) { g.credit = time.Hour })},
	{name: "the share cap has no end", layout: 1, disturbances: []moveKind{moveReload}, after: eachJob(func(c *Core, g *job) {
		if g.verdict.cause == CauseShareCap {
			g.credit = -time.Hour
		}
	})},
	{name: "a short run uses up the share cap", layout: 1, disturbances: []moveKind{moveReload}, after: eachJob(func(_ *Core, g *job) { g.credit = min(g.credit, time.Millisecond) })},
	{name: "the linger has no end", layout: 1, disturbances: []moveKind{moveReload}, after: eachJob(func(c *Core, g *job) {
		if g.lingerUntil > c.now {
			g.lingerUntil = c.now + time.Second
		}
	})},
	{name: "priorities are ignored", event: func(ev Event) Event {
		if l, is := ev.(LeaseRequested); is {
			l.Priority = 15
			return l
		}
		return ev
	}},
	{name: "a lease suspends its owner", layout: 3, event: func(ev Event) Event {
		if l, is := ev.(LeaseRequested); is {
			l.Owner = gpreempt.ProcessKey{}
			return l
		}
		return ev
	}},
	{name: "the lease of another spares a process that announces", layout: 3, event: func(ev Event) Event {
		if l, is := ev.(LeaseRequested); is {
			l.Owner = procKey(3)
			return l
		}
		return ev
	}},
	{name: "a failed attach counts as one that was resisted", layout: 4, disturbances: []moveKind{moveFail, moveReclassify}, event: func(ev Event) Event {
		if a, is := ev.(Attached); is && a.Result == CauseFailed {
			a.Result = gpreempt.ReasonResisted
			return a
		}
		return ev
	}},
	{name: "a class is ignored", disturbances: []moveKind{moveReclassify}, event: lose[TargetSeen]()},
	{name: "a new queue is not suspended", layout: 1, disturbances: []moveKind{moveBirth}, event: lose[Running]()},
	{name: "a drain is ignored", disturbances: []moveKind{moveDrain}, event: lose[Drain]()},
	{name: "a hold is ignored", disturbances: []moveKind{moveHold}, event: lose[Pin]()},
	{name: "an alarm opens no breaker", disturbances: []moveKind{moveAlarm}, event: lose[Alarm]()},
	{name: "a call that hangs opens no breaker", after: func(c *Core) {
		for _, u := range c.gpuOrder {
			u.breakerOpen = false
			c.timers.clear(&u.timer)
		}
	}},
	{name: "a failure quarantines nothing", disturbances: []moveKind{moveFail}, after: func(c *Core) {
		for _, t := range c.order {
			t.quarantinedUntil = 0
		}
	}},
	{name: "a resume that failed is not tried again", layout: 1, disturbances: []moveKind{moveFail}, after: func(c *Core) {
		for _, t := range c.order {
			if t.state == TargetResuming && t.flight.is(ActRecord) {
				c.timers.clear(&t.timer)
			}
		}
	}},
	{name: "a shadow policy acts", disturbances: []moveKind{moveReload}, event: func(ev Event) Event {
		if p, is := ev.(PolicyChanged); is {
			p.Policy.Shadow = false
			return p
		}
		return ev
	}},
	{name: "a parked process that has work stays parked", layout: 2, event: func(ev Event) Event {
		if p, is := ev.(Pin); is && p.Cause == CauseHQDRoom {
			return Tick{}
		}
		return ev
	}},
	{name: "a pin has no end", layout: 2, after: func(c *Core) {
		for _, t := range c.order {
			if c.now < t.pin.until {
				t.pin.until = c.now + time.Second
			}
		}
	}},
	{name: "a suspend is ordered twice", actions: func(actions []Action) []Action {
		for _, a := range actions {
			if a.Kind == ActSuspend {
				return append(actions, a)
			}
		}
		return actions
	}},
	{name: "a resume is lost", actions: without(func(a Action) bool { return a.Kind == ActResume })},
	{name: "the end of max_wait is not answered", actions: without(func(a Action) bool { return a.Kind == ActAnswer && a.Answer.Reason == CauseMaxWait })},
	{name: "quiet is answered at once", actions: func(actions []Action) []Action {
		for i := range actions {
			actions[i].Answer.Quiesced = true
		}
		return actions
	}},
	{name: "a suspension leaves a queue running", layout: 1, disturbances: []moveKind{moveBirth}, perform: func(p *modelProcess) {
		if p.flight == ActSuspend {
			p.suspended = min(p.suspended, 1)
		}
	}},
	{name: "a resume leaves a queue suspended", perform: func(p *modelProcess) {
		if p.flight == ActResume {
			p.suspended = p.queues
		}
	}},
	{name: "the driver resumes nothing when the daemon dies", death: func(*modelProcess) {}},
}

func TestExplorerFindsEachSeededBug(t *testing.T) {
	for i := range seededBugs {
		bug := &seededBugs[i]
		t.Run(bug.name, func(t *testing.T) {
			f, err := explore(&layouts[bug.layout], bug, 200_000, func(found) {})
			switch {
			case err != nil:
				t.Fatal(err)
			case f.violation == nil:
				t.Fatalf("not found in %v", f)
			}
			t.Logf("%d states: %v, after\n%s", f.states, f.violation, strings.Join(f.history, "\n"))
		})
	}
}
