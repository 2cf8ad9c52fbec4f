package workload

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// device is the driver as this process opened it. It may be used by several
// goroutines at once.
type device struct {
	sys  Sys
	fd   int
	gpus []gpu
	// interrupted counts the calls a signal interrupted; each was made again.
	interrupted atomic.Uint64

	// mu guards what is mapped: the doorbells of each GPU, and the page of events.
	mu        sync.Mutex
	doorbells map[gpreempt.GPUID]region
	events    region
}

// openDevice opens the driver and asks for the GPUs this process can see.
func openDevice(sys Sys) (*device, error) {
	d := &device{sys: sys, doorbells: map[gpreempt.GPUID]region{}}
	err := d.again(func() (err error) {
		d.fd, err = sys.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC)
		return err
	})
	if err != nil {
		return nil, refused("open "+kfd.DevicePath, 0, kfd.NoQueue, err)
	}
	if err := d.findGPUs(); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// again makes a call until no signal interrupts it. All calls of a client may be made
// again: a call that was interrupted has done nothing, or (RUNTIME_ENABLE,
// DESTROY_QUEUE, WAIT_EVENTS) goes on where it was.
func (d *device) again(call func() error) error {
	for {
		err := call()
		if !errors.Is(err, unix.EINTR) {
			return err
		}
		d.interrupted.Add(1)
	}
}

// ioctl makes a call of the driver.
func (d *device) ioctl(req kfd.Request, arg kfd.Pointer) error {
	return d.again(func() error {
		_, err := d.sys.Ioctl(d.fd, req, arg)
		return err
	})
}

// refused words the refusal of a call.
func refused(op string, gpu gpreempt.GPUID, queue uint32, err error) error {
	errno, ok := errors.AsType[unix.Errno](err)
	if !ok {
		return err
	}
	return &kfd.Error{Op: op, GPU: gpu, Queue: queue, Errno: errno}
}

// findGPUs asks which GPUs there are, and what their queues need.
func (d *device) findGPUs() error {
	var args kfd.ProcessAperturesNewArgs
	if err := d.ioctl(kfd.ReqGetProcessAperturesNew, kfd.PointerTo(&args)); err != nil {
		return refused(kfd.ReqGetProcessAperturesNew.String(), 0, kfd.NoQueue, err)
	}
	apertures := make([]kfd.ProcessDeviceApertures, args.NumOfNodes)
	if len(apertures) > 0 {
		args.Apertures = kfd.PointerToSlice(apertures)
		if err := d.ioctl(kfd.ReqGetProcessAperturesNew, kfd.PointerTo(&args)); err != nil {
			return refused(kfd.ReqGetProcessAperturesNew.String(), 0, kfd.NoQueue, err)
		}
	}
	for _, a := range apertures[:min(len(apertures), int(args.NumOfNodes))] {
		d.gpus = append(d.gpus, gpu{ID: gpreempt.GPUID(a.GPUID), ControlStack: minControlStack, SaveArea: minSaveArea, XCCs: 1})
	}
	if len(d.gpus) == 0 {
		return errors.New("the driver shows this process no GPU")
	}
	return describe(topologyNodes, d.gpus)
}

// acquireVM returns the process an address space on a GPU, by way of the GPU's render
// node. Where there is no such node it is left out: what stands in for the driver
// may do without.
func (d *device) acquireVM(g gpu) error {
	if g.RenderMinor == 0 {
		return nil
	}
	path := fmt.Sprintf("/dev/dri/renderD%d", g.RenderMinor)
	var fd int
	err := d.again(func() (err error) {
		fd, err = d.sys.Open(path, unix.O_RDWR|unix.O_CLOEXEC)
		return err
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO):
		return nil
	case err != nil:
		return fmt.Errorf("open %s: %w", path, err)
	}
	args := kfd.AcquireVMArgs{DRMFD: uint32(fd), GPUID: uint32(g.ID)}
	err = d.ioctl(kfd.ReqAcquireVM, kfd.PointerTo(&args))
	return errors.Join(refused(kfd.ReqAcquireVM.String(), g.ID, kfd.NoQueue, err), d.sys.Close(fd))
}

// setRuntime tells the driver that a ROCm runtime begins here, or ends. With a
// debugger attached it waits for the debugger's answer.
func (d *device) setRuntime(on bool) error {
	var args kfd.RuntimeEnableArgs
	if on {
		args.ModeMask = kfd.RuntimeEnableModeEnable | kfd.RuntimeEnableModeTTMPSave
	}
	return refused(kfd.ReqRuntimeEnable.String(), 0, kfd.NoQueue, d.ioctl(kfd.ReqRuntimeEnable, kfd.PointerTo(&args)))
}

// doorbellBytes is what a process has of a GPU's doorbells: 1024 of 8 bytes. The
// driver's answer to CREATE_QUEUE is the place to map with the doorbell's own place
// in its lowest bits.
const doorbellBytes = 8192

// createQueue makes a queue and returns its id and its doorbell, which is good as long as
// the device is open.
func (d *device) createQueue(args *kfd.CreateQueueArgs) (uint32, *atomic.Uint64, error) {
	gpu := gpreempt.GPUID(args.GPUID)
	if err := d.ioctl(kfd.ReqCreateQueue, kfd.PointerTo(args)); err != nil {
		return 0, nil, refused(kfd.ReqCreateQueue.String(), gpu, kfd.NoQueue, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	page, mapped := d.doorbells[gpu]
	if !mapped {
		var err error
		if page, err = d.mapShared(int64(args.DoorbellOffset&^(doorbellBytes-1)), doorbellBytes); err != nil {
			err = fmt.Errorf("map the doorbells of GPU %d: %w", gpu, err)
			return 0, nil, errors.Join(err, d.destroyQueue(args.QueueID))
		}
		d.doorbells[gpu] = page
	}
	return args.QueueID, page.u64(int(args.DoorbellOffset & (doorbellBytes - 1))), nil
}

// mapShared maps memory of the driver's, which a child of fork does not get.
func (d *device) mapShared(offset int64, n int) (region, error) {
	mem, err := d.sys.Map(d.fd, offset, n)
	if err != nil {
		return region{}, err
	}
	if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
		return region{}, errors.Join(err, d.sys.Unmap(mem))
	}
	return region{mem: mem}, nil
}

// destroyQueue ends a queue, with what is in it. While a debugger has the queue
// suspended it waits.
func (d *device) destroyQueue(id uint32) error {
	args := kfd.DestroyQueueArgs{QueueID: id}
	return refused(kfd.ReqDestroyQueue.String(), 0, id, d.ioctl(kfd.ReqDestroyQueue, kfd.PointerTo(&args)))
}

// close ends the use of the driver. No queue may be used any more.
func (d *device) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	pages := slices.Collect(maps.Values(d.doorbells))
	if d.events.mem != nil {
		pages = append(pages, d.events)
	}
	var errs []error
	for _, page := range pages {
		errs = append(errs, d.sys.Unmap(page.mem))
	}
	clear(d.doorbells)
	d.events = region{}
	return errors.Join(append(errs, d.sys.Close(d.fd))...)
}
