package daemon

import (
	"context"
	"fmt"
	"io/fs"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
	"github.com/gpreempt/gpreempt/pkg/scheduler/parking"
)

// loadInterval is the time between two looks at the queues of offline targets under an HQD
// budget: a parked target waits for as long until its first kernel is noticed.
const loadInterval = 100 * time.Millisecond

// loadWatch looks at the compute queues of all targets and has those parked that the HQD budget is
// short of. It sleeps while there is no budget.
type loadWatch struct {
	runner    *scheduler.Runner
	inventory *inventory.Inventory
	backlogs  func(context.Context, gpreempt.ProcessKey, []gpreempt.QueueEntry) []inventory.Backlog
	// waves reports whether a process has waves on a GPU; false if that is not known.
	waves  func(gpreempt.ProcessKey, gpreempt.GPUID) bool
	wake   chan struct{}
	budget atomic.Pointer[parking.Budget]

	// Only run uses these: the positions of the queues of each target at the last look, by id.
	parking parking.Parking
	written map[gpreempt.ProcessKey]map[uint32]uint64
}

func (w *loadWatch) run(ctx context.Context) { pollWhile(ctx, w.wake, loadInterval, w.check) }

// check looks once, and returns whether there is a budget. Without one nothing stays parked.
func (w *loadWatch) check(ctx context.Context) bool {
	l := parking.Look{Slots: map[gpreempt.GPUID]int{}, Loads: map[gpreempt.ProcessKey]parking.Load{}}
	if b := w.budget.Load(); b != nil {
		l.Budget = *b
	}
	if !l.Budget.On() && w.written == nil {
		return false
	}
	w.runner.View(func(c *scheduler.Core) { l.Targets, l.Policy = c.Targets(), c.Policy() })
	l.Now = w.runner.Now()
	for _, g := range w.inventory.GPUs() {
		l.Slots[g.ID] = g.QueueSlots
	}
	var written map[gpreempt.ProcessKey]map[uint32]uint64
	if l.Budget.On() {
		written = make(map[gpreempt.ProcessKey]map[uint32]uint64, len(l.Targets))
		for _, t := range l.Targets {
			l.Loads[t.Key], written[t.Key] = w.load(ctx, t)
		}
	}
	w.written = written
	for _, pin := range w.parking.Step(l) {
		w.runner.Post(pin)
	}
	return l.Budget.On()
}

// load looks at a target. What is not known counts as work.
func (w *loadWatch) load(ctx context.Context, t scheduler.TargetInfo) (parking.Load, map[uint32]uint64) {
	queues := w.inventory.QueuesOf(t.Key)
	load := parking.Load{Queues: map[gpreempt.GPUID]int{}, Busy: true}
	for _, q := range queues {
		if q.Type == gpreempt.QueueCompute {
			load.Queues[q.GPU]++
		}
	}
	if t.Class != gpreempt.Offline || !t.Ready {
		return load, nil
	}
	backlogs := w.backlogs(ctx, t.Key, queues)
	idle := len(backlogs) > 0
	written := make(map[uint32]uint64, len(backlogs))
	for n, b := range backlogs {
		id := queues[n].ID
		before, known := w.written[t.Key][id]
		written[id] = b.Written
		idle = idle && b.Known && b.Value == 0 && known && before == b.Written
	}
	// The firmware goes on to the next packet when it has started one: a long kernel on a
	// queue without a backlog shows only in its waves.
	load.Busy = !idle
	for gpu := range load.Queues {
		load.Busy = load.Busy || w.waves(t.Key, gpu)
	}
	return load, written
}

// hasWaves reads cu_occupancy of the driver, which it has for gfx9. Elsewhere it is false.
func (d *daemon) hasWaves(key gpreempt.ProcessKey, gpu gpreempt.GPUID) bool {
	text, err := fs.ReadFile(d.backend.root, fmt.Sprintf("sys/class/kfd/kfd/proc/%d/stats_%d/cu_occupancy", key.PID, uint32(gpu)))
	return err == nil && strings.TrimSpace(string(text)) != "0"
}

// setHQDBudget puts a budget in force.
func (d *daemon) setHQDBudget(b parking.Budget) {
	d.loads.budget.Store(&b)
	wakeUp(d.loads.wake)
}

// slotsLow returns the warning about the GPUs on which less than a percentage of the slots is
// free.
func slotsLow(gpus []gpreempt.GPU, used map[gpreempt.GPUID]inventory.Occupancy, percent int) []gpreempt.Warning {
	var low []string
	for _, g := range gpus {
		if o := used[g.ID]; o.Low(percent) {
			low = append(low, fmt.Sprintf("GPU %v: %d of %d slots are free, %d compute queues are mapped, %d of them offline", g.ID, o.Free(), o.Slots, o.Mapped, o.Offline))
		}
	}
	if len(low) == 0 {
		return nil
	}
	return []gpreempt.Warning{gpreempt.WarnSlotsLow.Warn(strings.Join(low, "; "))}
}
