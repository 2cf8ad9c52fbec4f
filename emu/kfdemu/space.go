package kfdemu

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Space is an address space: the memory of one process from its start or exec to its exec
// or end. Processes that share memory without being threads of one process (vfork) share
// the Space, whose Key is that of the parent. Values of driver.MM are *Space. Several
// goroutines may call its methods at once; a nil Space has ended.
type Space struct {
	leader *Task
	key    gpreempt.ProcessKey
	serial uint64
	// bottom is an address that was mapped: the bottom of the stack. A read of unmapped
	// memory would take a lock of the process.
	bottom uint64
	// shared: another process has or had it, too.
	shared atomic.Bool
	gone   atomic.Bool

	// mu is read-locked to use mem, and locked to close it.
	mu sync.RWMutex
	// mem is /proc/PID/mem: it belongs to the address space at the time it was opened, and
	// is empty when that has ended.
	mem int
}

// FaultError is an access to unmapped memory.
type FaultError struct {
	// Addr is the first byte that could not be read or written.
	Addr uint64
}

func (e *FaultError) Error() string { return fmt.Sprintf("nothing is mapped at %#x", e.Addr) }

// Unwrap returns EFAULT.
func (e *FaultError) Unwrap() error { return unix.EFAULT }

// Key returns the process: its ID and start time. After an exec the process has another
// Space with the same Key: release what belongs to the old one, which Sweep returns, before
// the new one is used.
func (s *Space) Key() gpreempt.ProcessKey { return s.key }

// PID returns the process's ID.
func (s *Space) PID() int32 { return s.key.PID }

// Leader returns the main thread of the process, which may have ended.
func (s *Space) Leader() *Task { return s.leader }

// Alive reports whether a thread has the address space.
func (s *Space) Alive() bool {
	var b [1]byte
	// Another error means that the program has unmapped its stack.
	return s != nil && !errors.Is(s.ReadAt(b[:], s.bottom), ErrGone)
}

// ReadAt fills p from the memory at addr and ignores its protection. The error is ErrGone,
// or a *FaultError, after which the bytes up to its Addr were read.
func (s *Space) ReadAt(p []byte, addr uint64) error { return s.move(unix.Pread, p, addr) }

// WriteAt copies p to the memory at addr. It ignores the protection of private memory;
// shared memory must be mapped for writing. The errors are those of ReadAt.
func (s *Space) WriteAt(p []byte, addr uint64) error { return s.move(unix.Pwrite, p, addr) }

// move reads or writes. The kernel returns 0 bytes for an address space that has ended,
// and EIO for unmapped memory.
func (s *Space) move(how func(fd int, p []byte, at int64) (int, error), p []byte, addr uint64) error {
	if s == nil {
		return ErrGone
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	for len(p) > 0 {
		if s.gone.Load() {
			return ErrGone
		}
		n, err := how(s.mem, p, int64(addr))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return &FaultError{Addr: addr}
		case n == 0:
			s.gone.Store(true)
		default:
			p, addr = p[n:], addr+uint64(n)
		}
	}
	return nil
}

// close releases the file.
func (s *Space) close() {
	s.gone.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = unix.Close(s.mem) // writes are complete already
}

