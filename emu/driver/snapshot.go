package driver

import "encoding/binary"

// queueEntrySize is sizeof(struct kfd_queue_snapshot_entry).
const queueEntrySize = 64

// queueSnapshot is pqm_get_queue_snapshot.
func (d *Driver) queueSnapshot(c *call, p *process) errno {
	clearMask, buf, room, stride := c.exceptions(), c.pointer(16), c.u32(24), c.u32(28)
	c.put32(24, 0)
	if stride == 0 {
		return EINVAL
	}
	size := min(int(stride), queueEntrySize)
	c.put32(28, uint32(size))
	d.lock(c, &p.events)
	defer d.unlock(&p.events)
	for i, q := range p.queues {
		if uint32(i) < room {
			entry := queueEntry(q)
			q.exceptions &^= clearMask
			d.note()
			if !writeAt(buf, i*int(stride), entry[:size]) {
				return EFAULT
			}
		}
		c.put32(24, uint32(i+1))
	}
	return 0
}

// queueEntry is struct kfd_queue_snapshot_entry.
func queueEntry(q *queue) []byte {
	b := make([]byte, 0, queueEntrySize)
	for _, v := range []uint64{uint64(q.exceptions), q.ring, q.write, q.read, q.ctx} {
		b = binary.NativeEndian.AppendUint64(b, v)
	}
	for _, v := range []uint32{q.id, uint32(q.pdd.gpu.node.ID), q.size, q.kind, q.ctxSize, 0} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

// deviceSnapshot is kfd_dbg_trap_device_snapshot.
func (d *Driver) deviceSnapshot(c *call, p *process) errno {
	clearMask, buf, stride := c.exceptions(), c.pointer(16), c.u32(28)
	if buf == nil {
		return EINVAL
	}
	n := min(int(c.u32(24)), len(p.pdds))
	size := min(int(stride), d.prof.deviceInfoSize)
	c.put32(24, uint32(len(p.pdds)))
	c.put32(28, uint32(size))
	d.lock(c, &p.events)
	defer d.unlock(&p.events)
	for i, x := range p.pdds[:n] {
		entry := d.deviceEntry(x, i)
		x.exceptions &^= clearMask
		if !writeAt(buf, i*int(stride), entry[:size]) {
			return EFAULT
		}
	}
	return 0
}

// What topology says a GPU can do: HSA_CAP_* of kfd_sysfs.h.
const (
	capTrapDebug         = 0x00008000
	capLaunchOverride    = 0x00010000
	capLaunchMode        = 0x00020000
	capPreciseMemory     = 0x00040000
	capDebugFirmware     = 0x20000000
	capPreciseALU        = 0x40000000
	cap2LDSOutOfAddress  = 0x00000001 // HSA_CAP2_TRAP_DEBUG_LDS_OUT_OF_ADDR_RANGE_SUPPORTED
	vendorAMD            = 0x1002
	deviceInfoEntryBytes = 128
)

// capabilities is kfd_topology_set_capabilities.
func (n Node) capabilities(p profile) (one, two uint32) {
	one = capTrapDebug | capLaunchOverride | capLaunchMode
	if !n.NoDebugFirmware {
		one |= capDebugFirmware
	}
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

// deviceEntry is struct kfd_dbg_device_info_entry. Most of what it says of the GPU
// stands for some GPU.
func (d *Driver) deviceEntry(x *pdd, i int) []byte {
	n, a := x.gpu.node, aperturesOf(x)
	caps, caps2 := n.capabilities(d.prof)
	b := make([]byte, 0, deviceInfoEntryBytes)
	for _, v := range []uint64{
		uint64(x.exceptions), a.ldsBase, a.ldsLimit, a.scratchBase, a.scratchLimit, a.gpuvmBase, a.gpuvmLimit,
	} {
		b = binary.NativeEndian.AppendUint64(b, v)
	}
	for _, v := range []uint32{
		uint32(n.ID), uint32(i+1) << 8, vendorAMD, 0x74a1, 0, vendorAMD, 0x74a1, 0x9f, n.GFX,
		304 * 4, 8, 32, 1, uint32(n.XCCs), caps, 0x61f, caps2, 0,
	} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}
