package kfdemu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/seccomp"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// served is a call that is being answered. The time of the GPUs stands still while the
// emulator works for the caller, which a driver would not take: from the receipt of the call
// to its answer, except while the call waits.
type served struct {
	*seccomp.Call
	rt     *gpumodel.Realtime
	paused atomic.Bool
	watch  func()
}

// serve begins to answer a call. The caller calls resume when it is answered.
func (e *Emulator) serve(call *seccomp.Call) *served {
	c := &served{Call: call, rt: e.rt, watch: sync.OnceFunc(func() { call.Watch(e.askWake) })}
	c.paused.Store(true)
	e.rt.Do((*gpumodel.Machine).Pause)
	return c
}

// resume lets time run.
func (c *served) resume() {
	if c.paused.Swap(false) {
		c.rt.Do((*gpumodel.Machine).Resume)
	}
}

// Wait says that the call may wait.
func (c *served) Wait() {
	c.resume()
	c.Call.Wait()
}

// waits is called when the driver waits in the call.
func (c *served) waits() {
	c.Wait()
	c.watch()
}

// stepped is called when the driver need not wait for a step any more. That is noticed and
// answered late on a busy host.
func (c *served) stepped(m *gpumodel.Machine) {
	if !c.paused.Swap(true) {
		m.Pause()
	}
}

// call answers a call.
func (e *Emulator) call(call *seccomp.Call) {
	if call.NR == unix.SYS_MUNMAP || call.NR == unix.SYS_MREMAP {
		if err := e.unmap(call); !errors.Is(err, seccomp.ErrGone) {
			e.trouble("answer a call", err)
		}
		return
	}
	c := e.serve(call)
	defer c.resume()
	var err error
	switch c.NR {
	case unix.SYS_IOCTL:
		err = e.ioctl(c)
	case unix.SYS_OPENAT, unix.SYS_OPENAT2, seccomp.SysOpen:
		err = e.open(c)
	default:
		err = e.stat(c)
	}
	if !errors.Is(err, seccomp.ErrGone) {
		e.trouble("answer a call", err)
	}
}

// unmap tells the driver what memory a call will unmap, and lets the kernel do it. The driver
// learns it before, and also if the call then fails. What mremap moves is unmapped.
func (e *Emulator) unmap(c *seccomp.Call) error {
	start, n := c.Args[0], c.Args[1]
	if !e.driver.HasSVM() || start%uint64(os.Getpagesize()) != 0 || n == 0 {
		return c.Continue()
	}
	task, err := e.host.Task(c.TID)
	if err != nil {
		return c.Continue() // it has died
	}
	space := task.knownSpace()
	if space == nil || !c.Valid() {
		return c.Continue()
	}
	pages := func(start, n uint64) { e.driver.Unmapped(space, start, start+n-1|uint64(os.Getpagesize()-1)) }
	switch now := c.Args[2]; {
	case c.NR != unix.SYS_MREMAP:
		pages(start, n)
	case c.Args[3]&unix.MREMAP_FIXED != 0:
		pages(start, n)
		pages(c.Args[4], now)
	case now < n:
		pages(start+now, n-now)
	case now > n && c.Args[3]&unix.MREMAP_MAYMOVE != 0:
		pages(start, n)
	}
	return c.Continue()
}

// caller returns the thread that waits in a call and its address space, nil if it has died.
func (e *Emulator) caller(c *served) (*Task, *Space) {
	task, err := e.host.Task(c.TID)
	if err != nil {
		return nil, nil
	}
	space := task.callerSpace()
	if !c.Valid() {
		return nil, nil
	}
	return task, space
}

// enter is caller for a call that the driver will carry out. The caller calls end when it
// has ended.
func (e *Emulator) enter(c *served) (task *Task, end func()) {
	task, err := e.host.Task(c.TID)
	if err != nil {
		return nil, nil
	}
	end = e.ending.enter(task.callerSpace())
	if !c.Valid() { // it has died, and may have been released already
		end()
		return nil, nil
	}
	return task, end
}

// ioctl answers an ioctl, if its file is one of ours.
func (e *Emulator) ioctl(c *served) error {
	f, done := e.files.behind(c.TID, c.Args[0])
	if f == nil {
		return c.Continue()
	}
	task, end := e.enter(c)
	if task == nil {
		done()
		return nil
	}
	defer end()
	result, errno := e.fileCall(c, f, task)
	done()
	err := c.Return(result, errno)
	if errors.Is(err, seccomp.ErrNotInterrupted) {
		err = c.Return(0, unix.EINTR) // the signal is pending no longer
	}
	return err
}

