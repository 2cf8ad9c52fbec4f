package nvchannels

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// session is a process whose channels may be disabled. It implements mechanism.Session.
type session struct {
	m       *Mechanism
	target  gpreempt.ProcessKey
	process nvrm.Process
	mechanism.Notifier
	// soon asks watch for an examination, and alarm to catch up with the supervisor.
	soon, alarm chan struct{}
	ended       chan struct{} // closed when the session is
	// known is what other sessions may know of it.
	known atomic.Pointer[known]

	// calls holds a value during the calls of the driver and of the supervisor for this process, which
	// are made one at a time. Who has put it there may use what follows.
	calls chan struct{}
	view  *nvrm.View
	// guard is the supervisor that has armed, nil for none, and lapses the number of its lapses that
	// are taken in.
	guard  *guard
	lapses int64
	// looked is the time of the last examination, and full of the last one by a scan.
	looked, full time.Time
	total        int // number of channels, for changed
	// armed are the channels that the supervisor would enable.
	armed []nvrm.Channel
	// disabled are the channels that are disabled, each once, because the driver counts. unsure is
	// set while other channels of armed may be disabled too, or some of these may be enabled.
	disabled []nvrm.Channel
	unsure   bool
	// suspended is set from a successful Suspend to the next Resume.
	suspended bool
	// ran is why a suspended process runs again, and lost why it can no longer be suspended.
	ran             mechanism.Running
	changed, closed bool
	lost            error
}

var _ mechanism.Session = (*session)(nil)

// known are the clients and channels of a process, by its last examination.
type known struct {
	clients  []nvrm.Handle
	channels []nvrm.Channel
}

func (s *session) begin() { s.calls <- struct{}{} }
func (s *session) end()   { <-s.calls }

// look examines the process.
func (s *session) look(examine func() error) error {
	defer s.publish()
	return examine()
}

func (s *session) publish() {
	channels, _ := s.view.Channels()
	s.known.Store(&known{slices.Clone(s.view.Clients()), slices.Clone(channels)})
}

// catchUp resumes the process if its supervisor has ended, because nothing would do so at the daemon's
// death, or has resumed it. It reports whether the process was resumed.
func (s *session) catchUp() bool {
	g := s.guard
	if g == nil || s.m.closed.Load() {
		return false
	}
	lapses := g.lapses.Load()
	switch {
	case g.HasClosed():
		s.guard, s.armed = nil, nil
	case lapses != s.lapses:
		s.lapses = lapses
	default:
		return false
	}
	return s.runAgain()
}

// watch examines the process periodically.
func (s *session) watch() {
	tick := time.NewTimer(idleEvery)
	defer tick.Stop()
	due := time.Now().Add(idleEvery)
	for {
		act := s.catchUp
		select {
		case <-s.m.stop:
			return
		case <-s.ended:
			return
		case <-s.soon:
			if next := time.Now().Add(soon); next.Before(due) {
				due = next
				tick.Reset(soon)
			}
			continue
		case <-s.alarm:
		case <-tick.C:
			act = nil
		}
		select {
		case <-s.m.stop:
			return
		case s.calls <- struct{}{}:
		}
		if act != nil {
			act()
			s.end()
			continue
		}
		every := idleEvery
		if s.suspended {
			every = PollEvery
		}
		s.examine()
		s.end()
		due = time.Now().Add(every)
		tick.Reset(every)
	}
}

var errClosed = errors.New("the mechanism, or the session with the process, has been closed")

// channels returns the channels to disable.
func (s *session) channels() ([]nvrm.Channel, error) {
	all, unknown := s.view.Channels()
	if len(all) != s.total {
		s.total, s.changed = len(all), true
		s.Notify()
	}
	if unknown > 0 {
		return nil, fmt.Errorf("process %d: the GPUs of %d channels are not known", s.target.PID, unknown)
	}
	chosen := make([]nvrm.Channel, 0, len(all))
	for _, c := range all {
		if c.Compute && s.owns(c.Client) {
			chosen = append(chosen, c)
		}
	}
	return chosen, nil
}

