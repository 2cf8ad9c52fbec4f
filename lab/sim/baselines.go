package sim

import (
	"slices"
	"time"
)

// drain implements BlockWait and Throttle: offline queues stop launching kernels while online
// work needs the GPU.
type drain struct {
	unwilling
	engine *engine
	// inFlight kernels of each queue still run. wait: online work begins after them.
	inFlight int
	wait     bool
	wanted   []int // claims, by GPU
	draining []int // streams with kernels in flight, by GPU
	waiting  []*claim
}

func newDrain(e *engine, inFlight int, wait bool) *drain {
	return &drain{engine: e, inFlight: inFlight, wait: wait, wanted: make([]int, len(e.gpus)), draining: make([]int, len(e.gpus))}
}

func (d *drain) ready(c *claim) {
	for _, g := range c.gpus {
		if d.wanted[g.index]++; d.wanted[g.index] > 1 {
			continue
		}
		d.engine.eachOffline(g, func(s *stream) {
			if !s.drain(d.inFlight) {
				d.draining[g.index]++
			}
		})
	}
	d.waiting = append(d.waiting, c)
	d.grant()
}

func (d *drain) grant() {
	for _, c := range slices.Clone(d.waiting) {
		if d.wait && slices.ContainsFunc(c.gpus, func(g *gpu) bool { return d.draining[g.index] > 0 }) {
			continue
		}
		i := slices.Index(d.waiting, c)
		d.waiting = slices.Delete(d.waiting, i, i+1)
		c.grant()
	}
}

func (d *drain) stopped(s *stream) {
	d.draining[s.gpu.index]--
	d.grant()
}

func (d *drain) released(c *claim) {
	for _, g := range c.gpus {
		if d.wanted[g.index]--; d.wanted[g.index] == 0 {
			d.draining[g.index] = 0
			d.engine.eachOffline(g, (*stream).allow)
		}
	}
}

func (e *engine) eachOffline(g *gpu, do func(*stream)) {
	for _, p := range e.procs {
		for _, s := range p.streams {
			if s.gpu == g {
				do(s)
			}
		}
	}
}

// reset is REEF's: kernels in flight are killed.
type reset struct {
	unwilling
	engine *engine
	wanted []int           // claims, by GPU
	freeAt []time.Duration // by GPU
}

func newReset(e *engine) *reset {
	return &reset{engine: e, wanted: make([]int, len(e.gpus)), freeAt: make([]time.Duration, len(e.gpus))}
}

func (r *reset) ready(c *claim) {
	e := r.engine
	begin := e.now
	for _, g := range c.gpus {
		if r.wanted[g.index]++; r.wanted[g.index] == 1 {
			busy := false
			e.eachOffline(g, func(s *stream) {
				busy = busy || s.running
				if s.kill() {
					e.out.Repeated++
				}
			})
			if busy {
				r.freeAt[g.index] = e.now + e.o.Costs.Reset
			}
		}
		begin = max(begin, r.freeAt[g.index])
	}
	e.at(begin, c.grant)
}

func (r *reset) released(c *claim) {
	for _, g := range c.gpus {
		if r.wanted[g.index]--; r.wanted[g.index] == 0 {
			r.engine.eachOffline(g, (*stream).allow)
		}
	}
}

// ticket is a place in the lines of a Sequential.
type ticket struct {
	claim  *claim  // of online work, or
	stream *stream // of a step of offline work
	gpus   []*gpu
}

// sequence is Sequential: a line at each GPU.
type sequence struct {
	unwilling
	engine  *engine
	lines   [][]*ticket // by GPU
	tickets map[*claim]*ticket
	steps   map[*stream]*ticket
}

func newSequence(e *engine) *sequence {
	return &sequence{engine: e, lines: make([][]*ticket, len(e.gpus)), tickets: map[*claim]*ticket{}, steps: map[*stream]*ticket{}}
}

func (q *sequence) join(t *ticket) {
	for _, g := range t.gpus {
		q.lines[g.index] = append(q.lines[g.index], t)
	}
	q.serve(t)
}

