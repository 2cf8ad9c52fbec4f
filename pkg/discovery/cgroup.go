package discovery

import (
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// CgroupV2Path returns the cgroup v2 path from /proc/PID/cgroup as the kernel
// writes it, "" when the process is in none. That of a removed cgroup ends in
// " (deleted)", so that it is not taken for a new one of the same name.
func CgroupV2Path(b []byte) string {
	for line := range strings.SplitSeq(text(b), "\n") {
		if path, found := strings.CutPrefix(line, "0::"); found {
			return path
		}
	}
	return ""
}

// ParseCgroup reads /proc/PID/cgroup (cgroups(7)) and what the paths in it tell.
// What it cannot read it passes over: it never fails.
//
// With v1 and v2 both in use, Path is v2's unless that is the root. The container
// is the one that v2's path names, else systemd's, else the first of the others;
// Unit and Slice are from the same path, so that a container is not taken for the
// service of its runtime.
//
// The container is the innermost, which under docker-in-docker and kind the host's
// runtime does not know; the pod is the closest around it. What LXC and
// systemd-nspawn run is no container here: their paths have a name and no id.
//
// Below user@UID.service the path is that user's own word: the user can name a
// cgroup after any container.
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
		// systemd puts an underscore before the names of units that the kernel could
		// take for a file of its own, such as _cpu.service (cg_escape in
		// src/basic/cgroup-util.c).
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

// runtimes are the runtimes by what stands before the id of a container, in
// PREFIX-ID.scope where systemd manages cgroups. Who writes it:
//   - docker: dockerd's withCgroups
//   - cri-containerd: getCgroupsPath of containerd's CRI
//   - nerdctl: nerdctl's generateCgroupPath
//   - crio: CRI-O's internal/config/cgmgr, without .scope under cgroupfs
//   - libpod: Podman's getOCICgroupPath, without .scope under cgroupfs;
//     libpod-payload with --cgroups=split, as Quadlet has it
//
// The monitors beside them, crio-conmon-ID and libpod-conmon-ID, are none of them.
var runtimes = map[string]string{
	"docker": "docker", "cri-containerd": "containerd", "nerdctl": "containerd", "crio": "cri-o",
	"libpod": "podman", "libpod-payload": "podman",
}

// container returns the innermost container that a path names, and its runtime where
// the path tells.
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
	// "default" can be told from other people's cgroups.
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

// containerName returns the container that a cgroup is named after, if any.
func containerName(parent, name string) (runtime, id string) {
	if isID(name) {
		// cgroupfs: /docker/ID, /kubepods/burstable/podUID/ID. The last is containerd's
		// and cri-dockerd's alike. Podman's pods have their own ids as names.
		if parent == "libpod_parent" {
			return "", ""
		}
		return runtimes[parent], name
	}
	prefix, id := "", ""
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		// SLICE:PREFIX:ID is meant for a runtime under systemd. One that was not told so
		// takes it for a name.
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

// isID reports whether s is an id such as Docker, Podman, CRI-O, nerdctl and
// containerd's CRI give: 32 random bytes in hex.
func isID(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// isIdentifier reports whether s can be a containerd id that is no name of systemd's.
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

// podUID returns the pod that a cgroup of the kubelet's is named after, if any:
// podUID with cgroupfs, [ROOT-]kubepods[-QOS]-podUID.slice with systemd, where the
// dashes of the id are underscores (GetPodContainerName and
// escapeSystemdCgroupName in pkg/kubelet/cm). A static pod's id is 32 digits without any.
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
