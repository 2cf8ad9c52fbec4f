// Package nvchannels implements an experimental mechanism for NVIDIA's GPUs: it disables the compute
// channels of processes in the middle of their kernels, and enables them again, as the processes' own
// RM clients (see pkg/nvrm).
//
// The driver does not enable them when the daemon dies. So each process with a session is in the
// journal, and a supervisor process has the list of its channels before any is disabled. The
// supervisor enables them within a second of the daemon's death or silence. Journal and supervisor
// are updated when channels are created, not at each Suspend: enabling an enabled channel has no
// effect.
//
// A copy of a process's descriptor would keep its memory on the GPU after its death. So copies exist
// only during a call, and only pidfds are kept.
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

// Name is the name of the mechanism.
const Name = "nvchannels"

const (
	// PollEvery is the time between examinations of suspended processes for new channels of known
	// clients. They are disabled within it and the time of two calls.
	PollEvery = 20 * time.Millisecond
	// soon is the time from a Suspend to the first examination, which would delay the answer to an
	// announcement.
	soon = 2 * time.Millisecond
	// hotGap and gap are the numbers of handles after the known channels that a Suspend and an
	// examination try: 2.4 us each.
	hotGap = 2
	gap    = 32
	// idleEvery is the time between examinations of processes that run.
	idleEvery = 500 * time.Millisecond
	// fullEvery and idleFullEvery are the times between examinations of a suspended process, and of
	// one that runs, for new clients and freed channels too. Such an examination takes a few times
	// as long, and delays a call that disables channels meanwhile. The channels of a new client of a
	// suspended process are disabled within fullEvery.
	fullEvery     = 500 * time.Millisecond
	idleFullEvery = 5 * time.Second
	// searchScans is the number of scans after which every handle for a client has been tried.
	searchScans = 300
)

// Config is what a Mechanism needs.
type Config struct {
	Sys     nvrm.Sys
	Profile nvrm.Profile
	Journal mechanism.Store
	// CopyEngines disables channels of copy engines too.
	CopyEngines bool
	// Owner returns the process that a client belongs to when several have its file; zero if it is
	// not known. Nil means that none is known.
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
	wake     chan struct{}         // makes examine look soon
	stop     chan struct{}
	examiner sync.WaitGroup
	closed   atomic.Bool

	// calls is held during calls of the driver, which makes them one at a time. It guards what
	// follows, and the sessions.
	calls   sync.Mutex
	members []*session
	// single is set when the driver has refused a call with channels of several processes.
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
		m.handleEnd(g)
	}
	g, err := newGuard(m.cfg.Start, m.lapsed)
	if err != nil {
		return fmt.Errorf("start the supervisor: %w", err)
	}
	m.guard.Store(g)
	if m.closed.Load() { // Close was called meanwhile
		m.guard.Store(nil)
		g.close()
		return errClosed
	}
	go func() {
		<-g.ended
		m.calls.Lock()
		defer m.calls.Unlock()
		m.handleEnd(g)
	}()
	return nil
}

// handleEnd resumes everything after a supervisor has ended before the daemon, because nothing would
// do so at the daemon's death. It needs calls.
func (m *Mechanism) handleEnd(g *guard) {
	if m.closed.Load() || m.guard.Load() != g || g.handled {
		return
	}
	g.handled = true
	m.cfg.Log.Error("the supervisor of nvchannels has ended; what was suspended runs, and is suspended again with another one", log.Mechanism(Name))
	for _, s := range m.members {
		s.runAgain()
		s.armed = nil
	}
}

// lapsed is called when the supervisor reports that it has resumed everything.
func (m *Mechanism) lapsed() {
	go func() { // not in the goroutine that receives the supervisor's answers
		m.calls.Lock()
		defer m.calls.Unlock()
		m.handleLapse()
	}()
}

// handleLapse resumes everything here too if the supervisor has resumed it. It needs calls.
func (m *Mechanism) handleLapse() {
	if g := m.guard.Load(); g == nil || !g.lapse.CompareAndSwap(true, false) {
		return
	}
	m.cfg.Log.Warn("gpreemptd was silent, and the supervisor of nvchannels has resumed everything; it is suspended again", log.Mechanism(Name))
	for _, s := range m.members {
		s.runAgain()
	}
}

