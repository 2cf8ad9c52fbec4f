// Package nvchannels implements an experimental mechanism for NVIDIA's GPUs: it takes the compute
// channels of a process off its GPUs, in the middle of kernels, and puts them on again, as the
// process's own RM client (see pkg/nvrm).
//
// The driver does not undo that when the daemon dies. So each pause is in the journal first, and a
// supervisor process, which has copies of the descriptors, puts everything on again within a second
// of the daemon's death or silence.
//
// A copy of a descriptor keeps the process's memory on the GPU after its death. Copies exist only
// while the process is suspended, and are closed within PollEvery of its end.
package nvchannels

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// Name is the mechanism's.
const Name = "nvchannels"

const (
	// PollEvery is how often a suspended process is examined: its end, and channels that were
	// born. Those are off within it, and the time of two calls.
	PollEvery = 20 * time.Millisecond
	// idleEvery is how often one that runs is.
	idleEvery = 500 * time.Millisecond
	// fullEvery is how often a suspended process is examined as a running one.
	fullEvery = time.Second
	// searchScans is how many scans may be needed to find the clients of a process: every handle
	// is tried then.
	searchScans = 256
)

// Config is what a Mechanism needs.
type Config struct {
	Sys     nvrm.Sys
	Profile nvrm.Profile
	Journal mechanism.Store
	// CopyEngines has channels of copy engines taken off, too.
	CopyEngines bool
	// Refused returns why processes of this host must not be suspended, and what to do; "" if
	// nothing prevents it.
	Refused func() (why, remedy string)
	// Log may be nil.
	Log *zap.Logger

	// start starts a supervisor; nil is the program's.
	start func() (*guard, error)
}

// Mechanism is a mechanism.Mechanism.
type Mechanism struct {
	cfg      Config
	pauses   mechanism.Pauses
	sessions mechanism.Sessions[*session]

	mu      sync.Mutex // guards what follows
	guard   *guard     // nil before the first
	closed  bool
	members map[*session]bool
}

var _ mechanism.Mechanism = (*Mechanism)(nil)

// New returns the mechanism. It starts the supervisor when it is first needed.
func New(cfg Config) *Mechanism {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.Refused == nil {
		cfg.Refused = func() (string, string) { return "", "" }
	}
	m := &Mechanism{cfg: cfg, pauses: mechanism.Pauses{Store: cfg.Journal, Mechanism: Name, Log: cfg.Log}, members: map[*session]bool{}}
	if cfg.start == nil {
		m.cfg.start = func() (*guard, error) {
			file, pid, err := start()
			if err != nil {
				return nil, err
			}
			return newGuard(file, pid, m.lapsed), nil
		}
	}
	return m
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return Name }

// Owns reports whether a process is the supervisor.
func (m *Mechanism) Owns(pid int32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.guard != nil && int32(m.guard.pid) == pid
}

// Beat shows that the daemon works. It is called at least every BeatEvery, and does not block.
func (m *Mechanism) Beat() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.guard != nil {
		m.guard.beat()
	}
}

// supervisor returns the supervisor, and starts one if it does not run.
func (m *Mechanism) supervisor() (*guard, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return nil, errors.New("the mechanism has been closed")
	case m.guard != nil && !m.guard.hasEnded():
		return m.guard, nil
	}
	g, err := m.cfg.start()
	if err != nil {
		return nil, fmt.Errorf("start the supervisor: %w", err)
	}
	m.guard = g
	go m.watch(g)
	return g, nil
}

// watch puts everything on again when the supervisor ends before the daemon: nobody would do so
// at the daemon's death.
func (m *Mechanism) watch(g *guard) {
	<-g.ended
	m.mu.Lock()
	closed := m.closed
	members := m.list()
	m.mu.Unlock()
	if closed {
		return
	}
	m.cfg.Log.Error("the supervisor of nvchannels has ended; what was suspended runs, and is suspended again with another one", log.Mechanism(Name))
	for _, s := range members {
		s.unguarded()
	}
}

// lapsed takes in that the supervisor has put everything on.
func (m *Mechanism) lapsed() {
	m.cfg.Log.Warn("gpreemptd was silent, and the supervisor of nvchannels has resumed everything; it is suspended again", log.Mechanism(Name))
	m.mu.Lock()
	members := m.list()
	m.mu.Unlock()
	for _, s := range members {
		go s.ranMeanwhile() // not in the goroutine that takes the supervisor's answers
	}
}

// list needs mu.
func (m *Mechanism) list() (all []*session) {
	for s := range m.members {
		all = append(all, s)
	}
	return all
}

// Close ends the supervisor, which puts on what may still be off.
func (m *Mechanism) Close() error {
	m.mu.Lock()
	g := m.guard
	m.closed = true
	m.mu.Unlock()
	if g != nil {
		g.close()
	}
	return nil
}

// Probe implements mechanism.Mechanism.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	one := func(e mechanism.Evidence) mechanism.Capability {
		return mechanism.Capability{Evidence: []mechanism.Evidence{e}}
	}
	if why, remedy := m.cfg.Refused(); why != "" {
		return one(mechanism.Evidence{Check: "NVIDIA driver", Found: why, Remedy: remedy})
	}
	p, err := m.cfg.Sys.Open(target)
	switch {
	case errors.Is(err, mechanism.ErrGone):
		return one(mechanism.Evidence{Check: "process", Found: "it has exited"})
	case err != nil:
		return one(mechanism.Evidence{Check: "process", Found: err.Error(), Remedy: "run as root, with CAP_SYS_PTRACE in the host's namespaces"})
	}
	p.Close()
	return one(mechanism.Evidence{Check: "NVIDIA driver", Found: m.cfg.Profile.Version + ", whose structures are those of " + m.cfg.Profile.Tag, OK: true})
}

// Attach implements mechanism.Mechanism. It changes nothing for the process.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	p, err := m.cfg.Sys.Open(target)
	if err != nil {
		return nil, err
	}
	s := &session{m: m, target: target, process: p, events: make(chan struct{}, 1), wake: make(chan struct{}, 1), stop: make(chan struct{}), ended: make(chan struct{})}
	if s.view, err = search(ctx, m.cfg, p); err == nil {
		err = m.sessions.Add(target, s)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	_, _ = s.channels() // Suspend reports it
	m.mu.Lock()
	m.members[s] = true
	m.mu.Unlock()
	go s.run()
	return s, nil
}

// search returns a view of a process whose clients were looked for among all handles.
func search(ctx context.Context, cfg Config, p nvrm.Process) (*nvrm.View, error) {
	v := nvrm.NewView(cfg.Sys, p, cfg.Profile)
	for range searchScans {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := v.Scan(); err != nil {
			return nil, err
		}
		if v.Searched() {
			break
		}
	}
	return v, nil
}

// Undo puts the channels of a process on that an earlier daemon may have left off, and removes the
// entry. That has no effect on channels that are on. Errors: others than that it has exited.
func (m *Mechanism) Undo(ctx context.Context, e mechanism.JournalEntry) error {
	return m.pauses.Undo(e, func() error {
		p, err := m.cfg.Sys.Open(e.Target)
		if err != nil {
			return err
		}
		defer p.Close()
		v, err := search(ctx, m.cfg, p)
		if err != nil {
			return err
		}
		files, err := v.Copies()
		if err != nil {
			return err
		}
		defer nvrm.CloseAll(files)
		channels, unknown := v.Channels()
		if err := nvrm.Set(files, channels, false); err != nil || unknown == 0 {
			return err
		}
		return fmt.Errorf("the GPUs of %d channels of process %d are not known", unknown, e.Target.PID)
	})
}
