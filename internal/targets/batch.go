package targets

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// order hands an order to the target's actor, at the next Flush if its mechanism can carry it
// out with others.
func (s *Sessions) order(o order) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch a := s.actors[o.target]; {
	case o.kind == detach:
		s.flush() // actions on one target are carried out in order
	case a != nil && a.batcher != nil:
		s.orders = append(s.orders, o)
		return
	}
	s.hand(o)
}

// Flush implements scheduler.Executor: the orders of one kind to one mechanism become one batch.
func (s *Sessions) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flush()
}

// flush needs mu.
func (s *Sessions) flush() {
	orders := s.orders
	s.orders = nil
	s.form(orders)
	for _, o := range orders {
		s.hand(o)
	}
}

// form puts orders of one kind to one mechanism into a batch. None may have been handed out: a
// batch knows how many will come before the first does. It needs mu.
func (s *Sessions) form(orders []order) {
	type group struct {
		batcher mechanism.Batcher
		kind    kind
	}
	members := map[group][]*order{}
	for i := range orders {
		if a := s.actors[orders[i].target]; a != nil && a.batcher != nil {
			g := group{a.batcher, orders[i].kind}
			members[g] = append(members[g], &orders[i])
		}
	}
	for g, together := range members {
		if len(together) == 1 {
			continue
		}
		b := &batch{s: s, batcher: g.batcher, kind: g.kind, coming: len(together)}
		for _, o := range together {
			o.batch = b
		}
	}
}

// joinTime is how long a batch waits for the rest once its first member has come.
const joinTime = 3 * time.Millisecond

// batch is one call of a mechanism for several targets. Their actors join it, lend their
// sessions and wait, each for its own result. The call is made when the last has joined, or joinTime is over: an actor
// that is late, has ended, or uses another mechanism by now, holds the others up no longer.
type batch struct {
	s       *Sessions
	batcher mechanism.Batcher
	kind    kind

	mu     sync.Mutex
	coming int       // members that may still join; the call is due when it becomes 0
	joined []*member // as it is once coming is 0
}

// member is an actor in a batch.
type member struct {
	a   *actor
	seq uint64
	// err is the result, which took that long.
	err  error
	took time.Duration
	done chan struct{} // closed when they are known
}

// join returns after the call. False: that has begun without m.
func (b *batch) join(m *member) bool {
	b.mu.Lock()
	if b.coming == 0 {
		b.mu.Unlock()
		return false
	}
	b.joined = append(b.joined, m)
	b.coming--
	first, last := len(b.joined) == 1, b.coming == 0
	b.mu.Unlock()
	switch {
	case last:
		go b.call() // one of the others may be held up for longer than this one
	case first:
		time.AfterFunc(joinTime, b.depart)
	}
	<-m.done
	return true
}

// depart makes the call unless it was made.
func (b *batch) depart() {
	b.mu.Lock()
	late := b.coming > 0
	b.coming = 0
	b.mu.Unlock()
	if late {
		b.call()
	}
}

// call makes the call, and posts the results that are good: the answer to an announcement waits
// for them.
func (b *batch) call() {
	sessions := make([]mechanism.Session, len(b.joined))
	for i, m := range b.joined {
		sessions[i] = m.a.held.session
	}
	do := b.batcher.ResumeEach
	if b.kind == suspend {
		do = b.batcher.SuspendEach
	}
	begin := b.s.cfg.Now()
	known := make([]atomic.Bool, len(sessions))
	result := func(i int, err error) {
		if known[i].Swap(true) {
			return
		}
		m := b.joined[i]
		m.err, m.took = err, b.s.cfg.Now()-begin
		if err == nil {
			m.a.post(b.kind, m.seq, nil, m.took)
		}
		close(m.done)
	}
	if broken := mechanism.Guard(func() error { do(b.s.ctx, sessions, result); return nil }); broken != nil {
		for i := range sessions {
			result(i, broken)
		}
	}
}

// post reports the result of an action to the scheduler.
func (a *actor) post(kind kind, seq uint64, err error, took time.Duration) {
	result, gpus := a.s.result(a.target, err)
	if kind == suspend {
		a.s.cfg.Post(scheduler.Suspended{Target: a.target, Seq: seq, Result: result, FailedGPUs: gpus, Took: took})
		return
	}
	a.s.cfg.Post(scheduler.Resumed{Target: a.target, Seq: seq, Result: result, FailedGPUs: gpus, Took: took})
}

// together carries an order out in its batch. False: the actor has to do so alone.
func (a *actor) together(o order) bool {
	m := &member{a: a, seq: o.seq, done: make(chan struct{})}
	if o.batch == nil || a.held.batcher != o.batch.batcher || !o.batch.join(m) {
		return false
	}
	if o.kind == suspend {
		a.suspended = m.err == nil
	} else {
		a.suspended = a.suspended && m.err != nil
	}
	a.noteAction(o.kind == suspend, m.err)
	if m.err != nil {
		a.post(o.kind, o.seq, m.err, m.took)
	}
	if o.kind == resume {
		a.afterResume(m.err)
	}
	return true
}
