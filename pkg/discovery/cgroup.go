package discovery

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// CgroupV2Path returns the cgroup v2 path from /proc/PID/cgroup as the kernel writes it,
// "" when the process has none. The path of a removed cgroup ends in " (deleted)", so that
// it is not mistaken for a new one with the same name.
func CgroupV2Path(b []byte) string {
	for line := range strings.SplitSeq(text(b), "\n") {
		if path, found := strings.CutPrefix(line, "0::"); found {
			return path
		}
	}
	return ""
}

// ParseCgroup parses /proc/PID/cgroup (cgroups(7)) and the paths in it. It skips what it
// cannot parse, and never fails.
//
// With v1 and v2 both in use, Path is v2's unless that is the root. Slurm makes its groups only
// for some controllers of v1, and leaves the others in the group of slurmd: there Path is the
// longest of its groups. The container is the
// one in v2's path, else in systemd's, else in the first of the others; Unit and Slice are
// from the same path, so that a container is not mistaken for the service of its runtime.
//
// Names count only where the system wrote them: down to the first container, unit or
// manager of a user. What runs there may make groups below, with any name. So the container
// is the outermost, which the host's runtime knows under docker-in-docker and kind too.
// LXC and systemd-nspawn are not containers here: their paths have a name and no id.
//
// Of ids that cannot all be true none counts, and Conflict has them.
func ParseCgroup(b []byte) gpreempt.Cgroup {
	var v2, systemd string
	var others []string
	for line := range strings.SplitSeq(text(b), "\n") {
		// hierarchy:controllers:path, where the path may have colons too.
		_, line, _ = strings.Cut(line, ":")
		controllers, path, _ := strings.Cut(line, ":")
		path = strings.TrimSuffix(path, " (deleted)")
		switch {
		case path == "" || path[0] != '/':
		case controllers == "":
			v2 = path
		case controllers == "name=systemd":
			systemd = path
		default:
			others = append(others, path)
		}
	}
	var c gpreempt.Cgroup
	var all, own names // own are those in Path
	for _, path := range append([]string{v2, systemd}, others...) {
		n := namesIn(path)
		if c.Path == "" || c.Path == "/" && path != "" {
			c.Path, own = path, n
		}
		all.merge(&n)
	}
	if all.id == "" {
		all.unit, all.slice = own.unit, own.slice
	}
	if container := cmp.Or(all.id, all.pod); all.inManager && container != "" {
		all.contradict("cgroups of container", container, "the manager of a user")
	}
	inV2 := slurmJobV2(v2)
	c.SlurmJob = inV2
	for _, path := range others {
		switch job := slurmJobV1(path); {
		case job == 0:
		case c.SlurmJob != 0 && c.SlurmJob != job:
			all.contradict("Slurm jobs", strconv.FormatUint(uint64(c.SlurmJob), 10), strconv.FormatUint(uint64(job), 10))
		case c.SlurmJob == 0 || inV2 == 0 && len(path) > len(c.Path):
			c.Path, c.SlurmJob = path, job
		}
	}
	c.Unit, c.Slice, c.UserUnit = all.unit, all.slice, own.userUnit
	c.Runtime, c.ContainerID, c.ContainerPath, c.PodUID = all.runtime, all.id, all.container, all.pod
	if all.conflict != "" {
		c.Unit, c.Slice = own.unit, own.slice
		c.Refuse(all.conflict)
	}
	return c
}

// names are those in a path that the system wrote.
type names struct {
	unit, slice string
	// inManager: it is below the service manager of a user, which wrote userUnit.
	inManager bool
	userUnit  string
	// container is the path of the container's own group.
	runtime, id, container, pod string
	conflict                    string
}

// merge adds the ids of another hierarchy.
func (n *names) merge(o *names) {
	n.conflict = cmp.Or(n.conflict, o.conflict)
	n.inManager = n.inManager || o.inManager
	switch {
	case o.id == "":
	case n.id == "":
		n.runtime, n.id, n.container, n.unit, n.slice = o.runtime, o.id, o.container, o.unit, o.slice
	case n.id != o.id:
		n.contradict("containers", n.id, o.id)
	}
	n.addPod(o.pod)
}

func (n *names) addPod(uid string) {
	if n.pod != "" && uid != "" && uid != n.pod {
		n.contradict("pods", n.pod, uid)
	}
	n.pod = cmp.Or(n.pod, uid)
}

