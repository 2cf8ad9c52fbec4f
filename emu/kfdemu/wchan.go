package kfdemu

import (
	"errors"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// threadOfWchan returns the thread of a path /proc/PID/task/TID/wchan, 0 for other paths.
func threadOfWchan(name string) int32 {
	matches, err := path.Match("/proc/*/task/*/wchan", name)
	if err != nil || !matches {
		return 0
	}
	return number([]byte(strings.Split(name, "/")[4]))
}

// openWchan answers the open of the wchan of a thread that waits in an emulated call for the
// mutex of a process, with the function in which it would wait in the driver. For all others
// the kernel answers: in an emulated call, a thread waits for the supervisor there.
func (e *Emulator) openWchan(c *served, caller *Task, tid int32, flags uint64) error {
	thread := caller.Find(tid)
	if thread == nil {
		return c.Continue()
	}
	function := e.driver.WaitsIn(thread)
	if function == "" {
		return c.Continue()
	}
	fd, err := unix.MemfdCreate("wchan", unix.MFD_CLOEXEC)
	if err != nil {
		return c.Return(0, unix.ENOMEM)
	}
	if _, err = unix.Pwrite(fd, []byte(function), 0); err == nil {
		err = c.ReturnFD(fd, flags&unix.O_CLOEXEC != 0)
	}
	return errors.Join(err, unix.Close(fd))
}

// HoldMutex takes the driver's mutex of a process until release is called, as a call of the
// process does that has the driver pin much host memory. It reports whether the process uses
// the driver.
func (e *Emulator) HoldMutex(pid int32) (release func(), ok bool) {
	task, err := e.host.Task(pid)
	if err != nil {
		return nil, false
	}
	return e.driver.HoldMutex(task.MM())
}
