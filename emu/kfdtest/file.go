package kfdtest

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// file is an open file: struct file.
type file struct {
	m    *Machine
	name string
	// One of these.
	kfd  *driver.File
	kmap *driver.KmapFile
	smi  *driver.SMIStream
	pipe *pipe
	// pidfd is the main thread of a process.
	pidfd *Thread

	// For an end of a pipe.
	writes, nonblock bool

	// refs counts descriptors and users. Guarded by Machine.mu.
	refs int
}

// descriptor is an entry of a process's table.
type descriptor struct {
	file        *file
	closeOnExec bool
}

// pipe is shared by its two ends. Guarded by Machine.mu.
type pipe struct {
	buf              []byte
	readers, writers int
}

// pipeSize is the capacity of a pipe in bytes.
const pipeSize = 65536

// hold returns the file of a descriptor with a reference, nil if it is not open.
func (p *Process) hold(fd int) *file {
	defer p.m.lock()()
	d := p.fds[fd]
	if d == nil {
		return nil
	}
	d.file.refs++
	return d.file
}

// isKmap reports whether a descriptor is one of the extension.
func (p *Process) isKmap(fd int) bool {
	defer p.m.lock()()
	d := p.fds[fd]
	return d != nil && d.file.kmap != nil
}

// put releases a file. No lock is held.
func (f *file) put() {
	f.m.mu.Lock()
	f.refs--
	last := f.refs == 0
	if last && f.pipe != nil {
		if f.writes {
			f.pipe.writers--
		} else {
			f.pipe.readers--
		}
	}
	f.m.mu.Unlock()
	if !last {
		return
	}
	switch {
	case f.kfd != nil:
		f.m.Driver.Release(f.kfd)
	case f.kmap != nil:
		f.m.Driver.ReleaseKmap(f.kmap)
	case f.smi != nil:
		f.smi.Release()
	default:
		f.m.Wake()
	}
}

// install assigns the lowest free descriptor to a file and returns it. mu is held.
func (p *Process) install(f *file, closeOnExec bool) int {
	fd := p.firstFD
	for p.fds[fd] != nil {
		fd++
	}
	f.refs++
	p.fds[fd] = &descriptor{file: f, closeOnExec: closeOnExec}
	return fd
}

// Open opens /dev/kfd, or with [driver.KmapProfile] /dev/kfd_kmap. For a fake process no other file
// exists; Self opens other files of the real machine.
func (t *Thread) Open(path string, flags int) (fd int, err error) {
	op := driver.OpOpen
	switch {
	case path == kfdabi.KmapPath:
		op = driver.OpOpenKmap
	case t.p.real && path != kfd.DevicePath:
		return kfd.Kernel().Open(path, flags)
	}
	t = t.caller()
	if err := t.enter(); err != nil {
		return -1, err
	}
	r1, err := t.observe(Call{Op: op}, func() (uintptr, error) {
		f := &file{m: t.p.m, name: path}
		var err error
		switch path {
		case kfd.DevicePath:
			f.kfd, err = f.m.Driver.Open(t)
		case kfdabi.KmapPath:
			f.kmap, err = f.m.Driver.OpenKmap(t)
		default:
			err = unix.ENOENT
		}
		if err != nil {
			return 0, err
		}
		defer t.p.m.lock()()
		return uintptr(t.p.install(f, flags&unix.O_CLOEXEC != 0)), nil
	})
	return int(r1), t.leave(err)
}

