package sim

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// process is one process of an offline job.
type process struct {
	engine   *engine
	job      *scenario.Job
	key      gpreempt.ProcessKey
	gpus     []*gpu
	streams  []*stream
	queues   int
	arrivals []scenario.Arrival

	op operation
	// moved is the way's, and called at the end of an operation.
	moved func(resume bool, seq uint64, took time.Duration)
	// cause is what its last suspension was for, under GPreempt.
	cause cause
}

// firstPID is that of the first process: a number as a process may have it.
const firstPID = 1000

func (e *engine) addJob(j *scenario.Job, index int) error {
	gpus, err := e.gpuList(j.GPUs)
	if err != nil {
		return err
	}
	durations := j.Step.Durations(mix(e.o.Seed, 'j', uint64(index)))
	if len(durations) == 0 {
		return errors.New("its step has no kernel")
	}
	kernels := newKernels(durations)
	if kernels.total() <= 0 {
		return errors.New("its step takes no time")
	}
	if j.Priority < 0 || j.Priority > int(gpreempt.MaxPriority) {
		return errors.New("its priority is outside 0 to 15")
	}
	var arrivals []scenario.Arrival
	if j.Arrivals != nil {
		if j.Arrivals.Kind == scenario.Closed {
			return errors.New("steps cannot arrive by closed: leave out the arrivals for steps that follow each other")
		}
		arrivals = j.Arrivals.Times(mix(e.o.Seed, 'a', uint64(index)), e.scenario.Duration)
	}
	for range max(1, j.Processes) {
		p := &process{engine: e, job: j, gpus: gpus, arrivals: arrivals}
		p.op.process, p.op.timer.do = p, p.op.due
		p.key = gpreempt.ProcessKey{PID: int32(firstPID + len(e.procs)), Start: 1}
		for _, g := range gpus {
			for range max(1, j.Queues) {
				s := &stream{gpu: g, occupancy: occupancy(j.Step), kernels: kernels, process: p, allowed: true, drainAt: math.Inf(1), stepEnd: math.Inf(1)}
				s.endless = j.Arrivals == nil
				s.stepped = e.scheme.Kind == Sequential
				if s.endless && !s.stepped {
					// Queues do not run in step.
					s.begin = math.Floor(fraction(mix(e.o.Seed, uint64(p.key.PID), uint64(p.queues))) * kernels.total())
					s.pos = s.begin
				}
				p.streams = append(p.streams, s)
				p.queues++
			}
		}
		e.procs = append(e.procs, p)
	}
	return nil
}

func occupancy(w scenario.Work) float64 {
	if w.Occupancy == 0 {
		return 1
	}
	return w.Occupancy
}

// mix returns a number that depends on all of its arguments (splitmix64).
func mix(values ...uint64) uint64 {
	var x uint64
	for _, v := range values {
		x += v + 0x9e3779b97f4a7c15
		x ^= x >> 30
		x *= 0xbf58476d1ce4e5b9
		x ^= x >> 27
		x *= 0x94d049bb133111eb
		x ^= x >> 31
	}
	return x
}

// fraction returns a number from 0 to below 1.
func fraction(x uint64) float64 { return float64(x>>11) / (1 << 53) }

func (p *process) start() {
	for _, s := range p.streams {
		switch {
		case s.stepped && s.endless:
			s.wantStep()
		case s.endless:
			s.resume()
		}
	}
	p.arrive(0)
}

// arrive has the steps arrive, from the nth on.
func (p *process) arrive(n int) {
	if n >= len(p.arrivals) {
		return
	}
	p.engine.at(p.arrivals[n].At, func() {
		for _, s := range p.streams {
			if s.pending++; s.pending == 1 {
				s.wantStep()
			}
		}
		p.arrive(n + 1)
	})
}

// wantStep begins the next step, or asks for leave to.
func (s *stream) wantStep() {
	s.stepEnd = s.pos + s.kernels.total()
	if s.stepped {
		s.allowed = false
		s.gpu.engine.way.stepEnded(s)
		return
	}
	s.resume()
}

// wants reports whether the stream has work.
func (s *stream) wants() bool { return s.endless || s.pending > 0 }

// resume starts the stream when it has work and may run.
func (s *stream) resume() {
	if s.allowed && s.wants() {
		s.run()
	}
}

// allow permits the stream to run from now on.
func (s *stream) allow() {
	s.gpu.engine.touch(s.gpu)
	s.allowed, s.drainAt = true, math.Inf(1)
	s.resume()
}

// forbid stops the stream at once, in the middle of a kernel, which continues later.
func (s *stream) forbid() {
	s.allowed, s.drainAt = false, math.Inf(1)
	s.halt()
}