// serve begins the work of a ticket that is the first at all of its GPUs.
func (q *sequence) serve(t *ticket) {
	for _, g := range t.gpus {
		if q.lines[g.index][0] != t {
			return
		}
	}
	if t.claim != nil {
		t.claim.grant()
	} else {
		t.stream.allow()
	}
}

// leave ends the work of a ticket.
func (q *sequence) leave(t *ticket) {
	for _, g := range t.gpus {
		q.lines[g.index] = q.lines[g.index][1:]
	}
	for _, g := range t.gpus {
		if line := q.lines[g.index]; len(line) > 0 {
			q.serve(line[0])
		}
	}
}

func (q *sequence) ready(c *claim) {
	t := &ticket{claim: c, gpus: c.gpus}
	q.tickets[c] = t
	q.join(t)
}

func (q *sequence) released(c *claim) {
	t := q.tickets[c]
	delete(q.tickets, c)
	q.leave(t)
}

func (q *sequence) stepEnded(s *stream) {
	before := q.steps[s]
	delete(q.steps, s)
	s.allowed = false
	if s.wants() {
		s.stepEnd = s.pos + s.kernels.total()
		t := &ticket{stream: s, gpus: []*gpu{s.gpu}}
		q.steps[s] = t
		for _, g := range t.gpus {
			q.lines[g.index] = append(q.lines[g.index], t)
		}
		defer q.serve(t)
	}
	if before != nil {
		q.leave(before)
	}
}

// slicer is TimeSlice: a turn for online work and a turn for offline work.
type slicer struct {
	unwilling
	engine  *engine
	quantum time.Duration
	gpus    []sliced
}

// sliced is the state of a GPU.
type sliced struct {
	claims int  // that want it
	turn   turn // whose it is
	since  time.Duration
	// switching: the turn changes; timer ends it.
	switching bool
	timer     *event
}

func newSlicer(e *engine, quantum time.Duration) *slicer {
	s := &slicer{engine: e, quantum: quantum, gpus: make([]sliced, len(e.gpus))}
	for i := range s.gpus {
		s.gpus[i] = sliced{turn: offlineTurn, timer: &event{}}
		s.gpus[i].timer.do = func() { s.turn(e.gpus[i]) }
		e.gpus[i].mute = onlineTurn
	}
	return s
}

func (s *slicer) ready(c *claim) {
	for _, g := range c.gpus {
		st := &s.gpus[g.index]
		if st.claims++; st.claims == 1 && st.turn == offlineTurn && !st.switching {
			end := st.since + s.quantum
			if !s.offlineWants(g) {
				end = s.engine.now
			}
			s.engine.events.set(st.timer, max(s.engine.now, end))
		}
	}
	c.grant()
}

func (s *slicer) released(c *claim) {
	for _, g := range c.gpus {
		st := &s.gpus[g.index]
		if st.claims--; st.claims == 0 && st.turn == onlineTurn && !st.switching {
			s.turn(g)
		}
	}
}

func (s *slicer) offlineWants(g *gpu) (wants bool) {
	s.engine.eachOffline(g, func(st *stream) { wants = wants || st.wants() })
	return wants
}

// turn assigns the GPU to the other class if that has work, or leaves it for another quantum.
func (s *slicer) turn(g *gpu) {
	e, st := s.engine, &s.gpus[g.index]
	e.events.clear(st.timer)
	if e.reach(g); st.switching {
		return // what ended with the turn was the last of it
	}
	to, want := onlineTurn, st.claims > 0
	if st.turn == onlineTurn {
		to, want = offlineTurn, st.claims == 0 || s.offlineWants(g)
	}
	if !want {
		st.since = e.now
		if st.claims > 0 {
			e.events.set(st.timer, e.now+s.quantum)
		}
		return
	}
	st.switching = true
	g.stopAll(e.o.Costs.Disturb, func() {
		st.switching, st.turn, st.since = false, to, e.now
		g.mute = onlineTurn
		if to == onlineTurn {
			g.mute = offlineTurn
		}
		switch {
		case st.claims > 0:
			e.events.set(st.timer, e.now+s.quantum)
		case to == onlineTurn:
			s.turn(g) // nobody wants it any more
		}
	})
}
