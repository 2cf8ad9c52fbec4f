package workload

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// pageBytes is the size of the pages of GPU and driver.
const pageBytes = 4096

// memory is memory at the same address for this process and the GPUs. It stays until the
// process ends. Words that both sides use are accessed atomically.
type memory struct {
	mem  []byte
	base uint64
}

// allocate returns zeroed memory of the process that every GPU of the process can use: an
// own mapping, as the driver wants for each buffer of a queue (kfd_queue_buffer_get).
func (d *device) allocate(bytes int) (memory, error) {
	const host = kfdabi.AllocUserptr | kfdabi.AllocWritable | kfdabi.AllocExecutable | kfdabi.AllocCoherent
	return d.place(bytes, unix.PROT_READ|unix.PROT_WRITE, host, d.gpu, d.all)
}

// allocateVRAM returns memory of a GPU that some GPUs can use, and the process cannot.
func (d *device) allocateVRAM(gpu uint32, users []uint32, bytes int) (uint64, error) {
	m, err := d.place(bytes, unix.PROT_NONE, kfdabi.AllocVRAM|kfdabi.AllocWritable, gpu, users)
	return m.base, err
}

func (d *device) place(bytes, protection int, flags, gpu uint32, users []uint32) (memory, error) {
	bytes = (bytes + pageBytes - 1) &^ (pageBytes - 1)
	mem, err := unix.Mmap(-1, 0, bytes, protection, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return memory{}, fmt.Errorf("map %d bytes: %w", bytes, err)
	}
	// As ROCm's runtime does: a child of fork must not make the pages copied on write.
	if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
		return memory{}, errors.Join(fmt.Errorf("keep %d bytes from children: %w", bytes, err), unix.Munmap(mem))
	}
	m := memory{mem: mem, base: uint64(uintptr(unsafe.Pointer(&mem[0])))}
	args := kfdabi.AllocMemoryArgs{VAAddr: m.base, Size: uint64(bytes), GPUID: gpu, Flags: flags}
	if flags&kfdabi.AllocUserptr != 0 {
		args.MmapOffset = m.base
	}
	if err := d.ioctl(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&args)); err != nil {
		return memory{}, errors.Join(fmt.Errorf("allocate %d bytes: %w", bytes, err), unix.Munmap(mem))
	}
	mapped := kfdabi.MapMemoryArgs{Handle: args.Handle, DeviceIDsArrayPtr: kfd.PointerToSlice(users), NumDevices: uint32(len(users))}
	if err := d.ioctl(kfdabi.ReqMapMemoryToGPU, kfd.PointerTo(&mapped)); err != nil {
		return memory{}, fmt.Errorf("map %d bytes on the GPUs: %w", bytes, err)
	}
	return m, nil
}

// reserve returns an address at which neither the process nor a GPU has memory.
func reserve(bytes int) (uint64, error) {
	mem, err := unix.Mmap(-1, 0, bytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return 0, fmt.Errorf("reserve %d bytes: %w", bytes, err)
	}
	return uint64(uintptr(unsafe.Pointer(&mem[0]))), nil
}

// addr returns the address of byte off.
func (m memory) addr(off int) uint64 { return m.base + uint64(off) }

// doorbell is a register of the GPU that a plain store rings: the atomic ones of Go lock the
// bus for a device.
type doorbell struct{ at *uint64 }

func newDoorbell(page []byte, off int) doorbell {
	return doorbell{(*uint64)(unsafe.Pointer(&page[off:][:8][0]))}
}

// ring writes to the doorbell, after every atomic store before. The compiler keeps a store
// that a function of its own makes.
//
//go:noinline
func (d doorbell) ring(value uint64) { *d.at = value }

// u64 returns the 8 bytes at off, a multiple of 8.
func (m memory) u64(off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&m.mem[off:][:8][0]))
}

// u32 returns the 4 bytes at off, a multiple of 4.
func (m memory) u32(off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&m.mem[off:][:4][0]))
}
