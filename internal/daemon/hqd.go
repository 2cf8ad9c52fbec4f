package daemon

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// loadInterval is the time between two looks at the queues of offline targets under an HQD
// budget: a parked target waits for as long until its first kernel is noticed.
const loadInterval = 100 * time.Millisecond

// loadWatch reports to the scheduler the compute queues of all targets, and which of the
// offline ones have work. It sleeps while there is no HQD budget.
type loadWatch struct {
	runner    *scheduler.Runner
	inventory *inventory.Inventory
	backlogs  func(context.Context, gpreempt.ProcessKey, []gpreempt.QueueEntry) []inventory.Backlog
	// waves reports whether a process has waves on a GPU; false if that is not known.
	waves func(gpreempt.ProcessKey, gpreempt.GPUID) bool
	wake  chan struct{}
	// known is what was reported. Only run uses it.
	known map[gpreempt.ProcessKey]knownLoad
}

// knownLoad is the last report about a target.
type knownLoad struct {
	scheduler.TargetLoad
	// written are the positions of its queues, by id.
	written map[uint32]uint64
}

func (w *loadWatch) run(ctx context.Context) { pollWhile(ctx, w.wake, loadInterval, w.check) }

// check reports what has changed, and returns whether there is a budget. Without one it forgets
// what was reported.
func (w *loadWatch) check(ctx context.Context) bool {
	var targets []scheduler.TargetInfo
	on := false
	w.runner.View(func(c *scheduler.Core) {
		if on = c.HQDBudget().On(); on {
			targets = c.Targets()
		}
	})
	now := make(map[gpreempt.ProcessKey]knownLoad, len(targets))
	for _, t := range targets {
		last, reported := w.known[t.Key]
		load := w.load(ctx, t, last)
		now[t.Key] = load
		if !reported || load.Busy != last.Busy || !slices.Equal(load.Queues, last.Queues) {
			w.runner.Post(load.TargetLoad)
		}
	}
	w.known = now
	return on
}

// load looks at a target. What is not known counts as work.
func (w *loadWatch) load(ctx context.Context, t scheduler.TargetInfo, last knownLoad) knownLoad {
	queues := w.inventory.QueuesOf(t.Key)
	load := knownLoad{TargetLoad: scheduler.TargetLoad{Target: t.Key, Queues: computeQueues(queues), Busy: true}}
	if t.Class != gpreempt.Offline || !t.Ready {
		return load
	}
	backlogs := w.backlogs(ctx, t.Key, queues)
	idle := len(backlogs) > 0
	load.written = make(map[uint32]uint64, len(backlogs))
	for n, b := range backlogs {
		id := queues[n].ID
		before, known := last.written[id]
		load.written[id] = b.Written
		idle = idle && b.Known && b.Value == 0 && known && before == b.Written
	}
	// The firmware goes on to the next packet when it has started one: a long kernel on a
	// queue without a backlog shows only in its waves.
	load.Busy = !idle || slices.ContainsFunc(load.Queues, func(q scheduler.GPUQueues) bool { return w.waves(t.Key, q.GPU) })
	return load
}

// computeQueues counts the compute queues by GPU.
func computeQueues(queues []gpreempt.QueueEntry) (counts []scheduler.GPUQueues) {
	for _, q := range queues {
		if q.Type != gpreempt.QueueCompute {
			continue
		}
		at, found := slices.BinarySearchFunc(counts, q.GPU, func(c scheduler.GPUQueues, id gpreempt.GPUID) int { return int(c.GPU) - int(id) })
		if !found {
			counts = slices.Insert(counts, at, scheduler.GPUQueues{GPU: q.GPU})
		}
		counts[at].Queues++
	}
	return counts
}

// hasWaves reads cu_occupancy of the driver, which it has for gfx9. Elsewhere it is false.
func (d *daemon) hasWaves(key gpreempt.ProcessKey, gpu gpreempt.GPUID) bool {
	text, err := fs.ReadFile(d.backend.root, fmt.Sprintf("sys/class/kfd/kfd/proc/%d/stats_%d/cu_occupancy", key.PID, uint32(gpu)))
	return err == nil && strings.TrimSpace(string(text)) != "0"
}

// setHQDBudget puts a budget in force.
func (d *daemon) setHQDBudget(b scheduler.HQDBudget) {
	var inForce scheduler.HQDBudget
	d.runner.View(func(c *scheduler.Core) { inForce = c.HQDBudget() })
	if b == inForce {
		return
	}
	d.runner.Post(scheduler.HQDBudgetChanged{Budget: b})
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
	return about(gpreempt.WarnSlotsLow, "", low)
}
