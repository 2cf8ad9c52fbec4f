package host

import (
	"bytes"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// Task is a thread of a real process. Its methods make few system calls and never
// wait, but for the kernel's own short locks.
//
// A thread is its entry in the kernel's table of ids: after an exec by another thread
// than the main one, the main thread's Task stands for the one that took its id.
type Task struct {
	h      *Host
	tid    int32
	leader *Task
	// life is a file of /proc that costs little to read, and cannot be read once the
	// thread is no more, whoever has its id then.
	life *os.File
	// inside is the process's id in its innermost pid namespace, nested whether that
	// is another than this process's.
	inside int32
	nested bool

	call atomic.Pointer[call]

	mu     sync.Mutex
	closed bool
	status *os.File // opened when first needed
	comm   string
	told   bool   // of a leader: that its memory is out of reach
	space  *Space // of a leader: the address space of its process when last asked
}

var _ driver.Task = (*Task)(nil)

// call is what a thread is doing in the driver.
type call struct {
	interrupted func() bool
	install     func(stream int) (int, error)
}

// newTask looks at a thread. Holding life, it knows at the end that all it read was
// of one thread.
func (h *Host) newTask(tid int32) (*Task, error) {
	if tid <= 0 {
		return nil, fmt.Errorf("look up thread %d: it is in another pid namespace: %w", tid, ErrGone)
	}
	life, err := os.Open(procPath(tid, "oom_score_adj")) //nolint:gosec // G703: the path holds a number
	if err != nil {
		return nil, fmt.Errorf("look up thread %d: %w", tid, goneOr(err))
	}
	t := &Task{h: h, tid: tid, life: life}
	if err := t.look(); err != nil {
		t.close()
		return nil, fmt.Errorf("look up thread %d: %w", tid, goneOr(err))
	}
	return t, nil
}

func (t *Task) look() error {
	status, err := os.ReadFile(procPath(t.tid, "status"))
	if err != nil {
		return err
	}
	t.inside = number(value(status, "Tgid"))
	if ids := numbers(status, "NStgid"); len(ids) > 0 {
		t.inside, t.nested = ids[len(ids)-1], len(ids) > 1
	}
	if t.comm, err = readComm(t.tid); err != nil {
		return err
	}
	t.leader = t
	if leader := number(value(status, "Tgid")); leader != t.tid {
		if t.leader, err = t.h.Task(leader); err != nil {
			return err
		}
	}
	if !t.exists() {
		return ErrGone
	}
	return nil
}

func readComm(tid int32) (string, error) {
	text, err := os.ReadFile(procPath(tid, "comm"))
	if err != nil {
		return "", err
	}
	return string(bytes.TrimSuffix(text, []byte("\n"))), nil
}

// exists reports whether the thread is still in the kernel's table: it runs, or is a
// zombie that nobody has waited for.
func (t *Task) exists() bool {
	var b [1]byte
	_, err := t.life.ReadAt(b[:], 0)
	return err == nil
}

// close releases the files.
func (t *Task) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	t.life.Close() // it was only read, like the other
	if t.status != nil {
		t.status.Close()
	}
}

// Begin says that the thread is in a call now. interrupted reports whether a signal is
// pending, or the thread dead; install puts a copy of a descriptor of this process
// into the thread's table and returns its number there. Call it without the driver's
// lock.
func (t *Task) Begin(interrupted func() bool, install func(stream int) (int, error)) {
	t.h.takeMasks()
	t.call.Store(&call{interrupted: interrupted, install: install})
}

// End says that the call is over. Call it without the driver's lock, and before the
// thread is given its result: then the thread finds the events its call caused.
func (t *Task) End() {
	t.call.Store(nil)
	t.h.giveEvents()
}

// TID implements driver.Task.
func (t *Task) TID() int32 { return t.tid }

// Leader implements driver.Task.
func (t *Task) Leader() driver.Task { return t.leader }

// MM implements driver.Task. It is nil, or a *Space.
func (t *Task) MM() driver.MM {
	if s := t.Space(); s != nil {
		return s
	}
	return nil
}

// Interrupted implements driver.Task. A thread that is in no call has no signal to
// care about.
func (t *Task) Interrupted() bool {
	c := t.call.Load()
	return c != nil && c.interrupted != nil && c.interrupted()
}

// Tracer implements driver.Task: TracerPid of /proc/TID/status is a thread's id.
func (t *Task) Tracer() driver.Task {
	var buf [4096]byte
	tid := number(value(t.readStatus(buf[:]), "TracerPid"))
	if tid == 0 {
		return nil
	}
	tracer, err := t.h.Task(tid)
	if err != nil { // it ended since
		return nil
	}
	return tracer
}

// Capable implements driver.Task. The initial user namespace is played by the one of
// this process; and, if this process has not got CAP_SYS_ADMIN there, by those right
// below it as well, since it is in such a one that an ordinary user's programs can be
// root.
func (t *Task) Capable(c driver.Capability) bool {
	if !has(t.readStatus(make([]byte, 1<<14)), c) { // it comes behind the groups, of which there may be many
		return false
	}
	ns, err := namespaceOf(t.tid, "user")
	return err == nil && ns == t.h.userNS || !t.h.privileged && ancestor(t.tid, "user", 1) == t.h.userNS
}

// readStatus returns /proc/TID/status, nothing if the thread is no more.
func (t *Task) readStatus(buf []byte) []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	if t.status == nil {
		file, err := os.Open(procPath(t.tid, "status"))
		if err != nil {
			return nil
		}
		if !t.exists() { // the id may be another's
			file.Close()
			return nil
		}
		t.status = file
	}
	n, err := unix.Pread(int(t.status.Fd()), buf, 0)
	if err != nil {
		return nil
	}
	return buf[:n]
}

// PIDInside implements driver.Task.
func (t *Task) PIDInside() int32 { return t.inside }

// Comm implements driver.Task. For a thread that is no more it is the last name
// known.
func (t *Task) Comm() string {
	comm, err := readComm(t.tid)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil && t.exists() {
		t.comm = comm
	}
	return t.comm
}

// Find implements driver.Task.
func (t *Task) Find(pid int32) driver.Task {
	if pid <= 0 {
		return nil
	}
	if t.nested {
		if pid = t.h.fromNamespace(t.tid, pid); pid == 0 {
			return nil
		}
	}
	found, err := t.h.Task(pid)
	if err != nil {
		return nil
	}
	return found
}
