package scheduler_test

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// episode is one stretch a target was away.
type episode struct {
	from, sentAt, suspendedAt, resumeAt, to scheduler.Time
}

// beyond is how far a stretch may run into debt: the resume, and the Suspend that
// was still on its way when the resume was due and could not be taken back.
func (e episode) beyond() time.Duration {
	d := e.to - e.resumeAt
	if e.suspendedAt < e.sentAt || e.suspendedAt == e.resumeAt {
		d += e.resumeAt - e.sentAt
	}
	return d
}

// punctual is a machine whose deadlines fire on time and whose mechanism takes
// the time it takes.
type punctual struct {
	World
	due  []arrival
	cost func(scheduler.ActionKind) time.Duration
	fail func() bool
	// calm: there are few leases.
	calm bool
	away map[gpreempt.ProcessKey]*episode
	past map[gpreempt.ProcessKey][]episode
}

type arrival struct {
	at scheduler.Time
	ev scheduler.Event
}

func newPunctual(p scheduler.Policy, roll Dice) *punctual {
	m := &punctual{away: map[gpreempt.ProcessKey]*episode{}, past: map[gpreempt.ProcessKey][]episode{}}
	m.World = *NewWorld(p, roll, checked())
	m.Taken = m.follow
	return m
}

// follow schedules the results and keeps the episodes.
func (m *punctual) follow(now scheduler.Time, _ scheduler.Event, actions []scheduler.Action) {
	for _, a := range actions {
		switch {
		case a.Kind == scheduler.ActSuspend || a.Kind == scheduler.ActResume:
			took, result := m.cost(a.Kind), scheduler.Cause("")
			if m.fail() {
				result = scheduler.CauseFailed
			}
			var ev scheduler.Event = scheduler.Suspended{Target: a.Target, Seq: a.Seq, Took: took, Result: result}
			if a.Kind == scheduler.ActResume {
				ev = scheduler.Resumed{Target: a.Target, Seq: a.Seq, Took: took, Result: result}
			}
			m.due = append(m.due, arrival{now + took, ev})
		case a.Kind == scheduler.ActAttach:
			m.due = append(m.due, arrival{now, scheduler.Attached{Target: a.Target}})
		case a.Kind == scheduler.ActDetach:
			took := m.cost(a.Kind)
			m.due = append(m.due, arrival{now + took, scheduler.Detached{Target: a.Target, Took: took}})
		case a.Kind == scheduler.ActRecord && a.Record.Kind == scheduler.RecordTarget:
			m.followTarget(now, a.Record)
		}
	}
	slices.SortStableFunc(m.due, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })
}

func (m *punctual) followTarget(now scheduler.Time, r scheduler.Record) {
	if r.Cause == scheduler.CauseClass && r.FromTarget == r.ToTarget {
		return // reclassified: no action was sent
	}
	e := m.away[r.Target]
	if e == nil {
		e = &episode{from: now, resumeAt: -1}
	}
	switch {
	case r.ToTarget == scheduler.TargetSuspending:
		e.sentAt = now
		m.away[r.Target] = e
	case r.ToTarget == scheduler.TargetSuspended:
		e.suspendedAt = now
	case r.ToTarget == scheduler.TargetResuming && e.resumeAt < 0:
		e.resumeAt = now
	case Away(r.FromTarget) && !Away(r.ToTarget):
		e.to = now
		m.past[r.Target] = append(m.past[r.Target], *e)
		delete(m.away, r.Target)
	}
}

// run lets time pass up to a moment; every deadline and result comes on time.
func (m *punctual) run(until scheduler.Time) error {
	for steps := 0; ; steps++ {
		if steps == maxSteps {
			return fmt.Errorf("%d steps have only led to %v, on the way to %v", steps, m.Now, until)
		}
		at, ev := until, scheduler.Event(scheduler.Tick{})
		if len(m.due) > 0 && m.due[0].at <= at {
			at, ev = m.due[0].at, m.due[0].ev
		}
		if due, ok := m.Core.NextDeadline(); ok && due <= at {
			at, ev = due, scheduler.Tick{}
		}
		if _, tick := ev.(scheduler.Tick); !tick {
			m.due = m.due[1:]
		}
		m.Now = max(m.Now, at)
		if err := m.Step(ev); err != nil {
			return err
		}
		if _, tick := ev.(scheduler.Tick); tick && at == until {
			return nil
		}
	}
}

