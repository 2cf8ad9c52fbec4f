package gpumodel

import (
	"slices"
	"time"
)

// gpu is one GPU and its schedule.
type gpu struct {
	m     *Machine
	index int
	// compute and copies are what packets run on.
	compute, copies pool
	// queues are all there are, in runlist order: by process, then by queue.
	queues []*queue

	// op is the change of the schedule under way, ops those that wait.
	op  *op
	ops []*op
	// timer ends the part of a change that takes time; then next continues.
	timer timer
	next  func()

	// first is where in the runlist the mapped set begins, second where the one
	// after it will; crowded: not all queues fit into one set.
	first, second rank
	crowded       bool
	turn          timer
	// half: Unmap has unmapped everything, a cycle that Map completes.
	half bool
	// draining: a grace period runs, in which kernels may end and none begins.
	draining bool

	// slots are those for compute queues, sdma those for copy queues, engine by engine.
	slots, sdma []slot
	// tenants are the processes with a VMID, pages those with a page of doorbells.
	tenants []tenant
	pages   []*process
	// mqds are the queues by the place of their MQDs, sdmaQueues and xgmiQueues those by
	// the engine's queue they have. sdmaMemory are the MQDs of those, one after the other.
	mqds, sdmaQueues, xgmiQueues []*queue
	sdmaMemory                   []*memory
	// computeBirths counts the compute queues there ever were.
	computeBirths int

	faults [FaultRepeatPacket + 1]int // armed, by kind

	cycles uint64
}

// op is a change of a GPU's schedule.
type op struct {
	kind opKind
	// queues are those to suspend or resume.
	queues []*queue
	// grace is how long kernels may run on before they are saved (HWS).
	grace time.Duration
	// at is the index in queues the change has come to (MES).
	at int
	// set are the queues to map.
	set []*queue
	// loaded: there was something to unmap (HWS).
	loaded bool
	// done is called when it is over; nil for nothing.
	done func()
}

type opKind uint8

const (
	opSuspend opKind = iota
	opResume
	// opTurn maps the next set.
	opTurn
)

// rank is the place of a queue in the runlist.
type rank struct{ process, queue uint64 }

func (r rank) before(o rank) bool {
	return r.process < o.process || r.process == o.process && r.queue < o.queue
}

func (q *queue) rank() rank { return rank{q.proc.birth, q.birth} }

func newGPU(m *Machine, index int) *gpu {
	g := &gpu{m: m, index: index}
	g.slots = make([]slot, m.spec.Slots)
	g.sdma = make([]slot, (m.spec.SDMAEngines+m.spec.XGMIEngines)*m.spec.SDMAQueuesPerEngine)
	g.sdmaMemory = make([]*memory, len(g.sdma))
	g.tenants = make([]tenant, m.spec.VMIDs)
	for _, p := range []*pool{&g.compute, &g.copies} {
		p.m = m
		p.ended = func(k *packet) { k.q.ran(k) }
		p.finish.fire = p.expire
	}
	g.timer.fire = func() { g.next() }
	g.turn.fire = g.takeTurn
	return g
}

// list adds q to the runlist.
func (g *gpu) list(q *queue) {
	i, _ := slices.BinarySearchFunc(g.queues, q.rank(), func(o *queue, r rank) int {
		if o.rank().before(r) {
			return -1
		}
		return 1
	})
	g.queues = slices.Insert(g.queues, i, q)
}

func (g *gpu) unlist(q *queue) {
	g.queues = slices.DeleteFunc(g.queues, func(o *queue) bool { return o == q })
}

// reschedule updates the timers after a change of the running packets.
func (g *gpu) reschedule() {
	g.compute.schedule()
	g.copies.schedule()
}

// enqueue adds a change of the schedule; the changes are made one by one.
func (g *gpu) enqueue(o *op) {
	g.ops = append(g.ops, o)
	if g.op == nil {
		g.begin()
	}
}

// begin starts the oldest change that waits.
func (g *gpu) begin() {
	for g.op == nil && len(g.ops) > 0 {
		g.op = g.ops[0]
		g.ops = slices.Delete(g.ops, 0, 1)
		if g.m.spec.MES {
			g.beginMES()
		} else {
			g.beginHWS()
		}
	}
}

// after continues the change under way with next once d has passed, at once when d is 0.
func (g *gpu) after(d time.Duration, next func()) {
	if d <= 0 {
		next()
		return
	}
	g.next = next
	g.m.timers.start(&g.timer, g.m.now+d)
}

// finish ends the change under way.
func (g *gpu) finish() {
	o := g.op
	g.reschedule()
	if o.kind == opTurn {
		// The next quantum is counted from here.
		g.m.timers.stop(&g.turn)
	}
	g.armTurn()
	g.op = nil
	g.m.notify(o.done)
	g.begin()
}

// mark applies the change to q.
func (o *op) mark(q *queue) {
	if q.dead {
		return
	}
	switch o.kind {
	case opSuspend:
		q.suspended = true
	case opResume:
		q.suspended = false
	case opTurn:
	}
}

// choose returns the set of queues to map, from first on around the runlist, and
// records whether that is all of them.
func (g *gpu) choose() []*queue {
	var set []*queue
	g.crowded = false
	fit := g.fit()
	for q := range g.around() {
		if q.suspended {
			continue
		}
		if !fit.take(q) {
			g.crowded, g.second = true, q.rank()
			break
		}
		set = append(set, q)
	}
	return set
}

// around walks the runlist once, from first on.
func (g *gpu) around() func(yield func(*queue) bool) {
	start := slices.IndexFunc(g.queues, func(q *queue) bool { return !q.rank().before(g.first) })
	start = max(start, 0)
	return func(yield func(*queue) bool) {
		for i := range g.queues {
			if !yield(g.queues[(start+i)%len(g.queues)]) {
				return
			}
		}
	}
}

// fitting counts the slots and VMIDs that a set of mapped queues uses.
type fitting struct {
	slots, vmids int
	procs        []*process
}

func (g *gpu) fit() fitting { return fitting{slots: g.m.spec.Slots, vmids: g.m.spec.VMIDs} }

// take adds q if it fits. Copy queues have slots of their own.
func (f *fitting) take(q *queue) bool {
	compute := q.pool == &q.gpu.compute
	known := slices.Contains(f.procs, q.proc)
	if compute && f.slots == 0 || !known && len(f.procs) == f.vmids {
		return false
	}
	if compute {
		f.slots--
	}
	if !known {
		f.procs = append(f.procs, q.proc)
	}
	return true
}

// armTurn sets the time of the next turn, if sets take turns and any queue has work.
func (g *gpu) armTurn() {
	switch {
	case !g.crowded:
		g.m.timers.stop(&g.turn)
	case !g.turn.set() && g.hasWork():
		g.m.timers.start(&g.turn, g.m.now+g.m.spec.Quantum)
	}
}

// takeTurn is the end of a quantum.
func (g *gpu) takeTurn() {
	if g.crowded && g.hasWork() && !slices.ContainsFunc(g.ops, func(o *op) bool { return o.kind == opTurn }) {
		g.enqueue(&op{kind: opTurn})
	}
}

func (g *gpu) hasWork() bool {
	return slices.ContainsFunc(g.queues, func(q *queue) bool { return !q.suspended && q.read < q.write })
}

// restore maps q: packets in flight continue.
func (g *gpu) restore(q *queue) {
	if q.dead || q.suspended || q.mapped {
		return
	}
	g.injectLoss(q)
	if q.slot == nil {
		g.seat(q)
	}
	q.mapped = true
	for _, k := range q.inflight {
		q.pool.add(k)
	}
	q.dispatch()
}
