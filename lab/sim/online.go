package sim

import (
	"errors"
	"math"
	"slices"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// service is an online service.
type service struct {
	*scenario.Service
	engine   *engine
	index    int
	gpus     []*gpu
	streams  []*stream // one on each GPU
	left     int       // streams that run
	done     func()    // when all have ended
	arrivals []scenario.Arrival

	queue []*request // in order of arrival, without the one in service
	// outstanding requests have no result; late ones are not sent yet, with Options.Paced.
	outstanding, late int
	busy              *request // in service, without LLM
	llm               *batcher
}

func (e *engine) addService(cfg *scenario.Service, index int) error {
	gpus, err := e.gpuList(cfg.GPUs)
	if err != nil {
		return err
	}
	if cfg.Priority < 0 || cfg.Priority > int(gpreempt.MaxPriority) {
		return errors.New("its priority is outside 0 to 15")
	}
	s := &service{Service: cfg, engine: e, index: index, gpus: gpus}
	total := 0.0
	if cfg.LLM != nil {
		if s.llm, err = newBatcher(s); err != nil {
			return err
		}
	} else {
		for _, d := range cfg.Request.Durations(mix(e.o.Seed, 's', uint64(index))) {
			total += float64(d)
		}
		if total <= 0 {
			return errors.New("its request takes no time")
		}
	}
	for _, g := range gpus {
		st := &stream{gpu: g, isOnline: true, occupancy: occupancy(cfg.Request), drainAt: math.Inf(1), stepEnd: total}
		st.reached = s.streamEnded
		s.streams = append(s.streams, st)
	}
	if cfg.Arrivals.Kind != scenario.Closed {
		s.arrivals = cfg.Arrivals.Times(mix(e.o.Seed, 'o', uint64(index)), e.scenario.Duration)
		e.out.Requests = slices.Grow(e.out.Requests, len(s.arrivals))
	}
	e.services = append(e.services, s)
	return nil
}

func (s *service) start() {
	if a := s.Arrivals; a.Kind == scenario.Closed {
		for range max(1, a.Clients) {
			s.engine.at(0, func() { s.arrive(scenario.Arrival{}) })
		}
		return
	}
	s.next(0)
}

// next has the requests arrive, from the nth on.
func (s *service) next(n int) {
	if n >= len(s.arrivals) {
		return
	}
	s.engine.at(s.arrivals[n].At, func() {
		s.arrive(s.arrivals[n])
		s.next(n + 1)
	})
}

func (s *service) arrive(a scenario.Arrival) {
	e := s.engine
	if e.o.Paced && s.outstanding > 0 {
		s.late++
		return
	}
	s.outstanding++
	r := &request{service: s, index: len(e.out.Requests), at: e.now, prompt: a.Prompt, output: a.Output}
	e.out.Requests = append(e.out.Requests, evidence.Request{At: ms(e.now), Server: s.Name})
	e.live++
	if s.llm != nil {
		s.llm.arrive(r)
		return
	}
	c := s.newClaim()
	c.requests = append(c.requests, r)
	c.onGrant = func() { s.begin(r) }
	r.claim = c
	s.queue = append(s.queue, r)
	e.way.announced(c)
	e.after(s.Prepare, func() {
		r.ready = true
		s.serve()
	})
}

func (s *service) newClaim() *claim {
	return &claim{service: s, gpus: s.gpus, readyAt: s.engine.now + s.Prepare, answered: s.engine.now}
}

// serve asks for the GPUs for the next request, when it is ready and none is in service.
func (s *service) serve() {
	if s.busy != nil || len(s.queue) == 0 || !s.queue[0].ready {
		return
	}
	s.busy = s.queue[0]
	s.queue = s.queue[1:]
	s.busy.claim.ask()
}

func (c *claim) ask() {
	c.asked = true
	c.service.engine.way.ready(c)
}

func (s *service) begin(r *request) {
	r.began = s.engine.now
	s.occupy(s.streams[0].stepEnd, func() {
		s.busy = nil
		s.finish(r)
		s.engine.way.released(r.claim)
		s.serve()
	})
}

// occupy runs work on all GPUs of the service and calls done when all have done it.
func (s *service) occupy(work float64, done func()) {
	s.left, s.done = len(s.streams), done
	for _, st := range s.streams {
		st.pos, st.stepEnd = 0, work
		st.run()
	}
}

func (s *service) streamEnded() {
	if s.left--; s.left == 0 {
		s.done()
	}
}

// finish takes down the result of a request.
func (s *service) finish(r *request) {
	e := s.engine
	e.live--
	out := &e.out.Requests[r.index]
	answered := min(max(r.at, r.claim.answered), r.began)
	out.Total, out.Announce, out.Start, out.Service = ms(e.now-r.at), ms(answered-r.at), ms(r.began-answered), ms(e.now-r.began)
	out.Preemptions = r.preemptions
	s.outstanding--
	if s.late > 0 && e.now < e.scenario.Duration {
		s.late--
		e.after(0, func() { s.arrive(scenario.Arrival{}) })
	}
	if s.Arrivals.Kind == scenario.Closed && e.now+s.Arrivals.Think < e.scenario.Duration {
		e.after(s.Arrivals.Think, func() { s.arrive(scenario.Arrival{}) })
	}
}

// open returns the requests without a result.
func (s *service) open() []*request {
	open := slices.Clone(s.queue)
	if s.busy != nil {
		open = append(open, s.busy)
	}
	if s.llm != nil {
		open = append(open, s.llm.batch...)
		if s.llm.prefill != nil {
			open = append(open, s.llm.prefill)
		}
	}
	return open
}
