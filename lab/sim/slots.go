package sim

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
	"github.com/gpreempt/gpreempt/pkg/scheduler/parking"
)

// turnTime is how long a set of queues stays mapped where not all fit, as in the model of the GPU
// (emu/gpumodel).
const turnTime = 10 * time.Millisecond

// runlist is which queues of a GPU have a slot.
type runlist struct {
	queues []*stream // all, in the order of their processes
	// first is the first mapped queue while not all fit, second that of the next turn.
	first, second int
	turn          event
}

// remap maps the queues that are not suspended: all if they fit, else as many as there are slots,
// from first on.
func (g *gpu) remap() {
	slots := g.engine.o.Slots
	if slots == 0 {
		return
	}
	g.engine.touch(g)
	l := &g.runlist
	free := slots
	l.second = -1
	for i := range l.queues {
		at := (l.first + i) % len(l.queues)
		s := l.queues[at]
		s.unmapped = s.suspended || free == 0
		switch {
		case s.suspended:
		case free > 0:
			free--
		case l.second < 0:
			l.second = at
		}
	}
	if l.second < 0 {
		g.engine.events.clear(&l.turn)
	} else if l.turn.place == 0 {
		g.engine.events.set(&l.turn, g.engine.now+turnTime)
	}
}

// takeTurn maps the next queues. As in the model of the GPU, a turn is a runlist cycle, and needs
// a queue with work.
func (g *gpu) takeTurn() {
	e, l := g.engine, &g.runlist
	e.events.set(&l.turn, e.now+turnTime)
	if len(g.online)+len(g.offline) == 0 {
		return
	}
	l.first = l.second
	g.stopAll(e.o.Costs.Disturb, g.remap)
}

// countMapped accounts for the time in which online queues had a slot.
func (g *gpu) countMapped(from time.Duration) {
	e := g.engine
	if e.o.Slots == 0 || e.over {
		return
	}
	for _, s := range g.runlist.queues {
		switch {
		case !s.isOnline:
		case s.unmapped:
			e.out.UnmappedUntil = max(e.out.UnmappedUntil, ms(e.now))
		default:
			s.mappedFor += e.now - from
		}
	}
}

// onlineMapped returns the share of the duration in which an online queue had a slot, of the queue
// with the least.
func (e *engine) onlineMapped() *float64 {
	var least *float64
	for _, s := range e.services {
		for _, st := range s.streams {
			if share := float64(st.mappedFor) / float64(e.scenario.Duration); least == nil || share < *least {
				least = &share
			}
		}
	}
	return least
}

// pollTime is the time between two looks of the daemon at the queues of its targets.
const pollTime = 100 * time.Millisecond

// serviceKey is the process of a service.
func serviceKey(s *service) gpreempt.ProcessKey {
	return gpreempt.ProcessKey{PID: int32(s.index + 1), Start: 1}
}

// startBudget has the core know the services, and begins to look at the queues.
func (d *daemon) startBudget() {
	e := d.engine
	if !e.o.HQDBudget.On() {
		return
	}
	for _, s := range e.services {
		d.step(scheduler.TargetSeen{Target: serviceKey(s), Class: gpreempt.Online, Priority: gpreempt.Priority(s.Priority), GPUs: gpuIDs(s.gpus), Queues: uint64(len(s.streams))})
	}
	d.poll()
}

// poll parks what has had no work since the last polls.
func (d *daemon) poll() {
	e := d.engine
	l := parking.Look{
		Now: e.now, Policy: d.core.Policy(), Budget: e.o.HQDBudget, Slots: map[gpreempt.GPUID]int{},
		Targets: d.core.Targets(), Loads: map[gpreempt.ProcessKey]parking.Load{},
	}
	for _, g := range e.gpus {
		l.Slots[gpuID(g)] = e.o.Slots
	}
	for _, s := range e.services {
		l.Loads[serviceKey(s)] = parking.Load{Queues: queuesOf(s.streams), Busy: true}
	}
	now := map[*process]float64{}
	for _, p := range e.procs {
		done := 0.0
		for _, s := range p.streams {
			s.gpu.engine.touch(s.gpu)
			done += s.pos
		}
		before, known := d.worked[p]
		now[p] = done
		l.Loads[p.key] = parking.Load{Queues: queuesOf(p.streams), Busy: !known || done != before || slices.ContainsFunc(p.streams, (*stream).wants)}
	}
	d.worked = now
	for _, pin := range d.parking.Step(l) {
		d.step(pin)
	}
	e.after(pollTime, d.poll)
}

// queuesOf counts streams by GPU.
func queuesOf(streams []*stream) map[gpreempt.GPUID]int {
	counts := map[gpreempt.GPUID]int{}
	for _, s := range streams {
		counts[gpuID(s.gpu)]++
	}
	return counts
}
