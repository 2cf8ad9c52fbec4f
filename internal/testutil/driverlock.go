package testutil

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The requests of a userfaultfd, and their arguments (include/uapi/linux/userfaultfd.h).
const (
	uffdioAPI      kfd.Request = 0xc018aa3f
	uffdioRegister kfd.Request = 0xc020aa00
)

type (
	uffdioAPIArgs      struct{ API, Features, Ioctls uint64 }
	uffdioRegisterArgs struct {
		Start             kfd.Pointer
		Len, Mode, Ioctls uint64
	}
)

// HoldDriverLock has this process hold its own lock in AMD's compute driver
// (kfd_process.mutex), as a job can that wants to: it debugs itself, and the driver, which
// holds the lock, waits for a page of memory to write its answer to. fd is the descriptor of
// /dev/kfd. release has the driver's write fail, so that it ends the debugging before it
// releases the lock (since 6.12.117, kfd_dbg_trap_enable), and returns then.
// It needs a userfaultfd that also stops the kernel, which root may have.
func HoldDriverLock(fd int) (release func() error, err error) {
	var events [2]int
	if err := unix.Pipe2(events[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	end := func() error { return errors.Join(unix.Close(events[0]), unix.Close(events[1])) }
	sys, pid := kfd.Kernel(), uint32(os.Getpid())
	refuse, err := stop(func(memory []byte) error {
		args := kfd.TrapEnableArgs{PID: pid, Op: kfd.TrapEnable, RinfoPtr: kfd.PointerToSlice(memory), RinfoSize: 16, DbgFD: uint32(events[1])}
		_, err := sys.Ioctl(fd, kfd.ReqDbgTrap, kfd.PointerTo(&args))
		return err
	})
	if err != nil {
		return nil, errors.Join(err, end())
	}
	return func() error { return errors.Join(refuse(), end()) }, nil
}

// stop has a call of the kernel wait for the page of memory that it is to write to, until refuse
// has the write fail. Without refuse it waits for as long as the process lives.
func stop(call func(memory []byte) error) (refuse func() error, err error) {
	page, err := newUnfilled()
	if err != nil {
		return nil, err
	}
	called, accessed := make(chan error, 1), make(chan error, 1)
	go func() {
		err := call(page.memory)
		runtime.KeepAlive(page) // the kernel fills the page of a userfaultfd that was collected and closed
		called <- err
	}()
	go func() { accessed <- page.awaitAccess() }()
	select {
	case err = <-accessed:
	case err = <-called:
		called <- err // for refuse
		err = fmt.Errorf("the kernel did not access the page: %w", err)
	}
	refuse = func() error {
		refusing := page.refuse()
		calling := <-called
		if errors.Is(calling, unix.EFAULT) {
			calling = nil
		}
		return errors.Join(refusing, calling, page.close())
	}
	if err != nil {
		return nil, errors.Join(err, refuse())
	}
	return refuse, nil
}

// unfilled is a page of memory that nobody fills: who accesses it waits, also in the kernel.
type unfilled struct {
	memory []byte
	faults *os.File // the userfaultfd
}

func newUnfilled() (*unfilled, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0) //nolint:forbidigo // x/sys has no userfaultfd
	if errno != 0 {
		return nil, fmt.Errorf("userfaultfd: %w", errno)
	}
	sys := kfd.Kernel()
	api := uffdioAPIArgs{API: 0xaa}
	if _, err := sys.Ioctl(int(fd), uffdioAPI, kfd.PointerTo(&api)); err != nil {
		return nil, errors.Join(fmt.Errorf("UFFDIO_API: %w", err), unix.Close(int(fd)))
	}
	u := &unfilled{faults: os.NewFile(fd, "userfaultfd")} // it cannot be polled before UFFDIO_API
	var err error
	if u.memory, err = unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, errors.Join(fmt.Errorf("map a page: %w", err), u.close())
	}
	const missing = 1 // UFFDIO_REGISTER_MODE_MISSING
	register := uffdioRegisterArgs{Start: kfd.PointerToSlice(u.memory), Len: uint64(len(u.memory)), Mode: missing}
	if _, err := sys.Ioctl(int(fd), uffdioRegister, kfd.PointerTo(&register)); err != nil {
		return nil, errors.Join(fmt.Errorf("UFFDIO_REGISTER: %w", err), u.close())
	}
	return u, nil
}

// awaitAccess waits until somebody waits for the page.
func (u *unfilled) awaitAccess() error {
	var message [32]byte // struct uffd_msg
	_, err := u.faults.Read(message[:])
	return err
}

// refuse makes accesses to the page fail, also those that wait.
func (u *unfilled) refuse() error {
	return errors.Join(unix.Mprotect(u.memory, unix.PROT_NONE), u.faults.Close())
}

// close releases the page, which nobody may use.
func (u *unfilled) close() error {
	err := u.faults.Close()
	if errors.Is(err, os.ErrClosed) {
		err = nil
	}
	if u.memory != nil {
		err = errors.Join(err, unix.Munmap(u.memory))
	}
	return err
}
