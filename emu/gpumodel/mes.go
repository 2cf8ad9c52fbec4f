package gpumodel

import "slices"

// MES: the firmware removes and adds queue by queue, and the others run on.

// beginMES starts with the first queue of the change.
func (g *gpu) beginMES() {
	if g.op.kind == opTurn {
		g.switchSets()
	} else {
		g.changeNext()
	}
}

// changeNext takes the next queue of the change off, or puts it on.
func (g *gpu) changeNext() {
	o := g.op
	next := func() { o.at++; g.changeNext() }
	for ; o.at < len(o.queues); o.at++ {
		q := o.queues[o.at]
		switch {
		case q.dead:
		case o.kind == opSuspend && !q.suspended: // else it asks nothing of the firmware
			saved := int64(0)
			if q.mapped {
				saved = q.demand()
			}
			q.unmap()
			o.mark(q)
			g.cycles++
			g.reschedule()
			g.after(g.m.cost(g.m.spec.Costs.RemoveQueue)+g.m.share(g.m.spec.Costs.Save, saved), next)
			return
		case o.kind == opResume && !q.mapped:
			g.cycles++
			g.after(g.m.cost(g.m.spec.Costs.AddQueue)+g.m.share(g.m.spec.Costs.Restore, q.demand()), func() {
				o.mark(q)
				g.fill()
				next()
			})
			return
		}
	}
	g.fill()
	g.finish()
}

// fill maps what waits for a slot, as long as there are any.
func (g *gpu) fill() {
	fit := g.fit()
	for _, q := range g.queues {
		if q.mapped {
			fit.take(q)
		}
	}
	g.crowded = false
	for q := range g.around() {
		switch {
		case q.mapped || q.suspended:
		case !fit.take(q):
			if !g.crowded {
				g.crowded, g.second = true, q.rank()
			}
		default:
			g.restore(q)
		}
	}
	g.reschedule()
}

// switchSets takes off the queues whose turn is over.
func (g *gpu) switchSets() {
	o := g.op
	g.first = g.second
	o.set = g.choose()
	var state int64
	for _, q := range g.queues {
		if q.mapped && !slices.Contains(o.set, q) {
			state += q.demand()
			q.unmap()
			g.cycles++
		}
	}
	g.reschedule()
	cost := g.m.share(g.m.spec.Costs.Save, state)
	state = 0
	for _, q := range o.set {
		if !q.mapped {
			state += q.demand()
			g.cycles++
		}
	}
	g.after(cost+g.m.share(g.m.spec.Costs.Restore, state), g.switched)
}

// switched puts on those whose turn it is.
func (g *gpu) switched() {
	for _, q := range g.op.set {
		g.restore(q)
	}
	g.fill()
	g.finish()
}
