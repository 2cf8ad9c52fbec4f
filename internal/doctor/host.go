package doctor

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// The capabilities that matter (capabilities(7)), by number.
var capabilities = []struct {
	bit  int
	name string
}{{19, "CAP_SYS_PTRACE"}, {21, "CAP_SYS_ADMIN"}, {40, "CAP_CHECKPOINT_RESTORE"}, {34, "CAP_SYSLOG"}}

// has reports whether this process has a capability.
func (p *patient) has(name string) bool {
	for _, c := range capabilities {
		if c.name == name {
			return p.self.Capabilities>>c.bit&1 != 0
		}
	}
	return false
}

// asRoot is what to do when this process may not look or act.
func (p *patient) asRoot() string {
	if p.cfg.ByDaemon {
		return "run gpreemptd as root, with the capabilities its systemd unit grants"
	}
	return "sudo gpreemptd diagnose"
}

// limited is a finding about the rights of this process: the daemon cannot do
// without, and a person who diagnoses may only see less.
func (p *patient) limited(format string, args ...any) finding {
	if p.cfg.ByDaemon {
		return fail(p.asRoot(), format, args...)
	}
	return warn(p.asRoot(), format, args...)
}

func (p *patient) kernel() finding {
	s, err := p.text("proc/sys/kernel/osrelease")
	if err != nil {
		return unread(err)
	}
	r, err := parseRelease(s)
	switch {
	case err != nil:
		return warn("check that the KFD interface below is 1.13 or newer", "%v", err)
	case !r.atLeast(6, 5, 0):
		return warn("Linux 6.5 or newer, or AMD's amdgpu-dkms package with interface 1.13 or newer", "%s: its own amdgpu driver has no DBG_TRAP", s)
	}
	return ok("%s", s)
}

func (p *patient) rights() finding {
	if p.selfErr != nil {
		return unread(p.selfErr)
	}
	var have []string
	for _, c := range capabilities {
		if p.has(c.name) {
			have = append(have, c.name)
		}
	}
	who := "this diagnosis runs as"
	if p.cfg.ByDaemon {
		who = "the daemon runs as"
	}
	who = fmt.Sprintf("%s uid %d with ", who, p.self.UID)
	if len(have) == 0 {
		who += "no capability that matters"
	} else {
		who += strings.Join(have, ", ")
	}
	switch checkpoint := p.has("CAP_SYS_ADMIN") || p.has("CAP_CHECKPOINT_RESTORE"); {
	case !p.has("CAP_SYS_PTRACE"):
		f := p.limited("%s: CAP_SYS_PTRACE is missing, which dbgtrap and criu need", who)
		if p.cfg.ByDaemon {
			f = f.blocking(dbgtrap, criu)
		}
		return f
	case !checkpoint:
		f := warn(p.asRoot(), "%s: criu needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN", who)
		if p.cfg.ByDaemon {
			f = f.blocking(criu)
		}
		return f
	}
	return ok("%s", who)
}

// firstPIDNamespace is the inode number of the first pid namespace
// (PROC_PID_INIT_INO, include/linux/proc_ns.h).
const firstPIDNamespace = "pid:[4026531836]"

func (p *patient) namespaces() finding {
	link, err := fs.ReadLink(p.cfg.Root, "proc/self/ns/pid")
	if err != nil {
		return unread(err)
	}
	users, err := p.text("proc/self/uid_map")
	if err != nil {
		return unread(err)
	}
	remedy := "run it in the host's namespaces: hostPID: true in Kubernetes, --pid=host and no user namespace elsewhere"
	switch {
	case link != firstPIDNamespace && p.cfg.ByDaemon:
		return fail(remedy, "a pid namespace of its own: the driver lists processes by the host's pids").blocking(dbgtrap, criu, freezer)
	case link != firstPIDNamespace:
		return warn(remedy, "a pid namespace of its own: what follows about processes is not that of the host")
	case !wholeRange(users) && p.cfg.ByDaemon:
		return fail(remedy, "a user namespace of its own: its capabilities do not reach the host's processes").blocking(dbgtrap, criu)
	case !wholeRange(users):
		return warn(remedy, "a user namespace of its own: its capabilities do not reach the host's processes")
	}
	return ok("the host's")
}

