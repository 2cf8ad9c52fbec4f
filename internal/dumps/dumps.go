// Package dumps reads the driver's files in debugfs, in processes of their own: the driver may not return
// from a read for any time, and nothing ends the reader then.
package dumps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

// Argument is the only argument of a program that is to call Main.
const Argument = "debugfs-reader"

// limit is how long a read may take before its process is abandoned. The driver takes 9 s for a GPU
// that does not answer.
const limit = 10 * time.Second

// answer is the content of a file, or the errno, or what else went wrong.
type answer struct {
	Text  []byte
	Errno syscall.Errno
	Error string
}

// Reader starts a process for each read, and keeps none: reads are rare. Its methods may be called by
// several goroutines.
type Reader struct {
	root  fs.FS
	limit time.Duration
	// owns reports whether a process is a helper of the daemon.
	owns  func(pid int32) bool
	start func() (*child.Process[string, answer], error)

	mu sync.Mutex // guards what follows
	// hangs are the processes that have not returned, by the file that they read.
	hangs map[string]*child.Process[string, answer]
}

// New returns a reader of the files of this host. owns reports whether a process is a helper of the daemon.
func New(owns func(pid int32) bool, logger *zap.Logger) *Reader {
	return newReader(os.DirFS("/"), owns, func() (*child.Process[string, answer], error) {
		socket, cmd, err := child.Start(Argument, nil)
		if err != nil {
			return nil, fmt.Errorf("start a helper process: %w", err)
		}
		return child.Started[string](socket, cmd, func(answer) {}, logger), nil
	})
}

func newReader(root fs.FS, owns func(int32) bool, start func() (*child.Process[string, answer], error)) *Reader {
	return &Reader{root: root, limit: limit, owns: owns, start: start, hangs: map[string]*child.Process[string, answer]{}}
}

// Read reads a file of debugfs. The error is a *inventory.BusyError if a process may make the driver wait,
// and inventory.ErrHangs while a process has not come back from the driver: then it starts no other one.
func (r *Reader) Read(path string) ([]byte, error) {
	r.mu.Lock()
	hung := r.hangs[path]
	r.mu.Unlock()
	if hung != nil && !hung.HasEnded() {
		return nil, r.hang(path, hung)
	}
	if path == debugfs.MQDs {
		if pid, ours := r.holder(); pid != 0 {
			return nil, &inventory.BusyError{PID: pid, Ours: ours}
		}
	}
	p, err := r.start()
	if err != nil {
		return nil, err
	}
	first := true
	a, err := p.Call(path, func() time.Duration {
		if !first {
			return 0
		}
		first = false
		return r.limit
	})
	p.Kill()
	switch {
	case errors.Is(err, child.ErrLate):
		r.mu.Lock()
		r.hangs[path] = p
		r.mu.Unlock()
		return nil, r.hang(path, p)
	case err != nil:
		return nil, fmt.Errorf("read /%s: its helper process: %w", path, err)
	}
	switch {
	case a.Errno != 0:
		return nil, fmt.Errorf("read /%s: %w", path, a.Errno)
	case a.Error != "":
		return nil, errors.New(a.Error)
	}
	return a.Text, nil
}

// hang returns the error about a process that does not come back.
func (r *Reader) hang(path string, p *child.Process[string, answer]) error {
	who := ""
	if pid, ours := r.holder(); pid != 0 && !ours {
		who = fmt.Sprintf("; process %d is in a call of the driver: end it if it stays there", pid)
	}
	return fmt.Errorf("/%s: %w (helper process %d%s)", path, inventory.ErrHangs, p.PID, who)
}

// holder returns a process of the driver that may hold its lock (kfd_process.mutex) for any time: a thread of
// it sleeps in a call of the driver, perhaps until memory of its own answers. 0: no process is in one. A helper of the daemon,
// one of ours, is only returned if no other process is in a call: it may wait for that one.
//
// Between this and the read such a call can begin. That takes a program that wants it; it then has to be ended.
func (r *Reader) holder() (pid int32, ours bool) {
	procs, _ := fs.ReadDir(r.root, "sys/class/kfd/kfd/proc") // missing without a driver
	for _, p := range procs {
		n, err := strconv.ParseInt(p.Name(), 10, 32)
		if err != nil || !r.inDriver(int32(n)) {
			continue
		}
		if pid, ours = int32(n), r.owns(int32(n)); !ours {
			return pid, false
		}
	}
	return pid, ours
}

// inDriver reports whether a thread of a process sleeps in a call of the driver, or may not be looked at.
func (r *Reader) inDriver(pid int32) bool {
	tasks := fmt.Sprintf("proc/%d/task", pid)
	threads, _ := fs.ReadDir(r.root, tasks) // it may have ended
	return slices.ContainsFunc(threads, func(t fs.DirEntry) bool {
		call, err := fs.ReadFile(r.root, tasks+"/"+t.Name()+"/syscall")
		ended := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
		return err != nil && !ended || inDriver(string(call))
	})
}

// waitEvents is the number of AMDKFD_IOC_WAIT_EVENTS, in which each runtime has a thread most of the time,
// without the lock.
const waitEvents = 0x0c

// inDriver reports whether a thread sleeps in another ioctl of KFD, by its /proc/PID/task/TID/syscall:
// the number and the arguments in hexadecimal, or "running".
func inDriver(call string) bool {
	fields := strings.Fields(call)
	if len(fields) < 3 || fields[0] != strconv.Itoa(syscall.SYS_IOCTL) {
		return false
	}
	request, err := strconv.ParseUint(fields[2], 0, 64)
	return err == nil && byte(request>>8) == 'K' && byte(request) != waitEvents
}

// Main is the program of the process. It returns the exit status, when the daemon has ended.
func Main() int {
	socket, err := child.Main("dumps")
	if err == nil {
		err = serve(socket, os.DirFS("/"))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "gpreemptd: %s: %v\n", Argument, err)
		return 1
	}
	return 0
}

func serve(socket *os.File, root fs.FS) error {
	daemon := child.Serve[string, answer](socket)
	for req := range daemon.Requests {
		var a answer
		text, err := inventory.ReadFile(root, req.Body)
		if a.Text = text; err != nil && !errors.As(err, &a.Errno) {
			a.Error = err.Error()
		}
		daemon.Answer(req, a)
	}
	return daemon.Err()
}