// TestShareFloorHolds storms a few targets with leases and measures what each
// target got. The promise: over any stretch of time T, the time away is at most
//
//	(1-f)*T + f*(1-f)*W + f*D
//
// with f the floor, W the window and D how far the last suspension of the stretch
// ran beyond the moment it was due to end (episode.beyond). Proof: the budget is
// at most (1-f)*W when the stretch begins; it loses the time away A, gains at most
// (T-A)*(1-f)/f, and is at least -D when the stretch ends. Solve for A.
func TestShareFloorHolds(t *testing.T) {
	t.Parallel()
	const seeds = 24
	episodes, tight := 0, 0
	for seed := range uint64(seeds) {
		roll := Seeded(seed)
		pick := func(from ...time.Duration) time.Duration { return from[roll(len(from))] }
		p := scheduler.DefaultPolicy()
		p.ShareFloor = []float64{0.01, 0.1, 0.25, 0.5, 0.75, 0.95}[roll(6)]
		p.ShareWindow = pick(100*time.Millisecond, 333*time.Millisecond, 2*time.Second)
		p.MaxSuspend = pick(10*time.Millisecond, 100*time.Millisecond, 2*time.Second, time.Minute)
		p.MinRun = pick(time.Millisecond, 20*time.Millisecond)
		p.Linger = pick(0, scheduler.LingerLearned, 20*time.Millisecond)
		m := newPunctual(p, roll)
		slowest := pick(0, 400*time.Microsecond, 5*time.Millisecond, 30*time.Millisecond)
		m.cost = func(scheduler.ActionKind) time.Duration { return slowest/4 + slowest*time.Duration(roll(16))/16 }
		failures := roll(3) == 0
		m.fail = func() bool { return failures && roll(200) == 0 }
		if err := storm(m, "", 400, pick(time.Millisecond, 10*time.Millisecond, 50*time.Millisecond)); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for key, past := range m.past {
			episodes += len(past)
			n, err := checkShare(p, past)
			if err != nil {
				t.Fatalf("seed %d, target %v, window %v, slowest %v: %v", seed, key, p.ShareWindow, slowest, err)
			}
			tight += n
		}
	}
	t.Logf("%d stretches away, %d of them close to the bound", episodes, tight)
	if episodes < 5_000 || tight < 10_000 {
		t.Error("the storm is too mild to prove anything")
	}
}

// TestShareCapHolds lets a few targets run with a cap, beside a floor and leases, and measures what
// each of them ran. The promise is that of Policy.ShareCap. Proof: the credit is at most cap*W when
// the stretch begins; it loses the time that the target ran, R, gains at most (T-R)*cap/(1-cap),
// and is at least -MinRun when the stretch ends. Solve for R.
func TestShareCapHolds(t *testing.T) {
	t.Parallel()
	const seeds = 24
	stretches, tight := 0, 0
	for seed := range uint64(seeds) {
		roll := Seeded(seed)
		pick := func(from ...time.Duration) time.Duration { return from[roll(len(from))] }
		p := scheduler.DefaultPolicy()
		p.ShareCap = []float64{0.05, 0.2, 0.5, 0.8, 0.98}[roll(5)]
		p.ShareFloor = []float64{0, 0.01, 0.5, 1}[roll(4)] * min(p.ShareCap, 0.95)
		p.ShareWindow = pick(100*time.Millisecond, 333*time.Millisecond, 2*time.Second)
		p.MaxSuspend = pick(100*time.Millisecond, 2*time.Second, time.Minute)
		p.MinRun = pick(time.Millisecond, 5*time.Millisecond)
		p.AttachAfter = pick(0, time.Hour)
		m := newPunctual(p, roll)
		slowest := pick(0, 400*time.Microsecond, 5*time.Millisecond)
		m.cost = func(scheduler.ActionKind) time.Duration { return slowest/4 + slowest*time.Duration(roll(16))/16 }
		m.fail = func() bool { return false }
		m.calm = roll(2) == 0
		if err := storm(m, "", 400, pick(10*time.Millisecond, 50*time.Millisecond)); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for key, past := range m.past {
			stretches += len(past)
			n, err := checkCap(p, past)
			if err == nil && p.ShareFloor > 0 {
				_, err = checkShare(p, past)
			}
			if err != nil {
				t.Fatalf("seed %d, target %v, policy %+v, slowest %v: %v", seed, key, p, slowest, err)
			}
			tight += n
		}
	}
	t.Logf("%d stretches away, %d of them close to the bound", stretches, tight)
	if stretches < 5_000 || tight < 5_000 {
		t.Error("the storm is too mild to prove anything")
	}
}

