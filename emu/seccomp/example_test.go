package seccomp_test

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/seccomp"
)

// A device whose ioctl 1 of the type 'X' returns its argument, for one thread of this
// process.
func ExampleNewListener() {
	const number = 1<<30 | 4<<16 | 'X'<<8 | 1 // _IOW('X', 1, int)
	handle := func(c *seccomp.Call) {
		var err error
		if c.NR == unix.SYS_IOCTL && uint32(c.Args[1]) == number {
			err = c.Return(int64(c.Args[2]), 0)
		} else {
			err = c.Continue()
		}
		if err != nil {
			fmt.Println(err)
		}
	}

	var listener *seccomp.Listener
	var err error
	seccomp.OwnThread(func() {
		var fd int
		if fd, err = seccomp.Install(seccomp.Filter('X')); err != nil {
			return
		}
		listener = seccomp.NewListener(fd, handle)
		err = unix.IoctlSetInt(-1, number, 7) // a program would open the device first
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(listener.Wait())
}
