package workload

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// device is the driver as this process opened it, and one GPU of it.
type device struct {
	sys kfd.Sys
	fd  int
	gpu uint32
	all []uint32 // every GPU of the process
	// node has the properties of the GPU in the topology, apertures its addresses.
	node      map[string]uint64
	apertures kfdabi.ProcessDeviceApertures
	doorbells []byte
	code      code
	spare     map[uint32]*queue // by the scratch of a lane
}

// openDevice opens the driver and does what ROCm's runtime does at its start: it acquires
// the VM of every GPU and enables the runtime, without which no queue can be suspended.
func openDevice(gpu uint32, xnack string) (*device, error) {
	d := &device{sys: kfd.Kernel(), gpu: gpu, spare: map[uint32]*queue{}}
	var err error
	if d.fd, err = d.sys.Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("open %s: %w", kfd.DevicePath, err)
	}
	var args kfdabi.ProcessAperturesNewArgs
	if err := d.ioctl(kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args)); err != nil {
		return nil, err
	}
	list := make([]kfdabi.ProcessDeviceApertures, max(args.NumOfNodes, 1))
	args.Apertures = kfd.PointerToSlice(list)
	if err := d.ioctl(kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args)); err != nil {
		return nil, err
	}
	for _, a := range list[:min(int(args.NumOfNodes), len(list))] {
		node, err := readNode(a.GPUID)
		if err != nil {
			return nil, err
		}
		if err := d.acquireVM(a.GPUID, node["drm_render_minor"]); err != nil {
			return nil, err
		}
		d.all = append(d.all, a.GPUID)
		if a.GPUID == gpu {
			d.node, d.apertures = node, a
		}
	}
	if d.node == nil {
		return nil, fmt.Errorf("the driver has no GPU %d for this process", gpu)
	}
	if xnack != "" {
		args := kfdabi.SetXnackModeArgs{}
		if xnack == "on" {
			args.XnackEnabled = 1
		}
		if err := d.ioctl(kfdabi.ReqSetXnackMode, kfd.PointerTo(&args)); err != nil {
			return nil, err
		}
	}
	return d, d.setRuntime(kfdabi.RuntimeEnableModeEnable | kfdabi.RuntimeEnableModeTTMPSave)
}

// setRuntime enables the runtime, or ends it with mode 0.
func (d *device) setRuntime(mode uint32) error {
	args := kfdabi.RuntimeEnableArgs{ModeMask: mode}
	return d.ioctl(kfdabi.ReqRuntimeEnable, kfd.PointerTo(&args))
}

// ioctl makes a call until no signal interrupts it.
func (d *device) ioctl(req kfd.Request, arg kfd.Pointer) error {
	for {
		if _, err := d.sys.Ioctl(d.fd, req, arg); !errors.Is(err, unix.EINTR) {
			if err != nil {
				return fmt.Errorf("%v: %w", req, err)
			}
			return nil
		}
	}
}

// acquireVM acquires the address space of a GPU. The render node stays open.
func (d *device) acquireVM(gpu uint32, minor uint64) error {
	path := "/dev/dri/renderD" + strconv.FormatUint(minor, 10)
	fd, err := d.sys.Open(path, unix.O_RDWR|unix.O_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	args := kfdabi.AcquireVMArgs{DRMFD: uint32(fd), GPUID: gpu}
	return d.ioctl(kfdabi.ReqAcquireVM, kfd.PointerTo(&args))
}

// doorbellBytes is the size of a process's doorbells on a GPU. The offset in the result of
// CREATE_QUEUE is that of the mapping, with the doorbell's own in the lowest bits.
const doorbellBytes = 8192

// createQueue creates a queue and returns its doorbell.
func (d *device) createQueue(args *kfdabi.CreateQueueArgs) (doorbell, error) {
	args.GPUID, args.QueuePercentage, args.QueuePriority = d.gpu, 100, 7
	if err := d.ioctl(kfdabi.ReqCreateQueue, kfd.PointerTo(args)); err != nil {
		return doorbell{}, err
	}
	if d.doorbells == nil {
		var err error
		d.doorbells, err = unix.Mmap(d.fd, int64(args.DoorbellOffset&^(doorbellBytes-1)), doorbellBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return doorbell{}, fmt.Errorf("map the doorbells: %w", err)
		}
	}
	return newDoorbell(d.doorbells, int(args.DoorbellOffset&(doorbellBytes-1))), nil
}

func (d *device) destroyQueue(id uint32) error {
	args := kfdabi.DestroyQueueArgs{QueueID: id}
	return d.ioctl(kfdabi.ReqDestroyQueue, kfd.PointerTo(&args))
}

// cus is the number of compute units of all XCCs.
func (d *device) cus() uint64 { return d.node["simd_count"] / max(d.node["simd_per_cu"], 1) }

func (d *device) xccs() uint64 { return max(d.node["num_xcc"], 1) }

// readNode returns the properties of a GPU's node in the topology.
func readNode(gpu uint32) (map[string]uint64, error) {
	node, err := kfdabi.NodeValues(os.DirFS("/"), gpreempt.GPUID(gpu))
	if err == nil && node == nil {
		err = fmt.Errorf("the topology has no GPU %d", gpu)
	}
	return node, err
}
