package kfdtest

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// firstSelfFD is above the descriptors of a real process.
const firstSelfFD = 1 << 30

// newSelf creates the process that represents the running one.
func (m *Machine) newSelf() *Process {
	defer m.lock()()
	p := m.spawn(int32(os.Getpid()))
	p.real, p.firstFD = true, firstSelfFD
	return p
}

// SpawnPart starts a process that stands for a part of the running one: its descriptors that
// are not the Machine's are those of this process.
func (m *Machine) SpawnPart() *Process {
	defer m.lock()()
	p := m.spawn(m.newID())
	p.real, p.firstFD = true, firstSelfFD
	return p
}

// caller returns the thread that makes a call of t. Each call of Self's main thread is one
// of the OS thread that makes it.
func (t *Thread) caller() *Thread {
	tid := int32(unix.Gettid())
	if t != t.p.m.self.main || t.tid == tid {
		return t
	}
	defer t.p.m.lock()()
	for _, o := range t.p.threads {
		if o.tid == tid {
			return o
		}
	}
	return t.p.newThread(tid)
}

// tracedBy returns the tracer, nil for none. The end of a real thread, which ends its
// tracing (exit_ptrace), is noticed here. mu is held.
func (t *Thread) tracedBy() *Thread {
	if tracer := t.tracer; tracer != nil && tracer.p.real && tracer.tid < firstID &&
		errors.Is(unix.Tgkill(os.Getpid(), int(tracer.tid), 0), unix.ESRCH) {
		t.tracer = nil
	}
	return t.tracer
}

// realFile is an EventFile for a real descriptor: a duplicate, which has the same open
// file. A dot for which a pipe has no room is lost, as with a pipe in non-blocking mode.
type realFile int

// dupReal returns the file of a real descriptor, nil if it is not open.
func dupReal(fd int) driver.EventFile {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return realFile(dup)
}

// WriteDot implements driver.EventFile.
func (f realFile) WriteDot(driver.Task) (full bool) {
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(f), Events: unix.POLLOUT}}, 0); n > 0 || err != nil {
		_, _ = unix.Write(int(f), []byte{'.'}) // the driver ignores errors, too
	}
	return false
}

// Put implements driver.EventFile.
func (f realFile) Put() { _ = unix.Close(int(f)) }