// fileCall makes a call with an emulated file.
func (e *Emulator) fileCall(c *served, f *file, task *Task) (int64, syscall.Errno) {
	req, arg := uint32(c.Args[1]), c.Args[2]
	if f.kfd == nil && f.kmap == nil {
		node, _ := e.tree.RenderNode(f.render) // it was opened
		return 0, node.Ioctl(req, arg, task.Space())
	}
	if f.kfd != nil && req>>8&0xff != 'K' {
		return 0, unix.ENOTTY
	}
	began := time.Now()
	task.Begin(c.Interrupted, c.waits, c.stepped, func(fd int) (int, error) { return c.AddFD(fd, false) })
	memory := argument(task.Memory(arg), kfd.Request(req).Size())
	what := driver.Described{Op: driver.Op(kfdabi.KmapName(kfd.Request(req)))}
	if f.kfd != nil {
		what = driver.Describe(kfd.Request(req), memory)
	}
	if target, ok := task.Find(what.Target).(*Task); ok {
		// The driver holds a reference to its memory during the call (get_task_mm): if the
		// process dies, its memory ends with the call.
		defer e.ending.enter(target.Space())()
	}
	result, errno, injected := e.driverCall(c, f, task, kfd.Request(req), memory, what)
	e.report(Event{
		Kind: EventCall, PID: task.Leader().TID(), TID: c.TID, Op: string(what.Op), Target: what.Target, Queues: what.Queues, Mask: what.Mask,
		Result: result, Errno: errnoName(errno), Took: float64(time.Since(began)) / float64(time.Microsecond), Text: injected,
	})
	task.End()
	return result, errno
}

// driverCall makes a call of the driver, with the faults that match it.
func (e *Emulator) driverCall(c *served, f *file, task *Task, req kfd.Request, memory driver.Memory, what driver.Described) (int64, syscall.Errno, string) {
	caller := task.Leader().TID()
	fault, errno, stop := e.before(c, what.Op, caller, what.Target)
	if stop {
		return 0, errno, "injected"
	}
	if what.Op == opCreateQueue {
		e.files.creates(f)
	}
	var freed *driver.Allocation
	if what.Op == opFree {
		freed = e.allocation(f.space, memory)
	}
	var r1 uintptr
	if f.kmap != nil {
		errno = e.driver.IoctlKmap(task, f.kmap, req, memory)
	} else {
		r1, errno = e.driver.Ioctl(task, f.kfd, req, memory)
	}
	result := int64(r1)
	if freed != nil && errno == 0 {
		e.trouble("give memory back", e.files.free(f.space, *freed))
	}
	if settles[what.Op] {
		e.settle()
	}
	if fault != nil && fault.After {
		if fault.Kill != KillNobody {
			e.trouble("kill for a fault", kill(victim(fault, caller, what.Target)))
		}
		if fault.Errno != 0 {
			return 0, fault.Errno, "injected"
		}
	}
	return result, errno, ""
}

// allocation returns the allocation that FREE_MEMORY_OF_GPU names, nil for an
// unknown one.
func (e *Emulator) allocation(space *Space, arg driver.Memory) *driver.Allocation {
	handle := make([]byte, 8)
	if arg == nil || !arg.Read(handle) {
		return nil
	}
	all := e.driver.Allocations(space)
	i := slices.IndexFunc(all, func(a driver.Allocation) bool { return a.Handle == binary.NativeEndian.Uint64(handle) })
	if i < 0 {
		return nil
	}
	return &all[i]
}

var (
	opCreateQueue = driver.RequestOp(kfdabi.ReqCreateQueue)
	opFree        = driver.RequestOp(kfdabi.ReqFreeMemoryOfGPU)
)

// settles are the calls that may change the driver's list of processes, or their VMs.
var settles = map[driver.Op]bool{
	driver.RequestOp(kfdabi.ReqCreateProcess): true, driver.TrapOp(kfd.TrapEnable): true,
	driver.RequestOp(kfdabi.ReqAcquireVM): true, opCreateQueue: true,
}

// before finds the fault of a call, nil for none, and applies it before the call has an
// effect. stop: the call returns errno.
func (e *Emulator) before(c *served, op driver.Op, caller, target int32) (f *Fault, errno syscall.Errno, stop bool) {
	if f = e.faults.forCall(op, caller, target); f == nil {
		return nil, 0, false
	}
	c.Wait()
	e.report(Event{Kind: EventFault, Op: string(op), PID: caller, Target: target, Errno: errnoName(f.Errno)})
	if f.Do != nil {
		f.Do()
	}
	if f.Delay > 0 {
		select {
		case <-time.After(f.Delay):
		case <-e.over:
		}
	}
	if f.After {
		return f, 0, false
	}
	if f.Kill != KillNobody {
		e.trouble("kill for a fault", kill(victim(f, caller, target)))
		if f.Kill == KillCaller {
			return f, unix.EINTR, true // the caller is dead
		}
	}
	return f, f.Errno, f.Errno != 0
}

