// Package host hides how the threads, address spaces and open files of a real Linux
// look to the rules of package kfdrules: whom a thread id names now, which address
// space a thread has and when one ends, who traces whom, and memory of others.
//
// Everything is read from /proc and asked of the kernel from outside; the processes
// notice nothing. Needed is the right to trace them (ptrace_may_access): root has it,
// and so has anybody for own processes that may be dumped, where Yama allows it.
package host

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// ErrGone is the error for a thread or an address space that has ended.
var ErrGone = errors.New("it has ended")

// Host is the threads and address spaces of this machine, as far as this process
// sees them: ids are those of its pid namespace. Its methods may be called by
// several goroutines at once.
type Host struct {
	wake   func()
	poller *poller
	ended  chan struct{}
	// userNS is the user namespace of this process; created ones count as initial,
	// too, if this process is not privileged. See Task.Capable.
	userNS     uint64
	privileged bool
	trouble    func(error)
	// scanOnly has Task.Find do without NS_GET_PID_FROM_PIDNS.
	scanOnly bool

	// creating is held while an address space is looked for: two threads of one
	// process must find the same. It is taken before mu.
	creating sync.Mutex

	mu    sync.Mutex
	tasks map[int32]*Task
	// enough is the number of tasks at which the ended ones are dropped.
	enough int
	// spaces are those not known to have ended, over those that Sweep has not told
	// of yet.
	spaces    map[*Space]bool
	lastSpace uint64
	over      []*Space
	streams   []*stream
	closed    bool
}

// minTasks is the number of tasks below which looking for ended ones saves nothing.
const minTasks = 32

// New returns the host of this process. wake is called when something has changed that a
// Task or an EventFile tells of, with no lock held; it may be called at any time until
// Close returns, and must not wait. A Host uses one file descriptor, one or two for
// every thread it was asked about, and two for every address space. The error says
// what is missing, and wraps the errno.
func New(wake func()) (*Host, error) {
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return nil, fmt.Errorf("find this process in /proc: %w", err)
	}
	if self != strconv.Itoa(os.Getpid()) {
		return nil, fmt.Errorf("/proc calls this process %s, and its own pid namespace %d: mount a proc of this namespace", self, os.Getpid())
	}
	if err := allowed(); err != nil {
		return nil, fmt.Errorf("%w: a container needs CAP_SYS_PTRACE for it, or another seccomp profile", err)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, fmt.Errorf("read the own capabilities: %w", err)
	}
	userNS, err := namespaceOf(int32(os.Getpid()), "user")
	if err != nil {
		return nil, fmt.Errorf("find the own user namespace: %w", err)
	}
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	return &Host{
		wake: wake, poller: p, ended: make(chan struct{}, 1),
		trouble: func(error) {}, userNS: userNS, privileged: has(status, driver.CapSysAdmin),
		tasks: map[int32]*Task{}, enough: minTasks, spaces: map[*Space]bool{},
	}, nil
}

// allowed asks for the system calls that a container may forbid.
func allowed() error {
	self := os.Getpid()
	pidfd, err := unix.PidfdOpen(self, 0)
	if err != nil {
		return fmt.Errorf("pidfd_open: %w", err)
	}
	dup, err := unix.PidfdGetfd(pidfd, pidfd, 0)
	_ = unix.Close(pidfd)
	if err != nil {
		return fmt.Errorf("pidfd_getfd: %w", err)
	}
	_ = unix.Close(dup)
	if _, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(self), uintptr(self), kcmpVM, 0, 0, 0); errno != 0 {
		return fmt.Errorf("kcmp: %w", errno)
	}
	return nil
}

// OnTrouble has f called with what keeps this process from looking at another, once
// for each: that one is then taken for one without memory. Call it before anything
// else; f is called with locks held, the driver's among them, and must not wait.
func (h *Host) OnTrouble(f func(error)) { h.trouble = f }

// Close releases everything: the tasks and address spaces are as good as ended, and
// the event streams end. It must not be called with the driver's lock held.
func (h *Host) Close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	h.mu.Unlock()
	h.endStreams(true)
	err := h.poller.close()
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.spaces {
		s.close()
	}
	for _, t := range h.tasks {
		t.close()
	}
	clear(h.spaces)
	clear(h.tasks)
	return err
}

// Task returns the thread that tid means now: always the same *Task for one thread, and
// never one for two. Threads that have ended are found while their id is taken, as
// zombies. The error is ErrGone if there is no such thread.
func (h *Host) Task(tid int32) (*Task, error) {
	h.mu.Lock()
	t := h.tasks[tid]
	h.mu.Unlock()
	if t != nil && t.exists() {
		return t, nil
	}
	fresh, err := h.newTask(tid)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		fresh.close()
		return nil, fmt.Errorf("look up thread %d: %w", tid, fs.ErrClosed)
	}
	switch t := h.tasks[tid]; {
	case t != nil && t.exists():
		fresh.close()
		return t, nil
	case t != nil:
		t.close()
	}
	h.tasks[tid] = fresh
	h.dropEnded()
	return fresh, nil
}

// dropEnded forgets the tasks that are no more, once there are many. mu is held.
func (h *Host) dropEnded() {
	if len(h.tasks) < h.enough {
		return
	}
	for tid, t := range h.tasks {
		if !t.exists() {
			t.close()
			delete(h.tasks, tid)
		}
	}
	h.enough = max(minTasks, 2*len(h.tasks))
}

// FileID tells open files apart: the device and inode number of what is behind a
// descriptor. Descriptors of one open file have the same, and so have others of the
// same file.
type FileID struct{ Device, Inode uint64 }

// Compare orders files by device, then by inode.
func (id FileID) Compare(other FileID) int {
	return cmp.Or(cmp.Compare(id.Device, other.Device), cmp.Compare(id.Inode, other.Inode))
}

// FileIDOf is for a descriptor of this process. The error wraps an errno.
func FileIDOf(fd int) (FileID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return FileID{}, fmt.Errorf("stat descriptor %d: %w", fd, err)
	}
	return FileID{Device: st.Dev, Inode: st.Ino}, nil
}

// FileIDAt is for a descriptor of thread tid. The error wraps an errno: ENOENT for no
// such thread, or no such descriptor.
func FileIDAt(tid int32, fd uint64) (FileID, error) {
	var st unix.Stat_t
	path := procPath(tid, "fd/"+strconv.FormatUint(fd, 10))
	if err := unix.Stat(path, &st); err != nil {
		return FileID{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return FileID{Device: st.Dev, Inode: st.Ino}, nil
}
