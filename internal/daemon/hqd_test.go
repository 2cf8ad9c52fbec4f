package daemon

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
	"github.com/gpreempt/gpreempt/pkg/scheduler/parking"
)

// attaches attaches to every target at once.
type attaches struct {
	noTargets
	later []scheduler.Event
}

func (e *attaches) Attach(key gpreempt.ProcessKey) {
	e.later = append(e.later, scheduler.Attached{Target: key})
}

func (e *attaches) Suspend(key gpreempt.ProcessKey, seq uint64) {
	e.later = append(e.later, scheduler.Suspended{Target: key, Seq: seq})
}

func (e *attaches) Resume(key gpreempt.ProcessKey, seq uint64) {
	e.later = append(e.later, scheduler.Resumed{Target: key, Seq: seq})
}

// TestIdleTargetsAreParkedByWhatTheirQueuesShow has two offline processes of two queues on a GPU
// with four slots, of which the budget permits two.
func TestIdleTargetsAreParkedByWhatTheirQueuesShow(t *testing.T) {
	idle, busy := gpreempt.ProcessKey{PID: 1, Start: 1}, gpreempt.ProcessKey{PID: 2, Start: 1}
	v := inventory.New(10)
	v.SetGPUs([]gpreempt.GPU{{ID: 7, QueueSlots: 4}})
	var procs []discovery.Proc
	for _, key := range []gpreempt.ProcessKey{idle, busy} {
		p := discovery.Proc{}
		p.Key = key
		for id := range uint32(2) {
			p.Queues = append(p.Queues, gpreempt.Queue{Process: key, ID: id, GPU: 7, Type: gpreempt.QueueCompute})
		}
		procs = append(procs, p)
	}
	v.Apply(time.Unix(1, 0), discovery.Snapshot{Processes: procs})

	var now testClock
	actions := &attaches{}
	policy := scheduler.DefaultPolicy()
	policy.AttachAfter = 0
	runner := scheduler.NewRunner(scheduler.New(policy, scheduler.Limits{}), &now, testutil.NewTimer(), actions, func(scheduler.Record) {})
	post := func(ev scheduler.Event) {
		runner.Post(ev)
		for len(actions.later) > 0 {
			next := actions.later[0]
			actions.later = actions.later[1:]
			runner.Post(next)
		}
	}
	post(scheduler.GPUAdded{GPU: 7})
	for _, key := range []gpreempt.ProcessKey{idle, busy} {
		post(scheduler.TargetSeen{Target: key, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{7}, Queues: 2})
	}

	written, waves := map[int32]uint64{}, map[int32]bool{}
	w := &loadWatch{
		runner: runner, inventory: v,
		backlogs: func(_ context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) []inventory.Backlog {
			all := make([]inventory.Backlog, len(queues))
			for n := range all {
				all[n] = inventory.Backlog{Known: true, Unit: inventory.Packets, Written: written[key.PID]}
			}
			return all
		},
		waves: func(key gpreempt.ProcessKey, gpu gpreempt.GPUID) bool { return gpu == 7 && waves[key.PID] },
	}
	if w.check(t.Context()) {
		t.Error("it watches without a budget")
	}
	w.budget.Store(&parking.Budget{Online: 40, Offline: 50, Spare: 10})
	look := func(rounds int) (states [2]scheduler.TargetState) {
		for range rounds {
			now.t += loadInterval
			written[busy.PID]++
			if !w.check(t.Context()) {
				t.Error("it does not watch under a budget")
			}
			post(scheduler.Tick{})
		}
		runner.View(func(c *scheduler.Core) {
			for n, info := range c.Targets() {
				states[n] = info.State
			}
		})
		return states
	}
	const running, suspended = scheduler.TargetRunning, scheduler.TargetSuspended
	for _, step := range []struct {
		what   string
		do     func()
		rounds int
		want   [2]scheduler.TargetState
	}{
		{"before a second has passed", func() {}, 8, [2]scheduler.TargetState{running, running}},
		{"a second later", func() {}, 8, [2]scheduler.TargetState{suspended, running}},
		{"with new packets on its queue", func() { written[idle.PID]++ }, 1, [2]scheduler.TargetState{running, running}},
		{"idle again", func() {}, 13, [2]scheduler.TargetState{suspended, running}},
		{"with waves of a long kernel", func() { waves[idle.PID] = true }, 1, [2]scheduler.TargetState{running, running}},
		{"while it runs", func() {}, 40, [2]scheduler.TargetState{running, running}},
	} {
		step.do()
		if got := look(step.rounds); got != step.want {
			t.Errorf("%s: %v, want %v", step.what, got, step.want)
		}
	}
}

// testClock is the time of a test.
type testClock struct{ t scheduler.Time }

func (c *testClock) Now() scheduler.Time { return c.t }

func TestLowSlotsAreOneWarning(t *testing.T) {
	gpus := []gpreempt.GPU{{ID: 1}, {ID: 2}, {ID: 3}}
	used := map[gpreempt.GPUID]inventory.Occupancy{1: {Slots: 24, Mapped: 30, Offline: 22}, 2: {Slots: 24, Mapped: 10}, 3: {Slots: 24, Mapped: 22}}
	want := []gpreempt.Warning{gpreempt.WarnSlotsLow.Warn("GPU 1: 0 of 24 slots are free, 30 compute queues are mapped, 22 of them offline; " +
		"GPU 3: 2 of 24 slots are free, 22 compute queues are mapped, 0 of them offline")}
	if diff := cmp.Diff(want, slotsLow(gpus, used, 10)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := slotsLow(gpus, used, 0); got != nil {
		t.Errorf("without an alarm: %v", got)
	}
}
