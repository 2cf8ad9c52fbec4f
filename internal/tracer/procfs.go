package tracer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// readStat reads the stat file of pid.
func readStat(pid int32) (discovery.ProcStat, error) {
	return readProc(procPath(pid, "stat"), discovery.ParseProcStat)
}

// readStatus reads a status file, of a process or a thread.
func readStatus(path string) (discovery.ProcStatus, error) {
	return readProc(path, discovery.ParseProcStatus)
}

func readProc[T any](path string, parse func([]byte) (T, error)) (T, error) {
	var none T
	text, err := os.ReadFile(path)
	if err != nil {
		return none, err
	}
	parsed, err := parse(text)
	if err != nil {
		return none, fmt.Errorf("%s: %w", path, err)
	}
	return parsed, nil
}

func procPath(pid int32, file string) string {
	return "/proc/" + strconv.Itoa(int(pid)) + "/" + file
}

// isGone reports whether reading a file of /proc/PID failed because the process ended.
func isGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}
