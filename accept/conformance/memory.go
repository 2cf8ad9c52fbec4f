package conformance

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// program is what a process needs to create queues as a ROCm program does: the VM of every
// GPU, and memory that is mapped there.
type program struct {
	// node describes a GPU, reserve returns new memory of the process, renew unmaps some and maps
	// other memory in its place, store writes to it.
	node    func(gpu uint32) (node, error)
	reserve func(bytes uint64) (uint64, error)
	renew   func(at, bytes uint64) error
	store   func(at uint64, value uint64) error

	mu      sync.Mutex // guards the rest
	renders map[uint32]int
	rings   map[uint32]uint64 // by the queue's ID
	shared  uint64            // memory for SVM, 0 before it is needed
}

// node is what the topology says of a GPU.
type node map[string]uint64

const pageSize = 4096

func pages(bytes uint64) uint64 { return (bytes + pageSize - 1) &^ (pageSize - 1) }

// render returns the descriptor of a GPU's render node, which stays open.
func (d *doing) render(gpu uint32) (int, error) {
	p := d.sys.program()
	p.mu.Lock()
	defer p.mu.Unlock()
	if fd, ok := p.renders[gpu]; ok {
		return fd, nil
	}
	n, err := p.node(gpu)
	if err != nil {
		return -1, err
	}
	fd := -1
	if minor := n["drm_render_minor"]; minor != 0 {
		if fd, err = d.sys.Open(fmt.Sprint("/dev/dri/renderD", minor), unix.O_RDWR|unix.O_CLOEXEC); err != nil {
			return -1, err
		}
	}
	p.renders[gpu] = fd
	return fd, nil
}

// acquire takes the VM of a GPU.
func (d *doing) acquire(gpu uint32) error {
	fd, err := d.render(gpu)
	if err != nil {
		return err
	}
	args := kfdabi.AcquireVMArgs{DRMFD: uint32(fd), GPUID: gpu}
	_, err = d.ioctl(kfdabi.ReqAcquireVM, kfd.PointerTo(&args))
	return err
}

// acquireAll takes the VM of every GPU, as ROCm's runtime does at its start, and returns the
// GPUs. A process with a VM on some GPUs only can crash the driver, see docs/reference/hazards.md.
func (d *doing) acquireAll() ([]kfdabi.ProcessDeviceApertures, error) {
	buf := make([]kfdabi.ProcessDeviceApertures, 8)
	args := kfdabi.ProcessAperturesNewArgs{}
	if _, err := d.ioctl(kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args)); err != nil {
		return nil, err
	}
	args.Apertures = kfd.PointerToSlice(buf)
	args.NumOfNodes = min(args.NumOfNodes, uint32(len(buf)))
	if _, err := d.ioctl(kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args)); err != nil {
		return nil, err
	}
	gpus := buf[:args.NumOfNodes]
	for _, a := range gpus {
		if err := d.acquire(a.GPUID); err != nil {
			return nil, fmt.Errorf("acquire the VM of GPU %d: %w", a.GPUID, err)
		}
	}
	return gpus, nil
}

// allocate returns the address of new memory that is mapped on a GPU, at the same address: the
// process's own, or the driver's.
func (d *doing) allocate(gpu uint32, bytes uint64, own bool) (uint64, error) {
	bytes = max(pages(bytes), pageSize)
	at, err := d.sys.program().reserve(bytes)
	if err != nil {
		return 0, err
	}
	alloc := kfdabi.AllocMemoryArgs{VAAddr: at, Size: bytes, MmapOffset: at, GPUID: gpu, Flags: kfdabi.AllocUserptr | kfdabi.AllocWritable}
	if !own {
		alloc.MmapOffset, alloc.Flags = 0, kfdabi.AllocGTT|kfdabi.AllocWritable
	}
	if _, err := d.ioctl(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&alloc)); err != nil {
		return 0, fmt.Errorf("allocate %d bytes: %w", bytes, err)
	}
	gpus := []uint32{gpu}
	mapped := kfdabi.MapMemoryArgs{Handle: alloc.Handle, DeviceIDsArrayPtr: kfd.PointerToSlice(gpus), NumDevices: 1}
	if _, err := d.ioctl(kfdabi.ReqMapMemoryToGPU, kfd.PointerTo(&mapped)); err != nil {
		return 0, fmt.Errorf("map %d bytes: %w", bytes, err)
	}
	return at, nil
}

