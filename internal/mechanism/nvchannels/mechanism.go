// Package nvchannels implements an experimental mechanism for NVIDIA's GPUs: it takes the compute
// channels of processes off their GPUs, in the middle of kernels, and puts them on again, as the
// processes' own RM clients (see pkg/nvrm).
//
// The driver does not undo that when the daemon dies. So everything that may be taken off is known
// to others first: each process with a session is in the journal, and a supervisor process has the
// list of its channels. That puts them on within a second of the daemon's death or silence. Both
// are brought up to date when channels are born, not at each Suspend: enabling what is on has no
// effect.
//
// A copy of a process's descriptor would keep its memory on the GPU after its death. Copies exist
// only during a call; what is kept are pidfds.
package nvchannels

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
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
	// PollEvery is how often suspended processes are examined for new channels of known clients.
	// Those are off within it, and the time of two calls.
	PollEvery = 20 * time.Millisecond
	// soon is how long after a Suspend they are examined first: not before the answer to an
	// announcement is on its way.
	soon = 2 * time.Millisecond
	// hotGap and gap are how far a Suspend and an examination look for channels behind those that are
	// known: 2.4 us for each handle.
	hotGap = 2
	gap    = 32
	// idleEvery is how often processes that run are.
	idleEvery = 500 * time.Millisecond
	// fullEvery and idleFullEvery are how often a process that is suspended, and one that runs, is
	// also examined for new clients and for channels that were freed. That takes a few times as
	// long, and meanwhile a call that takes channels off takes half as long again. So what a new
	// client of a suspended process has is off within fullEvery.
	fullEvery     = 500 * time.Millisecond
	idleFullEvery = 5 * time.Second
	// searchScans is how many scans may be needed to find the clients of a process: every handle
	// is tried then.
	searchScans = 300
)

// Config is what a Mechanism needs.
type Config struct {
	Sys     nvrm.Sys
	Profile nvrm.Profile
	Journal mechanism.Store
	// CopyEngines has channels of copy engines taken off, too.
	CopyEngines bool
	// Owner returns the process whose work the channels of a client have, when several have its
	// file; zero if that is not known. Nil is a host where none is known.
	Owner func(nvrm.Handle) gpreempt.ProcessKey
	// Refused returns why processes of this host must not be suspended, and what to do; "" if
	// nothing prevents it.
	Refused func() (why, remedy string)
	// Log may be nil.
	Log *zap.Logger

	// Start starts a supervisor, which calls Supervise, with its end of a socket; nil starts this
	// program as one.
	Start func(socket *os.File) (*os.Process, error)
}

// Mechanism is a mechanism.Batcher.
type Mechanism struct {
	cfg      Config
	pauses   mechanism.Pauses
	sessions mechanism.Sessions[*session]
	guard    atomic.Pointer[guard] // nil before the first
	wake     chan struct{}         // examine soon
	stop     chan struct{}
	examiner sync.WaitGroup
	closed   atomic.Bool

	// calls is held through calls of the driver, and guards all below and in sessions: the driver
	// makes such calls one at a time.
	calls   sync.Mutex
	members []*session
	// single is set once the driver has refused to set channels of several processes in one call.
	single bool
}

var _ mechanism.Batcher = (*Mechanism)(nil)

// New returns the mechanism. It starts the supervisor when it is first needed.
func New(cfg Config) *Mechanism {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	if cfg.Refused == nil {
		cfg.Refused = func() (string, string) { return "", "" }
	}
	if cfg.Owner == nil {
		cfg.Owner = func(nvrm.Handle) gpreempt.ProcessKey { return gpreempt.ProcessKey{} }
	}
	if cfg.Start == nil {
		cfg.Start = start
	}
	return &Mechanism{
		cfg: cfg, pauses: mechanism.Pauses{Store: cfg.Journal, Mechanism: Name, Log: cfg.Log},
		wake: make(chan struct{}, 1), stop: make(chan struct{}),
	}
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return Name }

// Owns reports whether a process is the supervisor.
func (m *Mechanism) Owns(pid int32) bool {
	g := m.guard.Load()
	return g != nil && g.process != nil && int32(g.process.Pid) == pid
}

// Beat shows that the daemon works. It is called at least every BeatEvery, and does not block.
func (m *Mechanism) Beat() {
	if g := m.guard.Load(); g != nil {
		g.beat()
	}
}

