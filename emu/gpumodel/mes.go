package gpumodel

import "slices"

// MES: the firmware removes and adds queue by queue, and the others run on.

// beginMES starts with the first queue of the change.
func (g *gpu) beginMES() {
	switch g.op.kind {
	case opSuspend:
		g.removeNext()
	case opResume:
		g.addNext()
	case opTurn:
		g.switchSets()
	}
}

// removeNext takes the next queue off.
func (g *gpu) removeNext() {
	o := g.op
	for ; o.at < len(o.queues); o.at++ {
		q := o.queues[o.at]
		// Suspending what is suspended asks nothing of the firmware.
		if q.dead || q.suspended {
			continue
		}
		saved := int64(0)
		if q.mapped {
			saved = q.demand()
		}
		q.unmap()
		o.mark(q)
		g.cycles++
		g.reschedule()
		cost := g.m.cost(g.m.spec.Costs.RemoveQueue) + g.m.share(g.m.spec.Costs.Save, saved)
		g.after(cost, phaseRemove)
		return
	}
	g.fill()
	g.finish()
}

// removed goes on to the next queue.
func (g *gpu) removed() {
	g.op.at++
	g.removeNext()
}

// addNext puts the next queue on.
func (g *gpu) addNext() {
	o := g.op
	for ; o.at < len(o.queues); o.at++ {
		q := o.queues[o.at]
		if q.dead || q.mapped {
			continue
		}
		g.cycles++
		g.after(g.m.cost(g.m.spec.Costs.AddQueue)+g.m.share(g.m.spec.Costs.Restore, q.demand()), phaseAdd)
		return
	}
	g.fill()
	g.finish()
}

// added goes on to the next queue.
func (g *gpu) added() {
	o := g.op
	o.mark(o.queues[o.at])
	g.fill()
	o.at++
	g.addNext()
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
				g.crowded, g.next = true, q.rank()
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
	g.first = g.next
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
	g.after(cost+g.m.share(g.m.spec.Costs.Restore, state), phaseSwitch)
}

// switched puts on those whose turn it is.
func (g *gpu) switched() {
	for _, q := range g.op.set {
		g.restore(q)
	}
	g.fill()
	g.finish()
}
