package kfdemu

import (
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

// Host implements the operating system of package driver with the Linux processes that are
// visible to this process: the thread of an ID, the address space of a thread and its end,
// tracers, open files, and memory of other processes. IDs are those of this process's pid
// namespace. Several goroutines may call its methods at once.
//
// It reads /proc and makes system calls from outside; the processes do not notice. It
// needs the right to trace them (ptrace_may_access): root has it, and other users have it
// for their own dumpable processes, if Yama permits that.
type Host struct {
	wake func()
	// userNS is the user namespace of this process. Its children also count as initial if
	// this process is not privileged. See Task.Capable.
	userNS     uint64
	privileged bool
	trouble    func(error)

	// creating is held during the search for an address space: two threads of one process
	// must find the same. It is taken before mu.
	creating sync.Mutex

	mu    sync.Mutex
	tasks map[int32]*Task
	// enough is the number of tasks at which ended ones are removed.
	enough int
	// spaces are those not known to have ended, over those that Sweep has not returned
	// yet.
	spaces    map[*Space]bool
	lastSpace uint64
	over      []*Space
	streams   []*stream
	full      map[*eventFile]bool // that a write of the driver waits for
	closed    bool
}

// minTasks is the number of tasks below which ended ones are not removed.
const minTasks = 32

// NewHost returns the host of this process. wake is called, without a lock, after a change of
// what a Task or an EventFile reports. It may be called at any time until Close returns,
// and must not wait. trouble is called once for each process whose memory cannot be
// accessed, with the error: such a process counts as one without memory. It is called with
// locks held, including the driver's, and must not wait. A Host uses one or two file descriptors for every known thread, and
// one for every address space. The error names what is missing, and wraps the errno.
func NewHost(wake func(), trouble func(error)) (*Host, error) {
	self, err := os.Readlink("/proc/self")
	if err != nil {
		return nil, fmt.Errorf("find this process in /proc: %w", err)
	}
	if self != strconv.Itoa(os.Getpid()) {
		return nil, fmt.Errorf("this process is %s in /proc and %d in its pid namespace: mount a proc of this namespace", self, os.Getpid())
	}
	if err := allowed(); err != nil {
		return nil, fmt.Errorf("%w: a container needs CAP_SYS_PTRACE, or another seccomp profile", err)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, fmt.Errorf("read the capabilities of this process: %w", err)
	}
	userNS, err := namespaceOf(int32(os.Getpid()), "user")
	if err != nil {
		return nil, fmt.Errorf("find the user namespace of this process: %w", err)
	}
	return &Host{
		wake: wake, trouble: trouble, userNS: userNS, privileged: has(status, driver.CapSysAdmin),
		tasks: map[int32]*Task{}, enough: minTasks, spaces: map[*Space]bool{}, full: map[*eventFile]bool{},
	}, nil
}

// allowed tries the system calls that a container may forbid.
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

// Close releases everything: tasks and address spaces count as ended, and the event
// streams end. It must not be called with the driver's lock held.
func (h *Host) Close() {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return
	}
	h.closed = true
	h.mu.Unlock()
	h.endStreams(true)
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
}

// Task returns the thread that has the ID tid now: always the same *Task for one thread,
// and never the same for two. Zombies are found. The error is ErrGone if there is no such
// thread.
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
		return nil, fmt.Errorf("find thread %d: %w", tid, fs.ErrClosed)
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

// dropEnded removes the tasks of ended threads when there are many tasks. mu is held.
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

// FileID is the device and inode number of the file of a descriptor. All descriptors of the
// same file have the same FileID.
type FileID struct{ Device, Inode uint64 }

// FileIDAt returns the ID for a descriptor of thread tid. The error wraps an errno: ENOENT
// if there is no such thread or descriptor.
func FileIDAt(tid int32, fd uint64) (FileID, error) {
	return fileID(procPath(tid, "fd/"+strconv.FormatUint(fd, 10)))
}

func fileID(path string) (FileID, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return FileID{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return FileID{Device: st.Dev, Inode: st.Ino}, nil
}
