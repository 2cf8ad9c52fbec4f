package sim

import (
	"errors"
	"slices"
	"sort"
	"time"

	"github.com/gpreempt/gpreempt/lab/scenario"
)

// oracle knows all arrivals. It suspends each process so that its GPUs are quiet when kernels
// are ready, and resumes it where the gap is longer than a resume and a suspend.
type oracle struct {
	unwilling
	engine  *engine
	readies [][]time.Duration // by GPU: when kernels are ready, in order
	wanted  []int             // claims that asked, by GPU
	waiting []*claim
	state   map[*process]*foreseen
}

// foreseen is what the oracle does with a process.
type foreseen struct {
	suspended, moving bool
	timer             event
}

func newOracle(e *engine) (*oracle, error) {
	o := &oracle{engine: e, readies: make([][]time.Duration, len(e.gpus)), wanted: make([]int, len(e.gpus)), state: map[*process]*foreseen{}}
	for _, s := range e.services {
		if s.Arrivals.Kind == scenario.Closed {
			return nil, errors.New("the oracle knows all arrivals beforehand: closed arrivals depend on the answers; use another scheme")
		}
		for _, a := range s.arrivals {
			for _, g := range s.gpus {
				o.readies[g.index] = append(o.readies[g.index], a.At+s.Prepare)
			}
		}
	}
	for _, times := range o.readies {
		slices.Sort(times)
	}
	for _, p := range e.procs {
		f := &foreseen{}
		f.timer.do = func() { o.look(p) }
		p.moved = func(resume bool, _ uint64, _ time.Duration) {
			f.moving, f.suspended = false, !resume
			o.grant()
			o.look(p)
		}
		o.state[p] = f
	}
	return o, nil
}

func (o *oracle) start() {
	for _, p := range o.engine.procs {
		o.look(p)
	}
}

// cost is how long a suspend or resume of the process takes when all processes of its GPUs move
// at once.
func (o *oracle) cost(p *process, fixed time.Duration) time.Duration {
	c := o.engine.o.Costs
	others := 0
	for _, q := range o.engine.procs {
		if q != p && slices.ContainsFunc(q.gpus, func(g *gpu) bool { return slices.Contains(p.gpus, g) }) {
			others++
		}
	}
	return fixed + time.Duration(p.queues)*c.PerQueue + time.Duration(len(p.gpus)-1+others)*c.Disturb
}

// look moves the process if it is time, and sets when to look again.
func (o *oracle) look(p *process) {
	e, f := o.engine, o.state[p]
	if f.moving {
		return // looks again at the end
	}
	busy, next := o.wants(p)
	suspend := o.cost(p, e.o.Costs.Suspend)
	due := next - suspend
	switch {
	case !f.suspended && (busy || due <= e.now):
		o.move(p, false)
	case f.suspended && !busy && due > e.now+o.cost(p, e.o.Costs.Resume):
		o.move(p, true)
	case !f.suspended && next < never:
		e.events.set(&f.timer, due)
	}
}

// never is later than any run.
const never = maxAhead

// wants returns whether online work has or waits for a GPU of the process, and when kernels are
// ready next.
func (o *oracle) wants(p *process) (busy bool, next time.Duration) {
	next = never
	for _, g := range p.gpus {
		busy = busy || o.wanted[g.index] > 0
		times := o.readies[g.index]
		if i := sort.Search(len(times), func(i int) bool { return times[i] >= o.engine.now }); i < len(times) {
			next = min(next, times[i])
		}
	}
	return busy, next
}

func (o *oracle) move(p *process, resume bool) {
	f := o.state[p]
	o.engine.events.clear(&f.timer)
	f.moving = true
	p.move(resume, 0)
}

func (o *oracle) ready(c *claim) {
	for _, g := range c.gpus {
		o.wanted[g.index]++
	}
	o.waiting = append(o.waiting, c)
	o.lookAt(c.gpus)
	o.grant()
}

func (o *oracle) lookAt(gpus []*gpu) {
	for _, p := range o.engine.procs {
		if slices.ContainsFunc(p.gpus, func(g *gpu) bool { return slices.Contains(gpus, g) }) {
			o.look(p)
		}
	}
}

// grant lets those begin whose GPUs are quiet.
func (o *oracle) grant() {
	for _, c := range slices.Clone(o.waiting) {
		if slices.ContainsFunc(o.engine.procs, func(p *process) bool {
			f := o.state[p]
			return (f.moving || !f.suspended) && slices.ContainsFunc(p.gpus, func(g *gpu) bool { return slices.Contains(c.gpus, g) })
		}) {
			continue
		}
		i := slices.Index(o.waiting, c)
		o.waiting = slices.Delete(o.waiting, i, i+1)
		c.grant()
	}
}

func (o *oracle) released(c *claim) {
	for _, g := range c.gpus {
		o.wanted[g.index]--
	}
	o.lookAt(c.gpus)
}
