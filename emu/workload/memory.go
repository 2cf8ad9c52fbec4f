package workload

import (
	"errors"
	"fmt"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// memory is memory of this process that a GPU can access.
type memory struct {
	region
	d   *device
	gpu gpu
	// handles are those of its parts that are mapped on the GPU.
	handles []uint64
}

// pageBytes is the size of the pages of GPU and driver.
const pageBytes = 4096

// allocate returns zeroed memory of several parts, whose sizes it rounds up to pages. Each
// part is one mapping on the GPU: the driver creates a queue only if each of its buffers
// is exactly one (kfd_queue_buffer_get). Without an address space on the GPU nothing is
// mapped there: a replacement of the driver may not need it.
func (d *device) allocate(g gpu, parts ...int) (*memory, error) {
	size := 0
	for i := range parts {
		parts[i] = (parts[i] + pageBytes - 1) &^ (pageBytes - 1)
		size += parts[i]
	}
	r, err := newRegion(size)
	if err != nil {
		return nil, err
	}
	m := &memory{region: r, d: d, gpu: g}
	at := 0
	for _, n := range parts {
		if !g.HasVM {
			break
		}
		if err := m.mapPart(at, n); err != nil {
			return nil, errors.Join(fmt.Errorf("map %d bytes on GPU %d: %w", n, g.ID, err), m.free())
		}
		at += n
	}
	return m, nil
}

// mapPart maps n bytes from byte off on, on the GPU at their address in the process.
func (m *memory) mapPart(off, n int) error {
	alloc := kfdabi.AllocMemoryArgs{
		VAAddr: m.addr(off), Size: uint64(n), MmapOffset: m.addr(off), GPUID: uint32(m.gpu.ID),
		Flags: kfdabi.AllocUserptr | kfdabi.AllocWritable | kfdabi.AllocExecutable,
	}
	if err := m.d.ioctl(kfdabi.ReqAllocMemoryOfGPU, m.gpu.ID, kfdabi.NoQueue, kfd.PointerTo(&alloc)); err != nil {
		return err
	}
	m.handles = append(m.handles, alloc.Handle)
	gpus := []uint32{uint32(m.gpu.ID)}
	args := kfdabi.MapMemoryArgs{Handle: alloc.Handle, DeviceIDsArrayPtr: kfd.PointerToSlice(gpus), NumDevices: 1}
	return m.d.ioctl(kfdabi.ReqMapMemoryToGPU, m.gpu.ID, kfdabi.NoQueue, kfd.PointerTo(&args))
}

// free unmaps the memory. Neither side may use it afterwards.
func (m *memory) free() error {
	if m == nil {
		return nil
	}
	var errs []error
	gpus := []uint32{uint32(m.gpu.ID)}
	for _, handle := range m.handles {
		unmap := kfdabi.UnmapMemoryArgs{Handle: handle, DeviceIDsArrayPtr: kfd.PointerToSlice(gpus), NumDevices: 1}
		free := kfdabi.FreeMemoryArgs{Handle: handle}
		errs = append(errs,
			m.d.ioctl(kfdabi.ReqUnmapMemoryFromGPU, m.gpu.ID, kfdabi.NoQueue, kfd.PointerTo(&unmap)),
			m.d.ioctl(kfdabi.ReqFreeMemoryOfGPU, m.gpu.ID, kfdabi.NoQueue, kfd.PointerTo(&free)))
	}
	m.handles = nil
	if err := errors.Join(errs...); err != nil {
		return err // the GPU may still write to it
	}
	return m.region.free()
}
