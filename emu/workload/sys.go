package workload

import (
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Sys is the part of the operating system that a client of the driver calls: the kernel,
// or a replacement. Implementations must be safe for concurrent use. Errors are unix.Errno
// values.
type Sys interface {
	kfd.Sys
	// Map is mmap(2) of n bytes of fd at offset, shared, for reading and writing. The
	// driver's offsets have bit 63 set.
	Map(fd int, offset int64, n int) ([]byte, error)
	// MapAt is Map in the place of mem, which is memory of this process.
	MapAt(mem []byte, fd int, offset int64) error
	// Unmap is munmap(2) of a result of Map, or of the mem of MapAt.
	Unmap(mem []byte) error
}

// Kernel returns the running kernel.
func Kernel() Sys { return kernel{kfd.Kernel()} }

type kernel struct{ kfd.Sys }

func (kernel) Map(fd int, offset int64, n int) ([]byte, error) {
	return unix.Mmap(fd, offset, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func (kernel) MapAt(mem []byte, fd int, offset int64) error { return mapAt(mem, fd, offset) }

func (kernel) Unmap(mem []byte) error { return unix.Munmap(mem) }
