// Package sim hides that a target is a process of the simulated machine: the
// preemption mechanism of `gpreemptd serve --sim`.
package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Mechanism suspends and resumes simulated processes.
type Mechanism struct{ rt *gpumodel.Realtime }

var _ mechanism.Mechanism = (*Mechanism)(nil)

// New returns the mechanism for the processes of rt.
func New(rt *gpumodel.Realtime) *Mechanism { return &Mechanism{rt: rt} }

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return "sim" }

// Probe implements mechanism.Mechanism: every simulated process can be suspended.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	e := mechanism.Evidence{Check: "simulated process", Found: "it lives", OK: true}
	if !m.rt.Alive(target) {
		e = mechanism.Evidence{Check: "simulated process", Found: "it has exited"}
	}
	return mechanism.Capability{Evidence: []mechanism.Evidence{e}}
}

// Attach implements mechanism.Mechanism. It does not touch the GPUs.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if !m.rt.Alive(target) {
		return nil, mechanism.ErrGone
	}
	return &session{rt: m.rt, target: target}, nil
}

// errClosed is what a session gives once it has been closed.
var errClosed = errors.New("the session with the simulated process has been closed")

type session struct {
	rt     *gpumodel.Realtime
	target gpreempt.ProcessKey

	// mu guards what follows. It is not held while a suspend or resume is waited
	// for.
	mu     sync.Mutex
	closed bool
	// held tells that something may be suspended.
	held bool
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errClosed
	}
	s.held = true
	s.mu.Unlock()

	results, err := s.rt.Suspend(ctx, s.target, nil)
	if err == nil {
		err = failure("suspend", s.target, results)
	}
	if err != nil {
		s.release()
		return gone(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		// Close came meanwhile. Its resume may have been before the suspend.
		s.releaseLocked()
		return errClosed
	}
	return nil
}

// Resume implements mechanism.Session.
func (s *session) Resume(ctx context.Context) error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return errClosed
	}
	results, err := s.rt.Resume(ctx, s.target, nil)
	if err == nil {
		err = failure("resume", s.target, results)
	}
	if err != nil {
		return gone(err)
	}
	s.mu.Lock()
	s.held = false
	s.mu.Unlock()
	return nil
}

// Close implements mechanism.Session. It does not wait for the resume, which the
// machine carries out after whatever is under way.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.held {
		s.releaseLocked()
	}
	return nil
}

func (s *session) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.releaseLocked()
}

// releaseLocked orders a resume of everything, without waiting for it: what made
// it necessary may be that the GPU is stuck. It needs mu.
func (s *session) releaseLocked() {
	s.held = false
	s.rt.Do(func(m *gpumodel.Machine) {
		// The only error is that the target left, and then nothing holds it.
		_ = m.Resume(s.target, nil, nil)
	})
}

// failure returns the error that the results stand for: nil when every queue is as
// asked, or no longer there.
func failure(verb string, target gpreempt.ProcessKey, results []gpumodel.QueueResult) error {
	var gpus []gpreempt.GPUID
	var queues []uint32
	for _, r := range results {
		if r.Result != gpumodel.ResultError {
			continue
		}
		queues = append(queues, r.ID)
		if !slices.Contains(gpus, r.GPU) {
			gpus = append(gpus, r.GPU)
		}
	}
	if len(gpus) == 0 {
		return nil
	}
	return &mechanism.HardwareError{GPUs: gpus, Err: fmt.Errorf("%s queues %v of simulated process %v", verb, queues, target)}
}

func gone(err error) error {
	if errors.Is(err, gpumodel.ErrNoProcess) {
		return mechanism.ErrGone
	}
	return err
}
