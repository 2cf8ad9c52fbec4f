package gpumodel

import (
	"slices"
	"time"
)

// HWS: the firmware unmaps the whole runlist and maps the new one.

// beginHWS unmaps every queue of the GPU, after the grace period of the change.
func (g *gpu) beginHWS() {
	if g.op.grace > 0 && len(g.compute.running) > 0 {
		g.draining = true
		g.after(g.op.grace, g.unload)
		return
	}
	g.unload()
}

// drained ends the grace period when no kernel runs any more.
func (g *gpu) drained() {
	if g.draining && len(g.compute.running) == 0 {
		g.m.timers.start(&g.timer, g.m.now)
	}
}

// unload unmaps every queue of the GPU.
func (g *gpu) unload() {
	g.draining = false
	o := g.op
	resident := g.compute.demand
	for _, q := range g.queues {
		o.loaded = o.loaded || q.mapped
	}
	g.compute.clear()
	g.copies.clear()
	for _, q := range g.queues {
		if q.mapped {
			q.mapped = false
			g.freeSlot(q)
		}
	}
	var cost time.Duration
	if o.loaded {
		cost = g.m.cost(g.m.spec.Costs.Unmap) + g.m.share(g.m.spec.Costs.Save, resident)
	}
	g.after(cost, g.unmapped)
}

// unmapped applies the change and maps the queues that are to run.
func (g *gpu) unmapped() {
	o := g.op
	for _, q := range o.queues {
		o.mark(q)
	}
	if o.kind == opTurn {
		g.first = g.second
	} else {
		g.m.moves++
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
		g.remapped()
		return
	}
	g.half = false
	g.after(g.m.cost(g.m.spec.Costs.Map)+g.m.share(g.m.spec.Costs.Restore, saved), g.remapped)
}

// remapped starts the mapped queues. The firmware walks the runlist from its beginning,
// where the newest queues are, and assigns each the next free slot.
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
