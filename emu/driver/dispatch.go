package driver

import (
	"slices"
	"syscall"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The errnos that the driver returns. ERESTARTSYS and ENOTSUPP are internal to the
// kernel: a program sees EINTR or a restarted call for the first, and 524 for the second.
const (
	EPERM      = syscall.EPERM
	ENOENT     = syscall.ENOENT
	ESRCH      = syscall.ESRCH
	E2BIG      = syscall.E2BIG
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
	EOVERFLOW  = syscall.EOVERFLOW

	ERESTARTSYS = syscall.Errno(512)
	ENOTSUPP    = syscall.Errno(524)
)

// call is one call under way, or the driver's own work.
type call struct {
	d *Driver
	// task makes the call, nil for the driver's own work.
	task   Task
	caller int32
	op     Op
	file   *File
	p      *process

	// target is the process that a DBG_TRAP is about. locking is the function in which a
	// DBG_TRAP or a CRIU_OP takes the mutex of its process, "" outside of that.
	target  *process
	locking string

	// data is the driver's copy of the argument, of which the caller passed usize bytes,
	// at arg. pointers are those of the structures made of it.
	data     []byte
	usize    int
	arg      Memory
	pointers []pointerField
}

// handler implements an ioctl. r1 is the result if err is 0.
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
	kfd.ReqGetVersion:                ioctl((*Driver).getVersion),
	kfdabi.ReqCreateQueue:            ioctl((*Driver).createQueue),
	kfdabi.ReqDestroyQueue:           ioctl((*Driver).destroyQueue),
	kfdabi.ReqSetMemoryPolicy:        ioctl((*Driver).setMemoryPolicy),
	kfdabi.ReqGetClockCounters:       ioctl((*Driver).clockCounters),
	kfdabi.ReqGetProcessApertures:    ioctl((*Driver).aperturesOld),
	kfdabi.ReqUpdateQueue:            ioctl((*Driver).updateQueue),
	kfdabi.ReqCreateEvent:            ioctl((*Driver).createEvent),
	kfdabi.ReqDestroyEvent:           ioctl((*Driver).destroyEvent),
	kfdabi.ReqSetEvent:               ioctl((*Driver).setEvent),
	kfdabi.ReqResetEvent:             ioctl((*Driver).resetEvent),
	kfdabi.ReqWaitEvents:             ioctl((*Driver).waitEvents),
	kfdabi.ReqSetScratchBackingVA:    ioctl((*Driver).setScratchBackingVA),
	kfdabi.ReqGetTileConfig:          ioctl((*Driver).tileConfig),
	kfdabi.ReqSetTrapHandler:         ioctl((*Driver).setTrapHandler),
	kfdabi.ReqAllocMemoryOfGPU:       ioctl((*Driver).allocMemory),
	kfdabi.ReqFreeMemoryOfGPU:        ioctl((*Driver).freeMemory),
	kfdabi.ReqMapMemoryToGPU:         ioctl((*Driver).mapMemory),
	kfdabi.ReqUnmapMemoryFromGPU:     ioctl((*Driver).unmapMemory),
	kfdabi.ReqGetQueueWaveState:      ioctl((*Driver).waveState),
	kfdabi.ReqGetDmabufInfo:          ioctl((*Driver).dmabufInfo),
	kfdabi.ReqImportDmabuf:           ioctl((*Driver).importDmabuf),
	kfdabi.ReqSVM:                    ioctl((*Driver).svmCall),
	kfdabi.ReqSetXnackMode:           ioctl((*Driver).setXnackMode),
	kfdabi.ReqAvailableMemory:        ioctl((*Driver).availableMemory),
	kfdabi.ReqExportDmabuf:           ioctl((*Driver).exportDmabuf),
	kfdabi.ReqSetCUMask:              ioctl((*Driver).setCUMask),
	kfdabi.ReqAllocQueueGWS:          ioctl((*Driver).allocQueueGWS),
	kfdabi.ReqAcquireVM:              ioctl((*Driver).acquireVM),
	kfdabi.ReqGetProcessAperturesNew: ioctl((*Driver).aperturesNew),
	kfd.ReqSMIEvents:                 ioctl((*Driver).smiEvents),
	kfd.ReqCRIUOp:                    ioctl((*Driver).criu),
	kfdabi.ReqRuntimeEnable:          ioctl((*Driver).runtimeEnable),
	kfd.ReqDbgTrap:                   (*Driver).dbgTrap,
	kfdabi.ReqCreateProcess:          (*Driver).createContext,
	kfdabi.ReqProfiler:               ioctl((*Driver).profiler),
	reqDbgRegister:                   (*Driver).noLonger,
	reqDbgUnregister:                 (*Driver).noLonger,
	reqDbgAddressWatch:               (*Driver).noLonger,
	reqDbgWaveControl:                (*Driver).noLonger,
}

// requests is the driver's request of each number.
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

// Ioctl makes a call of t on f (kfd_ioctl). err is 0 or the errno, and may be
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
	if own&dirOut != 0 && !copyTo(arg, c.data[:c.usize]) {
		return 0, EFAULT
	}
	return uintptr(n), err
}

func read(m Memory, p []byte) bool { return len(p) == 0 || m != nil && m.Read(p) }

