package kfdemu

import "golang.org/x/sys/unix"

const (
	sysOpen       = -1 // this architecture has no such call
	sysNewfstatat = unix.SYS_FSTATAT
)
