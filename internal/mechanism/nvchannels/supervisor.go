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

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// Argument is the only argument of a program that is to call Main.
const Argument = "nvidia-supervisor"

const (
	// BeatEvery is the longest time between two calls of Beat.
	BeatEvery = 200 * time.Millisecond
	// silence is how long the daemon may be silent before everything is put on again: with the
	// calls, less than a second.
	silence = 700 * time.Millisecond
	// again is how often that is repeated while the daemon is silent, because a call of a daemon
	// that hangs may take channels off after it.
	again = 200 * time.Millisecond
	// tries is how often channels are tried to be put on after the daemon's death.
	tries = 50
)

// socketFD is the descriptor by which the supervisor talks to its daemon.
const socketFD = 3

// Main is the program of the supervisor: it outlives the daemon, to put on again what that has
// taken off. It returns the exit status.
func Main() int {
	// A terminal and systemd send these to all processes of the daemon. The supervisor ends when
	// the daemon has.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	unix.CloseOnExec(socketFD)
	_ = os.WriteFile("/proc/self/comm", []byte("gpreempt-nvsup"), 0) // for people only
	if err := supervise(socketFD, nvrm.Kernel(), silence); err != nil {
		fmt.Fprintf(os.Stderr, "gpreemptd: %s: %v\n", Argument, err)
		return 1
	}
	return 0
}

// guarded is a process whose channels may be off.
type guarded struct {
	files    map[nvrm.Handle]nvrm.File
	pidfd    int
	channels []nvrm.Channel
}

func (g *guarded) close() {
	nvrm.CloseAll(g.files)
	_ = unix.Close(g.pidfd) // nothing is lost
}

// supervisor is the state of the program.
type supervisor struct {
	fd     int
	sys    nvrm.Sys
	held   map[gpreempt.ProcessKey]*guarded
	lapsed bool
}

// supervise serves a daemon until that closes its end, and puts everything on again then.
func supervise(fd int, sys nvrm.Sys, silence time.Duration) error {
	s := &supervisor{fd: fd, sys: sys, held: map[gpreempt.ProcessKey]*guarded{}}
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
			if len(s.held) > 0 {
				s.lapsed = true
				_ = s.enable() // it is tried again
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

// wait waits for a packet, at most for a time. It forgets processes that end meanwhile: its copies
// would keep their memory on the GPU.
func (s *supervisor) wait(most time.Duration) (ready bool, err error) {
	keys := slices.SortedFunc(maps.Keys(s.held), gpreempt.ProcessKey.Compare)
	fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
	for _, key := range keys {
		fds = append(fds, unix.PollFd{Fd: int32(s.held[key].pidfd), Events: unix.POLLIN})
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
	if g := s.held[key]; g != nil {
		g.close()
		delete(s.held, key)
	}
}

// serve takes a packet.
func (s *supervisor) serve(buf []byte) error {
	m, descriptors, err := receive(s.fd, buf)
	if err != nil {
		return err
	}
	if s.lapsed { // before the answer: the daemon knows then
		s.lapsed = false
		if err := send(s.fd, message{Kind: kindLapsed}, nil, 0); err != nil {
			return err
		}
	}
	switch m.Kind {
	case kindBeat:
		return nil
	case kindRelease:
		s.forget(m.Target)
	case kindHold:
		s.forget(m.Target)
		if len(descriptors) != len(m.Clients)+1 {
			return fmt.Errorf("%d descriptors for %d clients", len(descriptors), len(m.Clients))
		}
		g := &guarded{files: map[nvrm.Handle]nvrm.File{}, pidfd: descriptors[len(m.Clients)], channels: m.Channels}
		for i, client := range m.Clients {
			g.files[client] = s.sys.Adopt(descriptors[i])
		}
		s.held[m.Target] = g
	default:
		return fmt.Errorf("unknown message %q", m.Kind)
	}
	return send(s.fd, message{Kind: kindDone, Number: m.Number}, nil, 0)
}

// enable puts on everything that is held, all processes at once: a GPU that hangs holds up only
// its own.
func (s *supervisor) enable() error {
	var all sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, g := range s.held {
		all.Go(func() {
			if err := nvrm.Set(g.files, g.channels, false); err != nil && !proc.Exited(g.pidfd) {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// end puts everything on again after the daemon has ended.
func (s *supervisor) end() error {
	err := s.enable()
	for n := 0; err != nil && n < tries; n++ {
		time.Sleep(again)
		err = s.enable()
	}
	for key := range s.held {
		s.forget(key)
	}
	return err
}
