package workload

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// region is memory the GPU reads and writes while this process does: every word that
// both touch is accessed atomically. The garbage collector does not know it.
type region struct{ mem []byte }

// newRegion returns size bytes of zeroed memory, which a child of fork does not get:
// that is what ROCm's runtime does with all memory of the GPU (MADV_DONTFORK), so that
// a page is never copied on write under the GPU's feet.
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

// free returns the memory back. Nothing may use it any more, on either side.
func (r region) free() error {
	if r.mem == nil {
		return nil
	}
	return unix.Munmap(r.mem)
}

// addr is where byte off is in this process. It stays there until free.
func (r region) addr(off int) uint64 { return uint64(uintptr(unsafe.Pointer(&r.mem[off]))) }

// u64 is the 8 bytes at off, which is a multiple of 8.
func (r region) u64(off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&r.mem[off:][:8][0]))
}

// u32 is the 4 bytes at off, which is a multiple of 4.
func (r region) u32(off int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&r.mem[off:][:4][0]))
}
