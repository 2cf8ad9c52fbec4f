// Package proc implements a handle to a running process that another process with the
// same pid cannot take over, and a ptrace tracer.
//
// A handle holds the directory /proc/PID open. The kernel ties that directory to one
// process: once the process has ended and was waited for, every file in it fails with
// ESRCH, also when its pid names another process by then. What is read through a
// handle is therefore of one process.
//
// What takes a pid instead of a handle, such as ptrace, process_vm_readv or
// pidfd_open, is made safe by one rule: do it first, then call Check. A process that
// Check finds keeps its pid until its parent waits for it, so it had the pid before.
//
// # Tracing
//
// Trace returns a ptrace tracer that a running program does not notice.
//
// KFD answers debug requests only to the OS thread that traces the target's main
// thread, so each target gets a thread of its own. The thread attaches, runs the
// closures that make those requests, and meanwhile forwards each signal, stop and exit
// of the target. It sets no ptrace options: nothing dies with the tracer, and the
// children and the other threads of the target are not traced.
//
// Two effects remain visible to a target. A system call ends early with EINTR where an
// ignored signal would not have interrupted it (epoll_wait, for one). And a signal to
// its main thread arrives some tens of microseconds later, or at the end of the closure
// that runs when the signal is sent.
//
// The main thread of a process never exits, and a thread that stays keeps what it
// traces. Trace therefore never uses it; a program that pins its main goroutine to it
// in an init function, as the daemon does, avoids a detour.
package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ErrGone reports that the process has ended, or that its pid names another process:
// an event, not a failure.
var ErrGone = errors.New("the process has exited")

// Process is a handle to one process. Its methods may be called from any goroutine
// until Close. Errors match ErrGone when the process has ended.
type Process struct {
	key gpreempt.ProcessKey
	// path is the path of the directory, and dir its descriptor.
	path string
	dir  int
	// mem is the memory of the program that PinProgram found, which it does not keep
	// alive; pidfd is that of OpenWithPidfd. -1 without them.
	mem, pidfd int
}

// Open returns a handle to a process, found in the directory proc below root. A key
// with Start 0 means the process that has the pid now. The caller closes it.
func Open(root string, key gpreempt.ProcessKey) (*Process, error) {
	path := filepath.Join(root, "proc", strconv.Itoa(int(key.PID)))
	dir, err := openat(unix.AT_FDCWD, path, unix.O_DIRECTORY)
	if err != nil {
		return nil, wrap(key.PID, err)
	}
	p := &Process{key: key, path: path, dir: dir, mem: -1, pidfd: -1}
	stat, err := p.Stat()
	switch {
	case err != nil:
	case !stat.Alive(), key.Start != 0 && stat.Start != key.Start:
		err = wrap(key.PID, ErrGone)
	default:
		p.key.Start = stat.Start
		return p, nil
	}
	p.Close()
	return nil, err
}

// Check returns ErrGone when the process that key names has ended. It is Open for a
// caller that needs no handle.
func Check(root string, key gpreempt.ProcessKey) error {
	p, err := Open(root, key)
	if err == nil {
		p.Close()
	}
	return err
}

// wrap names the process, and replaces the errors of the files of a process that has
// ended by ErrGone.
func wrap(pid int32, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = ErrGone
	}
	return fmt.Errorf("process %d: %w", pid, err)
}

// Key returns the pid and the start time.
func (p *Process) Key() gpreempt.ProcessKey { return p.key }

// Close releases the handle. Nothing is lost: its files were only read.
func (p *Process) Close() {
	for _, fd := range []int{p.dir, p.mem, p.pidfd} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// Check returns nil while any thread of the process can still run.
func (p *Process) Check() error {
	stat, err := p.Stat()
	if err == nil && !stat.Alive() {
		err = wrap(p.key.PID, ErrGone)
	}
	return err
}

// Stat reads the stat file, also that of a process that nobody has waited for yet.
func (p *Process) Stat() (discovery.ProcStat, error) {
	return parse(p, "stat", discovery.ParseProcStat)
}

// Status reads the status file.
func (p *Process) Status() (discovery.ProcStatus, error) {
	return parse(p, "status", discovery.ParseProcStatus)
}

// Nested reports whether the process is in a pid namespace below that of /proc. A process
// never changes its own.
func (p *Process) Nested() (bool, error) {
	ids, err := parse(p, "status", discovery.ParseProcStatus)
	return len(ids.NamespacePIDs) > 0, err
}

// PIDNamespace returns a name of the pid namespace of the process: two processes have the
// same name if they are in the same one. It needs the right to trace the process.
func (p *Process) PIDNamespace() (string, error) { return p.readlink("ns/pid") }

// Cgroup returns the file cgroup; see cgroups(7).
func (p *Process) Cgroup() ([]byte, error) { return p.read("cgroup") }

// Exe returns the path of the program as the mount namespace of the process has it. A
// kernel thread has none: the error is ErrGone, too.
func (p *Process) Exe() (string, error) { return p.readlink("exe") }

func (p *Process) readlink(file string) (string, error) {
	path := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(p.dir, file, path)
	if err != nil {
		return "", p.failed("readlink", file, err)
	}
	return string(path[:n]), nil
}

// Dir opens a directory of the process, such as fd. The caller closes it.
func (p *Process) Dir(name string) (*os.File, error) {
	fd, err := openat(p.dir, name, unix.O_DIRECTORY)
	if err != nil {
		return nil, p.failed("open", name, err)
	}
	return os.NewFile(uintptr(fd), filepath.Join(p.path, name)), nil
}

// Threads returns the stat of each thread that has not been removed yet.
func (p *Process) Threads() ([]discovery.ProcStat, error) {
	dir, err := p.Dir("task")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	tasks, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, wrap(p.key.PID, err)
	}
	threads := make([]discovery.ProcStat, 0, len(tasks))
	for _, task := range tasks {
		stat, err := parse(p, filepath.Join("task", task, "stat"), discovery.ParseProcStat)
		if errors.Is(err, ErrGone) {
			continue // the thread ended
		} else if err != nil {
			return nil, err
		}
		threads = append(threads, stat)
	}
	return threads, nil
}

