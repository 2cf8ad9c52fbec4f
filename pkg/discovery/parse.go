package discovery

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ParseError is an error in the text of a kernel file.
type ParseError struct {
	// File is the path below the root of the host, or "" when only text was parsed.
	File string
	// Line counts from 1.
	Line int
	// Column is the byte of the line where it begins, counted from 1; 0 is the whole line.
	Column int
	// Problem describes the error.
	Problem string
}

func (e *ParseError) Error() string {
	at := strconv.Itoa(e.Line)
	if e.Column > 0 {
		at += ":" + strconv.Itoa(e.Column)
	}
	if e.File == "" {
		return "line " + at + ": " + e.Problem
	}
	return e.File + ":" + at + ": " + e.Problem
}

// NodeProperties are the values that we use from a topology node's file "properties".
type NodeProperties struct {
	// SIMDs is the number of SIMD units in the node, SIMDsPerCU in one compute unit.
	SIMDs, SIMDsPerCU uint64
	// GFX is gfx_target_version: major*10000 + minor*100 + step.
	GFX uint64
	// Domain and Location are the PCI address; Location is bus<<8 | devfn.
	Domain, Location uint64
	// RenderMinor is N of /dev/dri/renderDN.
	RenderMinor uint64
	// CPQueues is num_cp_queues; see queueSlots for its meaning.
	CPQueues uint64
	// XCCs is num_xcc, 0 on kernels without it.
	XCCs uint64
	// Capability is HSA_CAP_*: what the driver can do with the node.
	Capability uint64
	// Firmware and SDMAFirmware are fw_version, of the MEC, and sdma_fw_version.
	Firmware, SDMAFirmware uint64
}

// DebugFirmware is HSA_CAP_TRAP_DEBUG_FIRMWARE_SUPPORTED (kfd_topology_set_dbg_firmware_support).
func (p NodeProperties) DebugFirmware() bool { return p.Capability&(1<<29) != 0 }

// ParseNodeProperties parses "name value" lines in any order. It skips unknown names,
// whatever their value. The error is a *ParseError, or that of r.
func ParseNodeProperties(r io.Reader) (NodeProperties, error) {
	var p NodeProperties
	fields := map[string]*uint64{
		"simd_count":         &p.SIMDs,
		"simd_per_cu":        &p.SIMDsPerCU,
		"gfx_target_version": &p.GFX,
		"domain":             &p.Domain,
		"location_id":        &p.Location,
		"drm_render_minor":   &p.RenderMinor,
		"num_cp_queues":      &p.CPQueues,
		"num_xcc":            &p.XCCs,
		"capability":         &p.Capability,
		"fw_version":         &p.Firmware,
		"sdma_fw_version":    &p.SDMAFirmware,
	}
	lines := bufio.NewScanner(r)
	n := 0
	for lines.Scan() {
		n++
		name, value, _ := strings.Cut(lines.Text(), " ")
		field, used := fields[name]
		if !used {
			continue
		}
		// 32 bits: all values that we use fit, and their sums and products fit 64.
		// (hive_id and unique_id do not fit and are not used.)
		v, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32)
		if err != nil {
			return NodeProperties{}, &ParseError{Line: n, Problem: fmt.Sprintf("%s is %.20q, want a decimal number below 2^32", name, value)}
		}
		*field = v
	}
	if err := lines.Err(); err != nil {
		return NodeProperties{}, fmt.Errorf("after line %d: %w", n, err)
	}
	return p, nil
}

// ParseNumber parses a file with one decimal number of at most the given bits, with or
// without a newline: KFD's queue files have none, gpu_id has one. The error is a
// *ParseError.
func ParseNumber(b []byte, bits int) (uint64, error) {
	text := string(bytes.TrimSuffix(b, []byte("\n")))
	v, err := strconv.ParseUint(text, 10, bits)
	if err != nil {
		return 0, &ParseError{Line: 1, Problem: fmt.Sprintf("%.40q is not a decimal number of %d bits", text, bits)}
	}
	return v, nil
}

// ParseQueueType parses the file "type" of a queue: a number of KFD's internal
// enumeration, not of its uAPI.
//
// 0 is compute (PM4 and AQL alike) and 1 SDMA on every kernel. Later numbers moved
// when DIQ, 3 on 6.12 and older, was removed (enum kfd_queue_type): DIQ was the
// kernel's own and never appeared here, so 3 is SDMA over xGMI, of a newer kernel. 4 is
// SDMA over xGMI on older kernels and SDMA on a selected engine on newer ones, and 5 the
// latter on older ones: both are SDMA in either numbering. Nothing reports the numbering
// of a driver: the kernel's release is not sufficient where AMD's package has replaced
// the driver, and other changes in sysfs (contexts, a pasid of 0) are independent of it.
func ParseQueueType(b []byte) (gpreempt.QueueType, error) {
	v, err := ParseNumber(b, 31)
	if err != nil {
		return gpreempt.QueueUnknown, err
	}
	switch v {
	case 0:
		return gpreempt.QueueCompute, nil
	case 1, 4, 5:
		return gpreempt.QueueSDMA, nil
	case 3:
		return gpreempt.QueueSDMAXGMI, nil
	}
	return gpreempt.QueueUnknown, nil
}