// open answers an open of an emulated file.
func (e *Emulator) open(c *served) error {
	at, name, flags := int32(c.Args[0]), c.Args[1], c.Args[2]
	if c.NR == seccomp.SysOpen {
		at = unix.AT_FDCWD
		name, flags = c.Args[0], c.Args[1]
	}
	task, space := e.caller(c)
	if task == nil {
		return nil
	}
	if space == nil {
		return c.Continue()
	}
	if c.NR == unix.SYS_OPENAT2 { // struct open_how begins with the flags
		var err error
		if flags, err = readWord(space, c.Args[2]); err != nil {
			return c.Continue()
		}
	}
	text, err := readString(space, name)
	if err != nil || !c.Valid() {
		return c.Continue() // the kernel returns the error
	}
	if tid := threadOfWchan(text); tid != 0 && flags&unix.O_ACCMODE == unix.O_RDONLY {
		return e.openWchan(c, task, tid, flags)
	}
	if text == kmsgPath && flags&unix.O_ACCMODE == unix.O_RDONLY {
		return e.openKmsg(c, flags)
	}
	kind, render := deviceAt(c.TID, at, text)
	if kind == noDevice || flags&unix.O_ACCMODE != unix.O_RDWR {
		return c.Continue()
	}
	// For the kernel, a process that was killed in a call does not die before the call has
	// ended and the driver has released everything. A program that is started because of
	// that death can rely on it, and opens this file first. So does a program that another
	// one executes.
	c.Wait()
	e.sweep()
	e.ending.await()
	task, end := e.enter(c)
	if task == nil {
		return nil
	}
	defer end()
	f := &file{space: space, render: render}
	began := time.Now()
	errno := e.openDevice(c, kind, f, task)
	program := -1
	if errno == 0 {
		var err error
		if program, err = e.files.add(f); err != nil {
			e.trouble("open "+text, err)
			f.release(e.driver)
			errno = unix.ENOMEM
		}
		e.settle()
	}
	// The event comes before the answer: what the program does next is reported after it.
	e.report(Event{
		Kind: EventCall, PID: task.Leader().TID(), TID: c.TID, Op: string(kind.open()), Text: text, Errno: errnoName(errno),
		Took: float64(time.Since(began)) / float64(time.Microsecond),
	})
	if errno != 0 {
		return c.Return(0, errno)
	}
	// Closed before the answer: after it the program may close the file, and the next open must
	// find it released.
	fd, err := c.AddFD(program, flags&unix.O_CLOEXEC != 0)
	if err = errors.Join(err, unix.Close(program)); err != nil {
		return err
	}
	return c.Return(int64(fd), 0)
}

func (e *Emulator) openDevice(c *served, kind device, f *file, task *Task) syscall.Errno {
	if kind == renderDevice {
		if _, ok := e.tree.RenderNode(f.render); !ok {
			return unix.ENOENT
		}
		return 0
	}
	if _, errno, stop := e.before(c, kind.open(), task.Leader().TID(), 0); stop {
		return errno
	}
	var err error
	if kind == kmapDevice {
		f.kmap, err = e.driver.OpenKmap(task)
	} else {
		f.kfd, err = e.driver.Open(task)
	}
	var errno syscall.Errno
	errors.As(err, &errno)
	return errno
}

// device returns the emulated file that a path leads to.
type device int

const (
	noDevice device = iota
	kfdDevice
	kmapDevice
	renderDevice
)

// open returns the name of the call that opens it.
func (d device) open() driver.Op {
	if d == kmapDevice {
		return driver.OpOpenKmap
	}
	return driver.OpOpen
}

// deviceAt returns where a path leads, for a thread and a directory it has open.
func deviceAt(tid, at int32, name string) (kind device, render uint32) {
	if !strings.Contains(name, "kfd") && !strings.Contains(name, "renderD") {
		return noDevice, 0
	}
	if !path.IsAbs(name) {
		dir := fmt.Sprintf("/proc/%d/fd/%d", tid, at)
		if at == unix.AT_FDCWD {
			dir = fmt.Sprintf("/proc/%d/cwd", tid)
		}
		base, err := os.Readlink(dir)
		if err != nil {
			return noDevice, 0
		}
		name = path.Join(base, name)
	}
	name = path.Clean(name)
	switch name {
	case kfd.DevicePath:
		return kfdDevice, 0
	case kfdabi.KmapPath:
		return kmapDevice, 0
	}
	minor, ok := strings.CutPrefix(name, "/dev/dri/renderD")
	if n, err := strconv.ParseUint(minor, 10, 20); ok && err == nil {
		return renderDevice, uint32(n)
	}
	return noDevice, 0
}

// stat answers fstat and its variants for an emulated file: it is a device, and the
// memory file behind it is not.
func (e *Emulator) stat(c *served) error {
	f, done := e.files.behind(c.TID, c.Args[0])
	if f == nil {
		return c.Continue()
	}
	done() // it needs nothing more of the file
	task, space := e.caller(c)
	if task == nil {
		return nil
	}
	major, minor := uint32(KFDMajor), uint32(0)
	switch {
	case f.kmap != nil:
		major, minor = miscMajor, kmapMinor
	case f.kfd == nil:
		major, minor = DRMMajor, f.render
	}
	out, answer := c.Args[1], Stat(major, minor, f.id.Inode)
	switch c.NR {
	case unix.SYS_STATX:
		out, answer = c.Args[4], Statx(major, minor, f.id.Inode)
	case seccomp.SysNewfstatat:
		out = c.Args[2]
	}
	if err := space.WriteAt(answer, out); err != nil {
		return c.Return(0, unix.EFAULT)
	}
	return c.Return(0, 0)
}
