package targets

import (
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// order is a suspend or a resume that waits for Flush.
type order struct {
	target  gpreempt.ProcessKey
	batcher mechanism.Batcher
	command command
	without scheduler.Event // see Sessions.send
}

// order hands a command to the target's actor, at the next Flush if its mechanism can carry it
// out with others.
func (s *Sessions) order(target gpreempt.ProcessKey, c command, without scheduler.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.actors[target]; a != nil && a.batcher != nil {
		s.orders = append(s.orders, order{target, a.batcher, c, without})
		return
	}
	s.hand(target, c, without)
}

// Flush implements scheduler.Flusher: the orders of one kind to one mechanism become one batch.
func (s *Sessions) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flush()
}

// flush needs mu.
func (s *Sessions) flush() {
	type group struct {
		batcher mechanism.Batcher
		kind    kind
	}
	coming := map[group]int{}
	for _, o := range s.orders {
		if s.actors[o.target] != nil {
			coming[group{o.batcher, o.command.kind}]++
		}
	}
	batches := map[group]*batch{}
	for g, n := range coming {
		if n > 1 {
			batches[g] = &batch{s: s, batcher: g.batcher, kind: g.kind, coming: n, done: make(chan struct{})}
		}
	}
	for _, o := range s.orders {
		// Members arrive from the first one on: how many are still to come is not asked here.
		o.command.batch = batches[group{o.batcher, o.command.kind}]
		s.hand(o.target, o.command, o.without)
	}
	s.orders = nil
}

// batch is one call of a mechanism for several targets. Each of their actors joins it, or
// leaves it when it cannot use the mechanism any more. The last to come makes the call, while
// the others lend their sessions and wait.
type batch struct {
	s       *Sessions
	batcher mechanism.Batcher
	kind    kind
	done    chan struct{} // closed after the call

	mu     sync.Mutex // guards the rest until the last has come
	coming int
	joined []*member
}

// member is an actor in a batch.
type member struct {
	a   *actor
	seq uint64
	// err is the result, which took that long.
	err  error
	took time.Duration
}

// arrive takes in one that joins, or nil for one that leaves. It makes the call if that is the
// last.
func (b *batch) arrive(m *member) {
	b.mu.Lock()
	b.coming--
	if m != nil {
		b.joined = append(b.joined, m)
	}
	last := b.coming == 0
	b.mu.Unlock()
	if last {
		b.call()
		close(b.done)
	}
}

// call makes the call, and posts the results that are good: the answer to an announcement waits
// for them.
func (b *batch) call() {
	if len(b.joined) == 0 {
		return
	}
	sessions := make([]mechanism.Session, len(b.joined))
	for i, m := range b.joined {
		sessions[i] = m.a.held.session
	}
	do := b.batcher.ResumeAll
	if b.kind == suspend {
		do = b.batcher.SuspendAll
	}
	begin := b.s.cfg.Now()
	errs := make([]error, len(sessions))
	if broken := mechanism.Guard(func() error { copy(errs, do(b.s.ctx, sessions)); return nil }); broken != nil {
		for i := range errs {
			errs[i] = broken
		}
	}
	took := b.s.cfg.Now() - begin
	for i, m := range b.joined {
		m.err, m.took = errs[i], took
		if m.err == nil {
			m.a.post(b.kind, m.seq, nil, took)
		}
	}
}

// post reports the result of an action to the scheduler.
func (a *actor) post(kind kind, seq uint64, err error, took time.Duration) {
	result, gpus := outcome(err)
	if kind == suspend {
		a.s.cfg.Post(scheduler.Suspended{Target: a.target, Seq: seq, Result: result, FailedGPUs: gpus, Took: took})
		return
	}
	a.s.cfg.Post(scheduler.Resumed{Target: a.target, Seq: seq, Result: result, FailedGPUs: gpus, Took: took})
}

// together carries a command out in its batch. False: the actor has to do so alone.
func (a *actor) together(c command) bool {
	switch {
	case c.batch == nil:
		return false
	case a.held.batcher != c.batch.batcher: // it was replaced by a better one meanwhile
		c.batch.arrive(nil)
		return false
	}
	m := &member{a: a, seq: c.seq}
	c.batch.arrive(m)
	<-c.batch.done
	if c.kind == suspend {
		a.suspended = m.err == nil
	} else {
		a.suspended = a.suspended && m.err != nil
	}
	a.noteAction(c.kind == suspend, m.err)
	if m.err != nil {
		a.post(c.kind, c.seq, m.err, m.took)
	}
	if c.kind == resume {
		a.afterResume(m.err)
	}
	return true
}

// leaveBatches has the others not wait for an actor that has ended.
func (a *actor) leaveBatches() {
	for {
		select {
		case c := <-a.commands:
			if c.batch != nil {
				c.batch.arrive(nil)
			}
		default:
			return
		}
	}
}
