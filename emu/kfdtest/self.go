package kfdtest

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/kfd"
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

// Sys returns the process's [kfd.Sys]: for Self each call is one of the OS thread that
// makes it, for other processes one of the main thread.
//
// For Self, tracing that a goroutine begins with SeizeHere belongs to the OS thread that
// it is locked to, and ends with that thread. Descriptors that are not the Machine's are
// real: the real kernel reads, writes and closes them, and opens other files, and one
// passed to ENABLE is duplicated and written to. No call waits for a real pipe; use the
// threads of a Spawn for that.
func (p *Process) Sys() kfd.Sys {
	if p.real {
		return hereSys{p}
	}
	return p.main
}

// SeizeHere is Thread.Seize for the calling OS thread, of Self.
func (p *Process) SeizeHere(pid int32) error { return p.here().Seize(pid) }

// DetachHere is Thread.Detach for the calling OS thread, of Self.
func (p *Process) DetachHere(pid int32) error { return p.here().Detach(pid) }

// here returns the thread that represents the calling OS thread.
func (p *Process) here() *Thread {
	if !p.real {
		panic("kfdtest: only Self has a thread for the calling OS thread")
	}
	tid := int32(unix.Gettid())
	defer p.m.lock()()
	for _, t := range p.threads {
		if t.tid == tid {
			return t
		}
	}
	return p.newThread(tid)
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

// hereSys makes calls of Self's, each as the calling OS thread. The goroutine must stay on
// that thread between the lookup and the call.
type hereSys struct{ p *Process }

func (s hereSys) Open(path string, flags int) (int, error) {
	defer lockThread()()
	return s.p.here().Open(path, flags)
}

func (s hereSys) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	defer lockThread()()
	return s.p.here().Ioctl(fd, req, arg)
}

func (s hereSys) Read(fd int, b []byte) (int, error) {
	defer lockThread()()
	return s.p.here().Read(fd, b)
}

func (s hereSys) Write(fd int, b []byte) (int, error) {
	defer lockThread()()
	return s.p.here().Write(fd, b)
}

func (s hereSys) Close(fd int) error {
	defer lockThread()()
	return s.p.here().Close(fd)
}

func lockThread() (unlock func()) {
	runtime.LockOSThread()
	return runtime.UnlockOSThread
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
