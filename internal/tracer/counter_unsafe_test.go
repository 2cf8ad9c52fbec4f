package tracer

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Go's own signal handlers merge signals that come close together. To count every
// one, a target installs this handler of its own, in machine code:
//
//	count++; sum += siginfo.si_int
//
// for amd64, followed by the trampoline that returns from it.
var counterCode = []byte{
	0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, // mov rax, <address of the counters>
	0xf0, 0x48, 0xff, 0x00, // lock inc qword [rax]
	0x48, 0x63, 0x4e, 0x18, // movsxd rcx, dword [rsi+24]   si_int of the siginfo
	0xf0, 0x48, 0x01, 0x48, 0x08, // lock add [rax+8], rcx
	0xc3,                // ret
	0xb8, 0x0f, 0, 0, 0, // restorer: mov eax, SYS_rt_sigreturn
	0x0f, 0x05, // syscall
}

const (
	counterAddressAt = 2
	restorerAt       = 24

	// include/uapi/asm-generic/signal-defs.h and asm/signal.h.
	saSiginfo  = 0x00000004
	saRestorer = 0x04000000
	saOnStack  = 0x08000000
	saRestart  = 0x10000000
)

// counters lies in memory the garbage collector does not know. Set once.
var counters *[2]int64

func installCounter(number int) error {
	if runtime.GOARCH != "amd64" {
		return errors.New("the handler is for amd64")
	}
	page, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	code := unsafe.Pointer(unsafe.SliceData(page))
	counters = (*[2]int64)(unsafe.Pointer(&page[4096]))
	copy(page, counterCode)
	*(*uint64)(unsafe.Pointer(&page[counterAddressAt])) = uint64(uintptr(unsafe.Pointer(counters)))
	// struct sigaction of the kernel (not libc's): all signals are blocked in the
	// handler, which runs on the signal stack of the thread.
	action := struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}{
		handler:  uintptr(code),
		flags:    saSiginfo | saRestorer | saOnStack | saRestart,
		restorer: uintptr(unsafe.Add(code, restorerAt)),
		mask:     ^uint64(0),
	}
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(number), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func readCounter() string { return fmt.Sprintf("%d signals, sum %d", counters[0], counters[1]) }

// queueSignal sends a signal with a value to the main thread of a process. Unlike
// kill it does not merge the signal with one that is pending.
func queueSignal(pid int32, number unix.Signal, value int32) error {
	const siQueue = -1
	info := struct {
		signo, errno, code, _ int32
		pid                   int32
		uid                   uint32
		value                 int32
		_                     [100]byte
	}{signo: int32(number), code: siQueue, value: value}
	_, _, errno := unix.Syscall6(unix.SYS_RT_TGSIGQUEUEINFO, uintptr(pid), uintptr(pid), uintptr(number), uintptr(unsafe.Pointer(&info)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// rawWriteRead writes to standard output and reads from standard input with nothing
// of the Go runtime in between.
func rawWriteRead(out, in []byte) {
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, 1, uintptr(unsafe.Pointer(unsafe.SliceData(out))), uintptr(len(out)))
	_, _, _ = unix.RawSyscall(unix.SYS_READ, 0, uintptr(unsafe.Pointer(unsafe.SliceData(in))), uintptr(len(in)))
}

// waitForExit waits until a child has ended, and leaves it to be reaped.
func waitForExit(pid int32, info *childInfo) error {
	return unix.Waitid(unix.P_PID, int(pid), (*unix.Siginfo)(unsafe.Pointer(info)), unix.WEXITED|unix.WNOWAIT, nil)
}