// LiveThread returns the id of a thread that is not exiting: the main thread if
// possible. The error is ErrGone when every thread is exiting. The driver forgets a
// process when its last thread has released the memory, and each thread is marked as
// exiting before it does that.
func (p *Process) LiveThread() (tid int32, err error) {
	stat, err := p.Stat()
	switch {
	case err != nil:
		return 0, err
	case !stat.Alive():
		return 0, wrap(p.key.PID, ErrGone)
	case !exiting(stat):
		return stat.PID, nil
	}
	threads, err := p.Threads()
	if err != nil {
		return 0, err
	}
	for _, thread := range threads {
		if !exiting(thread) {
			return thread.PID, nil
		}
	}
	return 0, wrap(p.key.PID, ErrGone)
}

// exiting reports whether a thread has ended or has begun to end.
func exiting(stat discovery.ProcStat) bool {
	return stat.MainEnded() || stat.Flags&discovery.FlagExiting != 0
}

// PinProgram makes Replaced compare with the program that runs now. It needs the right
// to trace the process; without it Replaced always returns false. It is called before
// other goroutines have the handle.
func (p *Process) PinProgram() {
	if p.mem >= 0 {
		_ = unix.Close(p.mem)
	}
	var err error
	if p.mem, err = openat(p.dir, "mem", 0); err != nil {
		p.mem = -1
	}
}

// Replaced reports whether execve has replaced the program that PinProgram found:
// reading the memory of a program that has ended returns 0 bytes (mem_rw), while
// otherwise address 0 gives data or an error.
func (p *Process) Replaced() bool {
	if p.mem < 0 {
		return false
	}
	n, err := unix.Pread(p.mem, make([]byte, 1), 0)
	return n == 0 && err == nil
}

func parse[T any](p *Process, file string, parse func([]byte) (T, error)) (T, error) {
	var none T
	text, err := p.read(file)
	if err != nil {
		return none, err
	}
	parsed, err := parse(text)
	if err != nil {
		return none, fmt.Errorf("%s: %w", filepath.Join(p.path, file), err)
	}
	return parsed, nil
}

// read returns the content of a file.
func (p *Process) read(file string) ([]byte, error) {
	fd, err := openat(p.dir, file, 0)
	if err != nil {
		return nil, p.failed("open", file, err)
	}
	defer unix.Close(fd)
	text := make([]byte, 0, 4096)
	for {
		n, err := retry(func() (int, error) { return unix.Read(fd, text[len(text):cap(text)]) })
		switch {
		case err != nil:
			return nil, p.failed("read", file, err)
		case n == 0:
			return text, nil
		}
		if text = text[:len(text)+n]; len(text) == cap(text) {
			text = append(make([]byte, 0, 2*cap(text)), text...)
		}
	}
}

func (p *Process) failed(op, file string, err error) error {
	return wrap(p.key.PID, &fs.PathError{Op: op, Path: filepath.Join(p.path, file), Err: err})
}

func openat(dir int, path string, flags int) (int, error) {
	return retry(func() (int, error) { return unix.Openat(dir, path, unix.O_RDONLY|unix.O_CLOEXEC|flags, 0) })
}

// retry repeats a system call that a signal interrupted.
func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// Status reads the status file of what has a name in the directory proc below root: a
// pid, the id of a thread, "self" or "thread-self". There is no proof that it is the
// process that the caller means.
func Status(root, name string) (discovery.ProcStatus, error) {
	path := filepath.Join(root, "proc", name, "status")
	text, err := os.ReadFile(path)
	if err != nil {
		return discovery.ProcStatus{}, err
	}
	status, err := discovery.ParseProcStatus(text)
	if err != nil {
		return discovery.ProcStatus{}, fmt.Errorf("%s: %w", path, err)
	}
	return status, nil
}
