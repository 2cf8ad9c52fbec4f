package seccomp

import "golang.org/x/sys/unix"

const arch = unix.AUDIT_ARCH_AARCH64

// Numbers of system calls that differ by more than their value.
const (
	SysOpen       = -1 // there is only openat
	SysNewfstatat = unix.SYS_FSTATAT
)
