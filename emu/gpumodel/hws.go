package gpumodel

import (
	"slices"
	"time"
)

// HWS: the firmware takes the whole runlist off the GPU and puts the new one on.

// beginHWS unmaps every queue of the GPU.
func (g *gpu) beginHWS() {
	o := g.op
	resident := g.compute.demand
	for _, q := range g.queues {
		o.loaded = o.loaded || q.mapped
	}
	g.blame()
	g.compute.clear()
	g.copies.clear()
	for _, q := range g.queues {
		if q.mapped {
			q.mapped = false
			g.unseat(q)
		}
	}
	g.note()
	var cost time.Duration
	if o.loaded {
		cost = g.m.cost(g.m.spec.Costs.Unmap) + g.m.share(g.m.spec.Costs.Save, resident)
	}
	g.after(cost, phaseUnmap)
}

// blame counts the cycle against everybody whose work it interrupts for somebody
// else's sake.
func (g *gpu) blame() {
	o := g.op
	if n := len(g.queues); n > 0 && o.kind == opTurn && g.queues[0].proc == g.queues[n-1].proc {
		// A process that takes turns with itself.
		return
	}
	var last *process
	for _, q := range g.queues {
		p := q.proc
		// The runlist is in order of processes, so each is counted once.
		if p == o.proc || p == last || !q.mapped || q.read == q.write {
			continue
		}
		p.counters.CollateralCycles++
		last = p
	}
}

// unmapped makes the change and maps what is to run.
func (g *gpu) unmapped() {
	o := g.op
	for _, q := range o.queues {
		o.mark(q)
	}
	if o.kind == opTurn {
		g.first = g.next
	} else {
		g.makeRunlist()
	}
	o.set = g.choose()
	var saved int64
	for _, q := range o.set {
		saved += q.demand()
	}
	if !g.half && (o.loaded || len(o.set) > 0) {
		g.cycles++
	}
	if len(o.set) == 0 {
		g.half = g.half || o.loaded
		g.after(0, phaseMap)
		return
	}
	g.half = false
	g.after(g.m.cost(g.m.spec.Costs.Map)+g.m.share(g.m.spec.Costs.Restore, saved), phaseMap)
}

// remapped lets the mapped queues run. The firmware goes through the runlist from its
// beginning, which is where the newest are, and returns each the next slot.
func (g *gpu) remapped() {
	for _, q := range slices.Backward(g.op.set) {
		if !q.dead && !q.suspended {
			g.seat(q)
		}
	}
	for _, q := range g.op.set {
		g.restore(q)
	}
	g.finish()
}
