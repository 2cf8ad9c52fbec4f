package peercred

import (
	"fmt"
	"os"
	"strconv"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// Origin is where a process comes from.
type Origin struct {
	// Exe is the path of its program, as its mount namespace has it, and Cgroup that
	// of its control group; "" when it cannot be read.
	Exe, Cgroup string
}

// Origin reports where the process comes from now; false when it has exited. It asks
// anew each time: a process can change both.
func (c *Conn) Origin() (Origin, bool) {
	dir := "/proc/" + strconv.Itoa(int(c.peer.PID))
	var o Origin
	o.Exe, _ = os.Readlink(dir + "/exe") // a kernel thread has none
	if text, err := os.ReadFile(dir + "/cgroup"); err == nil {
		o.Cgroup = discovery.ParseCgroup(text).Path
	}
	return o, c.alive() // what was read by pid was its own if it still lives
}

// alive tells that the process has not exited, as far as the connection still
// knows.
func (c *Conn) alive() (alive bool) {
	raw, err := c.pidfd.SyscallConn()
	if err != nil {
		return false
	}
	return raw.Control(func(pidfd uintptr) { alive = !readable(pidfd) }) == nil && alive
}

// readStat reads the stat file of pid. It cannot be kept waiting by the process:
// the kernel takes no lock for it that user space can hold.
func readStat(pid int32) (discovery.ProcStat, error) {
	path := "/proc/" + strconv.Itoa(int(pid)) + "/stat"
	text, err := os.ReadFile(path)
	if err != nil {
		return discovery.ProcStat{}, err
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		return discovery.ProcStat{}, fmt.Errorf("%s: %w", path, err)
	}
	return stat, nil
}
