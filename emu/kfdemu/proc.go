package kfdemu

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

func procPath(tid int32, file string) string {
	return "/proc/" + strconv.Itoa(int(tid)) + "/" + file
}

// goneOr returns ErrGone for errors that mean that the thread has ended, otherwise err.
func goneOr(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrClosed) {
		return ErrGone
	}
	return err
}

// value returns the value of a line of /proc/TID/status, nil without such a line. The first
// line is the name, in which the kernel escapes newlines.
func value(status []byte, name string) []byte {
	_, rest, found := bytes.Cut(status, []byte("\n"+name+":"))
	if !found {
		return nil
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return bytes.TrimSpace(line)
}

// number returns the ID of a thread or process, 0 for an invalid one.
func number(text []byte) int32 {
	n, err := strconv.ParseInt(string(text), 10, 32)
	if err != nil || n < 0 {
		return 0
	}
	return int32(n)
}

// numbers returns the IDs of a thread or process in its pid namespaces, from that of /proc
// inwards. A kernel without namespaces has no such line.
func numbers(status []byte, name string) []int32 {
	var ids []int32
	for text := range bytes.FieldsSeq(value(status, name)) {
		ids = append(ids, number(text))
	}
	return ids
}

// has reports whether a capability is in the effective set.
func has(status []byte, c driver.Capability) bool {
	set, err := strconv.ParseUint(string(value(status, "CapEff")), 16, 64)
	return err == nil && c >= 0 && c < 64 && set>>c&1 != 0
}

// Fields of /proc/TID/stat (proc_pid_stat(5)).
const (
	statStart = 22 // the start time, in clock ticks since boot
	statStack = 28 // the address of the bottom of the stack, 0 without permission
)

// statField returns a field of /proc/TID/stat. The second is the name, in parentheses,
// which may hold anything.
func statField(stat []byte, n int) (uint64, error) {
	i := 3
	for text := range bytes.FieldsSeq(stat[bytes.LastIndexByte(stat, ')')+1:]) {
		if i == n {
			return strconv.ParseUint(string(text), 10, 64)
		}
		i++
	}
	return 0, fmt.Errorf("it has %d fields, and not %d", i-1, n)
}

// namespaceOf returns the inode number of a thread's namespace.
func namespaceOf(tid int32, kind string) (uint64, error) {
	id, err := fileID(procPath(tid, "ns/"+kind))
	return id.Inode, err
}

// ancestor returns the inode number of the namespace some levels above a thread's, 0 if it
// is not visible to this process.
func ancestor(tid int32, kind string, levels int) uint64 {
	file, err := os.Open(procPath(tid, "ns/"+kind))
	if err != nil {
		return 0
	}
	fd := int(file.Fd())
	defer func() { file.Close() }()
	for range levels {
		parent, err := unix.IoctlRetInt(fd, unix.NS_GET_PARENT)
		if err != nil {
			return 0
		}
		file.Close()
		fd, file = parent, os.NewFile(uintptr(parent), "namespace")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0
	}
	return st.Ino
}

// fromNamespace returns the ID, in this pid namespace, of the thread that has the ID pid in
// the pid namespace of thread tid, 0 without such a thread.
func fromNamespace(tid, pid int32) int32 {
	file, err := os.Open(procPath(tid, "ns/pid"))
	if err != nil {
		return 0
	}
	defer file.Close()
	found, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), unix.NS_GET_PID_FROM_PIDNS, uintptr(pid))
	switch errno {
	case 0:
		return int32(found)
	case unix.ENOTTY, unix.EINVAL: // before Linux 6.11
		return scan(tid, pid)
	}
	return 0
}

// scan is fromNamespace for kernels without the ioctl: it checks every thread.
func scan(tid, pid int32) int32 {
	status, err := os.ReadFile(procPath(tid, "status"))
	if err != nil {
		return 0
	}
	depth := len(numbers(status, "NSpid")) - 1
	ns, err := namespaceOf(tid, "pid")
	if err != nil {
		return 0
	}
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	for _, process := range processes {
		tgid := number([]byte(process.Name()))
		if tgid == 0 {
			continue
		}
		threads, err := os.ReadDir(procPath(tgid, "task"))
		if err != nil {
			continue // it has ended meanwhile
		}
		for _, thread := range threads {
			other := number([]byte(thread.Name()))
			status, err := os.ReadFile(procPath(other, "status"))
			if err != nil {
				continue
			}
			ids := numbers(status, "NSpid")
			if len(ids) > depth && ids[depth] == pid && ancestor(other, "pid", len(ids)-1-depth) == ns {
				return other
			}
		}
	}
	return 0
}
