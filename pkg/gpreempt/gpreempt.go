// Package gpreempt defines the domain types: processes, queues, classes, priorities,
// warnings and errors. It imports the standard library only.
package gpreempt

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// GPUID is the KFD gpu_id of a GPU node: the decimal number in
// /sys/class/kfd/kfd/topology/nodes/N/gpu_id. 0 means "no GPU".
type GPUID uint32

// String returns the decimal form sysfs uses.
func (id GPUID) String() string { return strconv.FormatUint(uint64(id), 10) }

// Word returns the word for a value of an enum, or kind(value) for a value without one.
func Word[T ~uint8 | ~uint32](value T, kind string, words ...string) string {
	if uint64(value) < uint64(len(words)) {
		return words[value]
	}
	return fmt.Sprintf("%s(%d)", kind, uint32(value))
}

// Class is how a process is treated. The zero value is Unmanaged: a process is
// preemptible only by a rule, a tag or an admin override.
type Class uint8

// The classes.
const (
	// Unmanaged processes are never suspended.
	Unmanaged Class = iota
	// Online processes are latency-critical and never suspended.
	Online
	// Offline processes may be suspended for a lease of higher priority.
	Offline
)

// String returns the name used in the config file, the API and the output.
func (c Class) String() string { return Word(c, "class", "unmanaged", "online", "offline") }

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
)

// ProcessKey identifies one process until the host reboots: a pid alone is reused, a pid
// with its start time is not.
type ProcessKey struct {
	// PID is the process id in the daemon's pid namespace.
	PID int32
	// Start is field 22 of /proc/PID/stat: start time in clock ticks since boot.
	Start uint64
}

// String returns "PID@START", the target id of the API.
func (k ProcessKey) String() string {
	return strconv.FormatInt(int64(k.PID), 10) + "@" + strconv.FormatUint(k.Start, 10)
}

// IsZero reports whether k is the zero key, which is not a process.
func (k ProcessKey) IsZero() bool { return k == ProcessKey{} }

// Compare orders keys by pid, then start time.
func (k ProcessKey) Compare(o ProcessKey) int {
	return cmp.Or(cmp.Compare(k.PID, o.PID), cmp.Compare(k.Start, o.Start))
}

// ParseProcessKey parses the form of String. A bare "PID" returns a key with Start 0,
// which the caller has to resolve to a live process.
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

// String returns the name used in the API and the output.
func (t QueueType) String() string { return Word(t, "type", "unknown", "compute", "sdma", "sdma-xgmi") }

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
	// Driver is what has the GPU; "" is KFD.
	Driver string
	// Node is the topology node number; CPU nodes come first.
	Node int
	// Name is the product's name, or that of the topology or of gfx when that is unknown.
	Name string
	// GFX is gfx_target_version: major*10000 + minor*100 + step.
	GFX uint32
	// BDF is the PCI address, domain:bus:device.function.
	BDF string
	// RenderMinor is N of /dev/dri/renderDN; 0 without a render node.
	RenderMinor int
	// XCCs is the number of accelerator complex dies in the node.
	XCCs int
	// CUs is the number of compute units.
	CUs int
	// QueueSlots is the number of user compute queues that fit the hardware at
	// once; beyond it the scheduler firmware time-slices runlists. 0 = unknown.
	QueueSlots int
	// MES is set where the firmware schedules queue by queue (gfx11 and later)
	// instead of by runlist.
	MES bool
	// DebugFirmware is set where the firmware can be debugged: without it on all GPUs
	// of a host, ROCm's runtime does not let its queues be suspended by DBG_TRAP.
	DebugFirmware bool
}

// QueueInfo has the properties of a queue that are not in sysfs: they are in the snapshots
// of the driver and in the dumps of debugfs. Unknown ones are zero.
type QueueInfo struct {
	// Source is the source of the rest.
	Source QueueSource
	// Note is why something is not known, such as several dumps that match.
	Note string
	// RingBase is the virtual address of the ring in the owner.
	RingBase uint64
	// AQL is set when its packets are AQL packets of 64 bytes.
	AQL bool
	// ReadPointer and WritePointer are the virtual addresses in the owner of the
	// two 64-bit positions: packets for AQL queues, dwords for others of compute,
	// bytes for SDMA.
	ReadPointer, WritePointer uint64
	// SaveArea is the virtual address of the area waves are saved to (CWSR).
	SaveArea uint64
	// MQD is the GPU address of its MQD, the first XCC's where there are several.
	MQD uint64
	// Doorbell is the place of its doorbell among the GPU's, in dwords.
	Doorbell uint32
	// Priority, when PriorityKnown, is the value that the driver was called with, if
	// PriorityExact; otherwise HIP's value of the pipe priority, as kernels from 7.x on show
	// no more. It is also known when all dumps that match have the same priority.
	Priority      Priority
	PriorityKnown bool
	PriorityExact bool
}

