package discovery

import (
	"bytes"
	"fmt"
	"strconv"
)

// ProcStatus are the values that we use from /proc/PID/status (proc_pid_status(5)).
type ProcStatus struct {
	// Name is the command name, as the kernel escapes it.
	Name string
	// Process is the id of the process the thread belongs to, Tgid.
	Process int32
	// Tracer is the thread that traces this one (ptrace), 0 for none.
	Tracer int32
	// UID and GID are the effective ids.
	UID, GID uint32
	// Capabilities is the effective set, bit n is capability n.
	Capabilities uint64
	// NamespacePIDs are its pids in the pid namespaces below that of /proc, outermost
	// first; nil without one.
	NamespacePIDs []int32
}

// maxNamespaces is how deep pid namespaces can be nested (MAX_PID_NS_LEVEL).
const maxNamespaces = 32

// ParseProcStatus parses a status file, which has the lines Uid and Gid. It skips unused
// lines; of several lines for a value the last counts. Kernels without pid namespaces have no
// line NSpid. The error is a *ParseError.
func ParseProcStatus(b []byte) (ProcStatus, error) {
	var s ProcStatus
	uid, gid := false, false
	n := 0
	for line := range bytes.Lines(b) {
		n++
		name, rest, _ := bytes.Cut(line, []byte(":"))
		value := bytes.TrimSpace(rest)
		var err error
		switch string(name) {
		case "Name":
			s.Name = text(value)
		case "Tgid":
			s.Process, err = thread(value)
		case "TracerPid":
			s.Tracer, err = thread(value)
		case "Uid":
			uid = true
			s.UID, err = effective(value)
		case "Gid":
			gid = true
			s.GID, err = effective(value)
		case "CapEff":
			if s.Capabilities, err = strconv.ParseUint(string(value), 16, 64); err != nil {
				err = fmt.Errorf("is %q, want a hexadecimal number", value)
			}
		case "NSpid":
			s.NamespacePIDs, err = nested(value)
		}
		if err != nil {
			return ProcStatus{}, &ParseError{Line: n, Problem: string(name) + " " + err.Error()}
		}
	}
	if !uid || !gid {
		return ProcStatus{}, &ParseError{Line: max(n, 1), Problem: "no line Uid: or Gid:"}
	}
	return s, nil
}

// thread parses the id of a thread, 0 for none.
func thread(b []byte) (int32, error) {
	id, err := strconv.ParseUint(string(b), 10, 31)
	if err != nil {
		return 0, fmt.Errorf("is %q, want a number", b)
	}
	return int32(id), nil
}

// effective parses the second of real, effective, saved and file system id.
func effective(b []byte) (uint32, error) {
	fields := bytes.Fields(b)
	if len(fields) != 4 {
		return 0, fmt.Errorf("has %d numbers, want 4", len(fields))
	}
	id, err := strconv.ParseUint(string(fields[1]), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("has the effective id %q, want a number", fields[1])
	}
	return uint32(id), nil
}

// nested parses the pids after the first, which is the one of /proc.
func nested(b []byte) (pids []int32, err error) {
	fields := bytes.Fields(b)
	if len(fields) == 0 || len(fields) > maxNamespaces+1 {
		return nil, fmt.Errorf("has %d numbers, want 1 to %d", len(fields), maxNamespaces+1)
	}
	for n, field := range fields {
		pid, err := thread(field)
		if err != nil || pid == 0 {
			return nil, fmt.Errorf("has the pid %q, want a positive number", field)
		}
		if n > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
