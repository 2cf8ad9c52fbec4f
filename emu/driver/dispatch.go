package driver

import (
	"encoding/binary"
	"syscall"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The errnos the driver gives. ERESTARTSYS and ENOTSUPP are the kernel's own:
// the first becomes EINTR, or the call is made again, before a program sees it; the
// second is seen as 524.
const (
	EPERM      = syscall.EPERM
	ESRCH      = syscall.ESRCH
	EINTR      = syscall.EINTR
	EIO        = syscall.EIO
	EBADF      = syscall.EBADF
	EAGAIN     = syscall.EAGAIN
	ENOMEM     = syscall.ENOMEM
	EACCES     = syscall.EACCES
	EFAULT     = syscall.EFAULT
	EBUSY      = syscall.EBUSY
	EEXIST     = syscall.EEXIST
	ENODEV     = syscall.ENODEV
	EADDRINUSE = syscall.EADDRINUSE
	EINVAL     = syscall.EINVAL
	ENOTTY     = syscall.ENOTTY
	ENOSPC     = syscall.ENOSPC
	ENOSYS     = syscall.ENOSYS
	ENODATA    = syscall.ENODATA
	ETIME      = syscall.ETIME
	EALREADY   = syscall.EALREADY
	EOPNOTSUPP = syscall.EOPNOTSUPP

	ERESTARTSYS = syscall.Errno(512)
	ENOTSUPP    = syscall.Errno(524)
)

// call is one call under way, or work of the driver's own.
type call struct {
	d *Driver
	// task makes the call, nil for work of the driver's own.
	task   Task
	caller int32
	op     Op
	file   *File
	p      *process

	// data is the driver's copy of the argument, of which the caller gave usize
	// bytes, at arg.
	data  []byte
	usize int
	arg   Memory
}

func (c *call) u32(off int) uint32      { return binary.NativeEndian.Uint32(c.data[off:]) }
func (c *call) u64(off int) uint64      { return binary.NativeEndian.Uint64(c.data[off:]) }
func (c *call) put32(off int, v uint32) { binary.NativeEndian.PutUint32(c.data[off:], v) }
func (c *call) put64(off int, v uint64) { binary.NativeEndian.PutUint64(c.data[off:], v) }

// exceptions is the first field of most of DBG_TRAP's arms.
func (c *call) exceptions() kfd.ExceptionMask { return kfd.ExceptionMask(c.u64(8)) }

// pointer returns the memory that a field names, nil for NULL.
func (c *call) pointer(off int) Memory {
	if c.u64(off) == 0 || off+8 > c.usize {
		return nil
	}
	return c.arg.Pointer(off)
}

// writeAt is copy_to_user. Nothing can be written at NULL, but nothing is nothing.
func writeAt(m Memory, off int, b []byte) bool {
	if len(b) == 0 {
		return true
	}
	return m != nil && m.At(off).Write(b)
}

// handler is the function of an ioctl. r1 is what it returns if errno is 0.
type handler func(*Driver, *call) (r1 int, err errno)

// deprecated are the numbers of the debug interface before 1.13.
const (
	reqDbgRegister     kfd.Request = 0x40084B0D
	reqDbgUnregister   kfd.Request = 0x40084B0E
	reqDbgAddressWatch kfd.Request = 0x40104B0F
	reqDbgWaveControl  kfd.Request = 0x40104B10
)

// handlers are the ioctls.
var handlers = map[kfd.Request]handler{
	kfd.ReqGetVersion:             (*Driver).getVersion,
	kfd.ReqCreateQueue:            (*Driver).createQueue,
	kfd.ReqDestroyQueue:           (*Driver).destroyQueue,
	kfd.ReqSetMemoryPolicy:        (*Driver).setMemoryPolicy,
	kfd.ReqGetClockCounters:       (*Driver).clockCounters,
	kfd.ReqGetProcessApertures:    (*Driver).aperturesOld,
	kfd.ReqUpdateQueue:            (*Driver).updateQueue,
	kfd.ReqCreateEvent:            (*Driver).createEvent,
	kfd.ReqDestroyEvent:           (*Driver).destroyEvent,
	kfd.ReqSetEvent:               (*Driver).setEvent,
	kfd.ReqResetEvent:             (*Driver).resetEvent,
	kfd.ReqWaitEvents:             (*Driver).waitEvents,
	kfd.ReqSetScratchBackingVA:    (*Driver).setScratchBackingVA,
	kfd.ReqGetTileConfig:          (*Driver).tileConfig,
	kfd.ReqSetTrapHandler:         (*Driver).setTrapHandler,
	kfd.ReqAllocMemoryOfGPU:       (*Driver).allocMemory,
	kfd.ReqFreeMemoryOfGPU:        (*Driver).freeMemory,
	kfd.ReqMapMemoryToGPU:         (*Driver).mapMemory,
	kfd.ReqUnmapMemoryFromGPU:     (*Driver).unmapMemory,
	kfd.ReqGetQueueWaveState:      (*Driver).waveState,
	kfd.ReqGetDmabufInfo:          (*Driver).dmabufInfo,
	kfd.ReqImportDmabuf:           (*Driver).importDmabuf,
	kfd.ReqSVM:                    (*Driver).svmCall,
	kfd.ReqSetXnackMode:           (*Driver).setXnackMode,
	kfd.ReqAvailableMemory:        (*Driver).availableMemory,
	kfd.ReqExportDmabuf:           (*Driver).exportDmabuf,
	kfd.ReqSetCUMask:              (*Driver).setCUMask,
	kfd.ReqAllocQueueGWS:          (*Driver).allocQueueGWS,
	kfd.ReqAcquireVM:              (*Driver).acquireVM,
	kfd.ReqGetProcessAperturesNew: (*Driver).aperturesNew,
	kfd.ReqSMIEvents:              (*Driver).smiEvents,
	kfd.ReqCRIUOp:                 (*Driver).criu,
	kfd.ReqRuntimeEnable:          (*Driver).runtimeEnable,
	kfd.ReqDbgTrap:                (*Driver).dbgTrap,
	kfd.ReqCreateProcess:          (*Driver).createContext,
	kfd.ReqProfiler:               (*Driver).profiler,
	reqDbgRegister:                (*Driver).noLonger,
	reqDbgUnregister:              (*Driver).noLonger,
	reqDbgAddressWatch:            (*Driver).noLonger,
	reqDbgWaveControl:             (*Driver).noLonger,
}

// requests has the driver's own request for each number.
var requests = func() map[uint8]kfd.Request {
	m := map[uint8]kfd.Request{}
	for req := range handlers {
		m[req.Number()] = req
	}
	return m
}()

// The direction bits of a request.
const (
	dirIn  kfd.Request = 1 << 30
	dirOut kfd.Request = 2 << 30
)

// Ioctl is a call of t on f (kfd_ioctl). err is 0 or the errno, and may be
// ERESTARTSYS.
func (d *Driver) Ioctl(t Task, f *File, req kfd.Request, arg Memory) (r1 uintptr, err syscall.Errno) {
	d.mu.Lock()
	defer d.leave()
	own, known := requests[req.Number()]
	if !known || req.Number() > d.prof.lastIoctl {
		if d.prof.enotty {
			return 0, ENOTTY
		}
		return 0, EINVAL
	}
	p := f.p
	criu := own == kfd.ReqCRIUOp
	if p.lead != t.Leader() && (!criu || p.lead.Tracer() != t) {
		return 0, EBADF
	}
	if criu && !t.Capable(CapCheckpointRestore) && !t.Capable(CapSysAdmin) {
		return 0, EACCES
	}

	c := &call{d: d, task: t, caller: t.Leader().TID(), op: RequestOp(own), file: f, p: p, usize: req.Size(), arg: arg}
	c.data = make([]byte, max(req.Size(), own.Size()))
	if own&dirIn != 0 && !read(arg, c.data[:c.usize]) {
		return 0, EFAULT
	}
	n, err := handlers[own](d, c)
	if own&dirOut != 0 && !writeAt(arg, 0, c.data[:c.usize]) {
		return 0, EFAULT
	}
	return uintptr(n), err
}

func read(m Memory, p []byte) bool { return len(p) == 0 || m != nil && m.Read(p) }

func (d *Driver) getVersion(c *call) (int, errno) {
	c.put32(0, 1)
	c.put32(4, d.prof.minor)
	return 0, 0
}

// noLonger is kfd_ioctl_dbg_register and the like.
func (d *Driver) noLonger(*call) (int, errno) { return 0, EPERM }

// aperturesNew is kfd_ioctl_get_process_apertures_new.
func (d *Driver) aperturesNew(c *call) (int, errno) {
	p, room := c.p, int(c.u32(8))
	if room > len(d.gpus)+max(d.cfg.CPUNodes, 1) { // all nodes of the topology
		return 0, EINVAL
	}
	d.lock(c, &p.mutex)
	defer d.unlock(&p.mutex)
	if room == 0 {
		c.put32(8, uint32(len(p.pdds)))
		return 0, 0
	}
	n := min(room, len(p.pdds))
	c.put32(8, uint32(n))
	if !writeAt(c.pointer(0), 0, apertureEntries(p.pdds[:n])) {
		return 0, EFAULT
	}
	return 0, 0
}

// apertureEntrySize is sizeof(struct kfd_process_device_apertures).
const apertureEntrySize = 56

func apertureEntries(pdds []*pdd) []byte {
	var b []byte
	for _, x := range pdds {
		a := aperturesOf(x)
		for _, v := range []uint64{a.ldsBase, a.ldsLimit, a.scratchBase, a.scratchLimit, a.gpuvmBase, a.gpuvmLimit} {
			b = binary.NativeEndian.AppendUint64(b, v)
		}
		b = append(b, u32s(uint32(x.gpu.node.ID), 0)...)
	}
	return b
}

// apertures are those of every GPU (kfd_init_apertures_v9).
type apertures struct {
	ldsBase, ldsLimit, scratchBase, scratchLimit, gpuvmBase, gpuvmLimit uint64
}

func aperturesOf(*pdd) apertures {
	return apertures{
		ldsBase: 0x1000000000000, ldsLimit: 0x10000ffffffff,
		scratchBase: 0x2000000000000, scratchLimit: 0x20000ffffffff,
		gpuvmBase: 0x10000, gpuvmLimit: 0x7fffffffffff,
	}
}

// acquireVM is kfd_ioctl_acquire_vm. Any descriptor is taken for a render node.
func (d *Driver) acquireVM(c *call) (int, errno) {
	p := c.p
	d.lock(c, &p.mutex)
	defer d.unlock(&p.mutex)
	x := p.pdd(c.u32(4))
	if x == nil {
		return 0, EINVAL
	}
	d.giveVM(x)
	return 0, 0
}

// giveVM is kfd_process_device_init_vm.
func (d *Driver) giveVM(x *pdd) {
	if x.vm {
		return
	}
	x.vm = true
	if d.prof.contexts {
		d.smiProcess(x, kfd.SMIProcessStart)
	}
}

// createContext is kfd_ioctl_create_process.
func (d *Driver) createContext(c *call) (int, errno) {
	p := c.p
	if p.secondary || p != c.file.p {
		return 0, EINVAL
	}
	fresh := d.newProcess(p.lead, c.task.MM())
	fresh.secondary = true
	fresh.refs = 1
	c.file.p = fresh
	d.unref(p)
	return 0, 0
}

// profiler is kfd_ioctl_profiler. CAP_PERFMON stands under CAP_SYS_ADMIN here, and
// no GPU has a peak tops limiter (PTL).
func (d *Driver) profiler(c *call) (int, errno) {
	switch c.u32(0) {
	case kfd.ProfilerVersion:
		c.put32(4, 1)
		return 0, 0
	case kfd.ProfilerPMC:
		if !c.task.Capable(CapSysAdmin) {
			return 0, EPERM
		}
		return 0, d.lockProfiler(c, c.u32(4), c.u32(8))
	case kfd.ProfilerPTLControl:
		if c.p.pdd(c.u32(4)) == nil {
			return 0, EINVAL
		}
		return 0, EOPNOTSUPP
	}
	return 0, EINVAL
}

// lockProfiler is profile_lock_device.
func (d *Driver) lockProfiler(c *call, gpuID, lock uint32) errno {
	d.lock(c, &c.p.mutex)
	x := c.p.pdd(gpuID)
	d.unlock(&c.p.mutex)
	if x == nil {
		return EINVAL
	}
	switch owner := x.gpu.profiler; {
	case lock == 1 && owner == nil:
		x.gpu.profiler = c.p
		return 0
	case lock == 1 && owner == c.p:
		return EALREADY
	case lock == 1:
		return EBUSY
	case lock == 0 && owner == c.p:
		x.gpu.profiler = nil
		return 0
	}
	return EINVAL
}
