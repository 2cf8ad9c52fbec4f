package sim

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
)

// WorkUnit is the unit of the offline work of a run.
const WorkUnit = "GPU seconds"

// engine is one run.
type engine struct {
	scenario scenario.Scenario
	scheme   Scheme
	o        Options
	way      way

	now      time.Duration
	events   eventQueue
	gpus     []*gpu
	services []*service
	procs    []*process
	dirty    []*gpu

	// live is the number of requests that have arrived and have no result.
	live int
	over bool // the duration is over: offline work does not count any more
	out  evidence.Repeat
}

// way is a way of sharing the GPUs: it decides when online work begins and when offline work
// runs.
type way interface {
	// start is called once, before the first request.
	start()
	// announced: online work has arrived, which asks later.
	announced(*claim)
	// ready: the work could begin now. The way answers with claim.grant, at once or later.
	ready(*claim)
	// released: the work is done.
	released(*claim)
	// stopped: an offline stream that was to stop after some kernels has none in flight.
	stopped(*stream)
	// stepEnded: an offline stream that runs step by step ended one, and wants the next.
	stepEnded(*stream)
}

// unwilling is a way that never interferes; others build on it.
type unwilling struct{}

func (unwilling) start()            {}
func (unwilling) announced(*claim)  {}
func (unwilling) ready(c *claim)    { c.grant() }
func (unwilling) released(*claim)   {}
func (unwilling) stopped(*stream)   {}
func (unwilling) stepEnded(*stream) {}

// claim is the right of a service to use its GPUs: for one request, or for as long as an LLM
// has requests.
type claim struct {
	service *service
	gpus    []*gpu
	// readyAt is when its work on the CPU is over.
	readyAt time.Duration
	// asked, granted: it could begin, and it may.
	asked, granted bool
	onGrant        func()
	// answered is when the client had an answer from the daemon.
	answered time.Duration
	// requests are those in service under it.
	requests []*request
	// lease is that of GPreempt.
	lease *lease
}

func (c *claim) grant() {
	if !c.granted {
		c.granted = true
		c.onGrant()
	}
}

// request is one request in service.
type request struct {
	*service
	index  int // in the results
	at     time.Duration
	began  time.Duration
	claim  *claim
	prompt int
	output int
	// tokens it has, and when the first came.
	tokens int
	first  time.Duration
	// preemptions it has caused.
	preemptions int
	ready       bool
}

func newEngine(s scenario.Scenario, scheme Scheme, o Options) (*engine, error) {
	if err := errors.Join(scheme.check(), o.Costs.check(), o.Sharing.check(), o.checkSlots()); err != nil {
		return nil, err
	}
	if s.GPUs < 1 || s.GPUs > 64 || s.Duration <= 0 {
		return nil, fmt.Errorf("%d GPUs for %v: want 1 to 64 GPUs and a duration above 0", s.GPUs, s.Duration)
	}
	e := &engine{scenario: s, scheme: scheme, o: o}
	e.out.Seconds, e.out.WorkUnit = s.Duration.Seconds(), WorkUnit
	for i := range s.GPUs {
		g := &gpu{engine: e, index: i}
		g.due.do = func() { e.reach(g) }
		g.runlist.turn.do = g.takeTurn
		e.gpus = append(e.gpus, g)
	}
	if scheme.Kind != OnlineAlone {
		for i := range s.Offline {
			if err := e.addJob(&e.scenario.Offline[i], i); err != nil {
				return nil, fmt.Errorf("job %s: %w", s.Offline[i].Name, err)
			}
		}
	}
	if scheme.Kind != OfflineAlone {
		for i := range s.Online {
			if err := e.addService(&e.scenario.Online[i], i); err != nil {
				return nil, fmt.Errorf("service %s: %w", s.Online[i].Name, err)
			}
		}
	}
	for _, p := range e.procs {
		for _, s := range p.streams {
			s.gpu.runlist.queues = append(s.gpu.runlist.queues, s)
		}
	}
	for _, s := range e.services {
		for _, st := range s.streams {
			st.gpu.runlist.queues = append(st.gpu.runlist.queues, st)
		}
	}
	way, err := e.newWay()
	e.way = way
	return e, err
}

func (e *engine) newWay() (way, error) {
	switch e.scheme.Kind {
	case BlockWait, Throttle:
		return newDrain(e, max(1, e.scheme.InFlight), e.scheme.Kind == BlockWait), nil
	case Sequential:
		return newSequence(e), nil
	case TimeSlice:
		quantum := e.scheme.Quantum
		if quantum == 0 {
			quantum = DefaultQuantum
		}
		return newSlicer(e, quantum), nil
	case Reset:
		return newReset(e), nil
	case GPreempt:
		return newDaemon(e), nil
	case Oracle:
		return newOracle(e)
	default:
		return unwilling{}, nil
	}
}

func (e *engine) gpuList(indices []int) ([]*gpu, error) {
	if len(indices) == 0 {
		indices = []int{0}
	}
	var list []*gpu
	for _, i := range indices {
		if i < 0 || i >= len(e.gpus) {
			return nil, fmt.Errorf("GPU %d is not one of the %d", i, len(e.gpus))
		}
		list = append(list, e.gpus[i])
	}
	return list, nil
}

// at has do called at a time, and returns the event, which can be cleared until then.
func (e *engine) at(t time.Duration, do func()) *event {
	ev := &event{do: do}
	e.events.set(ev, max(t, e.now))
	return ev
}

func (e *engine) after(d time.Duration, do func()) *event { return e.at(e.now+d, do) }

func (e *engine) run() {
	for _, g := range e.gpus {
		e.touch(g)
		g.remap()
	}
	e.way.start()
	for _, s := range e.services {
		s.start()
	}
	for _, p := range e.procs {
		p.start()
	}
	e.at(e.scenario.Duration, func() {
		for _, g := range e.gpus {
			e.touch(g)
		}
		e.count()
	})
	e.settle()
	limit := 2*e.scenario.Duration + 10*time.Second
	for !e.over || e.live > 0 {
		ev := e.events.pop()
		if ev == nil || ev.at > limit {
			break
		}
		e.now = ev.at
		ev.do()
		e.settle()
	}
	e.unfinished()
	for _, g := range e.gpus {
		g.closeSpans()
	}
}

// settle computes the speeds of the GPUs that changed.
func (e *engine) settle() {
	for _, g := range e.dirty {
		g.dirty = false
		g.plan()
	}
	e.dirty = e.dirty[:0]
}

// touch accounts for the progress on a GPU before something changes on it, and has settle look
// at it.
func (e *engine) touch(g *gpu) {
	g.advance()
	if !g.dirty {
		g.dirty = true
		e.dirty = append(e.dirty, g)
	}
}

// count takes down the offline work at the end of the duration.
func (e *engine) count() {
	e.over = true
	if e.o.Slots > 0 {
		e.out.OnlineMapped = e.onlineMapped()
	}
	for _, p := range e.procs {
		for _, s := range p.streams {
			e.out.Work += (s.pos - s.begin) * s.occupancy / float64(time.Second)
			if e.out.Steps == nil {
				e.out.Steps = map[string]float64{}
			}
			e.out.Steps[p.job.Name] += (s.pos - s.begin) / s.kernels.total()
		}
	}
}

// unfinished marks the requests that have no result.
func (e *engine) unfinished() {
	for _, s := range e.services {
		for _, r := range s.open() {
			e.out.Requests[r.index].Failed = "not finished"
		}
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
