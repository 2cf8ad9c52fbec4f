package conformance

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The verbs of DBG_TRAP, and of queues.

func (d *doing) pid() uint32 { return uint32(d.num("pid", 0)) }

func (d *doing) trap(arg kfd.Pointer) (int64, error) { return d.ioctl(kfd.ReqDbgTrap, arg) }

func trapEnable(d *doing) (int64, error) {
	info := make([]kfd.RuntimeInfo, 1)
	args := kfd.TrapEnableArgs{
		PID: d.pid(), Op: kfd.TrapEnable, ExceptionMask: d.mask("mask"),
		RinfoPtr: pointer(d, info), RinfoSize: uint32(d.num("size", 16)), DbgFD: uint32(d.num("events", 0)),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("rinfo_size", args.RinfoSize)
	d.out("state", uint32(info[0].State))
	d.out("r_debug", info[0].RDebug)
	return r, err
}

// trapDisable is any operation without arguments.
func trapDisable(d *doing) (int64, error) {
	args := kfd.TrapDisableArgs{PID: d.pid(), Op: kfd.TrapOp(d.num("op", uint64(kfd.TrapDisable)))}
	return d.trap(kfd.PointerTo(&args))
}

func trapSend(d *doing) (int64, error) {
	args := kfd.TrapSendRuntimeEventArgs{
		PID: d.pid(), Op: kfd.TrapSendRuntimeEvent, ExceptionMask: d.mask("mask"),
		GPUID: uint32(d.num("gpu", 0)), QueueID: uint32(d.num("queue", 0)),
	}
	return d.trap(kfd.PointerTo(&args))
}

func trapSetExceptions(d *doing) (int64, error) {
	args := kfdabi.TrapSetExceptionsEnabledArgs{PID: d.pid(), Op: kfdabi.TrapSetExceptionsEnabled, ExceptionMask: d.mask("mask")}
	return d.trap(kfd.PointerTo(&args))
}

func trapSuspend(d *doing) (int64, error) {
	ids := d.nums("ids")
	args := kfd.TrapSuspendQueuesArgs{
		PID: d.pid(), Op: kfd.TrapSuspendQueues, ExceptionMask: d.mask("mask"),
		QueueArrayPtr: pointer(d, ids), NumQueues: uint32(d.num("n", uint64(len(ids)))), GracePeriod: uint32(d.num("grace", 0)),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("ids", showIDs(ids))
	return r, err
}

func trapResume(d *doing) (int64, error) {
	ids := d.nums("ids")
	args := kfd.TrapResumeQueuesArgs{
		PID: d.pid(), Op: kfd.TrapResumeQueues,
		QueueArrayPtr: pointer(d, ids), NumQueues: uint32(d.num("n", uint64(len(ids)))),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("ids", showIDs(ids))
	return r, err
}

// showIDs returns IDs with the bits that the driver set.
func showIDs(ids []uint32) string {
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = fmt.Sprint(id &^ (kfd.QueueErrorMask | kfd.QueueInvalidMask))
		if id&kfd.QueueInvalidMask != 0 {
			words[i] += ":invalid"
		}
		if id&kfd.QueueErrorMask != 0 {
			words[i] += ":error"
		}
	}
	return strings.Join(words, ",")
}

func trapQueryEvent(d *doing) (int64, error) {
	args := kfd.TrapQueryDebugEventArgs{PID: d.pid(), Op: kfd.TrapQueryDebugEvent, ExceptionMask: d.mask("clear")}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("mask", showMask(args.ExceptionMask))
	d.out("gpu", args.GPUID)
	d.out("queue", args.QueueID)
	return r, err
}

// awaitEvent waits until an exception of the mask is pending: interrupts are handled later.
func awaitEvent(d *doing) (int64, error) {
	return 0, eventually("the exception is not raised", func() (bool, error) {
		args := kfd.TrapQueryDebugEventArgs{PID: d.pid(), Op: kfd.TrapQueryDebugEvent}
		_, err := d.trap(kfd.PointerTo(&args))
		return args.ExceptionMask&d.mask("mask") != 0, ignore(err, unix.EAGAIN)
	})
}

func trapQueryInfo(d *doing) (int64, error) {
	info := make([]kfd.RuntimeInfo, 1)
	args := kfd.TrapQueryExceptionInfoArgs{
		PID: d.pid(), Op: kfd.TrapQueryExceptionInfo, InfoPtr: pointer(d, info), InfoSize: uint32(d.num("size", 16)),
		SourceID: uint32(d.num("source", 0)), ExceptionCode: kfd.ExceptionCode(d.num("code", 0)), ClearException: uint32(d.num("clear", 0)),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("size", args.InfoSize)
	d.out("state", uint32(info[0].State))
	d.out("r_debug", info[0].RDebug)
	return r, err
}

func trapSnapshot(d *doing) (int64, error) {
	n := d.num("n", 0)
	buf := make([]kfd.QueueSnapshotEntry, n)
	args := kfd.TrapQueueSnapshotArgs{
		PID: d.pid(), Op: kfd.TrapGetQueueSnapshot, ExceptionMask: d.mask("clear"),
		SnapshotBufPtr: pointer(d, buf), NumQueues: uint32(n), EntrySize: uint32(d.num("entry", 64)),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("n", args.NumQueues)
	d.out("entry", args.EntrySize)
	if err == nil && n > 0 && d.num("entry", 64) == 64 {
		var ids, types, sizes, gpus []uint32
		var status []string
		for _, q := range buf[:min(args.NumQueues, uint32(n))] {
			ids, types = append(ids, q.QueueID), append(types, q.QueueType)
			sizes, gpus = append(sizes, q.RingSize), append(gpus, q.GPUID)
			status = append(status, showMask(q.ExceptionStatus))
		}
		d.list("ids", ids)
		d.list("types", types)
		d.list("sizes", sizes)
		d.list("gpus", gpus)
		d.out("status", strings.Join(status, ","))
	}
	return r, err
}

func trapDevices(d *doing) (int64, error) {
	n := d.num("n", 0)
	buf := make([]kfd.DeviceInfoEntry, max(n, 1))
	args := kfdabi.TrapDeviceSnapshotArgs{
		PID: d.pid(), Op: kfd.TrapGetDeviceSnapshot, ExceptionMask: d.mask("clear"),
		SnapshotBufPtr: pointer(d, buf), NumDevices: uint32(n), EntrySize: uint32(d.num("entry", 128)),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("n", args.NumDevices)
	d.out("entry", args.EntrySize)
	if err == nil && n > 0 && d.num("entry", 128) == 128 {
		var gpus, gfx []uint32
		for _, dev := range buf[:min(args.NumDevices, uint32(n))] {
			gpus, gfx = append(gpus, dev.GPUID), append(gfx, dev.GFXTargetVersion)
		}
		d.list("gpus", gpus)
		d.list("gfx", gfx)
	}
	return r, err
}

func trapSetFlags(d *doing) (int64, error) {
	args := kfdabi.TrapSetFlagsArgs{PID: d.pid(), Op: kfdabi.TrapSetFlags, Flags: uint32(d.num("flags", 0))}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("flags", args.Flags)
	return r, err
}

func trapLaunchMode(d *doing) (int64, error) {
	args := kfdabi.TrapSetWaveLaunchModeArgs{PID: d.pid(), Op: kfdabi.TrapSetWaveLaunchMode, LaunchMode: uint32(d.num("mode", 0))}
	return d.trap(kfd.PointerTo(&args))
}

func trapLaunchOverride(d *doing) (int64, error) {
	args := kfdabi.TrapSetWaveLaunchOverrideArgs{
		PID: d.pid(), Op: kfdabi.TrapSetWaveLaunchOverride, OverrideMode: uint32(d.num("mode", 0)),
		EnableMask: uint32(d.num("traps", 0)), SupportRequestMask: uint32(d.num("support", 0)),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("traps", args.EnableMask)
	d.out("support", args.SupportRequestMask)
	return r, err
}

func trapWatch(d *doing) (int64, error) {
	args := kfdabi.TrapSetNodeAddressWatchArgs{
		PID: d.pid(), Op: kfdabi.TrapSetNodeAddressWatch, Address: d.num("address", 0x1000),
		Mode: uint32(d.num("mode", 0)), Mask: uint32(d.num("bits", 0)), GPUID: uint32(d.num("gpu", 0)),
	}
	r, err := d.trap(kfd.PointerTo(&args))
	d.out("id", args.ID)
	return r, err
}

func trapClearWatch(d *doing) (int64, error) {
	args := kfdabi.TrapClearNodeAddressWatchArgs{
		PID: d.pid(), Op: kfdabi.TrapClearNodeAddressWatch, GPUID: uint32(d.num("gpu", 0)), ID: uint32(d.num("id", 0)),
	}
	return d.trap(kfd.PointerTo(&args))
}

var queueTypes = map[string]uint32{
	"compute": kfd.QueueTypeCompute, "sdma": kfd.QueueTypeSDMA, "aql": kfd.QueueTypeComputeAQL,
	"xgmi": kfd.QueueTypeSDMAXGMI, "engine": kfd.QueueTypeSDMAByEngID,
}

func createQueue(d *doing) (int64, error) {
	kind, ok := queueTypes[d.text("type", "aql")]
	if !ok {
		kind = uint32(d.num("type", 0))
	}
	args := kfdabi.CreateQueueArgs{
		RingSize: uint32(d.num("size", 65536)), GPUID: uint32(d.num("gpu", 0)), QueueType: kind,
		QueuePercentage: uint32(d.num("percent", 100)), QueuePriority: uint32(d.num("priority", 7)), SDMAEngineID: uint32(d.num("engine", 0)),
	}
	if d.text("memory", "yes") == "yes" {
		if err := d.furnish(&args); err != nil {
			return 0, err
		}
	}
	r, err := d.ioctl(kfdabi.ReqCreateQueue, kfd.PointerTo(&args))
	d.out("id", args.QueueID)
	d.sys.program().remember(&args)
	return r, err
}

func destroyQueue(d *doing) (int64, error) {
	args := kfdabi.DestroyQueueArgs{QueueID: uint32(d.num("id", 0))}
	return d.ioctl(kfdabi.ReqDestroyQueue, kfd.PointerTo(&args))
}

func updateQueue(d *doing) (int64, error) {
	args := kfdabi.UpdateQueueArgs{
		RingBaseAddress: d.num("ring", d.sys.program().ring(uint32(d.num("id", 0)))), QueueID: uint32(d.num("id", 0)), RingSize: uint32(d.num("size", 65536)),
		QueuePercentage: uint32(d.num("percent", 100)), QueuePriority: uint32(d.num("priority", 7)),
	}
	return d.ioctl(kfdabi.ReqUpdateQueue, kfd.PointerTo(&args))
}

func cuMask(d *doing) (int64, error) {
	mask := []uint32{uint32(d.num("mask", 0xffffffff))}
	args := kfdabi.SetCUMaskArgs{QueueID: uint32(d.num("id", 0)), NumCUMask: uint32(d.num("n", 32)), CUMaskPtr: kfd.PointerToSlice(mask)}
	return d.ioctl(kfdabi.ReqSetCUMask, kfd.PointerTo(&args))
}

func gws(d *doing) (int64, error) {
	args := kfdabi.AllocQueueGWSArgs{QueueID: uint32(d.num("id", 0)), NumGWS: uint32(d.num("n", 64))}
	return d.ioctl(kfdabi.ReqAllocQueueGWS, kfd.PointerTo(&args))
}