// drain stops the stream after n kernels, the one in progress included. It reports whether the
// stream has stopped already; otherwise the way's stopped is called.
func (s *stream) drain(n int) bool {
	s.gpu.engine.touch(s.gpu)
	if !s.running {
		s.allowed = false
		return true
	}
	s.drainAt = s.kernels.drain(s.pos, n)
	if s.drainAt <= s.pos+fluidError {
		s.forbid()
		return true
	}
	return false
}

// kill stops the stream at once. The kernel in progress begins anew later; kill reports whether
// there was one.
func (s *stream) kill() bool {
	s.gpu.engine.touch(s.gpu)
	was := s.running
	s.forbid()
	if !was {
		return false
	}
	_, _, begin := s.kernels.at(s.pos)
	begin = max(begin, s.begin)
	lost := s.pos > begin+fluidError
	s.pos = begin
	return lost
}

// atEnd handles a stream that is at the end of its step, of its last kernel in flight, or of both.
func (s *stream) atEnd() {
	s.gpu.engine.touch(s.gpu)
	if s.pos >= s.stepEnd-fluidError {
		s.pos = s.stepEnd
		if !s.endless {
			s.pending--
		}
		s.stepEnd = math.Inf(1)
		switch {
		case s.stepped:
			s.halt()
			s.gpu.engine.way.stepEnded(s)
		case s.wants():
			s.stepEnd = s.pos + s.kernels.total()
		default:
			s.halt()
			if !math.IsInf(s.drainAt, 1) {
				s.drainAt = s.pos
			}
		}
	}
	if s.pos >= s.drainAt-fluidError {
		s.forbid()
		s.gpu.engine.way.stopped(s)
	}
}

// operation is the suspend or resume of a process in progress. As the driver does, it goes from
// GPU to GPU, and each GPU's runlist is changed by one operation after the other.
type operation struct {
	process *process
	resume  bool
	seq     uint64
	began   time.Duration
	next    int // of the process's GPUs
	// cycling: the cycle of that GPU is in progress.
	cycling bool
	timer   event
}

// move suspends or resumes a process, which has no operation in progress, and calls moved at the
// end, with seq.
func (p *process) move(resume bool, seq uint64) {
	e := p.engine
	c := e.o.Costs
	op := &p.op
	op.resume, op.seq, op.began, op.next = resume, seq, e.now, 0
	fixed := c.Suspend
	if resume {
		fixed = c.Resume
	}
	for _, g := range p.gpus {
		g.moving(1)
	}
	e.events.set(&op.timer, e.now+fixed-c.Disturb+time.Duration(p.queues)*c.PerQueue)
}

func (op *operation) due() {
	if !op.cycling {
		op.step()
		return
	}
	g := op.process.gpus[op.next]
	op.cycling = false
	g.engine.touch(g)
	g.cycles--
	op.apply(g)
}

// step begins the cycle on the next GPU, or ends the operation.
func (op *operation) step() {
	p := op.process
	if op.next == len(p.gpus) {
		e := p.engine
		took := e.now - op.began
		timed := evidence.Timed{At: ms(op.began), MS: ms(took)}
		if op.resume {
			e.out.Resumes = append(e.out.Resumes, timed)
		} else {
			e.out.Suspends = append(e.out.Suspends, timed)
		}
		p.moved(op.resume, op.seq, took)
		return
	}
	g := p.gpus[op.next]
	if g.lock = append(g.lock, op); len(g.lock) == 1 {
		op.cycle(g)
	}
}

func (op *operation) cycle(g *gpu) {
	e := g.engine
	if e.o.Costs.Disturb == 0 {
		op.apply(g)
		return
	}
	e.touch(g)
	g.cycles++
	op.cycling = true
	e.events.set(&op.timer, e.now+e.o.Costs.Disturb)
}

// stopAll has nothing run on the GPU for a time, and calls done then.
func (g *gpu) stopAll(d time.Duration, done func()) {
	e := g.engine
	e.touch(g)
	g.cycles++
	e.after(d, func() {
		e.touch(g)
		g.cycles--
		done()
	})
}

// apply ends the cycle on a GPU.
func (op *operation) apply(g *gpu) {
	for _, s := range op.process.streams {
		switch {
		case s.gpu != g:
		case op.resume:
			s.suspended = false
			s.allow()
		default:
			s.suspended = true
			s.forbid()
		}
	}
	g.remap()
	g.moving(-1)
	if g.lock = slices.Delete(g.lock, 0, 1); len(g.lock) > 0 {
		g.lock[0].cycle(g)
	}
	op.next++
	op.step()
}
