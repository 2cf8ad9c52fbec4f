package tracer

import (
	"bytes"
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
	path := procPath(pid, "stat")
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

// procStatus is what tracer wants of /proc/PID/status (see proc_pid_status(5)).
type procStatus struct {
	name   string // as the kernel escapes it
	tgid   int32  // the process the thread belongs to
	tracer int32  // the thread that traces it, 0 for none
	capEff uint64
}

func readStatus(path string) (procStatus, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return procStatus{}, err
	}
	status, err := parseStatus(text)
	if err != nil {
		return procStatus{}, fmt.Errorf("%s: %w", path, err)
	}
	return status, nil
}

// parseStatus reads the text of a status file, whose lines are "Name:\tvalue".
func parseStatus(text []byte) (procStatus, error) {
	var s procStatus
	seen := map[string]bool{}
	for line := range bytes.Lines(text) {
		name, rest, _ := bytes.Cut(line, []byte(":"))
		value := string(bytes.TrimSpace(rest))
		var number uint64
		var err error
		switch string(name) {
		case "Name":
			s.name = value
		case "Tgid":
			number, err = strconv.ParseUint(value, 10, 31)
			s.tgid = int32(number)
		case "TracerPid":
			number, err = strconv.ParseUint(value, 10, 31)
			s.tracer = int32(number)
		case "CapEff":
			s.capEff, err = strconv.ParseUint(value, 16, 64)
		default:
			continue
		}
		if err != nil {
			return procStatus{}, fmt.Errorf("%s: %w", name, err)
		}
		seen[string(name)] = true
	}
	for _, name := range []string{"Name", "Tgid", "TracerPid", "CapEff"} {
		if !seen[name] {
			return procStatus{}, fmt.Errorf("no line %s", name)
		}
	}
	return s, nil
}

func procPath(pid int32, file string) string {
	return "/proc/" + strconv.Itoa(int(pid)) + "/" + file
}

// isGone tells whether reading a file of /proc/PID failed because the process ended.
func isGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}