// contradict notes two names of which one is false.
func (n *names) contradict(of, a, b string) {
	n.conflict = cmp.Or(n.conflict, of+" "+shortID(a)+" and "+shortID(b))
}

func shortID(id string) string {
	if isID(id) {
		return id[:12]
	}
	return id
}

// runtimeServices are the services of containerd, which makes groups SLICE:PREFIX:ID below
// its own where the kubelet has systemd manage them and containerd does not.
var runtimeServices = []string{"containerd.service", "k3s.service", "k3s-agent.service", "rke2-server.service", "rke2-agent.service"}

// namesIn returns the names in a path that the system wrote: of slices of systemd and then
// of a unit, or of groups that a runtime made by itself.
func namesIn(path string) (n names) {
	parent := ""
	inSystemd, inKubepods := true, false
	for end := 0; end < len(path) && n.id == ""; {
		name, _, _ := strings.Cut(path[end+1:], "/")
		end += 1 + len(name)
		// systemd adds an underscore before the names of units that collide with files of
		// the kernel, such as _cpu.service (cg_escape in src/basic/cgroup-util.c).
		unit := strings.TrimPrefix(name, "_")
		runtime, id := containerName(parent, name)
		makesPods := inSystemd || inKubepods
		switch {
		case n.unit != "":
			// What runs in a unit may own the groups below. Podman's --cgroups=split has
			// the container in the unit of its service.
			makesPods = slices.Contains(runtimeServices, n.unit)
			if id == "" || !makesPods && !strings.HasPrefix(name, "libpod-payload-") {
				return n
			}
		case name == "..": // seen from another cgroup namespace, which may be in a pod
			inKubepods = true
			continue
		case strings.HasPrefix(unit, "user@") && strings.HasSuffix(unit, ".service"): // the manager of a user's services
			if n.inManager = true; inSystemd {
				n.unit, n.userUnit = unit, namesIn(path[end:]).unit
			}
			return n
		case inSystemd && strings.HasSuffix(name, ".slice"):
			n.slice = unit
		case inSystemd && isUnit(name):
			n.unit = unit
		case name == "lxc", strings.HasPrefix(name, "lxc."), path[:end] == "/user":
			return n // of an LXC container, or of a login by pam_cgfs
		case path[:end] == "/default/"+name && isIdentifier(name):
			// containerd's own default is /NAMESPACE/ID (pkg/oci: populateDefaultUnixSpec),
			// where any name may be the id (pkg/identifiers). Only those of its namespace
			// "default" can be distinguished from other cgroups.
			runtime, id = "containerd", name
		default:
			inSystemd, inKubepods = false, inKubepods || name == "kubepods"
		}
		if makesPods {
			n.addPod(podUID(name))
		}
		if id != "" {
			n.runtime, n.id, n.container = runtime, id, path[:end]
		}
		parent = name
	}
	return n
}

// isUnit reports whether a name is that of a unit of systemd that can have processes.
func isUnit(name string) bool {
	switch name[strings.LastIndexByte(name, '.')+1:] {
	case "service", "scope", "socket", "mount", "swap":
		return strings.Contains(name, ".")
	}
	return false
}

// slurmJobV2 returns the job in a path of Slurm's cgroup/v2, 0 without one:
// /system.slice/slurmstepd.scope/job_7, or NODE_slurmstepd.scope with several slurmd on a
// host. Below user@UID.service a user can make groups of any name.
func slurmJobV2(path string) uint32 {
	rest, found := strings.CutPrefix(path, "/system.slice/")
	scope, rest, _ := strings.Cut(rest, "/")
	if !found || scope != "slurmstepd.scope" && !strings.HasSuffix(scope, "_slurmstepd.scope") {
		return 0
	}
	return slurmJob(rest)
}

// slurmJobV1 is slurmJobV2 for a controller of cgroup/v1: /slurm/uid_1000/job_7, or
// /slurm_NODE.
func slurmJobV1(path string) uint32 {
	rest, found := strings.CutPrefix(path, "/slurm")
	node, rest, _ := strings.Cut(rest, "/")
	user, rest, _ := strings.Cut(rest, "/")
	if !found || node != "" && node[0] != '_' || !strings.HasPrefix(user, "uid_") {
		return 0
	}
	return slurmJob(rest)
}

