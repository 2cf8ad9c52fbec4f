package peercred

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// exiting is PF_EXITING of the kernel's task flags (include/linux/sched.h): the
// thread is on its way out. It is set before the thread gives up its files.
const exiting = 0x4

// procStat is what peercred wants of /proc/PID/stat.
type procStat struct {
	// flags is field 9, of the thread group's leader.
	flags uint32
	// start is field 22, in clock ticks since boot.
	start uint64
}

// readStat reads the stat file of pid. It cannot be kept waiting by the process:
// the kernel takes no lock for it that user space can hold.
func readStat(pid int32) (procStat, error) {
	path := "/proc/" + strconv.Itoa(int(pid)) + "/stat"
	text, err := os.ReadFile(path)
	if err != nil {
		return procStat{}, err
	}
	stat, err := parseStat(text)
	if err != nil {
		return procStat{}, fmt.Errorf("%s: %w", path, err)
	}
	return stat, nil
}

// parseStat reads the text of a stat file. The command name, field 2, stands in
// parentheses and may hold any byte, parentheses and spaces too.
func parseStat(text []byte) (procStat, error) {
	end := bytes.LastIndexByte(text, ')')
	if end < 0 {
		return procStat{}, fmt.Errorf("no command name in %q", text)
	}
	fields := bytes.Fields(text[end+1:]) // from field 3 on
	const flagsAt, startAt = 9 - 3, 22 - 3
	if len(fields) <= startAt {
		return procStat{}, fmt.Errorf("%d fields after the command name, want %d or more", len(fields), startAt+1)
	}
	flags, err := strconv.ParseUint(string(fields[flagsAt]), 10, 32)
	if err != nil {
		return procStat{}, fmt.Errorf("field 9 (flags): %w", err)
	}
	start, err := strconv.ParseUint(string(fields[startAt]), 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("field 22 (starttime): %w", err)
	}
	return procStat{flags: uint32(flags), start: start}, nil
}
