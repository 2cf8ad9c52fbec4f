package sim

import (
	"errors"
	"time"
)

// batcher serves an LLM with continuous batching: a step is the prefill of the request that
// waits longest, as long as there is room in the batch, or else a decode step of the whole batch.
//
// It holds one lease from the arrival of a request, when it has no other, until it has none left:
// the daemon hears nothing of single requests and steps.
type batcher struct {
	*service
	claim   *claim
	batch   []*request
	prefill *request // in the step in progress
	// byStep: each step is a claim of its own, under Sequential.
	byStep bool
	// idle: the claim is granted, and no step is in progress.
	idle bool
}

func newBatcher(s *service) (*batcher, error) {
	l := s.LLM
	if l.MaxBatch < 1 || l.DecodeBase+l.DecodeSequence <= 0 || l.PrefillBase+l.PrefillToken <= 0 {
		return nil, errors.New("llm: want max_batch of at least 1, and times above 0 for a decode step and a prefill")
	}
	return &batcher{service: s, byStep: s.engine.scheme.Kind == Sequential}, nil
}

func (b *batcher) arrive(r *request) {
	if r.prompt == 0 {
		r.prompt = b.LLM.PromptTokens
	}
	if r.output == 0 {
		r.output = max(1, b.LLM.OutputTokens)
	}
	b.queue = append(b.queue, r)
	b.engine.after(b.Prepare, func() { r.ready = true; b.wake() })
	if b.claim == nil {
		b.announce()
	}
	r.claim = b.claim
	b.claim.requests = append(b.claim.requests, r)
}

// announce makes the claim and announces it.
func (b *batcher) announce() {
	b.claim = b.newClaim()
	b.claim.onGrant = b.step
	b.engine.way.announced(b.claim)
}

// wake begins a step, or asks for the GPU first, when there is work and nothing has yet.
func (b *batcher) wake() {
	switch {
	case b.claim == nil || !b.work():
	case b.idle:
		b.idle = false
		b.step()
	case !b.claim.asked:
		b.claim.ask()
	}
}

func (b *batcher) work() bool { return len(b.batch) > 0 || len(b.queue) > 0 && b.queue[0].ready }

// step begins the next step.
func (b *batcher) step() {
	l := b.LLM
	switch {
	case len(b.queue) > 0 && b.queue[0].ready && len(b.batch) < l.MaxBatch:
		r := b.queue[0]
		b.queue = b.queue[1:]
		b.prefill = r
		r.began = b.engine.now
		b.occupy(float64(l.PrefillBase)+float64(l.PrefillToken)*float64(r.prompt), func() {
			b.prefill = nil
			r.first = b.engine.now
			b.batch = append(b.batch, r)
			b.stepped(r)
		})
	case len(b.batch) > 0:
		b.occupy(float64(l.DecodeBase)+float64(l.DecodeSequence)*float64(len(b.batch)), func() { b.stepped(b.batch...) })
	}
}

// stepped adds a token to each of the requests and goes on.
func (b *batcher) stepped(with ...*request) {
	for _, r := range with {
		if r.tokens++; r.tokens == r.output {
			b.result(r)
		}
	}
	kept := b.batch[:0]
	for _, r := range b.batch {
		if r.tokens < r.output {
			kept = append(kept, r)
		}
	}
	clear(b.batch[len(kept):])
	b.batch = kept
	switch {
	case len(b.batch) == 0 && len(b.queue) == 0:
		c := b.claim
		b.claim = nil
		b.engine.way.released(c)
	case b.byStep:
		b.engine.way.released(b.claim)
		b.announce()
		for _, r := range append(append([]*request(nil), b.batch...), b.queue...) {
			r.claim = b.claim
			b.claim.requests = append(b.claim.requests, r)
		}
		b.wake()
	case b.work():
		b.step()
	default:
		b.idle = true // a request has arrived that is not ready: the claim stays
	}
}

func (b *batcher) result(r *request) {
	out := &b.engine.out.Requests[r.index]
	out.TTFT = ms(r.first - r.at)
	if r.output > 1 {
		out.TPOT = ms((b.engine.now - r.first) / time.Duration(r.output-1))
	}
	b.finish(r)
	c := r.claim
	for i, o := range c.requests {
		if o == r {
			c.requests = append(c.requests[:i], c.requests[i+1:]...)
			break
		}
	}
}
