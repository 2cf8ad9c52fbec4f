package kfdemu

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
)

// Task is a thread of a real process. Its methods make few system calls and never wait,
// except for the kernel's own short locks.
//
// A thread is its entry in the kernel's table of IDs: after an exec by another thread than
// the main one, the main thread's Task is the thread that got its ID.
type Task struct {
	h      *Host
	tid    int32
	leader *Task
	// life is a file of /proc that is cheap to read, and cannot be read after the thread
	// has ended, even if its ID was reused.
	life *os.File
	// inside is the process's ID in its innermost pid namespace. nested: that is another
	// namespace than this process's.
	inside int32
	nested bool

	call atomic.Pointer[call]

	mu     sync.Mutex
	closed bool
	status *os.File // opened when first needed
	comm   string
	failed bool   // of a leader: that its memory cannot be accessed was reported
	space  *Space // of a leader: the last known address space of its process
}

var _ driver.Task = (*Task)(nil)

// call is the call of the driver that a thread is in.
type call struct {
	interrupted func() bool
	waits       func()
	stepped     func(*gpumodel.Machine)
	install     func(stream int) (int, error)
}

// newTask reads the properties of a thread. With life open it can check at the end that
// all of them were of one thread.
func (h *Host) newTask(tid int32) (*Task, error) {
	if tid <= 0 {
		return nil, fmt.Errorf("find thread %d: it is in another pid namespace: %w", tid, ErrGone)
	}
	life, err := os.Open(procPath(tid, "oom_score_adj"))
	if err != nil {
		return nil, fmt.Errorf("find thread %d: %w", tid, goneOr(err))
	}
	t := &Task{h: h, tid: tid, life: life}
	if err := t.read(); err != nil {
		t.close()
		return nil, fmt.Errorf("find thread %d: %w", tid, goneOr(err))
	}
	return t, nil
}

func (t *Task) read() error {
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

// exists reports whether the thread is in the kernel's table: it runs, or is a zombie.
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
	t.life.Close() // both files were only read
	if t.status != nil {
		t.status.Close()
	}
}

// Begin begins a call of the thread. interrupted reports whether a signal is pending, or
// the thread dead; waits is called before the call waits, stepped when a step of the hardware
// for it has ended, with the machine, which is locked; install copies a descriptor of this process into the thread's table and
// returns its number there. Call Begin without the driver's lock.
func (t *Task) Begin(interrupted func() bool, waits func(), stepped func(*gpumodel.Machine), install func(stream int) (int, error)) {
	t.h.eachStream((*stream).takeMasks)
	t.call.Store(&call{interrupted: interrupted, waits: waits, stepped: stepped, install: install})
}

// End ends the call. Call it without the driver's lock, and before the thread gets its
// result: then the thread finds the events that its call caused.
func (t *Task) End() {
	t.call.Store(nil)
	t.h.eachStream((*stream).giveEvents)
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

// Interrupted implements driver.Task. It returns false for a thread without a call.
func (t *Task) Interrupted() bool {
	c := t.call.Load()
	return c != nil && c.interrupted != nil && c.interrupted()
}

// waits is called when a call of the thread waits.
func (t *Task) waits() {
	if c := t.call.Load(); c != nil {
		c.waits()
	}
}

// stepped is called when a step for a call of the thread has ended.
func (t *Task) stepped(m *gpumodel.Machine) {
	if c := t.call.Load(); c != nil {
		c.stepped(m)
	}
}

// Tracer implements driver.Task: TracerPid of /proc/TID/status is a thread's id.
func (t *Task) Tracer() driver.Task {
	var buf [4096]byte
	tid := number(value(t.readStatus(buf[:]), "TracerPid"))
	if tid == 0 {
		return nil
	}
	tracer, err := t.h.Task(tid)
	if err != nil { // it has ended meanwhile
		return nil
	}
	return tracer
}

// Capable implements driver.Task. This process's user namespace replaces the initial one.
// If this process does not have CAP_SYS_ADMIN there, so do its direct children, where
// programs of an ordinary user can be root.
func (t *Task) Capable(c driver.Capability) bool {
	if !has(t.readStatus(make([]byte, 1<<14)), c) { // the line follows the groups, which may be many
		return false
	}
	ns, err := namespaceOf(t.tid, "user")
	return err == nil && ns == t.h.userNS || !t.h.privileged && ancestor(t.tid, "user", 1) == t.h.userNS
}

// readStatus returns /proc/TID/status, nil if the thread has ended.
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
		if !t.exists() { // the ID may have been reused
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

// Comm implements driver.Task. For a thread that has ended it returns the last known name.
func (t *Task) Comm() string {
	comm, err := readComm(t.tid)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil && t.exists() {
		t.comm = comm
	}
	return t.comm
}

// Pidfd implements driver.Task: the kernel shows the process in /proc/TID/fdinfo, by its ID in the
// pid namespace of that /proc; -1 if it was reaped.
func (t *Task) Pidfd(fd int32) (leader driver.Task, ok bool) {
	text, err := os.ReadFile(procPath(t.tid, "fdinfo/"+strconv.Itoa(int(fd))))
	if err != nil {
		return nil, false
	}
	pid := value(text, "Pid")
	if pid == nil {
		return nil, false
	}
	found, err := t.h.Task(number(pid))
	if err != nil {
		return nil, true
	}
	return found.leader, true
}

// Find implements driver.Task.
func (t *Task) Find(pid int32) driver.Task {
	if pid <= 0 {
		return nil
	}
	if t.nested {
		if pid = fromNamespace(t.tid, pid); pid == 0 {
			return nil
		}
	}
	found, err := t.h.Task(pid)
	if err != nil {
		return nil
	}
	return found
}