// Ioctl calls the driver. ERESTARTSYS is returned as EINTR: signal handlers here are
// without SA_RESTART.
func (t *Thread) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (r1 uintptr, err error) {
	t = t.caller()
	if err := t.enter(); err != nil {
		return 0, err
	}
	desc := driver.Described{Op: driver.Op(kfdabi.KmapName(req))}
	if !t.p.isKmap(fd) {
		desc = driver.Describe(req, memory(arg))
	}
	call := Call{Op: desc.Op, Target: desc.Target, Mask: desc.Mask, Queues: desc.Queues, Grace: desc.Grace}
	r1, err = t.observe(call, func() (uintptr, error) {
		f := t.p.hold(fd)
		if f == nil {
			return 0, unix.EBADF
		}
		defer f.put()
		var errno unix.Errno
		switch {
		case f.kfd != nil:
			r1, errno = t.p.m.Driver.Ioctl(t, f.kfd, req, memory(arg))
		case f.kmap != nil:
			errno = t.p.m.Driver.IoctlKmap(t, f.kmap, req, memory(arg))
		default:
			errno = unix.ENOTTY
		}
		if errno == driver.ERESTARTSYS {
			errno = unix.EINTR
		}
		if errno != 0 {
			return 0, errno
		}
		return r1, nil
	})
	return r1, t.leave(err)
}

// Read reads from a pipe or from an event stream.
func (t *Thread) Read(fd int, b []byte) (n int, err error) {
	t = t.caller()
	return t.transfer(fd, func(f *file) (int, error) {
		if f.smi != nil {
			return f.smi.Read(b)
		}
		if f.pipe == nil {
			return 0, unix.EINVAL
		}
		return t.readPipe(f, b)
	}, func() (int, error) { return kfd.Kernel().Read(fd, b) })
}

// Write writes to a pipe, or selects the events of a stream.
func (t *Thread) Write(fd int, b []byte) (n int, err error) {
	t = t.caller()
	return t.transfer(fd, func(f *file) (int, error) {
		if f.smi != nil {
			return f.smi.Write(b)
		}
		if f.pipe == nil {
			return 0, unix.EINVAL
		}
		return t.writePipe(f, b)
	}, func() (int, error) { return kfd.Kernel().Write(fd, b) })
}

func (t *Thread) transfer(fd int, do func(*file) (int, error), kernel func() (int, error)) (int, error) {
	f := t.p.hold(fd)
	if f == nil {
		if t.p.real {
			return kernel()
		}
		return -1, unix.EBADF
	}
	defer f.put()
	if err := t.enter(); err != nil {
		return -1, err
	}
	n, err := do(f)
	if err = t.leave(err); err != nil {
		return -1, err
	}
	return n, nil
}

// Close closes a descriptor.
func (t *Thread) Close(fd int) error {
	t.p.m.mu.Lock()
	d := t.p.fds[fd]
	delete(t.p.fds, fd)
	t.p.m.mu.Unlock()
	if d == nil {
		if t.p.real {
			return kfd.Kernel().Close(fd)
		}
		return unix.EBADF
	}
	d.file.put()
	return nil
}

// Pipe creates a pipe, with O_CLOEXEC, and with O_NONBLOCK if nonblock is set.
func (t *Thread) Pipe(nonblock bool) (r, w int, err error) {
	if err := t.enter(); err != nil {
		return -1, -1, err
	}
	m := t.p.m
	m.mu.Lock()
	m.inodes++
	name := fmt.Sprintf("pipe:[%d]", m.inodes)
	p := &pipe{readers: 1, writers: 1}
	r = t.p.install(&file{m: m, name: name, pipe: p, nonblock: nonblock}, true)
	w = t.p.install(&file{m: m, name: name, pipe: p, nonblock: nonblock, writes: true}, true)
	m.mu.Unlock()
	return r, w, t.leave(nil)
}

// PidfdOpen returns a pidfd of process pid, with O_CLOEXEC: ESRCH if there is no such process.
// Only the extension of the driver takes it.
func (t *Thread) PidfdOpen(pid int32) (int, error) {
	if err := t.enter(); err != nil {
		return -1, err
	}
	m := t.p.m
	m.mu.Lock()
	fd, err := -1, error(unix.ESRCH)
	if other := m.procs[pid]; other != nil && !other.dead {
		fd, err = t.p.install(&file{m: m, name: "anon_inode:[pidfd]", pidfd: other.main}, true), nil
	}
	m.mu.Unlock()
	return fd, t.leave(err)
}

// Pidfd implements driver.Task.
func (t *Thread) Pidfd(fd int32) (leader driver.Task, ok bool) {
	defer t.p.m.lock()()
	d := t.p.fds[int(fd)]
	if d == nil || d.file.pidfd == nil {
		return nil, false
	}
	return d.file.pidfd, true
}

