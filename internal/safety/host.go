package safety

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// capabilities are those that gpreempt needs (capabilities(7)), by number.
var capabilities = []struct {
	bit  int
	name string
}{{19, "CAP_SYS_PTRACE"}, {21, "CAP_SYS_ADMIN"}, {40, "CAP_CHECKPOINT_RESTORE"}, {34, "CAP_SYSLOG"}}

// has reports whether this process has a capability.
func (h *host) has(name string) bool {
	for _, c := range capabilities {
		if c.name == name {
			return h.self.Capabilities>>c.bit&1 != 0
		}
	}
	return false
}

// asRoot is the remedy if the daemon lacks rights.
const asRoot = "run gpreemptd as root, with the capabilities its systemd unit grants"

// notChecked is the finding of a diagnosis that lacks a right for the check. It says nothing about the daemon.
func (h *host) notChecked(right, format string, args ...any) finding {
	f := skip("not checked: uid %d may not %s", h.self.UID, fmt.Sprintf(format, args...))
	f.remedy = right + ", or sudo gpctl doctor"
	return f
}

// configFile is the finding about a config file that cannot be used.
func (h *host) configFile(err error) finding {
	first, more, _ := strings.Cut(err.Error(), "\n")
	switch {
	case hidden(err):
		return h.notChecked("a user who may read it", "read the config file: %s", first)
	case more != "":
		first += fmt.Sprintf(" (and %s)", plural(strings.Count(more, "\n")+1, "other error"))
	}
	return fail("gpreemptd config check", "%s", first)
}

func (h *host) kernel() finding {
	s, err := h.text("proc/sys/kernel/osrelease")
	if err != nil {
		return unread(err)
	}
	switch {
	case len(parseRelease(s).numbers) < 2:
		return warn("check that the KFD interface below is 1.13 or newer", "kernel release %q does not begin with a version such as 6.12", s)
	case compareToBound(s, "6.5") < 0:
		return warn("Linux 6.5 or newer, or AMD's amdgpu-dkms package with interface 1.13 or newer", "%s: its own amdgpu driver has no DBG_TRAP", s)
	}
	return ok("%s", s)
}

func (h *host) rights() finding {
	if h.selfErr != nil {
		return unread(h.selfErr)
	}
	of, who := h.self, "the daemon runs as"
	switch {
	case h.cfg.ByDaemon:
	case len(h.daemons) > 0:
		of = h.daemons[0]
	case h.self.UID != 0:
		return skip("no gpreemptd runs; it needs CAP_SYS_PTRACE, which it has as root")
	default:
		who = "no gpreemptd runs; this diagnosis runs as"
	}
	var have []string
	for _, c := range capabilities {
		if of.Capabilities>>c.bit&1 != 0 {
			have = append(have, c.name)
		}
	}
	who = fmt.Sprintf("%s uid %d with ", who, of.UID)
	if len(have) == 0 {
		who += "no capability that gpreempt needs"
	} else {
		who += strings.Join(have, ", ")
	}
	switch {
	case !slices.Contains(have, "CAP_SYS_PTRACE"):
		return fail(asRoot, "%s: dbgtrap and criu need CAP_SYS_PTRACE", who)
	case !slices.Contains(have, "CAP_SYS_ADMIN") && !slices.Contains(have, "CAP_CHECKPOINT_RESTORE"):
		return warn(asRoot, "%s: criu needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN", who)
	}
	return ok("%s", who)
}

// firstPIDNamespace is the inode number of the first pid namespace
// (PROC_PID_INIT_INO, include/linux/proc_ns.h).
const firstPIDNamespace = "pid:[4026531836]"

func (h *host) namespaces() finding {
	link, err := fs.ReadLink(h.cfg.Root, "proc/self/ns/pid")
	if err != nil {
		return unread(err)
	}
	users, err := h.text("proc/self/uid_map")
	if err != nil {
		return unread(err)
	}
	remedy := "run it in the host's namespaces: hostPID: true in Kubernetes, --pid=host and no user namespace elsewhere"
	switch {
	case link != firstPIDNamespace && h.cfg.ByDaemon:
		return fail(remedy, "its own pid namespace: the driver lists processes by the host's pids")
	case link != firstPIDNamespace:
		return warn(remedy, "its own pid namespace: the checks of processes below do not cover the host")
	case !wholeRange(users) && h.cfg.ByDaemon:
		return fail(remedy, "its own user namespace: its capabilities do not apply to the host's processes")
	case !wholeRange(users):
		return warn(remedy, "its own user namespace: its capabilities do not apply to the host's processes")
	}
	return ok("the host's")
}

// wholeRange reports whether the text of a uid_map maps every id to itself, as that
// of the first user namespace does.
func wholeRange(s string) bool {
	f := strings.Fields(s)
	return len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295"
}

func (h *host) yama() finding {
	s, err := h.text("proc/sys/kernel/yama/ptrace_scope")
	switch {
	case absent(err):
		return ok("none: the kernel has no Yama")
	case err != nil:
		return unread(err)
	}
	switch s {
	case "0", "1":
		return ok("%s", s)
	case "2":
		return ok("2: only with CAP_SYS_PTRACE, which the daemon has as root")
	case "3":
		return fail("remove kernel.yama.ptrace_scope = 3 from /etc/sysctl.conf and /etc/sysctl.d, then reboot: it cannot be lowered at run time",
			"3: no process may be traced, not even by root")
	}
	return warn("check that root may trace processes", "%s, which is not a known value", s)
}