func (p *patient) yama() finding {
	s, err := p.text("proc/sys/kernel/yama/ptrace_scope")
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
		return fail("take kernel.yama.ptrace_scope = 3 out of /etc/sysctl.conf and /etc/sysctl.d, then reboot: it cannot be lowered",
			"3: nobody may trace a process, root included").blocking(dbgtrap, criu)
	}
	return warn("check that root may trace processes", "%s, which is not a known value", s)
}

func (p *patient) lockdown() finding {
	s, err := p.text("sys/kernel/security/lockdown")
	switch {
	case absent(err):
		return ok("none: not in this kernel, or securityfs is not mounted")
	case err != nil:
		return unread(err)
	}
	mode, err := parseLockdown(s)
	switch {
	case err != nil:
		return warn("look at /sys/kernel/security/lockdown", "%v", err)
	case mode == "none":
		return ok("none")
	}
	return ok("%s: it restricts debugfs, and nothing that suspending needs", mode)
}

func (p *patient) groups() finding {
	if len(p.cfg.Groups) == 0 {
		return ok("the config file names none: only root may call")
	}
	b, err := p.read("etc/group")
	if err != nil {
		return unread(err)
	}
	known := groupNames(b)
	var missing []string
	for _, name := range p.cfg.Groups {
		number := strings.Trim(name, "0123456789") == ""
		if !known[name] && !number && !slices.Contains(missing, name) {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return ok("%s", strings.Join(p.cfg.Groups, ", "))
	}
	return warn("groupadd --system "+missing[0]+" for each, unless a directory service has it; until then it gives nobody a right",
		"not in /etc/group: %s", strings.Join(missing, ", "))
}

func (p *patient) cgroup() finding {
	const remedy = "boot with systemd.unified_cgroup_hierarchy=1; until then the freezer stops processes with SIGSTOP, and rules cannot match cgroups"
	switch {
	case p.exists("sys/fs/cgroup/cgroup.controllers"):
		return ok("2")
	case p.exists("sys/fs/cgroup/unified/cgroup.procs"):
		return warn(remedy, "1 and 2 side by side (hybrid)")
	case p.exists("sys/fs/cgroup/freezer"), p.exists("sys/fs/cgroup/cpu"):
		return warn(remedy, "1")
	}
	return warn("mount -t cgroup2 none /sys/fs/cgroup; until then the freezer stops processes with SIGSTOP", "none is mounted at /sys/fs/cgroup")
}

func (p *patient) exists(path string) bool {
	_, err := fs.Stat(p.cfg.Root, path)
	return err == nil
}

func (p *patient) kernelLog() finding {
	file, err := p.cfg.Root.Open("dev/kmsg")
	switch {
	case absent(err):
		return warn("give the daemon /dev/kmsg; without it, it does not hear of a GPU that hangs or resets", "there is no /dev/kmsg")
	case hidden(err):
		return p.mayNotRead("/dev/kmsg")
	case err != nil:
		return unread(err)
	}
	if err := file.Close(); err != nil {
		return unread(err)
	}
	return ok("/dev/kmsg can be read")
}

// mayNotRead is a finding about a file that only root may read: it says something
// of the daemon only when the daemon looks.
func (p *patient) mayNotRead(path string) finding {
	if p.cfg.ByDaemon {
		return warn("grant CAP_SYSLOG to the daemon", "this process may not read %s, so it does not hear of a GPU that hangs or resets", path)
	}
	return skip("uid %d may not read %s; %s", p.self.UID, path, p.asRoot())
}

// debugfs opens a file of it, which reads nothing yet: reading takes the locks of
// all processes of the driver.
func (p *patient) debugfs() finding {
	const path = "sys/kernel/debug/kfd/mqds"
	const use = "it is needed to look at queues in the GPU, never to suspend them"
	file, err := p.cfg.Root.Open(path)
	switch {
	case absent(err):
		return warn("mount -t debugfs none /sys/kernel/debug; "+use, "there is no /%s: debugfs is not mounted, or the kernel has none", path)
	case hidden(err) && p.self.UID != 0:
		return skip("uid %d may not read /%s; %s", p.self.UID, path, p.asRoot())
	case hidden(err):
		return warn("boot without lockdown= if you need it; "+use, "root may not read /%s: the kernel is locked down, or a security module forbids it", path)
	case err != nil:
		return unread(err)
	}
	if err := file.Close(); err != nil {
		return unread(err)
	}
	return ok("/%s can be read", path)
}
