package discovery

import (
	"bytes"
	"fmt"
	"strconv"
)

// ProcStatus is what we use of /proc/PID/status (proc_pid_status(5)).
type ProcStatus struct {
	// Name is the command name, as the kernel escapes it.
	Name string
	// Process is the id of the process the thread belongs to, Tgid.
	Process int32
	// Tracer is the thread that traces this one (ptrace), 0 for none.
	Tracer int32
	// UID is the effective user id.
	UID uint32
	// Capabilities is the effective set, bit n is capability n.
	Capabilities uint64
}

// ParseProcStatus reads a status file. Lines it does not use are passed over,
// whatever they hold; of those it uses, the last counts. The error is a
// *ParseError.
func ParseProcStatus(b []byte) (ProcStatus, error) {
	var s ProcStatus
	missing := map[string]bool{"Name": true, "Tgid": true, "TracerPid": true, "Uid": true, "CapEff": true}
	n := 0
	for line := range bytes.Lines(b) {
		n++
		name, rest, _ := bytes.Cut(line, []byte(":"))
		value := string(bytes.TrimSpace(rest))
		var v uint64
		var err error
		switch string(name) {
		case "Name":
			s.Name = text([]byte(value))
		case "Tgid":
			v, err = strconv.ParseUint(value, 10, 31)
			s.Process = int32(v)
		case "TracerPid":
			v, err = strconv.ParseUint(value, 10, 31)
			s.Tracer = int32(v)
		case "Uid":
			s.UID, err = ParseProcStatusUID(line)
		case "CapEff":
			s.Capabilities, err = strconv.ParseUint(value, 16, 64)
		default:
			continue
		}
		if err != nil {
			return ProcStatus{}, &ParseError{Line: n, Problem: fmt.Sprintf("%s is %q", name, value)}
		}
		delete(missing, string(name))
	}
	for _, name := range []string{"Name", "Tgid", "TracerPid", "Uid", "CapEff"} {
		if missing[name] {
			return ProcStatus{}, &ParseError{Line: max(n, 1), Problem: fmt.Sprintf("no line begins with %s:", name)}
		}
	}
	return s, nil
}