// QueueEntry is a queue with its properties that are not in sysfs.
type QueueEntry struct {
	Queue
	// Info is what other sources report about it.
	Info QueueInfo
	// FirstSeen is the wall clock time of the scan that found it.
	FirstSeen time.Time
	// ChangedAt is the wall clock time at which Info last changed, zero for never.
	ChangedAt time.Time
}

// QueueSource is a set of the sources of a QueueInfo.
type QueueSource uint8

// The sources.
const (
	// FromSnapshot is the driver's debug interface: exact.
	FromSnapshot QueueSource = 1 << iota
	// FromMQD is a dump in debugfs, matched to the queue.
	FromMQD
)

// Process has the facts of a KFD process, apart from its queues.
type Process struct {
	// Key names it.
	Key ProcessKey
	// Comm is /proc/PID/comm.
	Comm string
	// Cmdline is /proc/PID/cmdline with spaces between the words.
	Cmdline string
	// Exe is the target of /proc/PID/exe, or "" when unknown.
	Exe string
	// UID and GID are the effective ids.
	UID, GID uint32
	// NamespacePIDs are its pids in the pid namespaces below the daemon's, outermost
	// first; empty when it is in the daemon's own.
	NamespacePIDs []int32
	// Env are the requested variables that are set in its initial environment.
	Env map[string]string
	// Unread is set while Exe, Cmdline and Env, which are in the memory of the process,
	// have not been read since they were requested.
	Unread bool
	// Ancestors are the processes that it descends from, nearest first, and then those that have
	// exited and were seen.
	Ancestors []ProcessKey
	// Cgroup is its control group.
	Cgroup Cgroup
	// Slurm is what the prolog recorded of Cgroup.SlurmJob; zero without a record.
	Slurm SlurmJob
}

// Equal reports whether two processes have the same facts.
func (p Process) Equal(o Process) bool {
	return p.Key == o.Key && p.Comm == o.Comm && p.Cmdline == o.Cmdline && p.Exe == o.Exe && p.UID == o.UID && p.GID == o.GID &&
		slices.Equal(p.NamespacePIDs, o.NamespacePIDs) && slices.Equal(p.Ancestors, o.Ancestors) && maps.Equal(p.Env, o.Env) && p.Unread == o.Unread && p.Cgroup == o.Cgroup && p.Slurm == o.Slurm
}

// SlurmJob has the facts of a Slurm job by which it is classified. "" is unknown.
type SlurmJob struct {
	Partition, Account, QOS string
}

// Cgroup is a control group, and the names in its path.
type Cgroup struct {
	// Path is that of cgroup v2; where processes are still grouped by v1 alone, that
	// of the systemd hierarchy, or of the first that is not the root. For a job of Slurm
	// it is Slurm's in any case. "" is unknown.
	Path string
	// Unit is that of the system's systemd, such as train.service, and Slice the innermost
	// that it is in, such as system.slice; "" without one.
	Unit, Slice string
	// UserUnit is the unit of a user's systemd where Unit is that, user@UID.service. The
	// user chooses it; "" without one.
	UserUnit string
	// Runtime is docker, containerd, cri-o or podman; "" when the path has none of these.
	Runtime string
	// ContainerID is the full id of the outermost container; "" when in none. ContainerPath
	// is the path of its own group, in the hierarchy that names it.
	ContainerID, ContainerPath string
	// PodUID is the unique id of the Kubernetes pod, with dashes; "" when in none.
	PodUID string
	// SlurmJob is the number of the Slurm job; 0 when in none.
	SlurmJob uint32
	// Conflict has two ids of which one is false, such as "pods A and B": then container,
	// pod and Slurm job are unknown. "" without one.
	Conflict string
}

// Refuse removes the ids, which contradict each other or what is known otherwise.
func (c *Cgroup) Refuse(conflict string) {
	*c = Cgroup{Path: c.Path, Unit: c.Unit, Slice: c.Slice, UserUnit: c.UserUnit, Conflict: conflict}
}

// Container has the facts of a container that its runtime returns.
type Container struct {
	// Name and Image are as the user set them.
	Name, Image string
	// Labels are the container's.
	Labels map[string]string
	// Namespace, Pod and PodLabels are of the Kubernetes pod.
	Namespace, Pod string
	PodLabels      map[string]string
	// Conflict is what the runtime's answer and the control group contradict each other in;
	// then nothing else is set, and the ids in the control group are false. "" without one.
	Conflict string
}

// Equal reports whether two containers have the same facts.
func (c Container) Equal(o Container) bool {
	return c.Name == o.Name && c.Image == o.Image && maps.Equal(c.Labels, o.Labels) &&
		c.Namespace == o.Namespace && c.Pod == o.Pod && maps.Equal(c.PodLabels, o.PodLabels) && c.Conflict == o.Conflict
}
