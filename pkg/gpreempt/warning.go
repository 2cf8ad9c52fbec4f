package gpreempt

import "slices"

// Warning is a condition an admin should know. Make one by the Warn method of its
// code.
type Warning struct {
	// Code is that of a WarningKind.
	Code string
	// Severity is "warning" or "error".
	Severity string
	// Text says what is wrong here and now, Remedy what to do.
	Text, Remedy string
}

// WarningCode is the stable name of a kind of warning: scripts and alerts know it.
type WarningCode string

// The codes. What they mean is in the table below.
const (
	WarnUnknownPrincipal    WarningCode = "UNKNOWN_PRINCIPAL"
	WarnSocketGroup         WarningCode = "SOCKET_GROUP"
	WarnConfigRejected      WarningCode = "CONFIG_REJECTED"
	WarnRestartNeeded       WarningCode = "RESTART_NEEDED"
	WarnCertificateRejected WarningCode = "CERTIFICATE_REJECTED"
	WarnNoKFD               WarningCode = "NO_KFD"
	WarnNoGPU               WarningCode = "NO_GPU"
	WarnGPUsUnreadable      WarningCode = "GPUS_UNREADABLE"
	WarnNoMechanism         WarningCode = "NO_MECHANISM"
	WarnKFDClosed           WarningCode = "KFD_CLOSED"
	WarnKFDUnknown          WarningCode = "KFD_UNKNOWN"
	WarnNoJournal           WarningCode = "NO_JOURNAL"
	WarnJournalUnreadable   WarningCode = "JOURNAL_UNREADABLE"
	WarnOrphanedPause       WarningCode = "ORPHANED_PAUSE"
	WarnKernelLogUnreadable WarningCode = "KERNEL_LOG_UNREADABLE"
	WarnScanFailed          WarningCode = "SCAN_FAILED"
	WarnScanIncomplete      WarningCode = "SCAN_INCOMPLETE"
	WarnSMIUnavailable      WarningCode = "SMI_UNAVAILABLE"
	WarnGPUMemoryShort      WarningCode = "GPU_MEMORY_SHORT"
	WarnMQDsHangs           WarningCode = "MQDS_HANGS"
	WarnMQDsOdd             WarningCode = "MQDS_ODD"
	WarnMQDsUnreadable      WarningCode = "MQDS_UNREADABLE"
	WarnDebugfsMissing      WarningCode = "DEBUGFS_MISSING"
	WarnDebugfsDenied       WarningCode = "DEBUGFS_DENIED"
	WarnContainerRuntime    WarningCode = "CONTAINER_RUNTIME_UNREACHABLE"
	WarnContainerAnswer     WarningCode = "CONTAINER_ANSWER_REFUSED"
	WarnContainerUnknown    WarningCode = "CONTAINER_UNKNOWN"
	WarnKubelet             WarningCode = "KUBELET_UNREACHABLE"
)

// The severities.
const (
	// SeverityWarning: gpreempt does its work, with less than it could have.
	SeverityWarning = "warning"
	// SeverityError: a part of its work is not done.
	SeverityError = "error"
)

// WarningKind is what is true of every warning with a code.
type WarningKind struct {
	Code     WarningCode
	Severity string
	// Means says in a line what such a warning is about.
	Means string
	// Remedy is what to do, unless a warning knows better.
	Remedy string
}

