package kfdemu

import (
	"maps"
	"slices"
	"sync"
)

// endings are the address spaces and files that are being released, and the calls under way
// that delay that of an address space, of the process itself or about it: a thread that is killed in a call of the
// driver releases its state there when the call ends. The kernel that asks the supervisor
// about the call does not wait so long.
type endings struct {
	mu sync.Mutex // guards all below
	// over is closed when the *Space or the *file has been released.
	over map[any]chan struct{}
	// calls counts those under way; idle is closed when the last one has ended.
	calls map[*Space]int
	idle  map[*Space]chan struct{}
}

func newEndings() endings {
	return endings{over: map[any]chan struct{}{}, calls: map[*Space]int{}, idle: map[*Space]chan struct{}{}}
}

// enter records a call. The caller calls end when it has ended.
func (s *endings) enter(space *Space) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[space]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.calls[space]--; s.calls[space] > 0 {
			return
		}
		delete(s.calls, space)
		if idle := s.idle[space]; idle != nil {
			delete(s.idle, space)
			close(idle)
		}
	}
}

// begin records the end of a *Space or a *file. The caller calls over when it is released.
func (s *endings) begin(what any) (over func()) {
	done := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over[what] = done
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.over, what)
		close(done)
	}
}

// awaitCalls waits until no call of an address space whose end has begun is under way.
func (s *endings) awaitCalls(space *Space) {
	s.mu.Lock()
	if s.calls[space] == 0 {
		s.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	s.idle[space] = idle
	s.mu.Unlock()
	<-idle
}

// awaitOne waits until a *Space or a *file is released, if its end has begun.
func (s *endings) awaitOne(what any) {
	s.mu.Lock()
	over := s.over[what]
	s.mu.Unlock()
	if over != nil {
		<-over
	}
}

// await waits until everything whose end has begun is released.
func (s *endings) await() {
	s.mu.Lock()
	pending := slices.Collect(maps.Values(s.over))
	s.mu.Unlock()
	for _, over := range pending {
		<-over
	}
}
