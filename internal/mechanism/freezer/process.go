package freezer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/journal"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// process is a process held by a descriptor, so that no signal reaches another one
// that has its pid later.
type process struct {
	root string
	key  gpreempt.ProcessKey
	fd   int
}

// openProcess returns mechanism.ErrGone when the process has exited.
func openProcess(root string, key gpreempt.ProcessKey) (*process, error) {
	fd, err := unix.PidfdOpen(int(key.PID), 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, mechanism.ErrGone
	} else if err != nil {
		return nil, fmt.Errorf("process %v: %w", key, os.NewSyscallError("pidfd_open", err))
	}
	p := &process{root, key, fd}
	// The descriptor may be that of another process with the pid. If it is not now, it
	// never will be.
	if stat, err := p.stat(); err != nil || stat.Start != key.Start || !stat.Alive() {
		return nil, errors.Join(goneOr(err), p.close())
	}
	return p, nil
}

// goneOr returns the error of reading about a process, ErrGone for none and for one
// that says that there is no such process.
func goneOr(err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return mechanism.ErrGone
	}
	return err
}

func (p *process) close() error { return os.NewSyscallError("close", unix.Close(p.fd)) }

func (p *process) stat() (discovery.ProcStat, error) { return readStat(p.root, p.key.PID, "stat") }

func readStat(root string, pid int32, file string) (discovery.ProcStat, error) {
	path := procPath(root, pid, file)
	text, err := os.ReadFile(path)
	if err != nil {
		return discovery.ProcStat{}, err
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		return discovery.ProcStat{}, fmt.Errorf("%s: %w", path, err)
	}
	return stat, nil
}

func procPath(root string, pid int32, file string) string {
	return filepath.Join(root, "proc", strconv.Itoa(int(pid)), file)
}

// exited reports whether the process has exited: its descriptor is readable then
// (pidfd_poll).
func (p *process) exited() bool {
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

func (p *process) signal(number unix.Signal) error {
	err := unix.PidfdSendSignal(p.fd, number, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return mechanism.ErrGone
	} else if err != nil {
		return fmt.Errorf("send %s to process %v: %w", unix.SignalName(number), p.key, os.NewSyscallError("pidfd_send_signal", err))
	}
	return nil
}

// cont lets a stopped process run, and takes back a stop that is on its way.
func (p *process) cont() error { return p.signal(unix.SIGCONT) }

// stop is the pause of a single process, by SIGSTOP.
type stop struct{ session *session }

func (s *stop) begun() (bool, error) {
	stat, err := s.session.process.stat()
	if err != nil {
		return false, goneOr(err)
	}
	if stat.State == 't' {
		return false, fmt.Errorf("process %v is stopped by its debugger: end that", s.session.target)
	}
	return stat.State == 'T', nil
}

func (s *stop) begin(ctx context.Context) error {
	if err := s.session.process.signal(unix.SIGSTOP); err != nil {
		return err
	}
	return s.session.process.awaitStop(ctx)
}

func (s *stop) undo() error          { return s.session.process.cont() }
func (s *stop) entry() journal.Entry { return journal.Entry{} }
func (s *stop) close() error         { return nil }

// How often a process that is being stopped is looked at: nobody but its parent is
// told when its last thread has stopped.
const (
	firstLook = 50 * time.Microsecond
	lastLook  = 5 * time.Millisecond
)

// awaitStop returns when no thread runs the program any more.
func (p *process) awaitStop(ctx context.Context) error {
	deadline := time.Now().Add(patience)
	wait := firstLook
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		running, err := p.running()
		if err != nil || running == "" {
			return err
		}
		if !time.Now().Before(deadline) {
			return fmt.Errorf("process %v did not stop within %v: %s", p.key, patience, running)
		}
		select {
		case <-timer.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		wait = min(2*wait, lastLook)
		timer.Reset(wait)
	}
}

// running names a thread that still runs, "" when none does. It gives ErrGone when
// the process has exited.
func (p *process) running() (string, error) {
	threads, err := os.ReadDir(procPath(p.root, p.key.PID, "task"))
	if err != nil {
		return "", goneOr(err)
	}
	for _, thread := range threads {
		stat, err := readStat(p.root, p.key.PID, filepath.Join("task", thread.Name(), "stat"))
		if err != nil {
			if errors.Is(goneOr(err), mechanism.ErrGone) {
				continue // the thread has ended
			}
			return "", err
		}
		if !slices.Contains([]byte(restStates), stat.State) {
			return fmt.Sprintf("thread %s is in state %c", thread.Name(), stat.State), nil
		}
	}
	// A thread that stopped after the list was read may have begun another before.
	stat, err := p.stat()
	if err != nil {
		return "", goneOr(err)
	}
	if stat.Threads > len(threads) {
		return "a thread has just begun", nil
	}
	return "", nil
}

// restStates are the states in which a thread of a process that was sent a SIGSTOP
// runs nothing of the program: stopped, stopped by a tracer, ended, and deep in the
// kernel, from where it does not return before it has stopped.
const restStates = "TtZXxD"
