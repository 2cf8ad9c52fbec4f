package kfdemu

import "golang.org/x/sys/unix"

const (
	sysOpen       = -1 // there is none
	sysNewfstatat = unix.SYS_FSTATAT
)
