package kfdemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"sync"
	"syscall"

	"github.com/gpreempt/gpreempt/emu/seccomp"
	"github.com/gpreempt/gpreempt/emu/tree"
)

// ioctlTypes are the types of ioctl the emulator answers: those of KFD and of DRM.
var ioctlTypes = []byte{'K', 'd'}

// namespace is how programs get to see the tree. Root makes one mount namespace for
// all. Others have each program they start in a user namespace of its own, and it is
// for that one alone: what is to trace or to be traced by it, it has to start itself.
type namespace struct {
	fd    int // -1: there is none for all
	child *syscall.SysProcAttr
}

func (e *Emulator) findNamespace() error {
	fd, err := e.tree.Namespace()
	if err == nil {
		e.namespace.fd = fd
		return nil
	}
	e.namespace.fd = -1
	if !errors.Is(err, tree.ErrPrivilege) {
		return err
	}
	child, childErr := tree.UserNamespace()
	if childErr != nil {
		return errors.Join(err, childErr)
	}
	e.namespace.child = child
	return nil
}

// Command is a program to run on the machine, as exec.CommandContext gives it. What it
// starts itself runs there, too.
func (e *Emulator) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	verb := []string{"exec", "--socket", e.Socket()}
	if e.namespace.child != nil {
		verb = append(verb, "--tree", e.tree.Dir())
	}
	cmd := exec.CommandContext(ctx, e.cfg.Shim, append(append(verb, "--", name), args...)...) //nolint:gosec // G204: the caller says what to run
	cmd.SysProcAttr = e.namespace.child
	return cmd
}

// Exec makes the calling process a program on the machine that has a socket. It is what
// Config.Shim does for its verb "exec"; treeDir is its flag --tree. It returns only if
// that fails.
func Exec(socket, treeDir, program string, args, env []string) error {
	path, err := exec.LookPath(program)
	if err != nil {
		return err
	}
	// The thread that gets the filter is the one that becomes the program.
	runtime.LockOSThread()
	if treeDir != "" {
		if err := tree.Enter(treeDir); err != nil {
			return err
		}
	}
	filter, err := seccomp.Filter(runtime.GOARCH, ioctlTypes...)
	if err != nil {
		return err
	}
	// With ErrAlready it is on the machine, because who started it is.
	if err := seccomp.Enter(socket, filter); err != nil && !errors.Is(err, seccomp.ErrAlready) {
		return err
	}
	if treeDir != "" {
		if err := tree.DropPrivileges(); err != nil {
			return err
		}
	}
	if err := syscall.Exec(path, args, env); err != nil { //nolint:gosec // G204: the caller says what to run
		return fmt.Errorf("run %s: %w", path, err)
	}
	return nil
}

// accept takes the calls of a program that joined, and gives it its mount namespace.
func (e *Emulator) accept(_ seccomp.Peer, listener int) (mounts int, err error) {
	e.listeners.add(seccomp.NewListener(listener, e.call, blocks))
	return e.namespace.fd, nil
}

// joinFailed hears of a program that did not join. One that was killed meanwhile is no
// trouble.
func (e *Emulator) joinFailed(err error) {
	if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		e.trouble("let a program join", err)
	}
}

// AwaitUnused waits until no program is on the machine any more.
func (e *Emulator) AwaitUnused() error { return e.listeners.await() }

// listeners are those of the programs that joined.
type listeners struct {
	mu  sync.Mutex
	all []*seccomp.Listener
}

func (s *listeners) add(l *seccomp.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, l)
}

// take returns them all, and has none.
func (s *listeners) take() []*seccomp.Listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := s.all
	s.all = nil
	return all
}

func (s *listeners) await() error { return s.each((*seccomp.Listener).Wait) }

func (s *listeners) close() error { return s.each((*seccomp.Listener).Close) }

func (s *listeners) each(end func(*seccomp.Listener) error) error {
	var errs []error
	for all := s.take(); len(all) > 0; all = s.take() {
		for _, l := range all {
			errs = append(errs, end(l))
		}
	}
	return errors.Join(errs...)
}

// Here calls f on a thread of this process that is on the machine, and returns when f
// has. It is for tests and measurements: files of /sys are the host's, the thread's calls
// are answered by the other threads, and f must not be left waiting when the machine is
// closed.
func (e *Emulator) Here(f func()) error {
	filter, err := seccomp.Filter(runtime.GOARCH, ioctlTypes...)
	if err != nil {
		return err
	}
	var listener *seccomp.Listener
	seccomp.OwnThread(func() {
		if listener, err = seccomp.Thread(filter, e.call, blocks); err == nil {
			f()
		}
	})
	if err != nil {
		return err
	}
	return listener.Wait()
}
