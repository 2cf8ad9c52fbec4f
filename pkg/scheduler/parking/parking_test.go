package parking

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// rig is a core whose mechanism answers at once, and the parking that looks at it.
type rig struct {
	t       *testing.T
	core    *scheduler.Core
	parking Parking
	look    Look
	// quiet is since when each target is idle.
	quiet map[gpreempt.ProcessKey]scheduler.Time
}

const every = 100 * time.Millisecond

func newRig(t *testing.T, policy scheduler.Policy, budget Budget, slots int) *rig {
	t.Helper()
	policy.AttachAfter = 0
	return &rig{t, scheduler.New(policy, scheduler.Limits{LeasesPerClient: 9, LeasesPerUser: 9, LeasesTotal: 9}), Parking{}, Look{
		Policy: policy, Budget: budget, Slots: map[gpreempt.GPUID]int{1: slots}, Loads: map[gpreempt.ProcessKey]Load{},
	}, map[gpreempt.ProcessKey]scheduler.Time{}}
}

func key(n int) gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: int32(n), Start: 1} }

func (r *rig) step(ev scheduler.Event) {
	var results []scheduler.Event
	for _, a := range r.core.Step(r.look.Now, ev) {
		switch a.Kind {
		case scheduler.ActAttach:
			results = append(results, scheduler.Attached{Target: a.Target})
		case scheduler.ActDetach:
			results = append(results, scheduler.Detached{Target: a.Target})
		case scheduler.ActSuspend:
			results = append(results, scheduler.Suspended{Target: a.Target, Seq: a.Seq})
		case scheduler.ActResume:
			results = append(results, scheduler.Resumed{Target: a.Target, Seq: a.Seq})
		default:
		}
	}
	for _, ev := range results {
		r.step(ev)
	}
}

func (r *rig) seen(n int, class gpreempt.Class, priority gpreempt.Priority, job string) {
	r.step(scheduler.TargetSeen{Target: key(n), Class: class, Priority: priority, Job: job, GPUs: []gpreempt.GPUID{1}, Queues: 1})
}

func (r *rig) load(n, queues int, busy bool) {
	before, known := r.look.Loads[key(n)]
	if !known || before.Busy || before.Queues[1] != queues {
		r.quiet[key(n)] = r.look.Now
	}
	r.look.Loads[key(n)] = Load{Queues: map[gpreempt.GPUID]int{1: queues}, Busy: busy}
}

// pass lets time pass, and looks every 100 ms; check is called after each look with what was posted.
func (r *rig) pass(d time.Duration, check func([]scheduler.Pin)) {
	for end := r.look.Now + d; r.look.Now < end; {
		next := r.look.Now + every
		for due, ok := r.core.NextDeadline(); ok && due < next; due, ok = r.core.NextDeadline() {
			r.look.Now = due
			r.step(scheduler.Tick{})
		}
		r.look.Now = next
		r.step(scheduler.Tick{})
		r.look.Targets = r.core.Targets()
		pins := r.parking.Step(r.look)
		for _, pin := range pins {
			r.step(pin)
		}
		check(pins)
	}
}

// suspended returns the pids that are.
func (r *rig) suspended() (pids []int32) {
	for _, t := range r.core.Targets() {
		if t.State == scheduler.TargetSuspended {
			pids = append(pids, t.Key.PID)
		}
	}
	return pids
}