// owns reports whether a client belongs to this process. After a fork several processes have its
// file, and it belongs to the oldest.
func (s *session) owns(client nvrm.Handle) bool {
	if owner := s.m.cfg.Owner(client); !owner.IsZero() {
		return owner == s.target
	}
	return !slices.ContainsFunc(s.m.sessions.All(), func(o *session) bool {
		return nvrm.Older(o.target, s.target) && slices.Contains(o.known.Load().clients, client)
	})
}

// restore enables channels, and after a failure all channels of the process.
func (s *session) restore(known []nvrm.Channel) error {
	return restore(s.m.cfg.Sys, s.process, known, s.owns)
}

// arm sends a supervisor the channels before any of them is disabled. Disabled channels stay in its
// list even if they are no longer found.
func (s *session) arm(g *guard) error {
	if s.guard != nil && s.guard != g { // it has ended meanwhile
		return errUnsure
	}
	all, err := s.channels()
	if err != nil {
		return err
	}
	for _, c := range s.disabled {
		if !slices.ContainsFunc(all, c.Is) {
			all = append(all, c)
		}
	}
	if s.armed != nil && slices.Equal(all, s.armed) {
		return nil
	}
	lapses := g.lapses.Load()
	if err := g.arm(s.target, all); err != nil {
		return err
	}
	if s.guard == nil {
		s.guard, s.lapses = g, lapses
	}
	s.armed = all
	return nil
}

// ready reports why the process cannot be suspended.
func (s *session) ready(ctx context.Context) error {
	switch {
	case s.closed:
		return errClosed
	case s.lost != nil:
		return s.lost
	case ctx.Err() != nil:
		return s.failure(context.Cause(ctx))
	}
	return nil
}

// disableAlone disables every channel of this process.
func (s *session) disableAlone() error {
	var err error
	for try := range 2 {
		err = nil
		if s.unsure {
			err = s.enable()
		}
		if err == nil && try > 0 { // the list may have changed, for example because a channel was freed
			err = s.scan()
		}
		if err == nil {
			err = s.m.disable([]*session{s}, hotGap)
		}
		if err == nil || hardware(err) != nil {
			break
		}
	}
	if err != nil {
		return s.failure(err)
	}
	return nil
}

// hardware returns the error of a GPU that has failed.
func hardware(err error) *nvrm.SetError {
	var status nvrm.Status
	if set, ok := errors.AsType[*nvrm.SetError](err); ok && errors.As(set, &status) && status.Hardware() {
		return set
	}
	return nil
}

// enable enables every channel.
func (s *session) enable() error {
	known := s.disabled // after a failed call, all channels of that call
	if len(known) > 0 {
		if err := s.restore(known); err != nil {
			s.unsure = true
			return err
		}
	}
	s.disabled, s.unsure, s.suspended = nil, false, false
	return nil
}

// failure enables every channel, and returns the error of an action.
func (s *session) failure(err error) error {
	undo := s.enable()
	if s.process.Exited() || errors.Is(err, mechanism.ErrGone) {
		return fmt.Errorf("process %d: %w", s.target.PID, mechanism.ErrGone)
	}
	if undo != nil {
		err = errors.Join(err, fmt.Errorf("channels may stay disabled until gpreemptd resumes the process or ends: %w", undo))
	}
	if set := hardware(err); set != nil {
		return &mechanism.HardwareError{GPUs: []gpreempt.GPUID{set.GPU}, Err: err}
	}
	return fmt.Errorf("process %d: %w", s.target.PID, err)
}

func (s *session) resume() error {
	if s.closed {
		return errClosed
	}
	if err := s.enable(); err != nil {
		return s.failure(err)
	}
	return nil
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context, done func()) error {
	s.m.learn()
	s.begin()
	defer s.end()
	return s.m.suspend(ctx, []*session{s}, done)[0]
}

// Resume implements mechanism.Session.
func (s *session) Resume(context.Context) error {
	s.begin()
	defer s.end()
	return s.m.resume([]*session{s})[0]
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	s.begin()
	defer s.end()
	if s.closed {
		return nil
	}
	if err := s.enable(); err != nil {
		return s.failure(err)
	}
	s.release()
	s.closed = true
	close(s.ended)
	s.m.sessions.Remove(s.target, s)
	s.process.Close()
	return nil
}