// Close ends the supervisor, which enables what may still be disabled. It does not wait for calls that
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

// Attach implements mechanism.Mechanism. The process runs, even if another one has left its channels
// disabled.
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
		if err == nil && len(s.armed) > 0 { // a process that shared the file may have left them disabled
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
	return m.suspend(ctx, toSessions(sessions), func() {})
}

// suspend calls done for each session that it has suspended.
func (m *Mechanism) suspend(ctx context.Context, all []*session, done func()) []error {
	m.calls.Lock()
	defer m.calls.Unlock()
	if g := m.guard.Load(); g != nil && !g.fresh() {
		_ = g.ask(message{Kind: kindBeat}) // the answer follows the report of a lapse; supervised replaces a supervisor that does not answer
	}
	m.handleLapse()
	errs := make([]error, len(all))
	var ready []*session
	for i, s := range all {
		if errs[i] = s.ready(ctx); errs[i] == nil {
			ready = append(ready, s)
		}
	}
	if !m.several(ready, func(all []*session) error { return m.disable(all, hotGap) }) {
		for i, s := range all {
			if errs[i] == nil {
				errs[i] = s.disableAlone()
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

// several calls do for several sessions at once, and reports whether that succeeded. It needs calls.
func (m *Mechanism) several(all []*session, do func([]*session) error) bool {
	if len(all) < 2 || m.single {
		return false
	}
	err := do(all)
	if err != nil {
		m.cfg.Log.Info("one call for the channels of several processes failed; each process gets a call of its own", log.Err(err))
		m.single = errors.Is(err, nvrm.NotPermitted)
	}
	return err == nil
}

// disable disables every channel of sessions that is known, or found after at most gap handles without
// an object. After an error some may be disabled. It needs calls.
func (m *Mechanism) disable(all []*session, gap int) error {
	earlier := m.guard.Load()
	if err := m.supervised(); err != nil {
		return err
	}
	if earlier != m.guard.Load() { // everything that the earlier one knew was resumed
		return errUnsure
	}
	var groups []nvrm.Group
	armed := make([][]nvrm.Channel, len(all))
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
		armed[i] = s.armed
		added := slices.DeleteFunc(slices.Clone(s.armed), func(c nvrm.Channel) bool { return slices.ContainsFunc(s.disabled, c.Is) })
		if len(added) > 0 {
			groups = append(groups, nvrm.Group{Process: s.process, Channels: added})
		}
	}
	err := nvrm.Set(groups, true)
	if err == nil && m.closed.Load() { // the supervisor has ended meanwhile
		err = errClosed
	}
	for i, s := range all {
		s.disabled, s.unsure = armed[i], err != nil
	}
	return err
}

var errUnsure = errors.New("which channels of a process are disabled is not known")

// ResumeAll implements mechanism.Batcher.
func (m *Mechanism) ResumeAll(_ context.Context, sessions []mechanism.Session) []error {
	m.calls.Lock()
	defer m.calls.Unlock()
	all := toSessions(sessions)
	errs := make([]error, len(all))
	if m.several(all, m.enable) {
		return errs
	}
	for i, s := range all {
		errs[i] = s.resume()
	}
	return errs
}

// enable enables every channel of sessions. It needs calls.
func (m *Mechanism) enable(all []*session) error {
	var groups []nvrm.Group
	for _, s := range all {
		if s.closed || s.unsure {
			return errUnsure
		}
		groups = append(groups, nvrm.Group{Process: s.process, Channels: s.disabled})
	}
	if err := nvrm.Set(groups, false); err != nil {
		return err
	}
	for _, s := range all {
		s.disabled, s.suspended = nil, false
	}
	return nil
}

func toSessions(sessions []mechanism.Session) []*session {
	own := make([]*session, len(sessions))
	for i, s := range sessions {
		own[i] = s.(*session)
	}
	return own
}

// examine examines the processes periodically.
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
