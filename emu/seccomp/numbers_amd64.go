package seccomp

import "golang.org/x/sys/unix"

const arch = unix.AUDIT_ARCH_X86_64

// Numbers of system calls that differ by more than their value.
const (
	SysOpen       = unix.SYS_OPEN // -1 where there is only openat
	SysNewfstatat = unix.SYS_NEWFSTATAT
)