// release makes the supervisor and the journal forget a process that runs or has ended.
func (s *session) release() {
	s.suspended, s.unsure, s.disabled, s.armed = false, false, nil, nil
	if g := s.guard; g != nil && !g.HasClosed() {
		if err := g.arm(s.target, nil); err != nil {
			s.m.cfg.Log.Warn("the supervisor does not forget a process that runs", log.Target(s.target), log.Err(err))
		}
	}
	s.guard = nil
	s.m.pauses.End(s.target)
}

// examine looks for the end of the process and for new channels.
func (s *session) examine() {
	switch {
	case s.closed, s.lost != nil:
		return
	case s.process.Exited():
		s.lose(mechanism.ErrGone)
		return
	case !s.suspended:
		if time.Since(s.looked) < idleEvery {
			return
		}
		s.catchUp()
		look := func() error { return s.look(func() error { return s.view.Quick(gap) }) }
		if s.looked = time.Now(); s.total == 0 || time.Since(s.full) >= idleFullEvery {
			look = s.scan
		}
		if look() != nil {
			return
		}
		if g, err := s.m.supervised(); err == nil {
			_ = s.arm(g) // Suspend reports it
		}
		return
	case s.unsure: // the owner suspends the process again
		return
	}
	if time.Since(s.full) >= fullEvery {
		err := s.scan()
		if err == nil && len(s.disabled) > 0 && len(s.view.Clients()) == 0 && s.enable() == nil {
			s.lose(mechanism.ErrReplaced) // its files are closed: it runs another program, or has stopped using the GPU
			return
		}
	}
	s.looked = time.Now()
	if err := s.m.disable([]*session{s}, gap); err != nil { // the owner suspends the process again, and gets the error
		s.ran = cmp.Or(s.ran, mechanism.NewQueue)
		s.Notify()
	}
}

func (s *session) scan() error {
	s.full = time.Now()
	return s.look(s.view.Scan)
}

// lose records why the process can no longer be suspended. Another process may still have its file
// and channels.
func (s *session) lose(why error) {
	disabled := s.disabled
	for _, o := range s.m.sessions.All() {
		shared := slices.DeleteFunc(slices.Clone(o.known.Load().channels), func(c nvrm.Channel) bool { return !slices.ContainsFunc(disabled, c.Is) })
		if o == s || len(shared) == 0 {
			continue
		}
		select {
		case o.calls <- struct{}{}:
			o.takeOver(shared)
		default:
			s.m.watchers.Go(func() {
				o.begin()
				o.takeOver(shared)
			})
		}
	}
	s.lost = fmt.Errorf("process %d: %w", s.target.PID, why)
	s.release()
	s.Notify()
}

// takeOver enables the channels of a process that has exited and shared a file with this one. It ends
// the use of calls.
func (s *session) takeOver(shared []nvrm.Channel) {
	defer s.end()
	if s.closed {
		return
	}
	if _, err := nvrm.EnableEach(s.process, shared); err != nil {
		s.m.cfg.Log.Warn("a process that shares a file with one that has exited may stay suspended", log.Target(s.target), log.Err(err))
	}
}

// runAgain resumes the process after the supervisor has resumed it or has ended. The owner suspends
// it again. It reports whether there was something to resume.
func (s *session) runAgain() bool {
	if !s.suspended && !s.unsure && len(s.disabled) == 0 {
		return false
	}
	if s.suspended {
		s.ran = mechanism.Lapsed
	}
	if err := s.enable(); err != nil {
		s.m.cfg.Log.Error("a process could not be resumed", log.Target(s.target), log.Err(err))
	}
	s.Notify()
	return true
}

// Handle implements mechanism.Session.
func (s *session) Handle(context.Context) (mechanism.Report, error) {
	s.begin()
	defer s.end()
	r := mechanism.Report{Running: s.ran, Changed: s.changed}
	s.ran, s.changed = mechanism.NotRunning, false
	return r, s.lost
}