// supervised starts a supervisor if none runs. It needs calls.
func (m *Mechanism) supervised() error {
	if m.closed.Load() {
		return errClosed
	}
	if g := m.guard.Load(); g != nil {
		if !g.hasEnded() {
			return nil
		}
		m.takeEnd(g)
	}
	g, err := newGuard(m.cfg.Start, m.lapsed)
	if err != nil {
		return fmt.Errorf("start the supervisor: %w", err)
	}
	m.guard.Store(g)
	if m.closed.Load() { // meanwhile
		m.guard.Store(nil)
		g.close()
		return errClosed
	}
	go func() {
		<-g.ended
		m.calls.Lock()
		defer m.calls.Unlock()
		m.takeEnd(g)
	}()
	return nil
}

// takeEnd puts everything on, because a supervisor has ended before the daemon: nobody would do so
// at the daemon's death. It needs calls.
func (m *Mechanism) takeEnd(g *guard) {
	if m.closed.Load() || m.guard.Load() != g || g.taken {
		return
	}
	g.taken = true
	m.cfg.Log.Error("the supervisor of nvchannels has ended; what was suspended runs, and is suspended again with another one", log.Mechanism(Name))
	for _, s := range m.members {
		s.runAgain()
		s.armed = nil
	}
}

// lapsed is called when the supervisor says that it has put everything on.
func (m *Mechanism) lapsed() {
	go func() { // not in the goroutine that takes the supervisor's answers
		m.calls.Lock()
		defer m.calls.Unlock()
		m.takeLapse()
	}()
}

// takeLapse takes in that the supervisor has put everything on, if it has. It needs calls.
func (m *Mechanism) takeLapse() {
	if g := m.guard.Load(); g == nil || !g.lapse.CompareAndSwap(true, false) {
		return
	}
	m.cfg.Log.Warn("gpreemptd was silent, and the supervisor of nvchannels has resumed everything; it is suspended again", log.Mechanism(Name))
	for _, s := range m.members {
		s.runAgain()
	}
}

