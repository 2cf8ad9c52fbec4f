package scheduler_test

import (
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// seenLoad is what the reports say of a target's compute queues.
type seenLoad struct {
	queues       []scheduler.GPUQueues
	loaded, busy bool
	// quietSince is when it was last known to be active.
	quietSince scheduler.Time
}

func (o *Observer) takeLoad(ev scheduler.TargetLoad) {
	t := o.Targets[ev.Target]
	if t == nil {
		return
	}
	if !t.load.loaded || t.load.busy && !ev.Busy {
		t.load.quietSince = o.now
	}
	t.load.queues, t.load.loaded, t.load.busy = ev.Queues, true, ev.Busy
}

// mayBeParked reports whether the whole gang of a target has been idle for long enough, under
// a budget.
func (o *Observer) mayBeParked(t *seenTarget) bool {
	return o.hqd.On() && !slices.ContainsFunc(o.gang(t), func(m *seenTarget) bool {
		return !m.load.loaded || m.load.busy || o.now < m.load.quietSince+scheduler.ParkAfterIdle
	})
}

// parked returns why a target may not be parked now.
func (o *Observer) parked(t *seenTarget) error {
	if !o.mayBeParked(t) {
		return fmt.Errorf("rule 1: it is parked, under the budget %+v, with the load %+v", o.hqd, t.load)
	}
	for _, m := range o.gang(t) {
		for _, q := range m.load.queues {
			if q.Queues > 0 && o.overBudget(q.GPU) {
				o.Counts["Parked"]++
				return nil
			}
		}
	}
	return fmt.Errorf("rule 1: it is parked, and the budget %+v has room for its queues %+v", o.hqd, t.load.queues)
}

func (o *Observer) overBudget(id gpreempt.GPUID) bool {
	all, offline := 0, 0
	for _, t := range o.Targets {
		for _, q := range t.load.queues {
			if q.GPU == id {
				all += q.Queues
				if t.Class == gpreempt.Offline {
					offline += q.Queues
				}
			}
		}
	}
	slots := o.slots[id]
	return slots > 0 && (all > slots*(100-o.hqd.Spare)/100 || offline > slots*o.hqd.Offline/100)
}

// load reports on a target.
func (w *World) load() error {
	ev := scheduler.TargetLoad{Target: w.anyKey(), Busy: w.Roll(4) == 0}
	for _, id := range w.gpuIDs() {
		ev.Queues = append(ev.Queues, scheduler.GPUQueues{GPU: id, Queues: w.Roll(4)})
	}
	return w.Step(ev)
}

func (w *World) hqdBudget() error {
	budgets := []scheduler.HQDBudget{{}, {Online: 10, Offline: 80, Spare: 10}, {Offline: 50, Spare: 50}, {Online: 100}}
	return w.Step(scheduler.HQDBudgetChanged{Budget: budgets[w.Roll(len(budgets))]})
}
