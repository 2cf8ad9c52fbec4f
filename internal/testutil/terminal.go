package testutil

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Terminal opens a pseudo-terminal of a size: the side of the test, and that of a program.
// Closing the test's side ends a Read of it.
func Terminal(columns, lines uint16) (ours, theirs *os.File, err error) {
	if ours, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		return nil, nil, err
	}
	// Not by ours.Fd, after which Close waits for reads.
	raw, err := ours.SyscallConn()
	if err != nil {
		return nil, nil, errors.Join(err, ours.Close())
	}
	var number int
	var failed error
	err = raw.Control(func(fd uintptr) {
		number, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		failed = errors.Join(failed, unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0),
			unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: lines, Col: columns}))
	})
	if err = errors.Join(err, failed); err == nil {
		theirs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, nil, errors.Join(err, ours.Close())
	}
	return ours, theirs, nil
}
