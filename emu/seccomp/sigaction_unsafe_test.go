package seccomp

import (
	"fmt"
	"structs"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const saRestart = 0x10000000 // SA_RESTART (include/uapi/asm-generic/signal-defs.h)

// sigaction is the kernel's struct sigaction on 64-bit machines. Those without a restorer
// have the mask in its place; nothing here depends on either.
type sigaction struct {
	_        structs.HostLayout
	handler  uintptr
	flags    uint64
	restorer uintptr
	mask     uint64
}

// setRestart changes SA_RESTART of an installed handler.
func setRestart(sig syscall.Signal, restart bool) error {
	var sa sigaction
	if _, _, errno := unix.Syscall6(unix.SYS_RT_SIGACTION, uintptr(sig), 0, uintptr(unsafe.Pointer(&sa)), 8, 0, 0); errno != 0 {
		return fmt.Errorf("read the action of %v: %w", sig, errno)
	}
	sa.flags &^= saRestart
	if restart {
		sa.flags |= saRestart
	}
	if _, _, errno := unix.Syscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&sa)), 0, 8, 0, 0); errno != 0 {
		return fmt.Errorf("change the action of %v: %w", sig, errno)
	}
	return nil
}
