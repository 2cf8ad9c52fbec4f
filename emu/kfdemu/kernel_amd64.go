package kfdemu

import "golang.org/x/sys/unix"

const (
	sysOpen       = unix.SYS_OPEN
	sysNewfstatat = unix.SYS_NEWFSTATAT
)
