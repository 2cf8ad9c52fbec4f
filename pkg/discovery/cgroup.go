package discovery

import (
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
// The container is the innermost, which the host's runtime does not know under
// docker-in-docker and kind; the pod is the closest around it. LXC and systemd-nspawn are
// not containers here: their paths have a name and no id.
//
// Below user@UID.service the path is not trustworthy: the user can name a cgroup after any
// container.
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
	inOrder := append([]string{v2, systemd}, others...)
	var c gpreempt.Cgroup
	for _, path := range inOrder {
		if c.Path == "" || c.Path == "/" && path != "" {
			c.Path = path
		}
	}
	telling := c.Path
	if c.SlurmJob = slurmJobV2(v2); c.SlurmJob == 0 {
		for _, path := range others {
			if job := slurmJobV1(path); job != 0 && (c.SlurmJob == 0 || job == c.SlurmJob && len(path) > len(c.Path)) {
				c.Path, c.SlurmJob = path, job
			}
		}
	}
	for _, path := range inOrder {
		if c.Runtime, c.ContainerID = container(path); c.ContainerID != "" {
			telling = path
			break
		}
	}
	for name := range strings.SplitSeq(telling, "/") {
		if uid := podUID(name); uid != "" {
			c.PodUID = uid
		}
		// systemd adds an underscore before the names of units that collide with files of
		// the kernel, such as _cpu.service (cg_escape in src/basic/cgroup-util.c).
		unit := strings.TrimPrefix(name, "_")
		switch kind := name[strings.LastIndexByte(name, '.')+1:]; kind {
		case "slice":
			c.Slice = unit
		case "service", "scope", "socket", "mount", "swap":
			c.Unit = unit
		}
	}
	return c
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

// container returns the innermost container in a path, and its runtime where the path
// contains it.
func container(path string) (runtime, id string) {
	parent := ""
	for name := range strings.SplitSeq(path, "/") {
		if r, i := containerName(parent, name); i != "" {
			runtime, id = r, i
		}
		parent = name
	}
	// containerd's own default is /NAMESPACE/ID (pkg/oci: populateDefaultUnixSpec),
	// where any name may be the id (pkg/identifiers). Only those of its namespace
	// "default" can be distinguished from other cgroups.
	if name, found := strings.CutPrefix(path, "/default/"); found && id == "" {
		if name, _, _ = strings.Cut(name, "/"); isIdentifier(name) {
			return "containerd", name
		}
	}
	if runtime == "" && id != "" && strings.HasPrefix(path, "/default/"+id) {
		runtime = "containerd"
	}
	return runtime, id
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
