package conformance

import (
	"fmt"
	"structs"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sigaction is the kernel's struct sigaction on 64-bit machines, for changes only.
type sigaction struct {
	_       structs.HostLayout
	handler uintptr
	flags   uint64
	rest    [2]uint64 // the mask, and a restorer on some machines
}

// neverRestart makes a signal end calls that the kernel would restart for Go's runtime: then
// an interrupted call of the driver, ERESTARTSYS, is noticed.
func neverRestart(sig unix.Signal) error {
	const restart = 0x10000000 // SA_RESTART (include/uapi/asm-generic/signal-defs.h)
	var sa sigaction
	// The kernel fills sa, which is alive during both calls, and reads it.
	if _, _, errno := unix.Syscall6(unix.SYS_RT_SIGACTION, uintptr(sig), 0, uintptr(unsafe.Pointer(&sa)), 8, 0, 0); errno != 0 { //nolint:forbidigo // a signal action is the process's, whatever the thread
		return fmt.Errorf("read the action of %v: %w", sig, errno)
	}
	sa.flags &^= restart
	if _, _, errno := unix.Syscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&sa)), 0, 8, 0, 0); errno != 0 { //nolint:forbidigo // a signal action is the process's, whatever the thread
		return fmt.Errorf("change the action of %v: %w", sig, errno)
	}
	return nil
}
