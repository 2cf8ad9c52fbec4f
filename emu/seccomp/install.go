package seccomp

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// required are the flags of every filter of this package.
const required = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV

// Install installs the filter on the calling thread, which must be locked
// (runtime.LockOSThread), and returns the descriptor of its listener, which is closed on
// exec. The filter cannot be removed: the thread has it until it ends, and programs that
// it executes and forks inherit it. A thread without CAP_SYS_ADMIN gets no_new_privs, which
// the kernel requires: set-user-ID programs then gain no rights.
//
// From now on, selected calls wait until NewListener serves the descriptor. The error is
// ErrAlready, or names what the machine lacks.
func Install(filter []unix.SockFilter) (int, error) {
	fd, errno := setFilter(filter, required)
	if errno == unix.EACCES {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return -1, fmt.Errorf("seccomp: no CAP_SYS_ADMIN, and no_new_privs cannot be set: %w", err)
		}
		fd, errno = setFilter(filter, required)
	}
	switch errno {
	case 0:
	case unix.EBUSY:
		return -1, fmt.Errorf("seccomp: %w", ErrAlready)
	default:
		if err := kernelSupport(); err != nil {
			return -1, err
		}
		return -1, fmt.Errorf("seccomp: the filter of %d instructions cannot be installed: %w", len(filter), errno)
	}
	return fd, nil
}

// Supported checks whether this package works for the calling process: it returns nil,
// ErrAlready, or an error that names what the machine lacks. It installs a filter on a
// thread that then ends.
func Supported() error {
	if err := kernelSupport(); err != nil {
		return err
	}
	var err error
	OwnThread(func() {
		var fd int
		if fd, err = Install([]unix.SockFilter{ret(unix.SECCOMP_RET_ALLOW)}); err == nil {
			err = unix.Close(fd)
		}
	})
	return err
}

// kernelSupport returns what the kernel lacks, without installing a filter.
func kernelSupport() error {
	switch errno := actionAvailable(unix.SECCOMP_RET_USER_NOTIF); errno {
	case 0:
	case unix.ENOSYS:
		return fmt.Errorf("seccomp: no seccomp(2): the kernel is built without CONFIG_SECCOMP_FILTER, or a sandbox around this process hides it: %w", errno)
	case unix.EPERM, unix.EACCES:
		return fmt.Errorf("seccomp: seccomp(2) is forbidden to this process, by a container's seccomp profile or a security module: %w", errno)
	case unix.EOPNOTSUPP, unix.EINVAL:
		return fmt.Errorf("seccomp: the kernel lacks user notification (SECCOMP_RET_USER_NOTIF, Linux 5.0): %w", errno)
	default:
		return fmt.Errorf("seccomp: check for user notification: %w", errno)
	}
	got, errno := kernelSizes()
	if errno != 0 {
		return fmt.Errorf("seccomp: read the sizes of the kernel's structures: %w", errno)
	}
	if got != mySizes {
		return fmt.Errorf("seccomp: the kernel's notifications, responses and call data have %d, %d and %d bytes, this package supports %d, %d and %d",
			got.notif, got.response, got.data, mySizes.notif, mySizes.response, mySizes.data)
	}
	switch _, errno := setFilter(nil, required); errno {
	case unix.EFAULT: // the kernel accepted the flags before it read the filter
	case unix.EINVAL:
		return fmt.Errorf("seccomp: the kernel lacks SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (Linux 5.19), without which signals repeat calls: %w", errno)
	case unix.EPERM, unix.EACCES, unix.ENOSYS:
		return fmt.Errorf("seccomp: filters are forbidden to this process, by a container's seccomp profile or a security module: %w", errno)
	default:
		return fmt.Errorf("seccomp: check for SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV: %w", errno)
	}
	return nil
}

// OwnThread runs f on a new, locked thread, and returns when f has returned. The thread
// then ends, and with it a filter that f installed. It is never the first thread of the
// process, which does not end.
func OwnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // without an unlock: the thread ends
		if !onMainThread() {
			f()
			return
		}
		OwnThread(f) // this goroutine occupies the main thread meanwhile
		runtime.UnlockOSThread()
	}()
	<-done
}

func onMainThread() bool { return unix.Gettid() == unix.Getpid() }

// gone reports whether an errno of a listener means that the caller has ended: ENOENT,
// there is no such call; ESRCH, it ended while a descriptor was added.
func gone(errno syscall.Errno) bool {
	return errors.Is(errno, unix.ENOENT) || errors.Is(errno, unix.ESRCH)
}
