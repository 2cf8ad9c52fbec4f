package driver

import "github.com/gpreempt/gpreempt/emu/kfdabi"

// maxWatches is the number of watch points of a GPU (MAX_WATCH_ADDRESSES).
const maxWatches = 4

// setWatch is kfd_dbg_trap_set_dev_address_watch.
func (d *Driver) setWatch(c *call, args *kfdabi.TrapSetNodeAddressWatchArgs) (int, errno) {
	x := c.target.pdd(args.GPUID)
	if x == nil {
		return 0, ENODEV
	}
	for id := range uint32(maxWatches) {
		bit := uint32(1) << id
		if x.gpu.watches&bit != 0 {
			continue
		}
		args.ID = id
		if err := d.refresh(c, x); err != 0 {
			return 0, err
		}
		x.gpu.watches |= bit
		x.watches |= bit
		return 0, 0
	}
	args.ID = ^uint32(0) // KFD_DEBUGGER_INVALID_WATCH_POINT_ID
	return 0, ENOMEM
}

func (d *Driver) clearWatch(c *call, args *kfdabi.TrapClearNodeAddressWatchArgs) (int, errno) {
	x := c.target.pdd(args.GPUID)
	if x == nil {
		return 0, ENODEV
	}
	return 0, d.clearWatchOn(c, x, args.ID)
}

// clearWatchOn is kfd_dbg_trap_clear_dev_address_watch.
func (d *Driver) clearWatchOn(c *call, x *pdd, id uint32) errno {
	if id >= maxWatches || x.watches&(1<<id) == 0 {
		return EINVAL
	}
	if err := d.refresh(c, x); err != 0 {
		return err
	}
	x.gpu.watches &^= 1 << id
	x.watches &^= 1 << id
	return 0
}

// The wave launch modes: enum kfd_dbg_trap_wave_launch_mode.
const (
	launchNormal = 0
	launchHalt   = 1
	launchDebug  = 3
)

// setLaunchMode is kfd_dbg_trap_set_wave_launch_mode.
func (d *Driver) setLaunchMode(c *call, args *kfdabi.TrapSetWaveLaunchModeArgs) (int, errno) {
	switch uint8(args.LaunchMode) {
	case launchNormal, launchHalt, launchDebug:
	default:
		return 0, EINVAL
	}
	return 0, d.refreshAll(c, c.target)
}

func (d *Driver) refreshAll(c *call, target *process) errno {
	for _, x := range target.pdds {
		if err := d.refresh(c, x); err != 0 {
			return err
		}
	}
	return 0
}

// The traps: enum kfd_dbg_trap_mask.
const (
	trapFloatAndInt  = 0x7f
	trapAddressWatch = 0x80
	trapMemory       = 0x100
	trapWaveStartEnd = 3 << 30
)

// overrides is validate_trap_override_request: it returns the traps that the GPU supports.
func (n Node) overrides(mode uint32) (supported uint32, err errno) {
	const or, replace = 0, 1
	if n.GFX < 90010 || n.GFX >= 100000 && n.GFX < 110000 { // kgd_gfx_v9_..., kgd_gfx_v10_...
		if mode != or {
			return trapAddressWatch, EINVAL
		}
		return trapAddressWatch, 0
	}
	supported = trapFloatAndInt | trapAddressWatch | trapMemory
	if n.GFX >= 110004 {
		supported |= trapWaveStartEnd
	}
	if mode != or && mode != replace {
		return supported, EPERM
	}
	return supported, 0
}

// setLaunchOverride is kfd_dbg_trap_set_wave_launch_override. The previous traps are not
// recorded: it returns an empty set.
func (d *Driver) setLaunchOverride(c *call, args *kfdabi.TrapSetWaveLaunchOverrideArgs) (int, errno) {
	request, supported := args.SupportRequestMask, ^uint32(0)
	for _, x := range c.target.pdds {
		can, err := x.gpu.node.overrides(args.OverrideMode)
		supported &= can
		args.SupportRequestMask = supported
		if err != 0 {
			return 0, err
		}
	}
	args.SupportRequestMask = supported
	if request&^supported != 0 {
		return 0, EACCES
	}
	if len(c.target.pdds) > 0 {
		args.EnableMask = 0
	}
	return 0, d.refreshAll(c, c.target)
}

// The flags: enum kfd_dbg_trap_flags.
const (
	flagSingleMemOp       = 1
	flagSingleALUOp       = 2
	flagLDSOutOfAddrRange = 4
)

// setFlags is kfd_dbg_trap_set_flags when the debugger calls it.
func (d *Driver) setFlags(c *call, args *kfdabi.TrapSetFlagsArgs) (int, errno) {
	before := c.target.flags
	err := d.applyFlags(c, c.target, args.Flags)
	args.Flags = before
	return 0, err
}

// applyFlags is the rest of kfd_dbg_trap_set_flags.
func (d *Driver) applyFlags(c *call, target *process, flags uint32) errno {
	for _, x := range target.pdds {
		caps, caps2 := x.gpu.node.capabilities(d.prof)
		if flags&flagSingleMemOp != 0 && caps&capPreciseMemory == 0 ||
			flags&flagSingleALUOp != 0 && caps&capPreciseALU == 0 ||
			d.prof.contexts && flags&flagLDSOutOfAddrRange != 0 && caps2&cap2LDSOutOfAddress == 0 {
			return EACCES
		}
	}
	before := target.flags
	target.flags = flags
	for i, x := range target.pdds {
		if err := d.refresh(c, x); err != 0 {
			target.flags = before
			for _, x := range target.pdds[:i] {
				d.refresh(c, x) // undo; the driver ignores a failure
			}
			return err
		}
	}
	return 0
}
