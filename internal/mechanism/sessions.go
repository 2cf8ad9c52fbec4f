package mechanism

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Sessions are the sessions of a mechanism, at most one for each target. Its methods may be
// called by several goroutines at once.
type Sessions[S comparable] struct {
	mu  sync.Mutex // guards all
	all map[gpreempt.ProcessKey]S
}

// Add adds the session of a target, which must have none.
func (s *Sessions[S]) Add(target gpreempt.ProcessKey, session S) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, has := s.all[target]; has {
		return fmt.Errorf("process %d has a session already", target.PID)
	}
	if s.all == nil {
		s.all = map[gpreempt.ProcessKey]S{}
	}
	s.all[target] = session
	return nil
}

// Get returns the session of a target, the zero value for none.
func (s *Sessions[S]) Get(target gpreempt.ProcessKey) S {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[target]
}

// Remove removes a session, unless it was removed before.
func (s *Sessions[S]) Remove(target gpreempt.ProcessKey, session S) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all[target] == session {
		delete(s.all, target)
	}
}

// All returns the sessions, in no order.
func (s *Sessions[S]) All() []S {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.all))
}