// checkCap measures every stretch from the end of one suspension to the start of another, which is
// where the most has run, and counts those near the bound.
func checkCap(p scheduler.Policy, past []episode) (tight int, err error) {
	limit := p.ShareCap
	for i := range past {
		var ran time.Duration
		for j := i + 1; j < len(past); j++ {
			ran += past[j].from - past[j-1].to
			stretch := past[j].from - past[i].to
			bound := limit*float64(stretch) + (1-limit)*(limit*float64(p.ShareWindow)+float64(p.MinRun))
			// The cap is kept in millionths and the credit in nanoseconds.
			bound += 2e-6*float64(stretch) + float64(j-i+1)*10
			if float64(ran) > bound {
				return tight, fmt.Errorf("it ran %v in the %v from %v on, with a cap of %v at most %v", ran, stretch, past[i].to, limit, time.Duration(bound))
			}
			if float64(ran) > 0.9*bound {
				tight++
			}
		}
	}
	return tight, nil
}

// storm announces, completes and changes things at random for some steps; job is the job of
// the targets.
func storm(m *punctual, job string, steps int, pace time.Duration) error {
	for id := range gpreempt.GPUID(2) {
		m.Step(scheduler.GPUAdded{GPU: id + 1})
	}
	seen := make([]scheduler.TargetSeen, 3)
	for i := range seen {
		seen[i] = scheduler.TargetSeen{
			Target: gpreempt.ProcessKey{PID: int32(100 + i), Start: 1}, Class: gpreempt.Offline, Job: job,
			GPUs: [][]gpreempt.GPUID{{1}, {2}, {1, 2}}[i],
		}
		if err := m.Step(seen[i]); err != nil {
			return err
		}
	}
	for range steps {
		if err := m.run(m.Now + pace*time.Duration(m.Roll(16))/16); err != nil {
			return err
		}
		var err error
		switch i := m.Roll(3); m.Roll(10) {
		case 0:
			seen[i].Queues++
			err = m.Step(seen[i])
		case 1:
			seen[i].Priority = gpreempt.Priority(m.Roll(4))
			err = m.Step(seen[i])
		case 2, 3, 4:
			err = m.Finish()
		default:
			if m.calm && m.Roll(8) > 0 {
				continue
			}
			gpus := [][]gpreempt.GPUID{{1}, {2}, {1, 2}}[i]
			err = m.Request(scheduler.LeaseRequested{Client: scheduler.ClientID{PID: 1}, GPUs: gpus, Priority: 11, TTL: 1 + 4*pace*time.Duration(m.Roll(64))/16})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkShare measures every stretch from the start of one suspension to the end
// of another, which is where the most is away, and counts those near the bound.
func checkShare(p scheduler.Policy, past []episode) (tight int, err error) {
	f := p.ShareFloor
	for i := range past {
		var total time.Duration
		for j := i; j < len(past); j++ {
			total += past[j].to - past[j].from
			stretch := past[j].to - past[i].from
			bound := (1-f)*float64(stretch) + f*(1-f)*float64(p.ShareWindow) + f*float64(past[j].beyond())
			// The floor is kept in millionths and the budget in nanoseconds.
			bound += 2e-6*float64(stretch) + float64(j-i+1)*10
			if float64(total) > bound {
				return tight, fmt.Errorf("away %v in the %v from %v on, with a floor of %v at most %v", total, stretch, past[i].from, f, time.Duration(bound))
			}
			if float64(total) > 0.97*bound {
				tight++
			}
		}
	}
	return tight, nil
}
