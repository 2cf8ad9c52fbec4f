package kfdemu

import (
	"maps"
	"slices"
	"sync"
)

// endings are the address spaces and files that are being released, and the calls under way
// that delay that: calls of an address space, of the process itself or about it, and calls with a
// file. A thread that is killed in a call of the driver releases its state there when the call
// ends. The kernel that asks the supervisor about the call does not wait so long.
type endings struct {
	mu sync.Mutex // guards all below
	// over is closed when the *Space or the *file has been released.
	over map[any]chan struct{}
	// calls counts those under way with a *Space or a *file; idle is closed when the last one
	// has ended.
	calls map[any]int
	idle  map[any]chan struct{}
}

func newEndings() endings {
	return endings{over: map[any]chan struct{}{}, calls: map[any]int{}, idle: map[any]chan struct{}{}}
}

// enter records a call with a *Space or a *file. The caller calls end when it has ended.
func (s *endings) enter(with any) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[with]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.calls[with]--; s.calls[with] > 0 {
			return
		}
		delete(s.calls, with)
		if idle := s.idle[with]; idle != nil {
			delete(s.idle, with)
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

// underWay reports whether a call with a *Space or a *file is under way.
func (s *endings) underWay(with any) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[with] > 0
}

// awaitCalls waits until no call with a *Space or a *file whose end has begun is under way.
func (s *endings) awaitCalls(with any) {
	s.mu.Lock()
	if s.calls[with] == 0 {
		s.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	s.idle[with] = idle
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
