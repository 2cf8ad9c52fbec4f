package driver

import (
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// setMemoryPolicy is kfd_ioctl_set_memory_policy. No GPU here looks at the aperture.
func (d *Driver) setMemoryPolicy(c *call, args *kfdabi.SetMemoryPolicyArgs) (int, errno) {
	if args.DefaultPolicy > kfdabi.CachePolicyNonCoherent || args.AlternatePolicy > kfdabi.CachePolicyNonCoherent {
		return 0, EINVAL
	}
	return 0, d.setting(c, args.GPUID, ESRCH)
}

// setTrapHandler is kfd_ioctl_set_trap_handler.
func (d *Driver) setTrapHandler(c *call, args *kfdabi.SetTrapHandlerArgs) (int, errno) {
	return 0, d.setting(c, args.GPUID, ESRCH)
}

// setScratchBackingVA is kfd_ioctl_set_scratch_backing_va.
func (d *Driver) setScratchBackingVA(c *call, args *kfdabi.SetScratchBackingVAArgs) (int, errno) {
	return 0, d.setting(c, args.GPUID, ENODEV)
}

// setting is a call whose only effect is on hardware.
func (d *Driver) setting(c *call, gpuID uint32, noVM errno) errno {
	defer d.hold(c, &c.p.mutex)()
	_, err := c.p.bound(gpuID, noVM)
	return err
}

// clockCounters is kfd_ioctl_get_clock_counters.
func (d *Driver) clockCounters(c *call, args *kfdabi.ClockCountersArgs) (int, errno) {
	x := d.lookUp(c, args.GPUID)
	now := d.cfg.Clock()
	args.GPUClockCounter = 0
	if x != nil {
		args.GPUClockCounter = now.GPU
	}
	args.CPUClockCounter, args.SystemClockCounter, args.SystemClockFreq = uint64(now.Raw), uint64(now.Boot), 1e9
	return 0, 0
}

// Of GET_TILE_CONFIG: every GPU from gfx 9 on has tables of zeros. gbAddrConfig is
// GB_ADDR_CONFIG of gfx942 (gfx_v9_4_3.c), used for all GPUs here.
const (
	tileModes      = 32
	macroTileModes = 16
	gbAddrConfig   = 0x2a114042
)

// tileConfig is kfd_ioctl_get_tile_config.
func (d *Driver) tileConfig(c *call, args *kfdabi.TileConfigArgs) (int, errno) {
	x := d.lookUp(c, args.GPUID)
	if x == nil {
		return 0, EINVAL
	}
	args.GBAddrConfig, args.NumBanks, args.NumRanks = gbAddrConfig, 0, 0
	table := func(to *kfd.Pointer, count *uint32, size uint32) bool {
		*count = min(*count, size)
		ok := copyTo(c.memory(to), make([]byte, 4*int(*count)))
		if !ok {
			*count = 0
		}
		return ok
	}
	if !table(&args.TileConfigPtr, &args.NumTileConfigs, tileModes) ||
		!table(&args.MacroTileConfigPtr, &args.NumMacroTileConfigs, macroTileModes) {
		return 0, EFAULT
	}
	return 0, 0
}

// waveState is kfd_ioctl_get_queue_wave_state and get_wave_state, of a compute queue that
// is not on its GPU. No waves are saved here: the control stack in the header is empty.
func (d *Driver) waveState(c *call, args *kfdabi.QueueWaveStateArgs) (int, errno) {
	p := c.p
	defer d.hold(c, &p.mutex)()
	q := p.queue(args.QueueID)
	if q == nil {
		return 0, EFAULT
	}
	g := q.pdd.gpu
	d.lock(c, &g.dqm)
	off := (q.Type == kfd.QueueTypeCompute || q.Type == kfd.QueueTypeComputeAQL) && !q.Active
	d.unlock(&g.dqm)
	if !off {
		return 0, EINVAL
	}
	args.CtlStackUsedSize, args.SaveAreaUsedSize = 0, 0
	to := c.memory(&args.CtlStackAddress)
	if to == nil {
		return 0, EFAULT
	}
	// struct kfd_context_save_area_header begins with the offset and the size of the
	// control stack, and those of the waves.
	header := bytesOf([]uint32{q.ctlStackSize, 0, q.ctlStackSize, 0})
	for xcc := range g.node.XCCs {
		if !to.At(xcc * int(q.CtxSize)).Write(header) {
			return 0, EFAULT
		}
	}
	return 0, 0
}
