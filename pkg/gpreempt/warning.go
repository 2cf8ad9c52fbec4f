package gpreempt

import "slices"

// Warning is a condition that an admin should know. The Warn method of a code makes one.
type Warning struct {
	// Code is that of a WarningKind.
	Code string
	// Severity is "warning" or "error".
	Severity string
	// Text is the problem on this host, Remedy what to do.
	Text, Remedy string
}

// WarningCode is the stable name of a kind of warning, for scripts and alerts.
type WarningCode string

// The codes; warningKinds describes them.
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
	// SeverityWarning: gpreempt works, with less information or fewer functions.
	SeverityWarning = "warning"
	// SeverityError: a part of gpreempt does not work.
	SeverityError = "error"
)

// WarningKind describes the warnings with a code.
type WarningKind struct {
	Code     WarningCode
	Severity string
	// Means is the meaning in one line.
	Means string
	// Remedy is what to do, unless a warning has its own remedy.
	Remedy string
}

// warningKinds is the list of warnings. The API, gpctl, the log, the metrics and
// docs/warnings.md are made from it.
var warningKinds = []WarningKind{
	{
		WarnUnknownPrincipal, SeverityWarning, "access names a group or user that this host does not have",
		"create it (groupadd --system gpreempt) or remove it from the config file, then reload; until then it assigns no right",
	},
	{
		WarnSocketGroup, SeverityWarning, "the socket could not be given to its group, whose members cannot connect",
		"run gpreemptd as root, or as a member of the first group of access.online_groups",
	},
	{
		WarnConfigRejected, SeverityWarning, "a changed config file is invalid; the previous configuration stays in force",
		"fix it (gpreemptd config check), then reload again",
	},
	{
		WarnRestartNeeded, SeverityWarning, "the config file has values that take effect after a restart only",
		"systemctl restart gpreemptd",
	},
	{
		WarnCertificateRejected, SeverityWarning, "changed certificates for TCP are invalid; the previous ones stay in force",
		"fix the files, then reload again",
	},
	{
		WarnNoKFD, SeverityError, "the amdgpu driver is not loaded, or found no GPU",
		"load amdgpu (dmesg | grep -i kfd), then restart gpreemptd; kfdemu demo shows gpreempt on an emulated GPU",
	},
	{
		WarnNoGPU, SeverityError, "the driver is loaded and has no GPU for compute",
		"read its messages about the GPU (dmesg | grep -i amdgpu); gpreemptd keeps looking",
	},
	{
		WarnGPUsUnreadable, SeverityError, "the list of GPUs cannot be read",
		"gpreemptd needs to read /sys/class/kfd; it keeps trying",
	},
	{
		WarnNoMechanism, SeverityError, "no usable mechanism: nothing can be suspended on this host",
		"gpctl doctor shows what is missing; restart gpreemptd afterwards; kfdemu demo shows gpreempt on an emulated GPU",
	},
	{
		WarnKFDClosed, SeverityError, "the driver cannot be opened: dbgtrap cannot be used",
		"gpctl doctor shows what to do; then restart gpreemptd",
	},
	{
		WarnKFDUnknown, SeverityWarning, "this gpreempt does not know the version of the driver",
		"install a newer gpreempt; until then use it only where a GPU may be reset",
	},
	{
		WarnNoJournal, SeverityError, "the journal of pauses cannot be opened: criu and freezer are not used",
		"make its directory writable by root only, then restart gpreemptd",
	},
	{
		WarnJournalUnreadable, SeverityError, "a part of the journal cannot be read: an earlier pause may not be undone",
		"look for stopped processes (gpctl doctor); ending one ends its pause; then remove the file that the text names",
	},
	{
		WarnOrphanedPause, SeverityError, "processes that an earlier daemon paused are not resumed yet",
		"gpreemptd keeps trying; ending the process ends the pause too",
	},
	{
		WarnKernelLogUnreadable, SeverityWarning, "the kernel log cannot be read: its messages open no breaker",
		"run gpreemptd as root, or with CAP_SYSLOG",
	},
	{
		WarnScanFailed, SeverityError, "processes and queues cannot be read: new ones are not known",
		"gpreemptd needs to read /sys/class/kfd and /proc; it uses what it read before",
	},
	{
		WarnScanIncomplete, SeverityWarning, "some facts of processes cannot be read",
		"processes are shown without these facts, and fewer rules match them",
	},
	{
		WarnSMIUnavailable, SeverityWarning, "a GPU's events cannot be read: evictions are not counted",
		"run gpreemptd as root; everything else works",
	},
	{
		WarnGPUMemoryShort, SeverityWarning, "the driver evicts queues for lack of GPU memory",
		"have the processes use less memory together than the GPU has: gpreempt frees time, not memory",
	},
	{
		WarnMQDsHangs, SeverityWarning, "the driver does not list its queues: a GPU may hang",
		"dmesg | grep -i amdgpu; the details of queues beyond sysfs are from before",
	},
	{
		WarnMQDsOdd, SeverityWarning, "the driver's dump of queues has lines that cannot be parsed",
		"these lines are left out: report them to the authors of gpreempt, with the file /sys/kernel/debug/kfd/mqds",
	},
	{
		WarnMQDsUnreadable, SeverityWarning, "the driver's dump of queues cannot be read",
		"gpctl doctor shows the reason; discovery.mqds_interval: 0s turns this off",
	},
	{
		WarnDebugfsMissing, SeverityWarning, "debugfs is not mounted: fewer details of queues are known",
		"mount -t debugfs none /sys/kernel/debug, where the kernel has CONFIG_DEBUG_FS; discovery.mqds_interval: 0s turns this off",
	},
	{
		WarnDebugfsDenied, SeverityWarning, "debugfs may not be read: fewer details of queues are known",
		"run gpreemptd as root outside of containers; kernel lockdown may be in force; discovery.mqds_interval: 0s turns this off",
	},
	{
		WarnContainerRuntime, SeverityWarning, "a container runtime does not answer: rules by names, images and labels match less",
		"see whether the runtime is up; if it is not in use, remove its socket from containers.sockets",
	},
	{
		WarnContainerAnswer, SeverityWarning, "the answer of a runtime about a container is too large or invalid",
		"look at the container with the runtime's own tool (docker inspect, crictl inspect): rules by its name, image or labels do not match it",
	},
	{
		WarnContainerUnknown, SeverityWarning, "no configured runtime knows a container",
		"add the socket of its runtime to containers.sockets",
	},
	{
		WarnKubelet, SeverityWarning, "the kubelet does not list its pods: priority classes are not known",
		"check that containers.kubelet is its address, containers.kubelet_token a token that may get nodes/proxy, and containers.kubelet_ca the authority of its certificate",
	},
}

// WarningKinds returns every kind of warning, in the order of the table.
func WarningKinds() []WarningKind { return slices.Clone(warningKinds) }

// Warn returns a warning of this kind; text is the problem on this host. A code that is
// not in the table is a bug: the warning is an error without remedy.
func (c WarningCode) Warn(text string) Warning {
	for _, k := range warningKinds {
		if k.Code == c {
			return Warning{Code: string(c), Severity: k.Severity, Text: text, Remedy: k.Remedy}
		}
	}
	return Warning{Code: string(c), Severity: SeverityError, Text: text}
}

// WithRemedy returns w with its own remedy.
func (w Warning) WithRemedy(remedy string) Warning {
	w.Remedy = remedy
	return w
}