func (h *host) cgroup() finding {
	const remedy = "boot with systemd.unified_cgroup_hierarchy=1; until then the freezer stops processes with SIGSTOP, and rules cannot match cgroups"
	switch {
	case h.exists("sys/fs/cgroup/cgroup.controllers"):
		return ok("2")
	case h.exists("sys/fs/cgroup/unified/cgroup.procs"):
		return warn(remedy, "1 and 2 side by side (hybrid)")
	case h.exists("sys/fs/cgroup/freezer"), h.exists("sys/fs/cgroup/cpu"):
		return warn(remedy, "1")
	}
	return warn("mount -t cgroup2 none /sys/fs/cgroup; until then the freezer stops processes with SIGSTOP", "not mounted at /sys/fs/cgroup")
}

func (h *host) exists(path string) bool {
	_, err := fs.Stat(h.cfg.Root, path)
	return err == nil
}

func (h *host) kernelLog() finding {
	file, err := h.cfg.Root.Open("dev/kmsg")
	switch {
	case absent(err):
		return warn("make /dev/kmsg available to the daemon; without it the daemon does not notice a GPU that hangs or resets", "/dev/kmsg does not exist")
	case hidden(err):
		return h.mayNotRead("/dev/kmsg")
	case err != nil:
		return unread(err)
	}
	if err := file.Close(); err != nil {
		return unread(err)
	}
	return ok("/dev/kmsg can be read")
}

// mayNotRead is a finding about a file that only root may read. It concerns the daemon
// only if this process is the daemon.
func (h *host) mayNotRead(path string) finding {
	if h.cfg.ByDaemon {
		return warn("grant CAP_SYSLOG to the daemon", "this process may not read %s, so it does not notice a GPU that hangs or resets", path)
	}
	return h.notChecked("CAP_SYSLOG", "read %s", path)
}

// debugfs only opens a file: reading it takes the locks of all processes of the driver.
func (h *host) debugfs() finding {
	const path = "sys/kernel/debug/kfd/mqds"
	const use = "suspending does not need it"
	const lost = "the addresses, priorities and slots of queues are not known: rules by queue_priority match nothing, rules by ring_address only processes that dbgtrap is attached to"
	file, err := h.cfg.Root.Open(path)
	switch {
	case absent(err):
		return warn("mount -t debugfs none /sys/kernel/debug; "+use, "/%s does not exist: debugfs is not mounted, or not in this kernel; %s", path, lost)
	case hidden(err) && h.self.UID != 0 && h.cfg.ByDaemon:
		return warn(asRoot, "uid %d may not read /%s; %s", h.self.UID, path, lost)
	case hidden(err) && h.self.UID != 0:
		return h.notChecked("CAP_DAC_READ_SEARCH", "read /%s", path)
	case hidden(err):
		return warn("boot without lockdown= if you need debugfs; "+use, "root may not read /%s: the kernel is locked down, or a security module forbids it; %s", path, lost)
	case err != nil:
		return unread(err)
	}
	if err := file.Close(); err != nil {
		return unread(err)
	}
	if h.cfg.Debugfs {
		return ok("/%s is read", path)
	}
	return ok("/%s is not read, because discovery.debugfs is false: %s", path, lost)
}

// userQueues looks for queues that KFD does not know.
func (h *host) userQueues() finding {
	const remedy = "start these processes without HSA_ENABLE_DRM_DEBUG, or load amdgpu with user_queue=0, or add freezer to the config key mechanisms"
	u := discovery.ReadUserQueues(h.cfg.Root)
	var found []string
	for _, proc := range h.seen {
		if len(proc.DRM) > 0 {
			found = append(found, fmt.Sprintf("%s (pid %d)", proc.Comm, proc.Key.PID))
		}
	}
	switch {
	case len(found) > 0 && u.Listed:
		return warn(remedy, "%s: dbgtrap and criu cannot suspend the user queues of DRM of %s", gpreempt.ReasonDRMQueues, listed(found))
	case len(found) > 0:
		return warn(remedy, "%s: HSA_ENABLE_DRM_DEBUG is set and debugfs does not show the user queues of DRM, so that these processes are not suspended by dbgtrap or criu: %s",
			gpreempt.ReasonDRMQueues, listed(found))
	case u.Parameter == "":
		return ok("none: the driver has no parameter user_queue")
	case !u.Enabled():
		return ok("none: amdgpu.user_queue is 0")
	case u.Listed:
		return ok("none of a process of KFD; amdgpu.user_queue is %s", u.Parameter)
	case u.Parameter == "-1":
		return ok("amdgpu.user_queue is -1, which turns them off in every driver that was read, and debugfs shows none")
	}
	return warn("mount debugfs with Linux 6.17 or later, or load amdgpu with user_queue=0",
		"amdgpu.user_queue is %s, and debugfs does not show who has user queues of DRM: only processes with HSA_ENABLE_DRM_DEBUG are taken to have some", u.Parameter)
}