// warningKinds is the only list of warnings: the API, gpctl, the log, the metrics and
// docs/warnings.md have theirs from here.
var warningKinds = []WarningKind{
	{
		WarnUnknownPrincipal, SeverityWarning, "access names a group or user this host does not have",
		"create it (groupadd --system gpreempt) or take it out of the config file, then reload; until then it gives nobody a right",
	},
	{
		WarnSocketGroup, SeverityWarning, "the socket could not be given to its group, whose members cannot connect",
		"run gpreemptd as root, or as a member of the first group of access.online_groups",
	},
	{
		WarnConfigRejected, SeverityWarning, "a changed config file has mistakes and was not taken over",
		"mend it (gpreemptd config check), then reload again",
	},
	{
		WarnRestartNeeded, SeverityWarning, "the config file has values that are not in force before a restart",
		"systemctl restart gpreemptd",
	},
	{
		WarnCertificateRejected, SeverityWarning, "changed certificates for TCP are wrong; those from before stay in force",
		"mend the files, then reload again",
	},
	{
		WarnNoKFD, SeverityError, "the amdgpu driver is not loaded, or found no GPU",
		"load amdgpu (dmesg | grep -i kfd), then restart gpreemptd; kfdemu demo shows gpreempt on an emulated GPU",
	},
	{
		WarnNoGPU, SeverityError, "the driver is loaded and shows no GPU that computes",
		"see what it says of the GPU (dmesg | grep -i amdgpu); gpreemptd looks again all the time",
	},
	{
		WarnGPUsUnreadable, SeverityError, "the list of GPUs cannot be read",
		"gpreemptd needs to read /sys/class/kfd; it looks again all the time",
	},
	{
		WarnNoMechanism, SeverityError, "nothing can be suspended on this host; everything runs",
		"gpctl doctor says what is missing; restart gpreemptd when it is there; kfdemu demo shows gpreempt on an emulated GPU",
	},
	{
		WarnKFDClosed, SeverityError, "the driver cannot be opened, so that dbgtrap cannot be used",
		"gpctl doctor says what to do; then restart gpreemptd",
	},
	{
		WarnKFDUnknown, SeverityWarning, "the driver is of a version this gpreempt does not know",
		"look for a newer gpreempt; until then try it where a GPU may be reset",
	},
	{
		WarnNoJournal, SeverityError, "the journal of pauses cannot be opened: criu and freezer are not used",
		"make its directory one that only root can write, then restart gpreemptd",
	},
	{
		WarnJournalUnreadable, SeverityError, "a part of the journal cannot be read: an earlier pause may not be undone",
		"look for processes that are stopped (gpctl doctor); ending one ends its pause; then remove the file the text names",
	},
	{
		WarnOrphanedPause, SeverityError, "what an earlier daemon paused does not run again yet",
		"it is tried again all the time; ending the process ends the pause too",
	},
	{
		WarnKernelLogUnreadable, SeverityWarning, "the kernel log cannot be read: no breaker opens by what it tells",
		"run gpreemptd as root, or with CAP_SYSLOG",
	},
	{
		WarnScanFailed, SeverityError, "processes and queues cannot be read: new ones are not known",
		"gpreemptd needs to read /sys/class/kfd and /proc; what it knew before still stands",
	},
	{
		WarnScanIncomplete, SeverityWarning, "a part of what the kernel tells of processes cannot be read",
		"what could not be read is left out, or shown without it; a process without its facts is matched by fewer rules",
	},
	{
		WarnSMIUnavailable, SeverityWarning, "a GPU's events cannot be read: evictions are not told",
		"run gpreemptd as root; it does without",
	},
	{
		WarnGPUMemoryShort, SeverityWarning, "the driver takes queues off for lack of GPU memory",
		"let the processes on it use less memory together than it has: gpreempt frees time, not memory",
	},
	{
		WarnMQDsHangs, SeverityWarning, "the driver does not answer what its queues are: a GPU may hang",
		"dmesg | grep -i amdgpu; what is known of queues beyond sysfs is of before",
	},
	{
		WarnMQDsOdd, SeverityWarning, "the driver's dump of queues has lines that make no sense",
		"what is odd is left out: tell the authors of gpreempt, with the file /sys/kernel/debug/kfd/mqds",
	},
	{
		WarnMQDsUnreadable, SeverityWarning, "the driver's dump of queues cannot be read",
		"gpctl doctor says what is in the way; discovery.mqds_interval: 0s does without",
	},
	{
		WarnDebugfsMissing, SeverityWarning, "debugfs is not mounted: less is known of queues",
		"mount -t debugfs none /sys/kernel/debug, where the kernel has CONFIG_DEBUG_FS; discovery.mqds_interval: 0s does without",
	},
	{
		WarnDebugfsDenied, SeverityWarning, "debugfs may not be read: less is known of queues",
		"run gpreemptd as root outside of containers; kernel lockdown may be in force; discovery.mqds_interval: 0s does without",
	},
	{
		WarnContainerRuntime, SeverityWarning, "a container runtime does not answer: rules by names, images and labels match less",
		"see whether the runtime is up; if it is not in use, take its socket out of containers.sockets or remove it",
	},
	{
		WarnContainerAnswer, SeverityWarning, "what a runtime says of a container is too large or makes no sense",
		"look at the container with the runtime's own tool (docker inspect, crictl inspect): rules by its name, image or labels do not match it",
	},
	{
		WarnContainerUnknown, SeverityWarning, "no runtime that is asked knows a container",
		"add the socket of its runtime to containers.sockets",
	},
	{
		WarnKubelet, SeverityWarning, "the kubelet does not tell of its pods: priority classes are not known",
		"see whether containers.kubelet is its address, containers.kubelet_token a token that may get nodes/proxy, and containers.kubelet_ca what signed its certificate; until then priority classes are not known",
	},
}

// WarningKinds returns every kind of warning, in the order of the table.
func WarningKinds() []WarningKind { return slices.Clone(warningKinds) }

// Warn returns a warning of this kind; text says what is wrong here and now. A code
// that is not in the table is a mistake of the program: it is an error without remedy.
func (c WarningCode) Warn(text string) Warning {
	for _, k := range warningKinds {
		if k.Code == c {
			return Warning{Code: string(c), Severity: k.Severity, Text: text, Remedy: k.Remedy}
		}
	}
	return Warning{Code: string(c), Severity: SeverityError, Text: text}
}

// WithRemedy is w with a remedy that fits it better than that of its kind.
func (w Warning) WithRemedy(remedy string) Warning {
	w.Remedy = remedy
	return w
}
