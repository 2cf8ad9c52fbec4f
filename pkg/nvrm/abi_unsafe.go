package nvrm

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bytes returns the memory of a parameter block, which stays p's.
func Bytes[T any](p *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p)) }

// Params is the reverse of Bytes. It returns nil for a block of another size.
func Params[T any](b []byte) *T {
	var t T
	if len(b) != int(unsafe.Sizeof(t)) {
		return nil
	}
	return (*T)(unsafe.Pointer(unsafe.SliceData(b)))
}

// call makes an ioctl of type 'F' that reads and writes its argument (_IOWR).
func call[T any](fd int, number uintptr, arg *T) error {
	const readWrite = 3
	request := readWrite<<30 | unsafe.Sizeof(*arg)<<16 | 'F'<<8 | number
	for {
		// The conversion is in the argument list of the system call, as package unsafe demands.
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(arg)))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return os.NewSyscallError("ioctl", errno)
		}
	}
}

// control makes a control call. The block is pinned: the kernel gets its address as a number.
func control(fd int, client, object Handle, cmd Command, params []byte) error {
	var pin runtime.Pinner
	defer pin.Unpin()
	arg := nvos54{Client: client, Object: object, Command: cmd, ParamsSize: uint32(len(params))}
	if len(params) > 0 {
		p := unsafe.SliceData(params)
		pin.Pin(p)
		arg.Params = uint64(uintptr(unsafe.Pointer(p)))
	}
	if err := call(fd, escControl, &arg); err != nil {
		return err
	}
	if arg.Status != OK {
		return arg.Status
	}
	return nil
}
