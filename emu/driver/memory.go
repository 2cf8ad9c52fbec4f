package driver

import (
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	pageSize = 4096
	// defaultVRAM is the VRAM of a Node that does not specify it: 192 GiB.
	defaultVRAM = 192 << 30
	// vramAlign is the unit of AVAILABLE_MEMORY (VRAM_AVAILABILITY_ALIGN).
	vramAlign = 2 << 20
	// maxObject limits allocations: host memory is not counted here.
	maxObject = 1 << 46
	// firstMmapOffset is the offset of a render node's first memory
	// (DRM_FILE_PAGE_OFFSET_START).
	firstMmapOffset = 1 << 32
)

func alignUp(n, to uint64) uint64 { return (n + to - 1) &^ (to - 1) }

// object is struct kgd_mem: GPU memory of a process.
type object struct {
	va, size, offset, user uint64
	flags                  uint32
	mapped                 map[*gpu]bool
	users                  map[*gpu]int // queue_refcount
}

// bytes returns the memory that it uses: memory of an AQL queue is mapped twice.
func (o *object) bytes() uint64 {
	if o.flags&kfdabi.AllocAQLQueueMem != 0 {
		return alignUp(o.size/2, pageSize)
	}
	return alignUp(o.size, pageSize)
}

// vram returns the bytes that it uses on the GPU.
func (o *object) vram() uint64 {
	if o.flags&kfdabi.AllocVRAM == 0 {
		return 0
	}
	return o.bytes()
}

// overlaps reports whether the object is mapped on a GPU at any address from start to last
// (svm_range_check_vm).
func (o *object) overlaps(start, last uint64) bool {
	return len(o.mapped) > 0 && o.va <= last && o.va+o.size-1 >= start
}

// Allocation is GPU memory of a process.
type Allocation struct {
	Handle uint64
	GPU    gpreempt.GPUID
	// VA is the address on the GPUs, and Size the bytes there, which for an AQL queue is
	// twice the memory.
	VA, Size uint64
	Flags    uint32 // kfdabi.AllocVRAM and so on
	// Offset is the mmap offset: in the GPU's render node, or for kfdabi.AllocMMIORemap in
	// the driver's device.
	Offset uint64
	// User is the address in the process, for kfdabi.AllocUserptr.
	User uint64
	// Mapped are the GPUs it is mapped on, in order of their IDs.
	Mapped []gpreempt.GPUID
}

// Allocations returns the GPU memory of the process that has an address space, in the
// order of the handles.
func (d *Driver) Allocations(mm MM) []Allocation {
	d.mu.Lock()
	defer d.leave()
	p := d.byMM(mm)
	if p == nil {
		return nil
	}
	var all []Allocation
	for _, x := range p.pdds {
		for id, o := range x.memory {
			a := Allocation{
				Handle: x.handle(id), GPU: x.gpu.ID, VA: o.va, Size: o.size, Flags: o.flags, Offset: o.offset, User: o.user,
			}
			for g := range o.mapped {
				a.Mapped = append(a.Mapped, g.ID)
			}
			slices.Sort(a.Mapped)
			all = append(all, a)
		}
	}
	slices.SortFunc(all, func(a, b Allocation) int {
		if a.Handle < b.Handle {
			return -1
		}
		return 1
	})
	return all
}

// handle is MAKE_HANDLE.
func (x *pdd) handle(id uint32) uint64 { return uint64(x.gpu.ID)<<32 + uint64(id) }

// memoryOf returns the process's part of the GPU in a handle, and the memory, each nil if
// it does not exist.
func (p *process) memoryOf(handle uint64) (*pdd, *object) {
	x := p.pdd(uint32(handle >> 32))
	if x == nil {
		return nil, nil
	}
	return x, x.memory[uint32(handle)]
}

