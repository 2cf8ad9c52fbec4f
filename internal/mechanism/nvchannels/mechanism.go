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
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
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
	// busyTime is longer than an examination takes.
	busyTime = 5 * time.Millisecond
	// searchScans is the number of scans after which every handle for a client has been tried.
	searchScans = 300
)

// Config is what a Mechanism needs.
type Config struct {
	Sys     nvrm.Sys
	Version string // of the driver, for Probe
	Journal mechanism.Store
	// Owner returns the process that a client belongs to when several have its file; zero if it is
	// not known. Nil means that none is.
	Owner func(nvrm.Handle) gpreempt.ProcessKey
	// Refused returns why processes of this host must not be suspended, and what to do; "" if
	// nothing prevents it. Probe asks it.
	Refused func() (why, remedy string)
	Log     *zap.Logger

	// Start starts a supervisor, which calls Supervise, and returns the daemon's end of the socket; nil
	// starts this program as one.
	Start func() (daemon *os.File, cmd *exec.Cmd, err error)
}

// Mechanism is a mechanism.Batcher. It holds no lock of several processes during a call of the
// driver or of the supervisor, so one that hangs holds up only the processes that it is for.
type Mechanism struct {
	cfg      Config
	pauses   mechanism.Pauses
	sessions mechanism.Sessions[*session]
	guard    atomic.Pointer[guard] // nil before the first
	stop     chan struct{}
	watchers sync.WaitGroup
	closed   atomic.Bool
	// single is set when the driver has refused a call with channels of several processes.
	single atomic.Bool
	// busyTime is how long a call for several processes waits for those that have one under way.
	busyTime time.Duration

	starting sync.Mutex // held while a supervisor is started
}

var _ mechanism.Batcher = (*Mechanism)(nil)

// New returns the mechanism. It starts the supervisor when it is first needed.
func New(cfg Config) *Mechanism {
	if cfg.Owner == nil {
		cfg.Owner = func(nvrm.Handle) gpreempt.ProcessKey { return gpreempt.ProcessKey{} }
	}
	if cfg.Start == nil {
		cfg.Start = start
	}
	return &Mechanism{
		cfg: cfg, pauses: mechanism.Pauses{Store: cfg.Journal, Mechanism: mechanism.NVChannels, Log: cfg.Log},
		stop: make(chan struct{}), busyTime: busyTime,
	}
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return mechanism.NVChannels }

// Owns reports whether a process is the supervisor.
func (m *Mechanism) Owns(pid int32) bool {
	g := m.guard.Load()
	return g != nil && g.PID == int(pid)
}

// Beat shows that the daemon works. It is called at least every BeatEvery, and does not block.
func (m *Mechanism) Beat() {
	if g := m.guard.Load(); g != nil {
		go g.beat()
	}
}

// supervised returns the supervisor, and starts one if none runs.
func (m *Mechanism) supervised() (*guard, error) {
	m.starting.Lock()
	defer m.starting.Unlock()
	if m.closed.Load() {
		return nil, errClosed
	}
	if g := m.guard.Load(); g != nil && !g.HasClosed() {
		return g, nil
	}
	socket, cmd, err := m.cfg.Start()
	if err != nil {
		return nil, fmt.Errorf("start the supervisor: %w", err)
	}
	g := newGuard(socket, cmd, m.lapsed, m.cfg.Log)
	m.guard.Store(g)
	if m.closed.Load() { // Close was called meanwhile
		m.guard.Store(nil)
		g.close()
		return nil, errClosed
	}
	go func() {
		<-g.Closed
		if !m.closed.Load() {
			m.cfg.Log.Error("the supervisor of nvchannels has ended; what was suspended runs, and is suspended again with another one", log.Mechanism(mechanism.NVChannels))
			m.alarm()
		}
	}()
	return g, nil
}

// lapsed is called when the supervisor reports that it has resumed everything.
func (m *Mechanism) lapsed() {
	m.cfg.Log.Warn("gpreemptd was silent, and the supervisor of nvchannels has resumed everything; it is suspended again", log.Mechanism(mechanism.NVChannels))
	m.alarm()
}

