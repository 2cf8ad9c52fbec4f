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
	// UID is the effective user id.
	UID uint32
	// Capabilities is the effective set, bit n is capability n.
	Capabilities uint64
}

// ParseProcStatus parses a status file. It skips unused lines; of several lines for a value
// the last counts. The error is a *ParseError.
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
			s.UID, err = effective(rest)
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
			return ProcStatus{}, &ParseError{Line: max(n, 1), Problem: fmt.Sprintf("no line %s:", name)}
		}
	}
	return s, nil
}

// ProcIDs are the ids of a process from /proc/PID/status.
type ProcIDs struct {
	// UID and GID are the effective ids.
	UID, GID uint32
	// NamespacePIDs are its pids in the pid namespaces below that of /proc, outermost
	// first; nil without one.
	NamespacePIDs []int32
}

// maxNamespaces is how deep pid namespaces can be nested (MAX_PID_NS_LEVEL).
const maxNamespaces = 32

// ParseProcIDs parses a status file. Kernels without pid namespaces have no line NSpid. The
// error is a *ParseError.
func ParseProcIDs(b []byte) (ProcIDs, error) {
	var ids ProcIDs
	uid, gid := false, false
	n := 0
	for line := range bytes.Lines(b) {
		n++
		name, rest, _ := bytes.Cut(line, []byte(":"))
		var err error
		switch string(name) {
		case "Uid":
			uid = true
			ids.UID, err = effective(rest)
		case "Gid":
			gid = true
			ids.GID, err = effective(rest)
		case "NSpid":
			ids.NamespacePIDs, err = nested(rest)
		}
		if err != nil {
			return ProcIDs{}, &ParseError{Line: n, Problem: string(name) + " " + err.Error()}
		}
	}
	if !uid || !gid {
		return ProcIDs{}, &ParseError{Line: max(n, 1), Problem: "no line Uid: or Gid:"}
	}
	return ids, nil
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
		pid, err := strconv.ParseUint(string(field), 10, 31)
		if err != nil || pid == 0 {
			return nil, fmt.Errorf("has the pid %q, want a positive number", field)
		}
		if n > 0 {
			pids = append(pids, int32(pid))
		}
	}
	return pids, nil
}
