package seccomp

import "golang.org/x/sys/unix"

const sysNewfstatat = unix.SYS_FSTATAT