func preset(t *testing.T, name string) scheduler.Policy {
	t.Helper()
	p, err := scheduler.PresetByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func ignore([]scheduler.Pin) {}

// TestIdleJobsAreParkedTheLowestPriorityFirst: 10/80/10 of 10 slots is 9 queues at most, 8 of them
// offline.
func TestIdleJobsAreParkedTheLowestPriorityFirst(t *testing.T) {
	r := newRig(t, preset(t, "strict"), Budget{Online: 10, Offline: 80, Spare: 10}, 10)
	r.seen(100, gpreempt.Online, 12, "")
	r.seen(101, gpreempt.Offline, 3, "")
	r.seen(102, gpreempt.Offline, 1, "")
	r.seen(103, gpreempt.Offline, 0, "")
	r.load(100, 2, true)
	r.load(101, 4, false)
	r.load(102, 2, false)
	r.load(103, 2, true)
	for _, step := range []struct {
		what string
		do   func()
		wait time.Duration
		want []int32
	}{
		{"before they are idle for a second", func() {}, time.Second, nil},
		{"only as many as have to be", func() {}, 300 * time.Millisecond, []int32{102}},
		{"a lower priority that is idle later changes nothing", func() { r.load(103, 2, false) }, 2 * time.Second, []int32{102}},
		{"an online queue more", func() { r.load(100, 5, true) }, 200 * time.Millisecond, []int32{102, 103}},
		{"what has work returns at once", func() { r.load(102, 2, true) }, 100 * time.Millisecond, []int32{101, 103}},
		{"a new queue is no rest", func() { r.load(101, 1, false); r.load(102, 2, false) }, 300 * time.Millisecond, []int32{103}},
		{"room", func() { r.load(100, 2, true) }, 300 * time.Millisecond, nil},
		{"no room", func() { r.load(100, 6, true) }, 1500 * time.Millisecond, []int32{103}},
		{"an admin resumes it", func() { r.step(scheduler.Pin{Target: key(103), Cause: scheduler.CauseHold, For: time.Minute}) }, 200 * time.Millisecond, []int32{102}},
		{"no budget", func() { r.look.Budget = Budget{} }, 100 * time.Millisecond, nil},
	} {
		step.do()
		r.pass(step.wait, ignore)
		if got := r.suspended(); !slices.Equal(got, step.want) {
			t.Errorf("%s: at %v suspended are %v, want %v", step.what, r.look.Now, got, step.want)
		}
	}
}

// TestParkedJobsTakeTurns has room for one of two jobs, each of two processes: one is parked, never
// for longer than max_suspend, and its members together.
func TestParkedJobsTakeTurns(t *testing.T) {
	policy := preset(t, "strict")
	policy.MaxSuspend = 8 * time.Second
	r := newRig(t, policy, Budget{Offline: 50, Spare: 50}, 4)
	for n := range 4 {
		r.seen(101+n, gpreempt.Offline, 0, []string{"a", "b"}[n/2])
		r.load(101+n, 1, false)
	}
	r.pass(2*time.Second, ignore)
	turns := map[int32]int{}
	r.pass(time.Minute, func(pins []scheduler.Pin) {
		for _, pin := range pins {
			if pin.Cause == scheduler.CauseHQDBudget {
				turns[pin.Target.PID]++
			}
		}
		got := r.suspended()
		if a, b := []int32{101, 102}, []int32{103, 104}; !slices.Equal(got, a) && !slices.Equal(got, b) && !slices.Equal(got, slices.Concat(a, b)) {
			t.Fatalf("at %v suspended are %v, want one job, or both while one takes over", r.look.Now, got)
		}
	})
	if turns[101] < 3 || turns[103] < 3 || turns[101] > 5 || turns[103] > 5 || turns[101] != turns[102] {
		t.Errorf("in a minute they were parked %v times, want turns of 7 s", turns)
	}
}

// TestParkingLeavesHalfOfTheShareBudget: a lease finds as much as that.
func TestParkingLeavesHalfOfTheShareBudget(t *testing.T) {
	policy := preset(t, "balanced")
	policy.ShareFloor, policy.ShareWindow = 0.5, 4*time.Second
	r := newRig(t, policy, Budget{Offline: 50, Spare: 50}, 2)
	r.seen(101, gpreempt.Offline, 0, "")
	r.seen(102, gpreempt.Offline, 1, "")
	r.load(101, 1, false)
	r.load(102, 1, true)
	parked := 0
	r.pass(time.Minute, func([]scheduler.Pin) {
		info, _ := r.core.Target(key(101))
		if info.State == scheduler.TargetSuspended {
			parked++
		}
		if least := policy.MaxBudget()/2 - every; info.BudgetLeft < least {
			t.Fatalf("at %v %v of its budget is left, want %v", r.look.Now, info.BudgetLeft, least)
		}
	})
	if parked < 200 || parked > 400 {
		t.Errorf("it was parked at %d looks of 600, want about half", parked)
	}
}

// TestNothingIsParkedWithoutNeed: whatever targets do, a pin is for an offline job all of which is idle
// for a second, on a GPU with too many queues, and nothing that has work stays parked.
func TestNothingIsParkedWithoutNeed(t *testing.T) {
	parked := 0
	for seed := range uint64(20) {
		roll := rand.New(rand.NewPCG(seed, 1)).IntN
		budget := []Budget{{Online: 10, Offline: 80, Spare: 10}, {Offline: 50, Spare: 50}, {Online: 100}}[roll(3)]
		r := newRig(t, preset(t, []string{"strict", "balanced", "share"}[roll(3)]), budget, 4+roll(8))
		for range 300 {
			n := 101 + roll(6)
			switch roll(8) {
			case 0:
				r.seen(n, []gpreempt.Class{gpreempt.Online, gpreempt.Offline, gpreempt.Offline, gpreempt.Offline}[roll(4)], gpreempt.Priority(roll(3)), []string{"", "", "j"}[roll(3)])
			case 1:
				delete(r.look.Loads, key(n))
				r.step(scheduler.TargetGone{Target: key(n)})
			case 2, 3:
				r.load(n, roll(4), roll(2) == 0)
			default:
			}
			before := maps.Clone(r.look.Loads)
			r.pass(every*time.Duration(1+roll(5)), func(pins []scheduler.Pin) { parked += checkPins(r, before, pins) })
		}
	}
	if parked < 50 {
		t.Errorf("only %d pins in all", parked)
	}
}

// checkPins returns how many of the pins park.
func checkPins(r *rig, loads map[gpreempt.ProcessKey]Load, pins []scheduler.Pin) (parked int) {
	r.t.Helper()
	all, offline := 0, 0
	infos := map[gpreempt.ProcessKey]scheduler.TargetInfo{}
	for _, info := range r.look.Targets {
		infos[info.Key] = info
		all += loads[info.Key].Queues[1]
		if info.Class == gpreempt.Offline {
			offline += loads[info.Key].Queues[1]
		}
	}
	slots, b := r.look.Slots[1], r.look.Budget
	for _, pin := range pins {
		if pin.Cause != scheduler.CauseHQDBudget {
			continue
		}
		parked++
		load, info := loads[pin.Target], infos[pin.Target]
		if info.Class != gpreempt.Offline || load.Busy || r.look.Now < r.quiet[pin.Target]+AfterIdle {
			r.t.Fatalf("at %v %v is parked: %v, idle since %v, %+v", r.look.Now, pin.Target, info.Class, r.quiet[pin.Target], load)
		}
		if all <= slots*(100-b.Spare)/100 && offline <= slots*b.Offline/100 {
			r.t.Fatalf("at %v %v is parked, and %d queues, %d of them offline, are not too many for %d slots by %+v", r.look.Now, pin.Target, all, offline, slots, b)
		}
	}
	for _, info := range r.core.Targets() {
		if load, known := loads[info.Key]; info.Pin == scheduler.CauseHQDBudget && (!known || load.Busy) {
			r.t.Fatalf("at %v %v has work, or may have, and is parked", r.look.Now, info.Key)
		}
	}
	return parked
}

func TestBudgets(t *testing.T) {
	got := map[Budget]bool{}
	for _, b := range []Budget{{}, {Online: 10, Offline: 80, Spare: 10}, {Online: 100}, {Online: 10}, {Online: 110, Offline: -10}} {
		got[b] = b.Validate() == nil
	}
	want := map[Budget]bool{
		{}: true, {Online: 10, Offline: 80, Spare: 10}: true, {Online: 100}: true, {Online: 10}: false, {Online: 110, Offline: -10}: false,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("valid budgets (-want +got):\n%s", diff)
	}
}
