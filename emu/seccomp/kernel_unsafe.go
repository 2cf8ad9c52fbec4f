package seccomp

import (
	"structs"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// data is struct seccomp_data (include/uapi/linux/seccomp.h).
type data struct {
	_    structs.HostLayout
	nr   int32
	arch uint32
	ip   uint64
	args [6]uint64
}

// notif is struct seccomp_notif. pid is a thread's ID, in the pid namespace of the
// receiving thread.
type notif struct {
	_     structs.HostLayout
	id    uint64
	pid   uint32
	flags uint32
	data  data
}

// response is struct seccomp_notif_resp. err is negative.
type response struct {
	_     structs.HostLayout
	id    uint64
	val   int64
	err   int32
	flags uint32
}

// addition is struct seccomp_notif_addfd.
type addition struct {
	_          structs.HostLayout
	id         uint64
	flags      uint32
	srcfd      uint32
	newfd      uint32
	newfdFlags uint32
}

// sizes is struct seccomp_notif_sizes.
type sizes struct {
	_                     structs.HostLayout
	notif, response, data uint16
}

var mySizes = sizes{
	notif:    uint16(unsafe.Sizeof(notif{})),
	response: uint16(unsafe.Sizeof(response{})),
	data:     uint16(unsafe.Sizeof(data{})),
}

// ioctl repeats a call that a signal to this process interrupted: the kernel takes the
// lock of a filter interruptibly.
func ioctl(fd int, request uint, arg unsafe.Pointer) (uintptr, syscall.Errno) {
	for {
		// Legal: the memory of the callers' pointers is alive until the call has
		// returned, and the conversion is in the call's own expression.
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(arg))
		if errno != unix.EINTR {
			return r, errno
		}
	}
}

// receive receives the next call. The kernel rejects a buffer that is not zero
// (seccomp_notify_recv, check_zeroed_user).
func receive(fd int) (notif, syscall.Errno) {
	var n notif
	_, errno := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n))
	return n, errno
}

func send(fd int, r response) syscall.Errno {
	_, errno := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r))
	return errno
}

func idValid(fd int, id uint64) bool {
	_, errno := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_ID_VALID, unsafe.Pointer(&id))
	return errno == 0
}

func addFD(fd int, a addition) (int, syscall.Errno) {
	r, errno := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_ADDFD, unsafe.Pointer(&a))
	return int(r), errno
}

// setFilter installs a filter on the calling thread. A nil filter checks whether the
// kernel supports the flags: EFAULT if it does, EINVAL if not (seccomp_set_mode_filter
// checks the flags first).
func setFilter(filter []unix.SockFilter, flags uintptr) (int, syscall.Errno) {
	if filter == nil {
		_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, 0)
		return -1, errno
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: unsafe.SliceData(filter)}
	// Legal: prog and its filter are alive until the call has returned, and the conversion
	// is in the call's own expression.
	r, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	return int(r), errno
}

// actionAvailable returns 0 if filters may return an action.
func actionAvailable(action uint32) syscall.Errno {
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(&action)))
	return errno
}

// kernelSizes returns the sizes of the kernel's structures.
func kernelSizes() (sizes, syscall.Errno) {
	var s sizes
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_NOTIF_SIZES, 0, uintptr(unsafe.Pointer(&s)))
	return s, errno
}
