package auth

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// peerGroups returns the supplementary groups of the socket's peer, as they were
// when it connected. x/sys has no call for a socket option of variable length.
func peerGroups(fd int) ([]uint32, error) {
	groups := make([]uint32, 32)
	for {
		size := uint32(len(groups)) * 4
		// Legal: both pointers are converted in the call's own expression and point
		// to memory that outlives it; size says how much the kernel may write.
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(unsafe.SliceData(groups))), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == 0:
			return groups[:size/4], nil
		case errors.Is(errno, unix.ERANGE) && int(size/4) > len(groups):
			groups = make([]uint32, size/4) // the kernel said how many there are
		default:
			return nil, errno
		}
	}
}