// PidfdGetfd returns a descriptor for the open file that is fd in process pid
// (pidfd_open, pidfd_getfd): ESRCH if there is no such process, EPERM without
// driver.CapSysPtrace, EBADF if fd is not open there.
func (t *Thread) PidfdGetfd(pid int32, fd int) (int, error) {
	if err := t.enter(); err != nil {
		return -1, err
	}
	mine, err := t.observe(Call{Op: OpPidfdGetfd, Target: pid}, func() (uintptr, error) {
		m := t.p.m
		m.mu.Lock()
		defer m.mu.Unlock()
		other := m.procs[pid]
		switch {
		case other == nil || other.exiting || other.dead:
			return 0, unix.ESRCH
		case !t.p.caps[driver.CapSysPtrace] && other != t.p:
			return 0, unix.EPERM
		case other.fds[fd] == nil:
			return 0, unix.EBADF
		}
		return uintptr(t.p.install(other.fds[fd].file, true)), nil
	})
	return int(mine), t.leave(err)
}

func (t *Thread) readPipe(f *file, b []byte) (n int, err error) {
	if f.writes {
		return 0, unix.EBADF
	}
	err = t.awaitPipe(f, func() bool {
		if len(f.pipe.buf) == 0 && f.pipe.writers > 0 {
			return false
		}
		n = copy(b, f.pipe.buf)
		f.pipe.buf = f.pipe.buf[n:]
		return true
	})
	return n, err
}

// pipeAtomic is PIPE_BUF: a write of at most that size is atomic.
const pipeAtomic = 4096

func (t *Thread) writePipe(f *file, b []byte) (n int, err error) {
	if !f.writes {
		return 0, unix.EBADF
	}
	broken := false
	err = t.awaitPipe(f, func() bool {
		room := pipeSize - len(f.pipe.buf)
		if broken = f.pipe.readers == 0; broken {
			return true
		}
		if room == 0 || room < len(b) && len(b) <= pipeAtomic {
			return false
		}
		n = min(room, len(b))
		f.pipe.buf = append(f.pipe.buf, b[:n]...)
		return true
	})
	if broken {
		err = unix.EPIPE
	}
	return n, err
}

// awaitPipe calls do, which is called with mu held, until it returns true.
func (t *Thread) awaitPipe(f *file, do func() bool) error {
	ready := func() bool {
		defer f.m.lock()()
		return do()
	}
	switch {
	case ready():
	case f.nonblock:
		return unix.EAGAIN
	case !t.wait(ready, t.Interrupted):
		return unix.EINTR
	}
	f.m.Wake()
	return nil
}

// Install implements driver.Task.
func (t *Thread) Install(s *driver.SMIStream) int {
	defer t.p.m.lock()()
	return t.p.install(&file{m: t.p.m, name: "anon_inode:kfd_smi_ev", smi: s}, false)
}

// File implements driver.Task.
func (t *Thread) File(fd uint32) driver.EventFile {
	f := t.p.hold(int(fd))
	switch {
	case f != nil:
		return eventFile{f}
	case t.p.real:
		return dupReal(int(fd))
	}
	return nil
}

// eventFile is a fake file that a debugger passed to ENABLE.
type eventFile struct{ f *file }

// WriteDot implements driver.EventFile. At a pipe without a reader the writer gets a
// SIGPIPE, which ends it: the driver writes on behalf of the target (pipe_write).
func (e eventFile) WriteDot(by driver.Task) (full bool) {
	defer e.f.m.lock()()
	p := e.f.pipe
	switch {
	case p == nil || !e.f.writes:
	case p.readers == 0:
		if by, ok := by.(*Thread); ok {
			by.p.killed = true
		}
	case len(p.buf) < pipeSize:
		p.buf = append(p.buf, '.')
	default:
		return !e.f.nonblock
	}
	return false
}

// Put implements driver.EventFile.
func (e eventFile) Put() { e.f.put() }