// allocMemory is kfd_ioctl_alloc_memory_of_gpu. Host memory is not counted here, mmap
// offsets are used once, a GPU reserves no VRAM for page tables, and the host can access
// all VRAM.
func (d *Driver) allocMemory(c *call, args *kfdabi.AllocMemoryArgs) (int, errno) {
	p := c.p
	o := &object{va: args.VAAddr, size: args.Size, flags: args.Flags, mapped: map[*gpu]bool{}, users: map[*gpu]int{}}
	given := args.MmapOffset
	switch {
	case o.size == 0:
		return 0, EINVAL
	case p.Secondary && o.flags&kfdabi.AllocUserptr != 0:
		return 0, EOPNOTSUPP
	case (o.va != 0 || o.flags&kfdabi.AllocVRAM == 0) && p.svmAt(o.va, o.va+o.size-1) != nil,
		o.flags&kfdabi.AllocUserptr != 0 && p.svmAt(given, given+o.size-1) != nil:
		return 0, EADDRINUSE
	}
	defer d.hold(c, &p.mutex)()
	x, err := p.bound(args.GPUID, ENODEV)
	if err != 0 {
		return 0, err
	}
	if err := x.reserve(o, given); err != 0 {
		return 0, err
	}
	o.offset = firstMmapOffset + x.mmapped
	x.mmapped += o.bytes()
	if o.flags&kfdabi.AllocMMIORemap != 0 {
		o.offset = d.cfg.Offsets.MMIO(x.gpu.ID)
	}
	var id uint32
	for x.memory[id] != nil {
		id++
	}
	if x.memory == nil {
		x.memory = map[uint32]*object{}
	}
	x.memory[id] = o
	args.Handle, args.MmapOffset = x.handle(id), o.offset
	d.note()
	return 0, 0
}

// reserve has the checks of kfd_ioctl_alloc_memory_of_gpu and
// amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu, and the accounting of
// amdgpu_amdkfd_reserve_mem_limit. given is the address in the process, of a userptr.
func (x *pdd) reserve(o *object, given uint64) errno {
	g := x.gpu
	const registers = kfdabi.AllocDoorbell | kfdabi.AllocMMIORemap
	switch {
	case o.flags&kfdabi.AllocDoorbell != 0 && o.size != DoorbellBytes,
		o.flags&registers == kfdabi.AllocMMIORemap && o.size != pageSize:
		return EINVAL
	case o.flags&(kfdabi.AllocVRAM|kfdabi.AllocGTT) != 0:
	case o.flags&kfdabi.AllocUserptr != 0 && given == 0,
		o.flags&(kfdabi.AllocUserptr|registers) == 0:
		return EINVAL
	case o.flags&kfdabi.AllocUserptr != 0:
		o.user = given
	}
	if o.bytes() == 0 || o.bytes() < o.size/2 { // what is rounded up may overflow
		return EINVAL
	}
	if o.bytes() > maxObject || o.vram() > g.vram()-g.vramUsed {
		return ENOMEM
	}
	g.vramUsed += o.vram()
	g.vramUsedAligned += alignUp(o.vram(), vramAlign)
	return 0
}

// release ends the accounting of the memory.
func (x *pdd) release(o *object) {
	x.gpu.vramUsed -= o.vram()
	x.gpu.vramUsedAligned -= alignUp(o.vram(), vramAlign)
}

// vram returns the memory of the GPU in bytes.
func (g *gpu) vram() uint64 {
	if g.node.VRAM == 0 {
		return defaultVRAM
	}
	return g.node.VRAM
}

// freeAll is kfd_process_free_outstanding_kfd_bos.
func (p *process) freeAll() {
	for _, x := range p.pdds {
		for o := range maps.Values(x.memory) {
			x.release(o)
		}
		x.memory = nil
	}
}

// freeMemory is kfd_ioctl_free_memory_of_gpu.
func (d *Driver) freeMemory(c *call, args *kfdabi.FreeMemoryArgs) (int, errno) {
	p, handle := c.p, args.Handle
	defer d.hold(c, &p.mutex)()
	if p.signals.handle != 0 && p.signals.handle == handle {
		return 0, EPERM
	}
	x, o := p.memoryOf(handle)
	if o == nil {
		return 0, EINVAL
	}
	if d.prof.freeWaits { // kfd_process_wait_gpu_reset_complete
		d.wait(c, func() bool { return !slices.ContainsFunc(p.pdds, func(x *pdd) bool { return x.gpu.Resetting }) })
	}
	if len(o.mapped) > 0 {
		return 0, EBUSY
	}
	x.release(o)
	delete(x.memory, uint32(handle))
	d.note()
	return 0, 0
}

// maxDevices is the most GPUs of a call. The kernel's allocation fails earlier.
const maxDevices = 1 << 20

