package kfdemu

import (
	"maps"
	"slices"
	"sync"

	"github.com/gpreempt/gpreempt/emu/host"
)

// endings are the address spaces that are being taken down, and the calls under way that
// hold that up, of the process itself or about it: a thread that is killed in a call of
// the driver leaves it, and what it has there, when the call ends. The kernel that asks
// us about the call does not wait so long.
type endings struct {
	mu sync.Mutex // guards all below
	// over is closed when one has been taken down.
	over map[*host.Space]chan struct{}
	// calls counts those under way; idle is closed when there are none any more.
	calls map[*host.Space]int
	idle  map[*host.Space]chan struct{}
}

func newEndings() endings {
	return endings{over: map[*host.Space]chan struct{}{}, calls: map[*host.Space]int{}, idle: map[*host.Space]chan struct{}{}}
}

// enter notes a call; end is to be called when it has ended.
func (s *endings) enter(space *host.Space) (end func()) {
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

// begin notes the end of one; over is to be called when it has been taken down.
func (s *endings) begin(space *host.Space) (over func()) {
	done := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over[space] = done
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.over, space)
		close(done)
	}
}

// awaitCalls waits until no call of one whose end has begun is under way.
func (s *endings) awaitCalls(space *host.Space) {
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

// await waits until nothing is left of those whose end has begun.
func (s *endings) await() {
	s.mu.Lock()
	pending := slices.Collect(maps.Values(s.over))
	s.mu.Unlock()
	for _, over := range pending {
		<-over
	}
}