// slurmJob returns the number in job_NUMBER, which begins a path.
func slurmJob(path string) uint32 {
	name, _, _ := strings.Cut(path, "/")
	digits, found := strings.CutPrefix(name, "job_")
	if n, err := strconv.ParseUint(digits, 10, 32); found && err == nil {
		return uint32(n)
	}
	return 0
}

// runtimes are the runtimes by the prefix of a container's id, in PREFIX-ID.scope where
// systemd manages cgroups. The sources of the prefixes:
//   - docker: dockerd's withCgroups
//   - cri-containerd: getCgroupsPath of containerd's CRI
//   - nerdctl: nerdctl's generateCgroupPath
//   - crio: CRI-O's internal/config/cgmgr, without .scope under cgroupfs
//   - libpod: Podman's getOCICgroupPath, without .scope under cgroupfs;
//     libpod-payload with --cgroups=split, as Quadlet uses it
//
// Their monitors, crio-conmon-ID and libpod-conmon-ID, are not containers.
var runtimes = map[string]string{
	"docker": "docker", "cri-containerd": "containerd", "nerdctl": "containerd", "crio": "cri-o",
	"libpod": "podman", "libpod-payload": "podman",
}

// containerName returns the container after which a cgroup is named, if any.
func containerName(parent, name string) (runtime, id string) {
	if isID(name) {
		// cgroupfs: /docker/ID, /kubepods/burstable/podUID/ID. The last is of
		// containerd and of cri-dockerd. Podman's pods have their own ids as names.
		if parent == "libpod_parent" {
			return "", ""
		}
		return runtimes[parent], name
	}
	prefix, id := "", ""
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		// SLICE:PREFIX:ID is for a runtime that manages cgroups by systemd. Others use it as
		// a name.
		id = name[i+1:]
		_, prefix, _ = strings.Cut(name[:i], ":")
	} else if i := strings.LastIndexByte(name, '-'); i >= 0 {
		prefix, id = name[:i], strings.TrimSuffix(name[i+1:], ".scope")
	}
	if runtime = runtimes[prefix]; runtime == "" || !isID(id) {
		return "", ""
	}
	return runtime, id
}

// isID reports whether s has the form of the ids of Docker, Podman, CRI-O, nerdctl and
// containerd's CRI: 32 random bytes in hex.
func isID(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// isIdentifier reports whether s can be a containerd id and cannot be a name of systemd.
func isIdentifier(s string) bool {
	for _, kind := range []string{".slice", ".scope", ".service", ".mount"} {
		if strings.HasSuffix(s, kind) {
			return false
		}
	}
	alphanumeric := func(b byte) bool { return b >= '0' && b <= '9' || b|0x20 >= 'a' && b|0x20 <= 'z' }
	for i := range len(s) {
		if !alphanumeric(s[i]) && (strings.IndexByte("._-", s[i]) < 0 || i == 0 || !alphanumeric(s[i-1])) {
			return false
		}
	}
	return s != "" && len(s) <= 76 && alphanumeric(s[len(s)-1])
}

// podUID returns the pod after which a cgroup of the kubelet is named, if any:
// podUID with cgroupfs, [ROOT-]kubepods[-QOS]-podUID.slice with systemd, where the
// dashes of the id are underscores (GetPodContainerName and
// escapeSystemdCgroupName in pkg/kubelet/cm). The id of a static pod is 32 digits without
// dashes.
func podUID(name string) string {
	name, _, _ = strings.Cut(name, ":") // SLICE:PREFIX:ID
	if slice, systemd := strings.CutSuffix(name, ".slice"); systemd {
		i := strings.LastIndex(slice, "-pod")
		if i < 0 || !strings.Contains("-"+slice[:i]+"-", "-kubepods-") {
			return ""
		}
		name = strings.ReplaceAll(slice[i+1:], "_", "-")
	}
	uid, found := strings.CutPrefix(name, "pod")
	if !found || strings.Trim(uid, "0123456789abcdef-") != "" {
		return ""
	}
	dashes := strings.Count(uid, "-")
	if len(uid) == 32 && dashes == 0 ||
		len(uid) == 36 && dashes == 4 && uid[8] == '-' && uid[13] == '-' && uid[18] == '-' && uid[23] == '-' {
		return uid
	}
	return ""
}