func (d *Driver) getVersion(_ *call, args *kfd.GetVersionArgs) (int, errno) {
	args.Major, args.Minor = 1, d.prof.minor
	return 0, 0
}

// noLonger is kfd_ioctl_dbg_register and the other calls of the old debug interface.
func (d *Driver) noLonger(*call) (int, errno) { return 0, EPERM }

// aperturesNew is kfd_ioctl_get_process_apertures_new.
func (d *Driver) aperturesNew(c *call, args *kfdabi.ProcessAperturesNewArgs) (int, errno) {
	p, room := c.p, int(args.NumOfNodes)
	if room > len(d.gpus)+max(d.cfg.CPUNodes, 1) { // all nodes of the topology
		return 0, EINVAL
	}
	defer d.hold(c, &p.mutex)()
	if room == 0 {
		args.NumOfNodes = uint32(len(p.pdds))
		return 0, 0
	}
	args.NumOfNodes = uint32(min(room, len(p.pdds)))
	if !copyTo(c.memory(&args.Apertures), bytesOf(p.apertures(int(args.NumOfNodes)))) {
		return 0, EFAULT
	}
	return 0, 0
}

// aperturesOld is kfd_ioctl_get_process_apertures.
func (d *Driver) aperturesOld(c *call, args *kfdabi.ProcessAperturesArgs) (int, errno) {
	p := c.p
	defer d.hold(c, &p.mutex)()
	n := min(len(p.pdds), len(args.ProcessApertures))
	copy(args.ProcessApertures[:], p.apertures(n))
	args.NumOfNodes = uint32(n)
	return 0, 0
}

// apertures returns those of the first n GPUs, which are the same for every GPU
// (kfd_init_apertures_v9).
func (p *process) apertures(n int) []kfdabi.ProcessDeviceApertures {
	all := make([]kfdabi.ProcessDeviceApertures, n)
	for i := range all {
		all[i] = kfdabi.ProcessDeviceApertures{
			LDSBase: 0x1000000000000, LDSLimit: 0x10000ffffffff,
			ScratchBase: 0x2000000000000, ScratchLimit: 0x20000ffffffff,
			GPUVMBase: 0x10000, GPUVMLimit: 0x7fffffffffff,
			GPUID: uint32(p.pdds[i].gpu.ID),
		}
	}
	return all
}

// acquireVM is kfd_ioctl_acquire_vm. Any descriptor is accepted as a render node.
func (d *Driver) acquireVM(c *call, args *kfdabi.AcquireVMArgs) (int, errno) {
	p := c.p
	defer d.hold(c, &p.mutex)()
	x := p.pdd(args.GPUID)
	if x == nil {
		return 0, EINVAL
	}
	d.initVM(x)
	x.acquired = true
	return 0, 0
}

// initVMs has a process acquire the VMs that it needs for a queue on x, where the driver
// returns ESRCH: all of them if it has none, as ROCm's runtime does before its first queue.
func (d *Driver) initVMs(x *pdd) {
	if !d.cfg.OwnVMs && !slices.ContainsFunc(x.p.pdds, func(x *pdd) bool { return x.vm }) {
		for _, x := range x.p.pdds {
			d.initVM(x)
		}
	}
	d.initVM(x)
}

// initVM is kfd_process_device_init_vm.
func (d *Driver) initVM(x *pdd) {
	if x.vm {
		return
	}
	x.vm = true
	if d.prof.contexts {
		d.smiProcess(x, kfdabi.SMIProcessStart)
	}
}

// createContext is kfd_ioctl_create_process.
func (d *Driver) createContext(c *call) (int, errno) {
	p := c.p
	if p.Secondary || p != c.file.p {
		return 0, EINVAL
	}
	fresh := d.newProcess(p.lead, c.task.MM())
	fresh.Secondary = true
	fresh.refs = 1
	c.file.p = fresh
	d.unref(p)
	return 0, 0
}

// profiler is kfd_ioctl_profiler. CAP_SYS_ADMIN represents CAP_PERFMON here, and no GPU
// has a peak tops limiter (PTL).
func (d *Driver) profiler(c *call, args *kfdabi.ProfilerArgs) (int, errno) {
	switch args.Op {
	case kfdabi.ProfilerVersion:
		args.GPUID = 1 // the union's member version
		return 0, 0
	case kfdabi.ProfilerPMC:
		if !c.task.Capable(CapSysAdmin) {
			return 0, EPERM
		}
		return 0, d.lockProfiler(c, args)
	case kfdabi.ProfilerPTLControl:
		if c.p.pdd(args.GPUID) == nil {
			return 0, EINVAL
		}
		return 0, EOPNOTSUPP
	}
	return 0, EINVAL
}

// lockProfiler is profile_lock_device.
func (d *Driver) lockProfiler(c *call, args *kfdabi.ProfilerArgs) errno {
	x := d.lookUp(c, args.GPUID)
	if x == nil {
		return EINVAL
	}
	switch owner := x.gpu.profiler; {
	case args.Lock == 1 && owner == nil:
		x.gpu.profiler = c.p
		return 0
	case args.Lock == 1 && owner == c.p:
		return EALREADY
	case args.Lock == 1:
		return EBUSY
	case args.Lock == 0 && owner == c.p:
		x.gpu.profiler = nil
		return 0
	}
	return EINVAL
}
