package kfd

import (
	"runtime"
	"structs"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pointer is an address passed to the kernel: a u64 in the C structures. For Go it is a
// pointer, so its memory stays valid and in place while the Pointer is in use. The zero
// value is NULL.
type Pointer struct {
	_ structs.HostLayout
	p unsafe.Pointer
}

// The driver rejects 32-bit processes, and structures with a Pointer have the right layout
// only with 64-bit addresses: this does not compile elsewhere.
const _ = uint(unsafe.Sizeof(Pointer{}) - 8)

// PointerTo returns the address of what p points to.
func PointerTo[T any](p *T) Pointer { return Pointer{p: unsafe.Pointer(p)} }

// PointerToSlice returns the address of the first element of s, NULL if s is empty.
func PointerToSlice[T any](s []T) Pointer {
	if len(s) == 0 {
		return Pointer{}
	}
	return Pointer{p: unsafe.Pointer(unsafe.SliceData(s))}
}

// IsNil reports whether p is NULL.
func (p Pointer) IsNil() bool { return p.p == nil }

// As returns p as a pointer to a T, nil for NULL. It is for implementations of [Sys] other
// than the kernel, which know T from the request; the memory must contain a whole T.
func As[T any](p Pointer) *T { return (*T)(p.p) }

// SliceAt returns the n values of type T that p points to, nil for NULL. It is for
// implementations of [Sys], like [As].
func SliceAt[T any](p Pointer, n int) []T {
	if p.p == nil {
		return nil
	}
	return unsafe.Slice((*T)(p.p), n)
}

// Add returns the address n bytes further on, in the same piece of memory. It is for
// implementations of [Sys], like [As].
func (p Pointer) Add(n int) Pointer { return Pointer{p: unsafe.Add(p.p, n)} }

// bytesOf returns the memory of a structure without pointers. Writing any bytes there is
// safe: all fields are integers of fixed size.
func bytesOf[T QueueSnapshotEntry | DeviceInfoEntry | RuntimeInfo](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// Ioctl implements Sys. The conversion to uintptr is in the call itself, as package unsafe
// requires, and the memory is kept alive until the call has returned. The argument's own
// pointers keep alive what it points to.
func (kernel) Ioctl(fd int, req Request, arg Pointer) (uintptr, error) {
	r1, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg.p))
	runtime.KeepAlive(arg.p)
	if errno != 0 {
		return r1, errno
	}
	return r1, nil
}
