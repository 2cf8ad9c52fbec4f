package workload

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// crash ends the process by SIGSEGV, as for a process without a handler.
func crash() error {
	const sigsetBytes = 8
	var act [4]uint64 // struct kernel_sigaction: the default action
	if _, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGSEGV), uintptr(unsafe.Pointer(&act)), 0, sigsetBytes, 0, 0); errno != 0 {
		return fmt.Errorf("change the action of SIGSEGV: %w", errno)
	}
	return unix.Kill(unix.Getpid(), unix.SIGSEGV)
}

// forked is a child of forkAndTry.
type forked struct {
	PID   int
	Errno syscall.Errno
	// Wait returns when the child has ended, and must be called.
	Wait func() error
}

// forkAndTry creates a child that has all descriptors of this process, as fork(2) does,
// and returns the driver's error when the child uses fd. The child lives for linger.
func forkAndTry(fd int, linger time.Duration) (forked, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return forked{}, fmt.Errorf("make a pipe: %w", err)
	}
	defer func() { _ = r.Close() }()
	pid, errno := forkThread(fd, int(w.Fd()), linger)
	_ = w.Close()
	if errno != 0 {
		return forked{}, fmt.Errorf("fork: %w", errno)
	}
	child := forked{PID: pid, Wait: func() error {
		for {
			if _, err := unix.Wait4(pid, nil, 0, nil); !errors.Is(err, unix.EINTR) {
				return err
			}
		}
	}}
	var answer [1]byte
	if _, err := r.Read(answer[:]); err != nil {
		return child, fmt.Errorf("child %d ended without reporting the driver's error: %w", pid, err)
	}
	child.Errno = syscall.Errno(answer[0])
	return child, nil
}

// forkThread is fork(2) from a thread that blocks signals meanwhile.
func forkThread(fd, answer int, linger time.Duration) (int, syscall.Errno) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before); err != nil {
		return 0, unix.EINVAL
	}
	pid, errno := rawFork(uintptr(fd), uintptr(answer), unix.NsecToTimespec(int64(linger)))
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil); err != nil {
		return 0, unix.EINVAL
	}
	return int(pid), errno
}

// rawFork is the fork. The child has one thread and a Go runtime that cannot schedule,
// allocate or grow a stack: it makes raw system calls from this very function and ends.
//
//go:noinline
//go:norace
func rawFork(fd, answer uintptr, linger unix.Timespec) (uintptr, syscall.Errno) {
	var version kfd.GetVersionArgs
	var answered byte
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	_, _, errno = syscall.RawSyscall(syscall.SYS_IOCTL, fd, uintptr(kfd.ReqGetVersion), uintptr(unsafe.Pointer(&version)))
	answered = byte(errno)
	_, _, _ = syscall.RawSyscall(syscall.SYS_WRITE, answer, uintptr(unsafe.Pointer(&answered)), 1)
	_, _, _ = syscall.RawSyscall(syscall.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&linger)), 0, 0)
	for {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
}
