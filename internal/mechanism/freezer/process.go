package freezer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
)

// stop is the pause of a single process, by SIGSTOP.
type stop struct{ *proc.Process }

func (s stop) begun() (bool, error) {
	stat, err := s.Stat()
	if err != nil {
		return false, err
	}
	if stat.State == 't' {
		return false, fmt.Errorf("process %v is stopped by its debugger: end that", s.Key())
	}
	return stat.State == 'T', nil
}

func (s stop) begin(ctx context.Context) error {
	if err := s.Signal(unix.SIGSTOP); err != nil {
		return err
	}
	err := await(ctx, func() (string, error) { return runningThread(s.Process) })
	if status, unknown := s.Status(); err != nil && unknown == nil && status.Tracer != 0 {
		return fmt.Errorf("%w: thread %d: %w", mechanism.ErrTraced, status.Tracer, err)
	}
	return err
}

func (s stop) runs() (bool, error) {
	thread, err := runningThread(s.Process)
	return thread != "", err
}

// undo resumes a stopped process, and cancels a SIGSTOP that is pending.
func (s stop) undo() error                 { return s.Signal(unix.SIGCONT) }
func (stop) entry() mechanism.JournalEntry { return mechanism.JournalEntry{} }
func (stop) close()                        {} // the session closes the process

// How often what is stopping is polled: the kernel notifies only the parent of a process when its
// last thread has stopped.
const (
	firstPoll = 50 * time.Microsecond
	lastPoll  = 5 * time.Millisecond
)

// await returns when running describes nothing any more.
func await(ctx context.Context, running func() (string, error)) error {
	deadline := time.Now().Add(stopTimeout)
	wait := firstPoll
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		what, err := running()
		switch {
		case err != nil || what == "":
			return err
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !time.Now().Before(deadline):
			return fmt.Errorf("it did not stop within %v: %s", stopTimeout, what)
		}
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		wait = min(2*wait, lastPoll)
		timer.Reset(wait)
	}
}

// runningThread describes a thread that runs, "" for none.
func runningThread(p *proc.Process) (string, error) {
	threads, err := p.Threads()
	if err != nil {
		return "", err
	}
	for _, thread := range threads {
		if !slices.Contains([]byte(restStates), thread.State) {
			return fmt.Sprintf("thread %d is in state %c", thread.PID, thread.State), nil
		}
	}
	// A thread that has stopped since may have started another one before.
	stat, err := p.Stat()
	if err == nil && stat.Threads > len(threads) {
		return "a thread has just begun", nil
	}
	return "", err
}

// restStates are the states in which a thread of a process that was sent a SIGSTOP
// runs nothing of the program: stopped, stopped by a tracer, ended, and deep in the
// kernel, from where it does not return before it has stopped.
const restStates = "TtZXxD"

// unstoppable returns why a process must never be stopped, nil for most processes.
func unstoppable(pid int32) error {
	switch pid {
	case int32(os.Getpid()):
		return errors.New("it is this program itself")
	case 1:
		return errors.New("it is the init process")
	}
	return nil
}
