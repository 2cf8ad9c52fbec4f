package proc

import (
	"errors"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Go's own signal handlers merge signals that come close together. To count every
// one, a target installs this handler of its own, in machine code:
//
//	count[signo]++; sum[signo] += siginfo.si_int
//
// for amd64, followed by the trampoline that returns from it.
var counterCode = []byte{
	0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, // mov rax, <address of the counters>
	0xf0, 0x48, 0xff, 0x04, 0xf8, // lock inc qword [rax+rdi*8]
	0x48, 0x63, 0x4e, 0x18, // movsxd rcx, dword [rsi+24]   si_int of the siginfo
	0xf0, 0x48, 0x01, 0x8c, 0xf8, 0, 4, 0, 0, // lock add [rax+rdi*8+1024], rcx
	0xc3,                // ret
	0xb8, 0x0f, 0, 0, 0, // restorer: mov eax, SYS_rt_sigreturn
	0x0f, 0x05, // syscall
}

const (
	counterAddressAt = 2
	restorerAt       = 29

	// include/uapi/asm-generic/signal-defs.h and asm/signal.h.
	saSiginfo  = 0x00000004
	saRestorer = 0x04000000
	saOnStack  = 0x08000000
	saRestart  = 0x10000000
)

// counterTable has what the handler counts, by signal number.
type counterTable struct{ count, sum [128]atomic.Int64 }

// Both lie in memory the garbage collector does not know. Set once.
var (
	handler  unsafe.Pointer
	counters *counterTable
)

func installCounter(number int) error {
	if runtime.GOARCH != "amd64" {
		return errors.New("the handler is for amd64")
	}
	if counters == nil {
		page, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			return err
		}
		handler = unsafe.Pointer(unsafe.SliceData(page))
		counters = (*counterTable)(unsafe.Pointer(&page[4096]))
		copy(page, counterCode)
		*(*uint64)(unsafe.Pointer(&page[counterAddressAt])) = uint64(uintptr(unsafe.Pointer(counters)))
	}
	return (&sigaction{
		handler:  uintptr(handler),
		flags:    saSiginfo | saRestorer | saOnStack | saRestart,
		restorer: uintptr(unsafe.Add(handler, restorerAt)),
		mask:     ^uint64(0), // nothing interrupts it
	}).install(number)
}

// sigaction is the kernel's struct, not libc's. The zero value is the default action.
type sigaction struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

func (a *sigaction) install(number int) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(number), uintptr(unsafe.Pointer(a)), 0, unsafe.Sizeof(a.mask), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func readCounter(number int) (count, sum int64) {
	return counters.count[number].Load(), counters.sum[number].Load()
}

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

// vfork forks a child and waits in the kernel until it has written out, read in, and
// ended. The child is a copy of one thread: what may call the scheduler, as the
// check of the stack at the beginning of a function does, would wait for ever.
//
//go:nosplit
//go:norace
func vfork(out, in []byte) (pid uintptr, errno unix.Errno) {
	pid, _, errno = unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_VFORK|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, 1, uintptr(unsafe.Pointer(unsafe.SliceData(out))), uintptr(len(out)))
	_, _, _ = unix.RawSyscall(unix.SYS_READ, 0, uintptr(unsafe.Pointer(unsafe.SliceData(in))), uintptr(len(in)))
	for {
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	}
}

// waitForExit waits until a child has ended, and leaves it to be reaped.
func waitForExit(pid int32, info *childInfo) error {
	return unix.Waitid(unix.P_PID, int(pid), (*unix.Siginfo)(unsafe.Pointer(info)), unix.WEXITED|unix.WNOWAIT, nil)
}