// mapMemory is kfd_ioctl_map_memory_to_gpu.
func (d *Driver) mapMemory(c *call, args *kfdabi.MapMemoryArgs) (int, errno) {
	return 0, d.eachDevice(c, args, true, func(o *object, peer *pdd) errno {
		if !peer.vm {
			return ENODEV
		}
		o.mapped[peer.gpu] = true
		return 0
	})
}

// unmapMemory is kfd_ioctl_unmap_memory_from_gpu.
func (d *Driver) unmapMemory(c *call, args *kfdabi.UnmapMemoryArgs) (int, errno) {
	return 0, d.eachDevice(c, (*kfdabi.MapMemoryArgs)(args), false, func(o *object, peer *pdd) errno {
		if !o.mapped[peer.gpu] {
			return EINVAL
		}
		if o.users[peer.gpu] > 0 {
			return EBUSY
		}
		delete(o.mapped, peer.gpu)
		return 0
	})
}

// eachDevice calls do for the GPUs of the array from NumSuccess on, and counts them there.
func (d *Driver) eachDevice(c *call, args *kfdabi.MapMemoryArgs, bound bool, do func(*object, *pdd) errno) errno {
	p, n := c.p, args.NumDevices
	if n == 0 || args.NumSuccess > n {
		return EINVAL
	}
	if n > maxDevices {
		return ENOMEM
	}
	ids, ok := copyFrom[uint32](c.memory(&args.DeviceIDsArrayPtr), int(n))
	if !ok {
		return EFAULT
	}
	defer d.hold(c, &p.mutex)()
	x, o := p.memoryOf(args.Handle)
	switch {
	case x == nil:
		return EINVAL
	case bound && !x.vm:
		return ENODEV
	case o == nil:
		return ENOMEM
	}
	for _, id := range ids[args.NumSuccess:] {
		peer := p.pdd(id)
		if peer == nil {
			return EINVAL
		}
		if err := do(o, peer); err != 0 {
			return err
		}
		args.NumSuccess++
		d.note()
	}
	return 0
}

// availableMemory is kfd_ioctl_get_available_memory.
func (d *Driver) availableMemory(c *call, args *kfdabi.AvailableMemoryArgs) (int, errno) {
	defer d.hold(c, &c.p.mutex)()
	x := c.p.pdd(args.GPUID)
	if x == nil {
		return 0, EINVAL
	}
	used := min(x.gpu.vramUsedAligned, x.gpu.vram())
	args.Available = (x.gpu.vram() - used) &^ (vramAlign - 1)
	return 0, 0
}

// dmabuf is dma_buf_get. No file is a dma-buf here.
func (d *Driver) dmabuf(c *call, fd uint32) errno {
	f := c.task.File(fd)
	if f == nil {
		return EBADF
	}
	d.puts = append(d.puts, f)
	return EINVAL
}

// dmabufInfo is kfd_ioctl_get_dmabuf_info.
func (d *Driver) dmabufInfo(c *call, args *kfdabi.DmabufInfoArgs) (int, errno) {
	if len(d.gpus) == 0 {
		return 0, EINVAL
	}
	return 0, d.dmabuf(c, args.DmabufFD)
}

// importDmabuf is kfd_ioctl_import_dmabuf.
func (d *Driver) importDmabuf(c *call, args *kfdabi.ImportDmabufArgs) (int, errno) {
	defer d.hold(c, &c.p.mutex)()
	if _, err := c.p.bound(args.GPUID, ENODEV); err != 0 {
		return 0, err
	}
	return 0, d.dmabuf(c, args.DmabufFD)
}

// exportDmabuf is kfd_ioctl_export_dmabuf. There are no dma-bufs here: for memory that
// could become one it returns ENOMEM.
func (d *Driver) exportDmabuf(c *call, args *kfdabi.ExportDmabufArgs) (int, errno) {
	defer d.hold(c, &c.p.mutex)()
	_, o := c.p.memoryOf(args.Handle)
	switch {
	case o == nil:
		return 0, EINVAL
	case o.flags&kfdabi.AllocUserptr != 0:
		return 0, EPERM
	}
	return 0, ENOMEM
}

// bound is kfd_process_device_data_by_id and kfd_bind_process_to_device: the process must
// have the GPU, and have acquired its VM. Calls differ in the errno without a VM.
func (p *process) bound(gpuID uint32, noVM errno) (*pdd, errno) {
	x := p.pdd(gpuID)
	switch {
	case x == nil:
		return nil, EINVAL
	case !x.vm:
		return nil, noVM
	}
	return x, 0
}