// Close ends the supervisor, which puts on what may still be off. It does not wait for calls that
// hang.
func (m *Mechanism) Close() error {
	if m.closed.Swap(true) {
		return nil
	}
	close(m.stop)
	if g := m.guard.Swap(nil); g != nil {
		g.close()
	}
	ended := make(chan struct{})
	go func() {
		m.examiner.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(time.Second):
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

// Attach implements mechanism.Mechanism. The process runs on, also if another one has left its
// channels off.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	p, err := m.cfg.Sys.Open(target)
	if err != nil {
		return nil, err
	}
	s := &session{m: m, target: target, process: p, events: make(chan struct{}, 1)}
	if s.view, err = search(func() error { return context.Cause(ctx) }, m.cfg.Sys, m.cfg.Profile, p); err == nil {
		err = m.sessions.Add(target, s)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	m.calls.Lock()
	defer m.calls.Unlock()
	if err = m.pauses.Begin(mechanism.JournalEntry{Target: target}); err == nil {
		if err = m.supervised(); err == nil {
			err = s.arm()
		}
		if err == nil && len(s.armed) > 0 { // what a process that shared the file may have left off
			err = s.restore(s.armed)
		}
		if err != nil {
			m.pauses.End(target)
		}
	}
	if err != nil {
		m.sessions.Remove(target, s)
		p.Close()
		return nil, err
	}
	if m.members == nil {
		m.examiner.Go(m.examine)
	}
	m.members = append(m.members, s)
	return s, nil
}

// SuspendAll implements mechanism.Batcher.
func (m *Mechanism) SuspendAll(ctx context.Context, sessions []mechanism.Session) []error {
	return m.suspend(ctx, ours(sessions), func() {})
}

// suspend calls done for each that it has suspended.
func (m *Mechanism) suspend(ctx context.Context, all []*session, done func()) []error {
	m.calls.Lock()
	defer m.calls.Unlock()
	if g := m.guard.Load(); g != nil && !g.fresh() {
		_ = g.ask(message{Kind: kindBeat}) // its answer comes behind the news of a lapse; supervised replaces one without answer
	}
	m.takeLapse()
	errs := make([]error, len(all))
	var ready []*session
	for i, s := range all {
		if errs[i] = s.ready(ctx); errs[i] == nil {
			ready = append(ready, s)
		}
	}
	if !m.several(ready, func(all []*session) error { return m.off(all, hotGap) }) {
		for i, s := range all {
			if errs[i] == nil {
				errs[i] = s.offAlone()
			}
		}
	}
	for i, s := range all {
		if errs[i] == nil && ctx.Err() != nil {
			errs[i] = s.failure(context.Cause(ctx))
		}
		if errs[i] == nil {
			s.suspended, s.ran = true, false
			done()
		}
	}
	select {
	case m.wake <- struct{}{}:
	default:
	}
	return errs
}

// several does something with several sessions by calls for all of them, and reports whether it
// was done. It needs calls.
func (m *Mechanism) several(all []*session, do func([]*session) error) bool {
	if len(all) < 2 || m.single {
		return false
	}
	err := do(all)
	if err != nil {
		m.cfg.Log.Info("channels of several processes were not set by one call; each is set by a call of its own", log.Err(err))
		m.single = errors.Is(err, nvrm.NotPermitted)
	}
	return err == nil
}

// off takes every channel of sessions off that is known, or found behind at most so many handles
// without an object. After an error some may be. It needs calls.
func (m *Mechanism) off(all []*session, gap int) error {
	earlier := m.guard.Load()
	if err := m.supervised(); err != nil {
		return err
	}
	if earlier != m.guard.Load() { // what the earlier one knew was put on
		return errUnsure
	}
	var groups []nvrm.Group
	off := make([][]nvrm.Channel, len(all))
	for i, s := range all {
		if s.unsure {
			return errUnsure
		}
		if err := s.view.Quick(gap); err != nil {
			return err
		}
		if err := s.arm(); err != nil {
			return err
		}
		off[i] = s.armed
		born := slices.DeleteFunc(slices.Clone(s.armed), func(c nvrm.Channel) bool { return slices.ContainsFunc(s.off, c.Is) })
		if len(born) > 0 {
			groups = append(groups, nvrm.Group{Process: s.process, Channels: born})
		}
	}
	err := nvrm.Set(groups, true)
	if err == nil && m.closed.Load() { // the supervisor has ended meanwhile
		err = errClosed
	}
	for i, s := range all {
		s.off, s.unsure = off[i], err != nil
	}
	return err
}

var errUnsure = errors.New("what is off of a process is not known")

// ResumeAll implements mechanism.Batcher.
func (m *Mechanism) ResumeAll(_ context.Context, sessions []mechanism.Session) []error {
	m.calls.Lock()
	defer m.calls.Unlock()
	all := ours(sessions)
	errs := make([]error, len(all))
	if m.several(all, m.on) {
		return errs
	}
	for i, s := range all {
		errs[i] = s.resume()
	}
	return errs
}

// on puts every channel of sessions on. It needs calls.
func (m *Mechanism) on(all []*session) error {
	var groups []nvrm.Group
	for _, s := range all {
		if s.closed || s.unsure {
			return errUnsure
		}
		groups = append(groups, nvrm.Group{Process: s.process, Channels: s.off})
	}
	if err := nvrm.Set(groups, false); err != nil {
		return err
	}
	for _, s := range all {
		s.off, s.suspended = nil, false
	}
	return nil
}

func ours(sessions []mechanism.Session) []*session {
	own := make([]*session, len(sessions))
	for i, s := range sessions {
		own[i] = s.(*session)
	}
	return own
}

// examine examines the processes from time to time.
func (m *Mechanism) examine() {
	tick := time.NewTimer(idleEvery)
	defer tick.Stop()
	due := time.Now().Add(idleEvery)
	for {
		select {
		case <-m.stop:
			return
		case <-m.wake:
			if next := time.Now().Add(soon); next.Before(due) {
				due = next
				tick.Reset(soon)
			}
			continue
		case <-tick.C:
		}
		every := idleEvery
		m.calls.Lock()
		members := slices.Clone(m.members)
		m.calls.Unlock()
		for _, s := range members { // a Suspend need not wait for all of them
			m.calls.Lock()
			if s.suspended {
				every = PollEvery
			}
			s.examine()
			m.calls.Unlock()
		}
		due = time.Now().Add(every)
		tick.Reset(every)
	}
}
