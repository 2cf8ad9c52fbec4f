package kfd

import (
	"runtime"
	"structs"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pointer is an address handed to the kernel: a u64 in the C structures. It is a
// real pointer to Go's eyes, so the memory it names stays where it is for as
// long as the Pointer lives. The zero value is NULL.
type Pointer struct {
	_ structs.HostLayout
	p unsafe.Pointer
}

// The driver refuses 32-bit processes, and the structures with a Pointer in them
// have the right layout with 64-bit addresses only: this does not compile elsewhere.
const _ = uint(unsafe.Sizeof(Pointer{}) - 8)

// PointerTo returns the address of what p points to.
func PointerTo[T any](p *T) Pointer { return Pointer{p: unsafe.Pointer(p)} }

// PointerToSlice returns the address of the first element of s, NULL when s has none.
func PointerToSlice[T any](s []T) Pointer {
	if len(s) == 0 {
		return Pointer{}
	}
	return Pointer{p: unsafe.Pointer(unsafe.SliceData(s))}
}

// IsNil reports whether p is NULL.
func (p Pointer) IsNil() bool { return p.p == nil }

// As returns what p points to as a T, nil for NULL. It is for implementations of
// [Sys] other than the kernel, which know from the request number what T is;
// the memory must hold a whole T.
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

// bytesOf returns the memory of a structure without pointers in it. Writing any
// bytes there is safe: each field is a whole number of fixed size.
func bytesOf[T QueueSnapshotEntry | DeviceInfoEntry | RuntimeInfo](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// Ioctl implements Sys. The conversion to uintptr stands in the call itself, as
// package unsafe demands, and the memory is kept alive until the call is over.
// What the argument points to is kept alive by the argument's own pointers.
func (kernel) Ioctl(fd int, req Request, arg Pointer) (uintptr, error) {
	r1, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(arg.p))
	runtime.KeepAlive(arg.p)
	if errno != 0 {
		return r1, errno
	}
	return r1, nil
}
