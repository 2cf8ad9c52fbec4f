package nvchannels

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// Argument is the only argument of a program that is to call Main.
const Argument = "nvidia-supervisor"

const (
	// BeatEvery is the longest time between two calls of Beat.
	BeatEvery = 200 * time.Millisecond
	// Silence is how long the daemon may be silent before everything is resumed, which takes less
	// than a second together with the calls.
	Silence = 700 * time.Millisecond
	// again is the time between repetitions while the daemon is silent: a daemon that hangs in a
	// call may disable channels after the first.
	again = 200 * time.Millisecond
	// tries is the number of attempts to enable channels after the daemon's death.
	tries = 50
)

// socketFD is the descriptor by which the supervisor talks to its daemon.
const socketFD = 3

// Main is the program of the supervisor, which outlives the daemon and resumes what the daemon has
// suspended. It returns the exit status.
func Main() int {
	// A terminal and systemd send these to all processes of the daemon. The supervisor ends when
	// the daemon has.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	unix.CloseOnExec(socketFD)
	_ = os.WriteFile("/proc/self/comm", []byte("gpreempt-nvsup"), 0) // only people read the name
	profile, err := nvrm.ReadProfile(os.DirFS("/"))
	if err == nil {
		err = Supervise(socketFD, nvrm.Kernel(), profile, Silence)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "gpreemptd: %s: %v\n", Argument, err)
		return 1
	}
	return 0
}

// guarded is a process with channels that may be disabled.
type guarded struct {
	process  nvrm.Process
	channels []nvrm.Channel
}

// supervisor is the state of the program.
type supervisor struct {
	fd      int
	sys     nvrm.Sys
	profile nvrm.Profile
	armed   map[gpreempt.ProcessKey]guarded
	lapsed  bool
}

// Supervise serves a daemon on a socket until the daemon closes its end, and then resumes everything.
// It also does so after each silence of the daemon.
func Supervise(fd int, sys nvrm.Sys, profile nvrm.Profile, silence time.Duration) error {
	s := &supervisor{fd: fd, sys: sys, profile: profile, armed: map[gpreempt.ProcessKey]guarded{}}
	buf := make([]byte, maxPacket)
	limit := time.Now().Add(silence)
	for {
		ready, err := s.wait(time.Until(limit))
		switch {
		case err != nil:
			return errors.Join(err, s.end())
		case !ready:
			if time.Now().Before(limit) { // a process has ended
				continue
			}
			if len(s.armed) > 0 {
				s.lapsed = true
				_ = s.enable(false) // it is tried again
			}
			limit = time.Now().Add(again)
			continue
		}
		limit = time.Now().Add(silence)
		if err := s.serve(buf); errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return s.end()
		} else if err != nil {
			return errors.Join(err, s.end())
		}
	}
}

// wait waits for a packet, at most for a time. It forgets processes that end meanwhile.
func (s *supervisor) wait(most time.Duration) (ready bool, err error) {
	keys := slices.SortedFunc(maps.Keys(s.armed), gpreempt.ProcessKey.Compare)
	fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
	for _, key := range keys {
		fds = append(fds, unix.PollFd{Fd: int32(s.armed[key].process.FD()), Events: unix.POLLIN})
	}
	_, err = unix.Poll(fds, int(max(most, 0)/time.Millisecond)+1)
	if errors.Is(err, unix.EINTR) {
		return false, nil
	}
	if err != nil {
		return false, os.NewSyscallError("poll", err)
	}
	for i, key := range keys {
		if fds[i+1].Revents != 0 {
			s.forget(key)
		}
	}
	return fds[0].Revents != 0, nil
}

func (s *supervisor) forget(key gpreempt.ProcessKey) {
	if g, known := s.armed[key]; known {
		g.process.Close()
		delete(s.armed, key)
	}
}

// serve receives and answers a packet.
func (s *supervisor) serve(buf []byte) error {
	m, descriptors, err := receive(s.fd, buf)
	if err != nil {
		return err
	}
	if s.lapsed { // before the answer, so that the daemon knows it when it has the answer
		s.lapsed = false
		if err := send(s.fd, message{Kind: kindLapsed}, unix.MSG_DONTWAIT); err != nil {
			return err
		}
	}
	switch m.Kind {
	case kindBeat:
	case kindDisarm:
		s.forget(m.Target)
	case kindArm:
		if len(descriptors) != 1 {
			return fmt.Errorf("%d descriptors for one process", len(descriptors))
		}
		s.forget(m.Target)
		s.armed[m.Target] = guarded{s.sys.Adopt(descriptors[0], m.Target.PID), m.Channels}
	default:
		return fmt.Errorf("unknown message %q", m.Kind)
	}
	return send(s.fd, message{Kind: kindDone, Number: m.Number}, unix.MSG_DONTWAIT)
}

// enable enables every channel that may be disabled, all processes at once. With last it forgets
// the processes that run then, because the next daemon may suspend them.
func (s *supervisor) enable(last bool) error {
	keys := slices.Collect(maps.Keys(s.armed))
	errs := make([]error, len(keys))
	var all sync.WaitGroup
	for i, key := range keys {
		all.Go(func() { errs[i] = restore(s.sys, s.profile, s.armed[key].process, s.armed[key].channels, every) })
	}
	all.Wait()
	for i, key := range keys {
		if last && errs[i] == nil {
			s.forget(key)
		}
	}
	return errors.Join(errs...)
}

// end resumes everything after the daemon has ended.
func (s *supervisor) end() error {
	err := s.enable(true)
	for n := 0; err != nil && n < tries; n++ {
		time.Sleep(again)
		err = s.enable(true)
	}
	for key := range s.armed {
		s.forget(key)
	}
	return err
}