// ProcStat are the values that we use from /proc/PID/stat.
type ProcStat struct {
	PID  int32
	Comm string
	// State is the letter of field 3, of the main thread.
	State byte
	// Parent, Group and Session are the pids of the parent and of the leaders of the process group
	// and the session; 0 without one.
	Parent, Group, Session int32
	// Flags are the kernel's task flags of the main thread, such as FlagExiting.
	Flags uint32
	// Threads is the number of threads that have not ended.
	Threads int
	// Ticks is the processor time of all threads, in user and kernel mode, in clock ticks.
	Ticks uint64
	// Start is the start time in clock ticks since boot.
	Start uint64
	// Pages is the resident memory, in pages.
	Pages uint64
}

// ClockTicks is the number of clock ticks in a second: USER_HZ, on every architecture that has AMD GPUs.
const ClockTicks = 100

// FlagExiting is PF_EXITING (include/linux/sched.h): the thread is exiting. It is set
// before the thread releases its files.
const FlagExiting = 0x4

// MainEnded reports whether the main thread has ended; others may still run.
func (s ProcStat) MainEnded() bool { return s.State == 'Z' || s.State == 'X' || s.State == 'x' }

// Alive reports whether any thread can still run. A leader that ended before its
// other threads shows as a zombie with threads.
func (s ProcStat) Alive() bool {
	switch s.State {
	case 'X', 'x':
		return false
	case 'Z':
		return s.Threads > 1
	}
	return true
}

// ParseProcStat parses /proc/PID/stat. The command name is in parentheses and may contain
// any characters, including parentheses, spaces and newlines: it ends at the last
// parenthesis. The error is a *ParseError. A process that was removed while the kernel wrote
// the file has the state X: its process group is -1 (do_task_stat in fs/proc/array.c).
func ParseProcStat(b []byte) (ProcStat, error) {
	refuse := func(problem string) error {
		return &ParseError{Line: 1, Problem: problem}
	}
	opening, closing := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if opening < 0 || closing < opening {
		return ProcStat{}, refuse("no command name in parentheses")
	}
	pid, err := strconv.ParseInt(string(bytes.TrimSpace(b[:opening])), 10, 32)
	if err != nil || pid <= 0 {
		return ProcStat{}, refuse(fmt.Sprintf("the pid is %q, want a positive number", b[:opening]))
	}
	const first, last = 3, 24 // the fields after the name that are used, as proc(5) counts them
	var fields [last + 1][]byte
	n := first
	for field := range bytes.FieldsSeq(b[closing+1:]) {
		fields[n] = field
		if n++; n > last {
			break
		}
	}
	if n <= last {
		return ProcStat{}, refuse(fmt.Sprintf("only %d fields, want %d or more", n-1, last))
	}
	var failed error
	number := func(i, bits int, what string) uint64 {
		v, err := strconv.ParseUint(string(fields[i]), 10, bits)
		if err != nil && failed == nil {
			failed = refuse(fmt.Sprintf("field %d, the %s, is %q", i, what, fields[i]))
		}
		return v
	}
	if string(fields[5]) == "-1" {
		fields[first], fields[5], fields[6] = []byte("X"), []byte("0"), []byte("0")
	}
	s := ProcStat{
		PID: int32(pid), Comm: string(b[opening+1 : closing]), State: fields[first][0],
		Parent: int32(number(4, 31, "parent")), Group: int32(number(5, 31, "process group")), Session: int32(number(6, 31, "session")),
		Flags:   uint32(number(9, 32, "task flags")),
		Ticks:   number(14, 63, "time in user mode") + number(15, 63, "time in kernel mode"),
		Threads: int(number(20, 31, "number of threads")), Start: number(22, 64, "start time"), Pages: number(24, 64, "resident memory"),
	}
	if failed != nil {
		return ProcStat{}, failed
	}
	return s, nil
}

// ParseProcCmdline returns the words of /proc/PID/cmdline, separated by spaces.
func ParseProcCmdline(b []byte) string {
	return text(bytes.ReplaceAll(bytes.TrimRight(b, "\x00"), []byte{0}, []byte{' '}))
}

// ParseProcEnviron returns the variables of /proc/PID/environ with the given names, each
// with its first value, as with getenv(3). Values are cut at 4 KiB; entries without "=" are
// skipped.
func ParseProcEnviron(b []byte, names []string) map[string]string {
	env := map[string]string{}
	for word := range bytes.SplitSeq(b, []byte{0}) {
		name, value, isVariable := bytes.Cut(word, []byte("="))
		if !isVariable || !slices.Contains(names, string(name)) {
			continue
		}
		if _, set := env[string(name)]; !set {
			env[string(name)] = text(value[:min(len(value), maxValue)])
		}
	}
	return env
}

// text converts bytes chosen by a process: what is not UTF-8 becomes U+FFFD.
func text(b []byte) string {
	return strings.ToValidUTF8(string(b), "\uFFFD")
}