// furnish allocates the memory of a queue: what the script did not name. On an unknown GPU a queue
// has none.
func (d *doing) furnish(args *kfdabi.CreateQueueArgs) error {
	if _, err := d.acquireAll(); err != nil {
		return err
	}
	n, err := d.sys.program().node(args.GPUID)
	if err != nil {
		return ignore(err, unix.ENODEV)
	}
	save := kfdabi.SaveAreaOf(n)
	for _, part := range []struct {
		key   string
		at    *uint64
		bytes uint64
	}{
		{"ring", &args.RingBaseAddress, uint64(args.RingSize)},
		{"pointers", &args.WritePointerAddress, pageSize},
		{"eop", &args.EOPBufferAddress, pageSize},
		{"save", &args.CtxSaveRestoreAddress, (save.Bytes + save.Debug) * max(n["num_xcc"], 1)},
	} {
		bytes := d.num(part.key+"_bytes", part.bytes) // of the memory; the call may name another size
		if at, given := d.values[part.key]; given {
			if *part.at, err = parseNumber(at); err != nil {
				return err
			}
			continue
		}
		// MES reads write pointers from memory that the driver can pin.
		own := part.key != "pointers" || n["gfx_target_version"] < 110000
		if *part.at, err = d.allocate(args.GPUID, bytes, own); err != nil {
			return fmt.Errorf("%s of the queue: %w", part.key, err)
		}
	}
	args.ReadPointerAddress = args.WritePointerAddress + 8
	args.EOPBufferSize = d.num("eop_size", pageSize)
	args.CtxSaveRestoreSize = uint32(d.num("save_size", save.Bytes))
	args.CtlStackSize = uint32(d.num("ctl_size", save.Stack))
	if _, given := d.values["save"]; given {
		return nil
	}
	// The driver sends exceptions of the queue to this word: err_payload_addr of struct
	// kfd_context_save_area_header.
	payload := args.WritePointerAddress + 64
	d.out("payload", payload)
	return d.sys.program().store(args.CtxSaveRestoreAddress+24, payload)
}

// remember notes the ring of a new queue.
func (p *program) remember(args *kfdabi.CreateQueueArgs) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rings[args.QueueID] = args.RingBaseAddress
}

// ring returns the address of a queue's ring.
func (p *program) ring(queue uint32) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rings[queue]
}

// newProgram returns a program of the running kernel's process.
func newProgram() *program {
	return &program{node: topologyNode, reserve: reserve, renew: renew, store: store, renders: map[uint32]int{}, rings: map[uint32]uint64{}}
}

const topology = "/sys/class/kfd/kfd/topology/nodes"

// topologyNode reads the node of a GPU.
func topologyNode(gpu uint32) (node, error) {
	n, err := kfdabi.NodeValues(os.DirFS("/"), gpreempt.GPUID(gpu))
	if err == nil && n == nil {
		err = fmt.Errorf("GPU %d: %w", gpu, unix.ENODEV)
	}
	return n, err
}

// reserve maps new memory, which stays until the process ends.
func reserve(bytes uint64) (uint64, error) { return reserveAt(0, bytes, 0) }

func reserveAt(at, bytes uint64, flags uintptr) (uint64, error) {
	got, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(at), uintptr(bytes), unix.PROT_READ|unix.PROT_WRITE, //nolint:forbidigo // the address is needed, and the memory is not for Go
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags, ^uintptr(0), 0)
	if errno != 0 {
		return 0, fmt.Errorf("reserve %d bytes: %w", bytes, errno)
	}
	return uint64(got), nil
}

// renew unmaps memory of reserve, and maps other memory there.
func renew(at, bytes uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(at), uintptr(bytes), 0); errno != 0 { //nolint:forbidigo // as reserve
		return fmt.Errorf("unmap %d bytes: %w", bytes, errno)
	}
	_, err := reserveAt(at, bytes, unix.MAP_FIXED_NOREPLACE)
	return err
}

// store writes to memory of this process.
func store(at uint64, value uint64) error {
	memory, err := os.OpenFile("/proc/self/mem", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = memory.WriteAt(binary.NativeEndian.AppendUint64(nil, value), int64(at))
	return errors.Join(err, memory.Close())
}
