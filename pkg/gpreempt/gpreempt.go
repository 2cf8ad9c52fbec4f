// Package gpreempt holds the words every other package speaks: processes,
// queues, classes, priorities, leases and the errors a user can meet.
// It imports the standard library only.
package gpreempt

import (
	"fmt"
	"strconv"
	"strings"
)

// GPUID is the KFD gpu_id of a GPU node: the decimal number in
// /sys/class/kfd/kfd/topology/nodes/N/gpu_id. 0 means "no GPU".
type GPUID uint32

// String gives the decimal form sysfs uses.
func (id GPUID) String() string { return strconv.FormatUint(uint64(id), 10) }

// Class says how a process is treated. The zero value is Unmanaged: nothing is
// preemptible until a rule, a tag or an admin says so.
type Class uint8

// The classes.
const (
	// Unmanaged processes are never suspended and hold no leases of their own accord.
	Unmanaged Class = iota
	// Online processes are latency-critical and never suspended.
	Online
	// Offline processes may be suspended for a lease of higher priority.
	Offline
)

// String gives the word used in the config file, the API and the output.
func (c Class) String() string {
	switch c {
	case Unmanaged:
		return "unmanaged"
	case Online:
		return "online"
	case Offline:
		return "offline"
	}
	return "class(" + strconv.Itoa(int(c)) + ")"
}

// ParseClass reads a class as String writes it, in any letter case.
func ParseClass(s string) (Class, error) {
	switch strings.ToLower(s) {
	case "unmanaged":
		return Unmanaged, nil
	case "online":
		return Online, nil
	case "offline":
		return Offline, nil
	}
	return Unmanaged, fmt.Errorf("class %q is none of online, offline, unmanaged", s)
}

// Priority is a rank on KFD's own scale, 0 (lowest) to MaxPriority.
// HIP's low, normal and high streams are 0, 7 and 11.
type Priority uint8

// Priorities with a meaning.
const (
	PriorityLow    Priority = 0
	PriorityNormal Priority = 7
	PriorityHigh   Priority = 11
	// MaxPriority is the highest a process or a lease can have.
	MaxPriority Priority = 15
	// PriorityAdmin is above every process: the rank of a suspension an admin
	// orders by hand. No client can ask for it.
	PriorityAdmin Priority = 16
)

// ProcessKey names one process for as long as the host is up: a pid alone is
// reused, a pid with its start time is not.
type ProcessKey struct {
	// PID is the process id in the daemon's pid namespace.
	PID int32
	// Start is field 22 of /proc/PID/stat: start time in clock ticks since boot.
	Start uint64
}

// String gives "PID@START", the target id of the API.
func (k ProcessKey) String() string {
	return strconv.FormatInt(int64(k.PID), 10) + "@" + strconv.FormatUint(k.Start, 10)
}

// IsZero tells whether k names no process.
func (k ProcessKey) IsZero() bool { return k == ProcessKey{} }

// Compare orders keys by pid, then start time.
func (k ProcessKey) Compare(o ProcessKey) int {
	switch {
	case k.PID != o.PID:
		if k.PID < o.PID {
			return -1
		}
		return 1
	case k.Start < o.Start:
		return -1
	case k.Start > o.Start:
		return 1
	}
	return 0
}

// ParseProcessKey reads what String writes. A bare "PID" gives a key with
// Start 0, which the caller has to resolve among the living.
func ParseProcessKey(s string) (ProcessKey, error) {
	pid, start, both := strings.Cut(s, "@")
	p, err := strconv.ParseInt(pid, 10, 32)
	if err != nil || p <= 0 {
		return ProcessKey{}, fmt.Errorf("target %q: want PID or PID@START, as `gpctl target list` prints it", s)
	}
	k := ProcessKey{PID: int32(p)}
	if both {
		if k.Start, err = strconv.ParseUint(start, 10, 64); err != nil {
			return ProcessKey{}, fmt.Errorf("target %q: the part after @ is the start time in clock ticks, a whole number", s)
		}
	}
	return k, nil
}

// QueueType is what kind of engine a queue feeds.
type QueueType uint8

// The queue types, with KFD's uAPI meaning (not its numbers: those change
// between kernels and between sysfs and the uAPI).
const (
	QueueUnknown QueueType = iota
	QueueCompute
	QueueSDMA
	QueueSDMAXGMI
)

// String gives the word used in the API and the output.
func (t QueueType) String() string {
	switch t {
	case QueueUnknown:
		return "unknown"
	case QueueCompute:
		return "compute"
	case QueueSDMA:
		return "sdma"
	case QueueSDMAXGMI:
		return "sdma-xgmi"
	}
	return "type(" + strconv.Itoa(int(t)) + ")"
}

// Queue is one KFD user queue.
type Queue struct {
	// Process owns the queue.
	Process ProcessKey
	// ID is the KFD queue id: unique within the process, reused after destroy.
	ID uint32
	// GPU is the node the queue runs on.
	GPU GPUID
	// Type is the engine kind.
	Type QueueType
	// RingBytes is the size of the ring buffer in bytes.
	RingBytes uint64
}

// GPU is one KFD GPU node: a whole GPU, or one partition of it.
type GPU struct {
	// ID is the KFD gpu_id.
	ID GPUID
	// Node is the topology node number; CPU nodes come first.
	Node int
	// Name is the marketing or gfx name topology gives.
	Name string
	// GFX is gfx_target_version: major*10000 + minor*100 + step.
	GFX uint32
	// BDF is the PCI address, domain:bus:device.function.
	BDF string
	// RenderMinor is N of /dev/dri/renderDN; 0 when there is none.
	RenderMinor int
	// XCCs is the number of accelerator complex dies in the node.
	XCCs int
	// CUs is the number of compute units.
	CUs int
	// QueueSlots is the number of user compute queues that fit the hardware at
	// once; beyond it the scheduler firmware time-slices runlists. 0 = unknown.
	QueueSlots int
	// MES tells that the firmware schedules queue by queue (gfx11 and later)
	// instead of by runlist.
	MES bool
	// DebugFirmware tells that the firmware can be debugged: without it on all GPUs
	// of a host, ROCm's runtime does not let its queues be suspended by DBG_TRAP.
	DebugFirmware bool
}

// Process is what is known of a KFD process, apart from its queues.
type Process struct {
	// Key names it.
	Key ProcessKey
	// Comm is /proc/PID/comm.
	Comm string
	// Cmdline is /proc/PID/cmdline with spaces between the words.
	Cmdline string
	// UID is the effective user id.
	UID uint32
	// Cgroup is the cgroup v2 path, or "" when unknown.
	Cgroup string
}
