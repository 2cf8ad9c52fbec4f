package workload

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// region is memory that the GPU and this process read and write at the same time: words
// that both use are accessed atomically. The garbage collector does not manage it.
type region struct{ mem []byte }

// newRegion returns size bytes of zeroed memory that a child of fork does not get, as
// ROCm's runtime does with all memory of the GPU (MADV_DONTFORK): otherwise a page could
// be copied on write while the GPU uses it.
func newRegion(size int) (region, error) {
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return region{}, fmt.Errorf("map %d bytes of memory: %w", size, err)
	}
	if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
		_ = unix.Munmap(mem)
		return region{}, fmt.Errorf("keep %d bytes of memory from children: %w", size, err)
	}
	return region{mem: mem}, nil
}

// mapAt maps a file in the place of mem, which came from unix.Mmap: unix.Munmap unmaps either.
func mapAt(mem []byte, fd int, offset int64) error {
	_, err := unix.MmapPtr(fd, offset, unsafe.Pointer(&mem[0]), uintptr(len(mem)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	return err
}

// free unmaps the memory. Neither side may use it afterwards.
func (r region) free() error {
	if r.mem == nil {
		return nil
	}
	return unix.Munmap(r.mem)
}

// addr returns the address of byte off, valid until free.
func (r region) addr(off int) uint64 { return uint64(uintptr(unsafe.Pointer(&r.mem[off]))) }

// u64 returns the 8 bytes at off, a multiple of 8.
func (r region) u64(off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&r.mem[off:][:8][0]))
}

// u32 returns the 4 bytes at off, a multiple of 4.
func (r region) u32(off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&r.mem[off:][:4][0]))
}