// alarm has every session catch up with the supervisor.
func (m *Mechanism) alarm() {
	for _, s := range m.sessions.All() {
		select {
		case s.alarm <- struct{}{}:
		default:
		}
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
		m.watchers.Wait()
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
	return one(mechanism.Evidence{Check: "NVIDIA driver", Found: m.cfg.Version, OK: true})
}

// Attach implements mechanism.Mechanism. The process runs, even if another one has left its channels
// disabled.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	p, err := m.cfg.Sys.Open(target)
	if err != nil {
		return nil, err
	}
	s := &session{
		m: m, target: target, process: p, Notifier: mechanism.NewNotifier(), calls: make(chan struct{}, 1),
		soon: make(chan struct{}, 1), alarm: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	if s.view, err = search(func() error { return context.Cause(ctx) }, m.cfg.Sys, p); err != nil {
		p.Close()
		return nil, err
	}
	s.publish()
	s.begin()
	defer s.end()
	// Before it arms: of two that share a file, one owns it.
	if err = m.sessions.Add(target, s); err != nil {
		p.Close()
		return nil, err
	}
	if err = m.pauses.Begin(mechanism.JournalEntry{Target: target}); err == nil {
		var g *guard
		if g, err = m.supervised(); err == nil {
			err = s.arm(g)
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
	s.changed, s.Notifier = false, mechanism.NewNotifier() // it was looked at before
	m.watchers.Go(s.watch)
	return s, nil
}

// SuspendEach implements mechanism.Batcher.
func (m *Mechanism) SuspendEach(ctx context.Context, sessions []mechanism.Session, done func(int, error)) {
	m.learn()
	m.each(sessions, func(all []*session) []error { return m.suspend(ctx, all, nil) }, done)
}

// ResumeEach implements mechanism.Batcher.
func (m *Mechanism) ResumeEach(_ context.Context, sessions []mechanism.Session, done func(int, error)) {
	m.each(sessions, m.resume, done)
}

// each does something for all sessions without a call under way together, and for each of the others
// when that has ended.
func (m *Mechanism) each(sessions []mechanism.Session, do func([]*session) []error, done func(int, error)) {
	guarded := func(all []*session, which []int) {
		errs := make([]error, len(all))
		broken := mechanism.Guard(func() error { copy(errs, do(all)); return nil })
		for i, s := range all {
			s.end()
			done(which[i], cmp.Or(broken, errs[i]))
		}
	}
	late := make(chan struct{})
	defer time.AfterFunc(m.busyTime, func() { close(late) }).Stop()
	var free []*session
	var which []int
	var others sync.WaitGroup
	defer others.Wait()
	for i, one := range sessions {
		s := one.(*session)
		select {
		case s.calls <- struct{}{}:
			free, which = append(free, s), append(which, i)
		case <-late:
			others.Go(func() {
				s.begin()
				guarded([]*session{s}, []int{i})
			})
		}
	}
	if len(free) > 0 {
		guarded(free, which)
	}
}

// learn waits for what a supervisor may have to report: it has been silent for a while. Its answer
// follows the report of a lapse, and supervised replaces one that does not answer.
func (m *Mechanism) learn() {
	if g := m.guard.Load(); g != nil && !g.fresh() {
		_ = g.ask(order{})
	}
}

// suspend calls done for each session that it has suspended. It needs their calls.
func (m *Mechanism) suspend(ctx context.Context, all []*session, done func()) []error {
	errs := make([]error, len(all))
	var ready []*session
	for i, s := range all {
		s.catchUp()
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
			s.suspended, s.ran = true, mechanism.NotRunning
			if done != nil {
				done()
			}
		}
		select {
		case s.soon <- struct{}{}:
		default:
		}
	}
	return errs
}

// several calls do for several sessions at once, and reports whether that succeeded. It needs their
// calls.
func (m *Mechanism) several(all []*session, do func([]*session) error) bool {
	if len(all) < 2 || m.single.Load() {
		return false
	}
	err := do(all)
	if err != nil {
		m.cfg.Log.Info("one call for the channels of several processes failed; each process gets a call of its own", log.Err(err))
		m.single.Store(errors.Is(err, nvrm.NotPermitted))
	}
	return err == nil
}

// disable disables every channel of sessions that is known, or found after at most gap handles without
// an object. After an error some may be disabled. It needs their calls.
func (m *Mechanism) disable(all []*session, gap int) error {
	for _, s := range all {
		if s.catchUp() || s.unsure {
			return errUnsure
		}
	}
	g, err := m.supervised()
	if err != nil {
		return err
	}
	var groups []nvrm.Group
	armed := make([][]nvrm.Channel, len(all))
	for i, s := range all {
		if err := s.look(func() error { return s.view.Quick(gap) }); err != nil {
			return err
		}
		if err := s.arm(g); err != nil {
			return err
		}
		armed[i] = s.armed
		added := slices.DeleteFunc(slices.Clone(s.armed), func(c nvrm.Channel) bool { return slices.ContainsFunc(s.disabled, c.Is) })
		if len(added) > 0 {
			groups = append(groups, nvrm.Group{Process: s.process, Channels: added})
		}
	}
	err = nvrm.Set(groups, true)
	if err == nil && m.closed.Load() { // the supervisor has ended meanwhile
		err = errClosed
	}
	for i, s := range all {
		s.disabled, s.unsure = armed[i], err != nil
	}
	return err
}

var errUnsure = errors.New("which channels of a process are disabled is not known")

// resume resumes sessions. It needs their calls.
func (m *Mechanism) resume(all []*session) []error {
	errs := make([]error, len(all))
	if m.several(all, m.enable) {
		return errs
	}
	for i, s := range all {
		errs[i] = s.resume()
	}
	return errs
}

// enable enables every channel of sessions. It needs their calls.
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
