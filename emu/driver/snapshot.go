package driver

import (
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// queueSnapshot is pqm_get_queue_snapshot.
func (d *Driver) queueSnapshot(c *call, args *kfd.TrapQueueSnapshotArgs) (int, errno) {
	p, room, stride := c.target, args.NumQueues, int(args.EntrySize)
	args.NumQueues = 0
	if stride == 0 {
		return 0, EINVAL
	}
	size := min(stride, sizeOf[kfd.QueueSnapshotEntry]())
	args.EntrySize = uint32(size)
	defer d.hold(c, &p.events)()
	to := c.memory(&args.SnapshotBufPtr)
	for i, q := range p.queues {
		if uint32(i) < room {
			entry := bytesOf(q.entry())
			q.Exceptions &^= args.ExceptionMask
			d.note()
			if to == nil || !to.At(i*stride).Write(entry[:size]) {
				return 0, EFAULT
			}
		}
		args.NumQueues++
	}
	return 0, 0
}

func (q *queue) entry() kfd.QueueSnapshotEntry {
	return kfd.QueueSnapshotEntry{
		ExceptionStatus: q.Exceptions, RingBaseAddress: q.Ring, WritePointerAddress: q.Write, ReadPointerAddress: q.Read,
		CtxSaveRestoreAddress: q.Ctx, QueueID: q.ID, GPUID: uint32(q.pdd.gpu.ID), RingSize: q.Size, QueueType: q.Type,
		CtxSaveRestoreAreaSize: q.CtxSize,
	}
}

// deviceSnapshot is kfd_dbg_trap_device_snapshot.
func (d *Driver) deviceSnapshot(c *call, args *kfdabi.TrapDeviceSnapshotArgs) (int, errno) {
	p, to, stride := c.target, c.memory(&args.SnapshotBufPtr), int(args.EntrySize)
	if to == nil {
		return 0, EINVAL
	}
	n := min(int(args.NumDevices), len(p.pdds))
	size := min(stride, d.prof.deviceInfoSize)
	args.NumDevices, args.EntrySize = uint32(len(p.pdds)), uint32(size)
	defer d.hold(c, &p.events)()
	for i, x := range p.pdds[:n] {
		entry := bytesOf(d.deviceEntry(x, i))
		x.exceptions &^= args.ExceptionMask
		if !copyTo(to.At(i*stride), entry[:size]) {
			return 0, EFAULT
		}
	}
	return 0, 0
}

// Capabilities of a GPU in the topology: HSA_CAP_* of kfd_sysfs.h.
const (
	capTrapDebug        = 0x00008000
	capLaunchOverride   = 0x00010000
	capLaunchMode       = 0x00020000
	capPreciseMemory    = 0x00040000
	capDebugFirmware    = 0x20000000
	capPreciseALU       = 0x40000000
	cap2LDSOutOfAddress = 0x00000001 // HSA_CAP2_TRAP_DEBUG_LDS_OUT_OF_ADDR_RANGE_SUPPORTED
	vendorAMD           = 0x1002
	deviceMI300X        = 0x74a1
)

// capabilities is kfd_topology_set_capabilities.
func (n Node) capabilities(p profile) (one, two uint32) {
	one = capTrapDebug | capLaunchOverride | capLaunchMode | capDebugFirmware
	if n.GFX >= 90010 && n.GFX < 100000 || n.GFX >= 120100 {
		one |= capPreciseMemory
	}
	if n.GFX >= 120000 {
		one |= capPreciseALU
	}
	if p.contexts && n.GFX >= 120100 {
		two |= cap2LDSOutOfAddress
	}
	return one, two
}

// deviceEntry returns struct kfd_dbg_device_info_entry of the i-th GPU. Values that a Node
// lacks are the values of an MI300X.
func (d *Driver) deviceEntry(x *pdd, i int) kfd.DeviceInfoEntry {
	n, a := x.gpu.node, x.p.apertures(i + 1)[i]
	caps, caps2 := n.capabilities(d.prof)
	return kfd.DeviceInfoEntry{
		ExceptionStatus: x.exceptions, LDSBase: a.LDSBase, LDSLimit: a.LDSLimit, ScratchBase: a.ScratchBase,
		ScratchLimit: a.ScratchLimit, GPUVMBase: a.GPUVMBase, GPUVMLimit: a.GPUVMLimit,
		GPUID: uint32(n.ID), LocationID: uint32(i+1) << 8, VendorID: vendorAMD, DeviceID: deviceMI300X,
		SubsystemVendorID: vendorAMD, SubsystemDeviceID: deviceMI300X, FWVersion: 0x9f, GFXTargetVersion: n.GFX,
		SIMDCount: 304 * 4, MaxWavesPerSIMD: 8, ArrayCount: 32, SIMDArraysPerEngine: 1, NumXCC: uint32(n.XCCs),
		Capability: caps, DebugProp: 0x61f, Capability2: caps2,
	}
}
