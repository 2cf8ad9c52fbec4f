package kfdemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"

	"github.com/gpreempt/gpreempt/emu/seccomp"
)

// ioctlTypes are the types of ioctl the emulator answers: those of KFD, of its extension and of DRM.
var ioctlTypes = []byte{'K', kmapType, 'd'}

// kmapType is KFD_KMAP_IOC_MAGIC.
const kmapType = 0xEB

// treeLink is the name of the tree beside the machine's socket.
const treeLink = "tree"

// showTree makes the tree visible to programs, each of which enters it. Without privilege
// each has a user namespace of its own: a program that traces it, or that it traces, must
// be started by it.
func (e *Emulator) showTree() (err error) {
	if err := errors.Join(e.tree.Merge(), os.Symlink(e.tree.Dir(), filepath.Join(e.dir, treeLink))); err != nil {
		return err
	}
	if !e.host.privileged {
		e.child, err = UserNamespace()
	}
	return err
}

// Command returns a program to run on the machine, as exec.CommandContext does. Its
// children run there, too.
func (e *Emulator) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, e.cfg.Shim, append([]string{"exec", "--socket", e.Socket(), "--", name}, args...)...) //nolint:gosec // G204: the caller names the program
	cmd.SysProcAttr = e.child
	return cmd
}

// Exec replaces the calling process by a program on the machine with that socket. It is the
// verb "exec" of Config.Shim. It returns only on an error.
func Exec(socket, program string, args, env []string) error {
	path, err := exec.LookPath(program)
	if err != nil {
		return err
	}
	// The thread with the filter executes the program.
	runtime.LockOSThread()
	_, err = os.Stat("/" + emulatedFile)
	outside := err != nil
	if outside {
		if err := Enter(filepath.Join(filepath.Dir(socket), treeLink)); err != nil {
			return err
		}
	}
	// With ErrAlready it is on the machine, because its parent is.
	if err := seccomp.Enter(socket, seccomp.FilterWithUnmaps(ioctlTypes...)); err != nil && !errors.Is(err, seccomp.ErrAlready) {
		return err
	}
	if outside && os.Geteuid() != 0 {
		if err := DropPrivileges(); err != nil {
			return err
		}
	}
	if err := syscall.Exec(path, args, env); err != nil { //nolint:gosec // G204: the caller names the program
		return fmt.Errorf("run %s: %w", path, err)
	}
	return nil
}

// accept serves the calls of a program that joined.
func (e *Emulator) accept(listener int) error {
	e.listeners.add(seccomp.NewListener(listener, e.call))
	return nil
}

// joinFailed is called when a program did not join. That it was killed meanwhile is not
// reported.
func (e *Emulator) joinFailed(err error) {
	if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		e.trouble("let a program join", err)
	}
}

// AwaitUnused waits until the last program on the machine has ended.
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

// take returns all listeners and removes them.
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
