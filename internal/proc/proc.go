// Package proc implements a handle to a running process that another process with the
// same pid cannot take over.
//
// A handle holds the directory /proc/PID open. The kernel ties that directory to one
// process: once the process has ended and was waited for, every file in it fails with
// ESRCH, also when its pid names another process by then. What is read through a
// handle is therefore of one process.
//
// What takes a pid instead of a handle, such as ptrace, process_vm_readv or
// pidfd_open, is made safe by one rule: do it first, then call Check. A process that
// Check finds keeps its pid until its parent waits for it, so it had the pid before.
package proc

import (
	"errors"
	"fmt"
	"io"
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
	dir *os.Root
	// mem is the memory of the program that PinProgram found, nil before. It does not
	// keep that memory alive.
	mem *os.File
}

// Open returns a handle to a process, found in the directory proc below root. A key
// with Start 0 means the process that has the pid now. The caller closes it.
func Open(root string, key gpreempt.ProcessKey) (*Process, error) {
	dir, err := os.OpenRoot(filepath.Join(root, "proc", strconv.Itoa(int(key.PID))))
	if err != nil {
		return nil, wrap(key.PID, err)
	}
	p := &Process{key: key, dir: dir}
	stat, err := p.stat("stat")
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

// wrap names the process, and returns ErrGone for the errors that a file of a process
// that has ended gives.
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
	_ = p.dir.Close()
	if p.mem != nil {
		_ = p.mem.Close()
	}
}

// Check returns nil while any thread of the process can still run.
func (p *Process) Check() error {
	stat, err := p.stat("stat")
	if err == nil && !stat.Alive() {
		err = wrap(p.key.PID, ErrGone)
	}
	return err
}

// Stat reads the stat file, also that of a process that nobody has waited for yet.
func (p *Process) Stat() (discovery.ProcStat, error) { return p.stat("stat") }

// Status reads the status file.
func (p *Process) Status() (discovery.ProcStatus, error) {
	return read(p, "status", discovery.ParseProcStatus)
}

// Cgroup returns the file cgroup; see proc_pid_cgroup(5).
func (p *Process) Cgroup() ([]byte, error) {
	text, err := p.dir.ReadFile("cgroup")
	if err != nil {
		return nil, wrap(p.key.PID, err)
	}
	return text, nil
}

// Exe returns the path of the program as the mount namespace of the process has it. A
// kernel thread has none: the error is ErrGone, too.
func (p *Process) Exe() (string, error) {
	path, err := p.dir.Readlink("exe")
	if err != nil {
		return "", wrap(p.key.PID, err)
	}
	return path, nil
}

// Dir opens a directory of the process, such as fd.
func (p *Process) Dir(name string) (*os.File, error) {
	dir, err := p.dir.Open(name)
	if err != nil {
		return nil, wrap(p.key.PID, err)
	}
	return dir, nil
}

func (p *Process) stat(file string) (discovery.ProcStat, error) {
	return read(p, file, discovery.ParseProcStat)
}

func read[T any](p *Process, file string, parse func([]byte) (T, error)) (T, error) {
	var none T
	text, err := p.dir.ReadFile(file)
	if err != nil {
		return none, wrap(p.key.PID, err)
	}
	parsed, err := parse(text)
	if err != nil {
		return none, fmt.Errorf("%s: %w", filepath.Join(p.dir.Name(), file), err)
	}
	return parsed, nil
}

// Threads returns the stat of each thread that has not been removed yet.
func (p *Process) Threads() ([]discovery.ProcStat, error) {
	tasks, err := fs.ReadDir(p.dir.FS(), "task")
	if err != nil {
		return nil, wrap(p.key.PID, err)
	}
	threads := make([]discovery.ProcStat, 0, len(tasks))
	for _, task := range tasks {
		stat, err := p.stat(filepath.Join("task", task.Name(), "stat"))
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
// possible. The error is ErrGone when every thread is exiting. The driver forgets a process when
// its last thread has released the memory, and each thread is marked as exiting before
// it does that.
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
	if p.mem != nil {
		_ = p.mem.Close()
	}
	p.mem, _ = p.dir.Open("mem")
}

// Replaced reports whether execve has replaced the program that PinProgram found:
// reading the memory of a program that is no more gives nothing (mem_rw), while
// another address gives data or an error.
func (p *Process) Replaced() bool {
	if p.mem == nil {
		return false
	}
	_, err := p.mem.ReadAt(make([]byte, 1), 0)
	return errors.Is(err, io.EOF)
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
