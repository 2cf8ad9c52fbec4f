package workload

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// device is the driver as this process opened it. It may be used by several
// goroutines at once.
type device struct {
	sys  Sys
	fd   int
	gpus []gpu
	// nodes are the render nodes with VMs of this process. They stay open, as ROCm's runtime
	// keeps them: their fdinfo shows the VM.
	nodes []int
	// interrupted counts the calls a signal interrupted; each was made again.
	interrupted atomic.Uint64

	// mu guards what is mapped: the doorbells of each GPU, and the page of events.
	mu        sync.Mutex
	doorbells map[gpreempt.GPUID]region
	events    region
}

// openDevice opens the driver and finds the GPUs that this process can use.
func openDevice(sys Sys) (*device, error) {
	d := &device{sys: sys, doorbells: map[gpreempt.GPUID]region{}}
	var err error
	if d.fd, err = d.open(kfd.DevicePath); err != nil {
		return nil, refused("open "+kfd.DevicePath, 0, kfdabi.NoQueue, err)
	}
	if err := d.findGPUs(); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

func (d *device) open(path string) (fd int, err error) {
	err = d.again(func() error {
		fd, err = d.sys.Open(path, unix.O_RDWR|unix.O_CLOEXEC)
		return err
	})
	return fd, err
}

// again makes a call until no signal interrupts it. All calls of a client may be repeated:
// an interrupted call has had no effect, or continues (RUNTIME_ENABLE, DESTROY_QUEUE,
// WAIT_EVENTS).
func (d *device) again(call func() error) error {
	for {
		err := call()
		if !errors.Is(err, unix.EINTR) {
			return err
		}
		d.interrupted.Add(1)
	}
}

// ioctl makes a call of the driver, about a GPU or a queue, if any.
func (d *device) ioctl(req kfd.Request, gpu gpreempt.GPUID, queue uint32, arg kfd.Pointer) error {
	return refused(req.String(), gpu, queue, d.again(func() error {
		_, err := d.sys.Ioctl(d.fd, req, arg)
		return err
	}))
}

// refused returns the error of a call as a *kfd.Error.
func refused(op string, gpu gpreempt.GPUID, queue uint32, err error) error {
	errno, ok := errors.AsType[unix.Errno](err)
	if !ok {
		return err
	}
	if queue != kfdabi.NoQueue {
		op += fmt.Sprintf(" queue %d", queue)
	}
	return &kfd.Error{Op: op, GPU: gpu, Errno: errno}
}

// findGPUs finds the GPUs, and the memory that their queues need.
func (d *device) findGPUs() error {
	var args kfdabi.ProcessAperturesNewArgs
	if err := d.ioctl(kfdabi.ReqGetProcessAperturesNew, 0, kfdabi.NoQueue, kfd.PointerTo(&args)); err != nil {
		return err
	}
	apertures := make([]kfdabi.ProcessDeviceApertures, args.NumOfNodes)
	if len(apertures) > 0 {
		args.Apertures = kfd.PointerToSlice(apertures)
		if err := d.ioctl(kfdabi.ReqGetProcessAperturesNew, 0, kfdabi.NoQueue, kfd.PointerTo(&args)); err != nil {
			return err
		}
	}
	for _, a := range apertures[:min(len(apertures), int(args.NumOfNodes))] {
		d.gpus = append(d.gpus, gpu{ID: gpreempt.GPUID(a.GPUID), ControlStack: minControlStack, SaveArea: minSaveArea, DebugArea: minDebugArea, XCCs: 1})
	}
	if len(d.gpus) == 0 {
		return errors.New("this process can use no GPU")
	}
	return describe(topologyNodes, d.gpus)
}

// acquireVM acquires an address space on a GPU for the process, through the GPU's render
// node. Without such a node it does nothing: a replacement of the driver may not need it.
func (d *device) acquireVM(g *gpu) error {
	if g.RenderMinor == 0 {
		return nil
	}
	path := fmt.Sprintf("/dev/dri/renderD%d", g.RenderMinor)
	fd, err := d.open(path)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO):
		return nil
	case err != nil:
		return fmt.Errorf("open %s: %w", path, err)
	}
	args := kfdabi.AcquireVMArgs{DRMFD: uint32(fd), GPUID: uint32(g.ID)}
	err = d.ioctl(kfdabi.ReqAcquireVM, g.ID, kfdabi.NoQueue, kfd.PointerTo(&args))
	g.HasVM, g.Render = err == nil, fd
	d.nodes = append(d.nodes, fd)
	return err
}

// setRuntime starts or ends a ROCm runtime for the driver. With a debugger attached it
// waits for the debugger's answer.
func (d *device) setRuntime(on bool) error {
	var args kfdabi.RuntimeEnableArgs
	if on {
		args.ModeMask = kfdabi.RuntimeEnableModeEnable | kfdabi.RuntimeEnableModeTTMPSave
	}
	return d.ioctl(kfdabi.ReqRuntimeEnable, 0, kfdabi.NoQueue, kfd.PointerTo(&args))
}

// doorbellBytes is the size of a process's doorbells on a GPU: 1024 of 8 bytes. The
// offset in the result of CREATE_QUEUE is that of the mapping, with the doorbell's own
// offset in the lowest bits.
const doorbellBytes = 8192

// createQueue creates a queue and returns its ID and its doorbell, which is valid while
// the device is open.
func (d *device) createQueue(args *kfdabi.CreateQueueArgs) (uint32, *atomic.Uint64, error) {
	gpu := gpreempt.GPUID(args.GPUID)
	if err := d.ioctl(kfdabi.ReqCreateQueue, gpu, kfdabi.NoQueue, kfd.PointerTo(args)); err != nil {
		return 0, nil, err
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

// mapShared maps memory of the driver, which a child of fork does not get.
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

// destroyQueue destroys a queue, with the packets in it. It waits while a debugger has the
// queue suspended.
func (d *device) destroyQueue(id uint32) error {
	args := kfdabi.DestroyQueueArgs{QueueID: id}
	return d.ioctl(kfdabi.ReqDestroyQueue, 0, id, kfd.PointerTo(&args))
}

// close unmaps the driver's memory and closes the driver. No queue may be in use.
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
	for _, node := range d.nodes {
		errs = append(errs, d.sys.Close(node))
	}
	return errors.Join(append(errs, d.sys.Close(d.fd))...)
}
