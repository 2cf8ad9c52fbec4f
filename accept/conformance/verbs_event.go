package conformance

import (
	"errors"
	"maps"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The verbs about the events that a process waits for, and about its GPU memory.

func init() {
	maps.Copy(verbs, map[string]func(*doing) (int64, error){
		"create_event": createEvent,
		"destroy_event": func(d *doing) (int64, error) {
			args := kfdabi.DestroyEventArgs{EventID: uint32(d.num("id", 0))}
			return d.ioctl(kfdabi.ReqDestroyEvent, kfd.PointerTo(&args))
		},
		"set_event": func(d *doing) (int64, error) {
			args := kfdabi.SetEventArgs{EventID: uint32(d.num("id", 0))}
			return d.ioctl(kfdabi.ReqSetEvent, kfd.PointerTo(&args))
		},
		"reset_event": func(d *doing) (int64, error) {
			args := kfdabi.ResetEventArgs{EventID: uint32(d.num("id", 0))}
			return d.ioctl(kfdabi.ReqResetEvent, kfd.PointerTo(&args))
		},
		"wait_events": waitEvents,

		"acquire_vm": func(d *doing) (int64, error) {
			return 0, d.acquire(uint32(d.num("gpu", 0)))
		},
		"alloc": allocMemory,
		"free": func(d *doing) (int64, error) {
			args := kfdabi.FreeMemoryArgs{Handle: d.handle()}
			return d.ioctl(kfdabi.ReqFreeMemoryOfGPU, kfd.PointerTo(&args))
		},
		"map":   mapMemory,
		"unmap": unmapMemory,
		"available": func(d *doing) (int64, error) {
			args := kfdabi.AvailableMemoryArgs{GPUID: uint32(d.num("gpu", 0))}
			r, err := d.ioctl(kfdabi.ReqAvailableMemory, kfd.PointerTo(&args))
			d.out("mib", args.Available>>20)
			return r, err
		},
	})
}

var eventKinds = map[string]uint32{
	"signal": kfdabi.EventTypeSignal, "hw": kfdabi.EventTypeHWException, "debug": kfdabi.EventTypeDebug, "memory": kfdabi.EventTypeMemory,
}

// createEvent creates n events and returns the last. A driver without memory for signal events
// gets some, as from ROCm's runtime, unless page is "none".
func createEvent(d *doing) (r int64, err error) {
	kind, ok := eventKinds[d.text("kind", "signal")]
	if !ok {
		kind = uint32(d.num("kind", 0))
	}
	for range d.num("n", 1) {
		args := kfdabi.CreateEventArgs{EventType: kind, AutoReset: uint32(d.num("auto", 0))}
		page, given := d.values["page"]
		if given && page != "none" {
			args.EventPageOffset = d.num("gpu", 1)<<32 | d.num("page", 0)
		}
		r, err = d.ioctl(kfdabi.ReqCreateEvent, kfd.PointerTo(&args))
		if errors.Is(err, unix.ENOMEM) && !given {
			if args.EventPageOffset, err = d.eventPage(); err != nil {
				return r, err
			}
			r, err = d.ioctl(kfdabi.ReqCreateEvent, kfd.PointerTo(&args))
		}
		if err != nil {
			return r, err
		}
		d.out("id", args.EventID)
		d.out("trigger", args.EventTriggerData)
		d.out("slot", args.EventSlotIndex)
		d.out("offset", args.EventPageOffset>>62)
	}
	return r, err
}

// eventPage returns the handle of new memory for signal events on the first GPU.
func (d *doing) eventPage() (uint64, error) {
	gpus, err := d.acquireAll()
	if err != nil {
		return 0, err
	}
	const bytes = 8 * kfdabi.SignalEventLimit
	at, err := d.sys.program().reserve(bytes)
	if err != nil {
		return 0, err
	}
	alloc := kfdabi.AllocMemoryArgs{VAAddr: at, Size: bytes, GPUID: gpus[0].GPUID, Flags: kfdabi.AllocGTT | kfdabi.AllocWritable}
	_, err = d.ioctl(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&alloc))
	return alloc.Handle, err
}

func waitEvents(d *doing) (int64, error) {
	ids, ages := d.nums("ids"), d.nums("ages")
	list := make([]kfdabi.SignalEventData, max(len(ids), 1))
	for i, id := range ids {
		list[i].EventID = id
		if i < len(ages) {
			list[i].LastEventAge = uint64(ages[i])
		}
	}
	args := kfdabi.WaitEventsArgs{
		EventsPtr: pointer(d, list), NumEvents: uint32(d.num("n", uint64(len(ids)))), WaitForAll: uint32(d.num("all", 0)),
		Timeout: uint32(d.num("timeout", 0)), WaitResult: 99,
	}
	r, err := d.ioctl(kfdabi.ReqWaitEvents, kfd.PointerTo(&args))
	d.out("result", args.WaitResult)
	d.out("timeout", args.Timeout)
	words := make([]string, len(ids))
	for i := range ids {
		words[i] = strconv.FormatUint(list[i].LastEventAge, 10)
	}
	d.out("ages", strings.Join(words, ","))
	return r, err
}

// handle returns the handle of a GPU's memory by its number there.
func (d *doing) handle() uint64 { return d.num("gpu", 0)<<32 | d.num("handle", 0) }

func allocMemory(d *doing) (int64, error) {
	args := kfdabi.AllocMemoryArgs{
		VAAddr: d.num("va", 1<<32), Size: d.num("size", 4096), MmapOffset: d.num("user", 0), GPUID: uint32(d.num("gpu", 0)),
	}
	if d.num("shared", 0) == 1 { // at the addresses of svm_set
		at, err := d.shared()
		if err != nil {
			return 0, err
		}
		args.VAAddr = at + pageSize*d.num("page", 0)
	}
	for word := range strings.SplitSeq(d.text("flags", "vram"), "+") {
		args.Flags |= allocFlags[word]
	}
	r, err := d.ioctl(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&args))
	d.out("handle", uint32(args.Handle))
	d.out("gpu", args.Handle>>32)
	return r, err
}

var allocFlags = map[string]uint32{
	"vram": kfdabi.AllocVRAM, "gtt": kfdabi.AllocGTT, "userptr": kfdabi.AllocUserptr, "doorbell": kfdabi.AllocDoorbell,
	"mmio": kfdabi.AllocMMIORemap, "aql": kfdabi.AllocAQLQueueMem, "writable": kfdabi.AllocWritable,
}

func mapMemory(d *doing) (int64, error) {
	ids := d.nums("to")
	args := kfdabi.MapMemoryArgs{
		Handle: d.handle(), DeviceIDsArrayPtr: pointer(d, append(ids, 0)), NumDevices: uint32(d.num("n", uint64(len(ids)))),
		NumSuccess: uint32(d.num("done", 0)),
	}
	r, err := d.ioctl(kfdabi.ReqMapMemoryToGPU, kfd.PointerTo(&args))
	d.out("done", args.NumSuccess)
	return r, err
}

func unmapMemory(d *doing) (int64, error) {
	ids := d.nums("to")
	args := kfdabi.UnmapMemoryArgs{
		Handle: d.handle(), DeviceIDsArrayPtr: pointer(d, append(ids, 0)), NumDevices: uint32(d.num("n", uint64(len(ids)))),
		NumSuccess: uint32(d.num("done", 0)),
	}
	r, err := d.ioctl(kfdabi.ReqUnmapMemoryFromGPU, kfd.PointerTo(&args))
	d.out("done", args.NumSuccess)
	return r, err
}
