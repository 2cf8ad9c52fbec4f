package driver

import "github.com/gpreempt/gpreempt/pkg/kfd"

// setMemoryPolicy is kfd_ioctl_set_memory_policy. No GPU here looks at the aperture.
func (d *Driver) setMemoryPolicy(c *call) (int, errno) {
	if c.u32(20) > kfd.CachePolicyNonCoherent || c.u32(24) > kfd.CachePolicyNonCoherent {
		return 0, EINVAL
	}
	return 0, d.setting(c, c.u32(16), (*process).boundOrGone)
}

// setTrapHandler is kfd_ioctl_set_trap_handler.
func (d *Driver) setTrapHandler(c *call) (int, errno) {
	return 0, d.setting(c, c.u32(16), (*process).boundOrGone)
}

// setScratchBackingVA is kfd_ioctl_set_scratch_backing_va.
func (d *Driver) setScratchBackingVA(c *call) (int, errno) {
	return 0, d.setting(c, c.u32(8), (*process).bound)
}

// setting is a call that leaves no trace but on hardware.
func (d *Driver) setting(c *call, gpuID uint32, bound func(*process, uint32) (*pdd, errno)) errno {
	d.lock(c, &c.p.mutex)
	defer d.unlock(&c.p.mutex)
	_, err := bound(c.p, gpuID)
	return err
}

// clockCounters is kfd_ioctl_get_clock_counters.
func (d *Driver) clockCounters(c *call) (int, errno) {
	d.lock(c, &c.p.mutex)
	x := c.p.pdd(c.u32(32))
	d.unlock(&c.p.mutex)
	now := d.cfg.Clock()
	c.put64(0, 0)
	if x != nil {
		c.put64(0, now.GPU)
	}
	c.put64(8, uint64(now.Raw))
	c.put64(16, uint64(now.Boot))
	c.put64(24, 1e9)
	return 0, 0
}

// Of GET_TILE_CONFIG: every GPU from gfx 9 on has tables of zeros, and this is
// GB_ADDR_CONFIG of gfx942 (gfx_v9_4_3.c), which stands for all.
const (
	tileModes      = 32
	macroTileModes = 16
	gbAddrConfig   = 0x2a114042
)

// tileConfig is kfd_ioctl_get_tile_config.
func (d *Driver) tileConfig(c *call) (int, errno) {
	d.lock(c, &c.p.mutex)
	x := c.p.pdd(c.u32(24))
	d.unlock(&c.p.mutex)
	if x == nil {
		return 0, EINVAL
	}
	c.put32(28, gbAddrConfig)
	c.put32(32, 0)
	c.put32(36, 0)
	for _, table := range []struct{ ptr, count, size int }{{0, 16, tileModes}, {8, 20, macroTileModes}} {
		n := min(c.u32(table.count), uint32(table.size))
		c.put32(table.count, n)
		if !writeAt(c.pointer(table.ptr), 0, make([]byte, 4*n)) {
			c.put32(table.count, 0)
			return 0, EFAULT
		}
	}
	return 0, 0
}

// maxAperturesOld is NUM_OF_SUPPORTED_GPUS.
const maxAperturesOld = 7

// aperturesOld is kfd_ioctl_get_process_apertures.
func (d *Driver) aperturesOld(c *call) (int, errno) {
	p := c.p
	d.lock(c, &p.mutex)
	defer d.unlock(&p.mutex)
	n := min(len(p.pdds), maxAperturesOld)
	copy(c.data, apertureEntries(p.pdds[:n]))
	c.put32(maxAperturesOld*apertureEntrySize, uint32(n))
	return 0, 0
}

// waveState is kfd_ioctl_get_queue_wave_state and get_wave_state: of a compute queue
// that is off its GPU. No waves are saved here, so what the header tells of is empty:
// the control stack ends where it begins.
func (d *Driver) waveState(c *call) (int, errno) {
	p := c.p
	d.lock(c, &p.mutex)
	defer d.unlock(&p.mutex)
	q := p.queue(c.u32(16))
	if q == nil {
		return 0, EFAULT
	}
	g := q.pdd.gpu
	d.lock(c, &g.dqm)
	off := (q.kind == kfd.QueueTypeCompute || q.kind == kfd.QueueTypeComputeAQL) && !q.active
	d.unlock(&g.dqm)
	if !off {
		return 0, EINVAL
	}
	c.put32(8, 0)
	c.put32(12, 0)
	stack, to := q.ctlStackSize, c.pointer(0)
	for xcc := range g.node.XCCs {
		if !writeAt(to, xcc*int(q.ctxSize), u32s(stack, 0, stack, 0)) {
			return 0, EFAULT
		}
	}
	return 0, 0
}
