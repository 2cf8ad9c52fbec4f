package gpreempt

import "slices"

// Warning is a condition that an admin should know. Warn of a WarningKind makes one.
type Warning struct {
	// Code is the code of the WarningKind.
	Code string
	// Severity is "warning" or "error".
	Severity string
	// Text is the problem on this host, Remedy what to do.
	Text, Remedy string
}

// The severities.
const (
	// SeverityWarning: gpreempt works, with less information or fewer functions.
	SeverityWarning = "warning"
	// SeverityError: a part of gpreempt does not work.
	SeverityError = "error"
)

// WarningKind describes the warnings with a code.
type WarningKind struct {
	// Code is the stable name, for scripts and alerts.
	Code     string
	Severity string
	// Means is the meaning in one line.
	Means string
	// Remedy is what to do, unless a warning has its own remedy.
	Remedy string
}

var warningKinds []*WarningKind

// define adds a kind to the list.
func define(code, severity, means, remedy string) *WarningKind {
	k := &WarningKind{code, severity, means, remedy}
	warningKinds = append(warningKinds, k)
	return k
}

// The kinds of warnings. The API, gpctl, the log, the metrics and docs/reference/warnings.md are made
// from them.
var (
	WarnUnknownPrincipal = define("UNKNOWN_PRINCIPAL", SeverityWarning, "access names a group or user that this host does not have",
		"create it (groupadd --system gpreempt) or remove it from the config file, then reload; until then it assigns no right")
	WarnSocketGroup = define("SOCKET_GROUP", SeverityWarning, "the socket could not be given to its group, whose members cannot connect",
		"run gpreemptd as root, or as a member of the first group of access.online_groups")
	WarnConfigRejected = define("CONFIG_REJECTED", SeverityWarning, "a changed config file is invalid; the previous configuration stays in force",
		"fix it (gpreemptd config check), then reload again")
	WarnRestartNeeded = define("RESTART_NEEDED", SeverityWarning, "the config file has values that take effect after a restart only",
		"systemctl restart gpreemptd")
	WarnWithoutEffect = define("CONFIG_WITHOUT_EFFECT", SeverityWarning, "a part of the config file is valid and can have no effect on this host, such as a rule that matches no process",
		"the text has the place in the file and the remedy of each; gpreemptd config check lists all; then reload")
	WarnCertificateRejected = define("CERTIFICATE_REJECTED", SeverityWarning, "changed certificates for TCP are invalid; the previous ones stay in force",
		"fix the files, then reload again")
	WarnPrivateKey = define("PRIVATE_KEY_EXPOSED", SeverityWarning, "users other than root have access to the private key for TCP, and can impersonate the daemon",
		"chmod 0600 the file that tcp.key names, and reload; issue another key if they are not trusted")
	WarnNoKFD = define("NO_KFD", SeverityError, "the amdgpu driver is not loaded, or found no GPU",
		"load amdgpu (dmesg | grep -i kfd), then restart gpreemptd; kfdemu demo shows gpreempt on an emulated GPU")
	WarnNoGPU = define("NO_GPU", SeverityError, "the driver is loaded and has no GPU for compute",
		"read its messages about the GPU (dmesg | grep -i amdgpu); gpreemptd keeps looking")
	WarnGPUsUnreadable = define("GPUS_UNREADABLE", SeverityError, "the list of GPUs cannot be read",
		"gpreemptd needs to read /sys/class/kfd; it keeps trying")
	WarnGPUOmitted = define("GPU_UNREADABLE", SeverityError, "the driver's description of a GPU cannot be read: without earlier facts the GPU is not served; the others are",
		"see what the driver says of the GPU (dmesg | grep -i amdgpu), and let the daemon read its topology node; gpreemptd keeps trying")
	WarnNoMechanism = define("NO_MECHANISM", SeverityError, "no usable mechanism: nothing can be suspended on this host",
		"gpctl doctor shows what is missing; restart gpreemptd afterwards; kfdemu demo shows gpreempt on an emulated GPU")
	WarnKFDClosed = define("KFD_CLOSED", SeverityError, "the driver cannot be opened: dbgtrap cannot be used",
		"gpctl doctor shows what to do; then restart gpreemptd")
	WarnKFDUnknown = define("KFD_UNKNOWN", SeverityWarning, "this gpreempt does not know the version of the driver",
		"install a newer gpreempt; until then use it only where a GPU may be reset")
	WarnNoJournal = define("NO_JOURNAL", SeverityError, "the journal of pauses cannot be opened: criu and freezer are not used",
		"make its directory writable by root only, then restart gpreemptd")
	WarnJournalUnreadable = define("JOURNAL_UNREADABLE", SeverityError, "a part of the journal cannot be read: an earlier pause may not be undone",
		"look for stopped processes (gpctl doctor); ending one ends its pause; then remove the file that the text names")
	WarnOrphanedPause = define("ORPHANED_PAUSE", SeverityError, "processes that an earlier daemon paused are not resumed yet",
		"gpreemptd keeps trying; ending the process ends the pause too")
	WarnKernelLogUnreadable = define("KERNEL_LOG_UNREADABLE", SeverityWarning, "the kernel log cannot be read: its messages open no breaker, and a queue that the driver resets is not noticed",
		"run gpreemptd as root, or with CAP_SYSLOG")
	WarnFailureDoubted = define("GPU_FAILURE_DOUBTED", SeverityWarning, "the driver reports failures of a GPU, and this version of it is known to do so of GPUs that work: only the first report opened the breaker",
		"install another version of the driver; the text names the public report; when the GPU does fail, other messages open the breaker")
	WarnScanFailed = define("SCAN_FAILED", SeverityError, "processes and queues cannot be read: new ones are not known",
		"gpreemptd needs to read /sys/class/kfd and /proc; it uses what it read before")
	WarnScanIncomplete = define("SCAN_INCOMPLETE", SeverityWarning, "some facts of processes cannot be read",
		"processes are shown without these facts, and fewer rules match them")
	WarnStuck = define("STUCK", SeverityWarning, "processes cannot be suspended or resumed now: their own calls hold their locks in the driver",
		"wait: having the driver pin much memory takes seconds, and other processes are suspended meanwhile; ending the process ends it; gpctl target explain shows for how long it is left alone")
	WarnCannotSuspend = define("CANNOT_SUSPEND", SeverityWarning, "processes of class offline run through every lease: no mechanism can suspend them, or the last attempt failed",
		"gpctl target list has the reason of each: end the tracer or debugger that holds it, enable another mechanism, or have its rule stop or kill what resists (on_resist); without a reason of its own, see whether the daemon can start processes (pids.max, memory)")
	WarnQueueReset = define("QUEUE_RESET", SeverityWarning, "the driver has reset a queue in the last hour, because it could not take it off a GPU: its process has lost work, and most programs end",
		"gpctl events names the process, and the log has the kernel's line: if it was a server, take the GPU out of service (gpctl policy set shadow, or a row in safety.hazards) until the job that hangs is found; restart what lost a queue")
	WarnSMIUnavailable = define("SMI_UNAVAILABLE", SeverityWarning, "a GPU's events cannot be read: evictions are not counted",
		"run gpreemptd as root; everything else works")
	WarnGPUMemoryShort = define("GPU_MEMORY_SHORT", SeverityWarning, "the driver evicts queues for lack of GPU memory",
		"have the processes use less memory together than the GPU has: gpreempt frees time, not memory")
	WarnJobSlow = define("JOB_SLOW", SeverityWarning, "the processes of a job run together for less than the share floor",
		"gpctl target explain shows why a process does not run")
	WarnSlotsLow = define("HQD_SLOTS_LOW", SeverityWarning, "few slots for compute queues are free on a GPU: with more queues than slots, queues take turns, online ones too",
		"fewer queues: GPU_MAX_HW_QUEUES=2 for each process; or hqd_budget, which parks idle offline processes; gpctl gpu list has the figures")
	WarnAllGPUsTaken = define("ALL_GPUS_TAKEN", SeverityWarning, "a process without GPU queues announced work without naming GPUs: its lease covers all GPUs of the host",
		"name the GPUs in the announcement (gpus): a server whose queues are in other processes must do so")
	WarnOwnerOffline = define("OWNER_OFFLINE", SeverityWarning, "a process of class offline has its own work announced: the leases of other clients suspend it",
		"have no offline rule match servers (gpctl target explain names the rule): match the job's command line (cmdline: \"*train.py*\") rather than python, or put a rule of class online for the server before it")
	WarnMQDsHangs = define("MQDS_HANGS", SeverityWarning, "the driver does not list its queues: a GPU may hang",
		"dmesg | grep -i amdgpu; the details of queues beyond sysfs are from before")
	WarnMQDsOdd = define("MQDS_ODD", SeverityWarning, "the driver's dump of queues has lines that cannot be parsed",
		"these lines are left out: report them to the authors of gpreempt, with the file /sys/kernel/debug/kfd/mqds")
	WarnMQDsUnreadable = define("MQDS_UNREADABLE", SeverityWarning, "the driver's dump of queues cannot be read",
		"gpctl doctor shows the reason; discovery.debugfs: false turns this off")
	WarnDebugfsMissing = define("DEBUGFS_MISSING", SeverityWarning, "debugfs is not mounted: fewer details of queues are known",
		"mount -t debugfs none /sys/kernel/debug, where the kernel has CONFIG_DEBUG_FS; discovery.debugfs: false turns this off")
	WarnDebugfsDenied = define("DEBUGFS_DENIED", SeverityWarning, "debugfs may not be read: fewer details of queues are known",
		"run gpreemptd as root outside of containers; kernel lockdown may be in force; discovery.debugfs: false turns this off")
	WarnContainerRuntime = define("CONTAINER_RUNTIME_UNREACHABLE", SeverityWarning, "a container runtime does not answer: rules by names, images and labels match less",
		"see whether the runtime is up; if it is not in use, remove its socket")
	WarnContainerAnswer = define("CONTAINER_ANSWER_REFUSED", SeverityWarning, "the answer of a runtime about a container is too large or invalid",
		"look at the container with the runtime's own tool (docker inspect, crictl inspect): rules by its name, image or labels do not match it")
	WarnContainerUnknown = define("CONTAINER_UNKNOWN", SeverityWarning, "no configured runtime knows a container",
		"make a symbolic link to its runtime's socket at a path where gpreemptd looks for one, such as /run/crio/crio.sock")
)

// WarningKinds returns every kind of warning, in the order of their definitions.
func WarningKinds() []*WarningKind { return slices.Clone(warningKinds) }

// Warn returns a warning of this kind; text is the problem on this host.
func (k *WarningKind) Warn(text string) Warning {
	return Warning{Code: k.Code, Severity: k.Severity, Text: text, Remedy: k.Remedy}
}

// WithRemedy returns w with its own remedy.
func (w Warning) WithRemedy(remedy string) Warning {
	w.Remedy = remedy
	return w
}