// Sweep returns the address spaces that have ended since the last call, each once, the
// oldest first. It also moves the data of event streams, and finds full files that have room
// again. Call it every few milliseconds, without the driver's lock. It costs a system call
// for each address space and full file, and two for each stream.
func (h *Host) Sweep() []*Space {
	h.eachStream((*stream).takeMasks)
	h.eachStream((*stream).giveEvents)
	h.endStreams(false)
	h.mu.Lock()
	spaces, full := slices.Collect(maps.Keys(h.spaces)), h.full
	h.full = map[*eventFile]bool{}
	h.mu.Unlock()
	for f := range full {
		f.look()
	}
	for _, s := range spaces {
		if !s.Alive() {
			h.end(s)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	over := h.over
	h.over = nil
	slices.SortFunc(over, func(a, b *Space) int { return cmp.Compare(a.serial, b.serial) })
	return over
}

// end makes Sweep return a space that has ended.
func (h *Host) end(s *Space) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.spaces[s] {
		return
	}
	delete(h.spaces, s)
	h.over = append(h.over, s)
	s.close()
}

// Space returns the address space of the thread, nil for a zombie or a kernel thread.
func (t *Task) Space() *Space {
	if !t.hasMemory() {
		return nil
	}
	return t.callerSpace()
}

// callerSpace is Space for a thread that is in a call, and so has an address space.
func (t *Task) callerSpace() *Space {
	if s := t.knownSpace(); s != nil {
		return s
	}
	t.h.creating.Lock()
	defer t.h.creating.Unlock()
	return t.createSpace()
}

// hasMemory reports whether the thread has an address space: otherwise process_vm_readv
// fails with ESRCH before it checks addresses.
func (t *Task) hasMemory() bool {
	var b [1]byte
	_, err := unix.ProcessVMReadv(int(t.tid), []unix.Iovec{{Base: &b[0], Len: 1}}, []unix.RemoteIovec{{Base: 0, Len: 1}}, 0)
	return !errors.Is(err, unix.ESRCH) && t.exists()
}

// knownSpace returns the last known address space of the process, if it still has that.
// All threads of a process have the same.
func (t *Task) knownSpace() *Space {
	t.leader.mu.Lock()
	s := t.leader.space
	t.leader.mu.Unlock()
	switch {
	case s == nil:
		return nil
	case !s.Alive():
		t.h.end(s)
		return nil
	case s.shared.Load() && s.leader != t.leader && !sameMemory(t.tid, s.leader.tid):
		return nil // it has executed another program, and its parent still has the space
	}
	return s
}

// createSpace returns the address space of the thread, and opens it if it is not known.
// creating is held.
func (t *Task) createSpace() *Space {
	s := t.knownSpace()
	if s != nil {
		return s // another goroutine was faster
	}
	if s = t.lentSpace(); s == nil {
		var err error
		if s, err = t.openSpace(); err != nil {
			t.leader.refused(err)
			return nil
		}
	}
	t.leader.mu.Lock()
	t.leader.space = s
	t.leader.mu.Unlock()
	return s
}

// refused reports, once, that the memory of the process cannot be accessed, unless the
// process has ended.
func (t *Task) refused(err error) {
	t.mu.Lock()
	before := t.failed
	t.failed = true
	t.mu.Unlock()
	switch {
	case before || errors.Is(err, ErrGone):
		return
	case errors.Is(err, fs.ErrPermission):
		err = fmt.Errorf("%w: it needs root, or the same user and kernel.yama.ptrace_scope=0", err)
	}
	t.h.trouble(fmt.Errorf("cannot access the memory of process %d: %w", t.tid, err))
}

// lentSpace returns the address space of another process that this one uses, as between
// vfork and exec, nil if it has its own.
func (t *Task) lentSpace() *Space {
	t.h.mu.Lock()
	spaces := slices.Collect(maps.Keys(t.h.spaces))
	t.h.mu.Unlock()
	for _, s := range spaces {
		if s.leader != t.leader && sameMemory(t.tid, s.leader.tid) && s.Alive() {
			s.shared.Store(true)
			return s
		}
	}
	var buf [4096]byte
	parent := number(value(t.readStatus(buf[:]), "PPid"))
	if parent == 0 || !sameMemory(t.tid, parent) {
		return nil
	}
	lender, err := t.h.Task(parent)
	if err != nil {
		return nil
	}
	s := lender.createSpace()
	if s != nil {
		s.shared.Store(true)
	}
	return s
}

// kcmpVM is KCMP_VM (include/uapi/linux/kcmp.h).
const kcmpVM = 1

// sameMemory reports whether two threads have the same address space. Without kcmp it
// returns false.
func sameMemory(a, b int32) bool {
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), kcmpVM, 0, 0, 0)
	return errno == 0 && order == 0
}

// openSpace opens the address space of the thread.
func (t *Task) openSpace() (*Space, error) {
	stat, err := os.ReadFile(procPath(t.leader.tid, "stat"))
	if err != nil {
		return nil, goneOr(err)
	}
	start, err := statField(stat, statStart)
	if err != nil {
		return nil, fmt.Errorf("read the start time in %s: %w", procPath(t.leader.tid, "stat"), err)
	}
	path := procPath(t.tid, "mem")
	mem, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, goneOr(&fs.PathError{Op: "open", Path: path, Err: err})
	}
	s := &Space{leader: t.leader, key: gpreempt.ProcessKey{PID: t.leader.tid, Start: start}, mem: mem}
	if own, err := os.ReadFile(procPath(t.tid, "stat")); err == nil {
		stack, err := statField(own, statStack)
		if err == nil {
			s.bottom = stack
		}
	}
	t.leader.Comm() // record the name for the time after the process's end
	t.h.mu.Lock()
	defer t.h.mu.Unlock()
	if t.h.closed || !t.exists() || !s.Alive() {
		s.close()
		return nil, ErrGone
	}
	t.h.lastSpace++
	s.serial = t.h.lastSpace
	t.h.spaces[s] = true
	return s, nil
}
