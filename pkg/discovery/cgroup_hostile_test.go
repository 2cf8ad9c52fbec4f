package discovery_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// delegations are where users, and root in containers, may make groups of any name, with
// the names that the system gave to these places.
var delegations = map[string]struct {
	path string
	gpreempt.Cgroup
}{
	"a user's manager": {"/user.slice/user-1000.slice/user@1000.service", gpreempt.Cgroup{Unit: "user@1000.service", Slice: "user-1000.slice"}},
	"a container of Docker": {
		"/system.slice/docker-" + outer + ".scope",
		gpreempt.Cgroup{Unit: "docker-" + outer + ".scope", Slice: "system.slice", Runtime: "docker", ContainerID: outer, ContainerPath: "/system.slice/docker-" + outer + ".scope"},
	},
	"a container of Docker, cgroupfs": {"/docker/" + outer, gpreempt.Cgroup{Runtime: "docker", ContainerID: outer, ContainerPath: "/docker/" + outer}},
	"a pod": {
		"/kubepods.slice/kubepods-pod" + staticPod + ".slice/cri-containerd-" + outer + ".scope",
		gpreempt.Cgroup{
			Unit: "cri-containerd-" + outer + ".scope", Slice: "kubepods-pod" + staticPod + ".slice", Runtime: "containerd",
			ContainerID: outer, ContainerPath: "/kubepods.slice/kubepods-pod" + staticPod + ".slice/cri-containerd-" + outer + ".scope", PodUID: staticPod,
		},
	},
	"a pod, cgroupfs": {
		"/kubepods/burstable/pod" + outerPod + "/" + outer,
		gpreempt.Cgroup{ContainerID: outer, ContainerPath: "/kubepods/burstable/pod" + outerPod + "/" + outer, PodUID: outerPod},
	},
	"a container of ctr":          {"/default/web", gpreempt.Cgroup{Runtime: "containerd", ContainerID: "web", ContainerPath: "/default/web"}},
	"a service of a user":         {"/system.slice/web.service", gpreempt.Cgroup{Unit: "web.service", Slice: "system.slice"}},
	"LXC":                         {"/lxc.payload.train", gpreempt.Cgroup{}},
	"LXC before 4.0":              {"/lxc/train", gpreempt.Cgroup{}},
	"systemd-nspawn":              {"/machine.slice/systemd-nspawn@train.service/payload", gpreempt.Cgroup{Unit: "systemd-nspawn@train.service", Slice: "machine.slice"}},
	"a login, by pam_cgfs":        {"/user/bob/0", gpreempt.Cgroup{}},
	"a manager outside its slice": {"/batch/user@1000.service", gpreempt.Cgroup{}},
	"a step of Slurm": {
		"/system.slice/slurmstepd.scope/job_7/step_0",
		gpreempt.Cgroup{Unit: "slurmstepd.scope", Slice: "system.slice", SlurmJob: 7},
	},
}

// claims are names that imitate those of the system.
var claims = []string{
	"/system.slice/triton.service",
	"/triton.service",
	"/_triton.service",
	"/slurmstepd.scope/job_9",
	"/system.slice/slurmstepd.scope/job_9/step_0",
	"/slurm/uid_0/job_9",
	"/docker-" + inner + ".scope",
	"/docker/" + inner,
	"/" + inner,
	"/cri-containerd-" + inner + ".scope",
	"/crio-" + inner + "/container",
	"/libpod_parent/libpod-" + inner,
	"/default/redis-1",
	"/kubepods.slice/kubepods-burstable.slice/" + podSlice + "/cri-containerd-" + inner + ".scope",
	"/kubepods/burstable/pod" + pod + "/" + inner,
	"/" + podSlice,
	"/" + podSlice + ":cri-containerd:" + inner,
	"/system.slice/containerd.service/" + podSlice + ":cri-containerd:" + inner,
	"/../../system.slice/triton.service",
	"/user.slice/user-0.slice/user@0.service/docker-" + inner + ".scope",
	"//docker-" + inner + ".scope",
}

func TestNamesCountOnlyWhereTheSystemWroteThem(t *testing.T) {
	for name, at := range delegations {
		for _, claim := range claims {
			for version, text := range map[string]string{
				"v1": v1(at.path + claim), "v2": "0::" + at.path + claim + "\n",
				"both": v1(at.path+claim) + "0::" + at.path + claim + "\n", "v2 of the root": v1(at.path+claim) + "0::/\n",
			} {
				want := at.Cgroup
				want.Path = at.path + claim
				got := discovery.ParseCgroup([]byte(text))
				want.UserUnit = got.UserUnit // of the user, see below
				if want.SlurmJob != 0 && version != "v2" && version != "both" {
					want.SlurmJob = 0 // v1 has Slurm's own hierarchies
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s, %s: %s(-want +got):\n%s", name, version, text, diff)
				}
				if got.UserUnit != "" && !strings.Contains(at.path, "user@") {
					t.Errorf("%s, %s: %s: user unit %q", name, version, text, got.UserUnit)
				}
			}
		}
	}
}

func TestUnitOfAUserIsApart(t *testing.T) {
	const manager = "/user.slice/user-1000.slice/user@1000.service"
	for below, want := range map[string]string{
		"":                                        "",
		"/init.scope":                             "init.scope",
		"/app.slice/triton.service":               "triton.service",
		"/app.slice/app-a.slice/b.scope/c.scope":  "b.scope",
		"/user.slice/libpod-" + inner + ".scope":  "libpod-" + inner + ".scope",
		"/app.slice/_cpu.service":                 "cpu.service",
		"/own/c.service":                          "",
		"/app.slice":                              "",
		"/user@0.service/triton.service":          "user@0.service",
		"/app.slice/train.service/libpod-payload": "train.service",
	} {
		got := discovery.ParseCgroup([]byte("0::" + manager + below + "\n"))
		if diff := cmp.Diff(gpreempt.Cgroup{Path: manager + below, Unit: "user@1000.service", Slice: "user-1000.slice", UserUnit: want}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", below, diff)
		}
	}
}

func TestContradictingIDsAreRefused(t *testing.T) {
	const (
		otherSlice = "kubepods-pod57e67067_89e4_4001_bdd4_8632d39ea02b.slice"
		manager    = "/user.slice/user-1000.slice/user@1000.service"
	)
	for text, want := range map[string]gpreempt.Cgroup{
		// Hierarchies of v1 that a user may write to, beside those of the system.
		"4:memory:/docker/" + inner + "\n3:cpu:/docker/" + outer + "\n0::/\n": {
			Path: "/docker/" + inner, Conflict: "containers 6dd05e91f00f and 89ac90181a86",
		},
		"4:memory:/docker/" + inner + "\n0::/system.slice/docker-" + outer + ".scope\n": {
			Path: "/system.slice/docker-" + outer + ".scope", Unit: "docker-" + outer + ".scope", Slice: "system.slice",
			Conflict: "containers 89ac90181a86 and 6dd05e91f00f",
		},
		"4:memory:/docker/" + inner + "\n1:name=systemd:" + manager + "/a.service\n": {
			Path: manager + "/a.service", Unit: "user@1000.service", Slice: "user-1000.slice", UserUnit: "a.service",
			Conflict: "cgroups of container 6dd05e91f00f and the manager of a user",
		},
		"4:memory:/kubepods/pod" + pod + "\n0::" + manager + "\n": {
			Path: manager, Unit: "user@1000.service", Slice: "user-1000.slice",
			Conflict: "cgroups of container " + pod + " and the manager of a user",
		},
		"4:memory:/kubepods/pod" + pod + "/" + inner + "\n3:cpu:/kubepods/pod" + outerPod + "/" + inner + "\n": {
			Path: "/kubepods/pod" + pod + "/" + inner, Conflict: "pods " + pod + " and " + outerPod,
		},
		"0::/kubepods.slice/" + otherSlice + "/" + podSlice + "/cri-containerd-" + inner + ".scope\n": {
			Path: "/kubepods.slice/" + otherSlice + "/" + podSlice + "/cri-containerd-" + inner + ".scope",
			Unit: "cri-containerd-" + inner + ".scope", Slice: podSlice, Conflict: "pods " + outerPod + " and " + pod,
		},
		"6:freezer:/slurm/uid_1000/job_7\n5:memory:/slurm/uid_1000/job_8\n0::/\n": {
			Path: "/slurm/uid_1000/job_7", Conflict: "Slurm jobs 7 and 8",
		},
		"6:freezer:/slurm/uid_1000/job_7\n0::/system.slice/slurmstepd.scope/job_8\n": {
			Path: "/system.slice/slurmstepd.scope/job_8", Unit: "slurmstepd.scope", Slice: "system.slice", Conflict: "Slurm jobs 8 and 7",
		},
	} {
		if diff := cmp.Diff(want, discovery.ParseCgroup([]byte(text))); diff != "" {
			t.Errorf("%s(-want +got):\n%s", text, diff)
		}
	}
}

// What the system wrote outside delegations still counts, at its edges.
func TestNamesOfTheSystemCountAtTheEdgesOfDelegations(t *testing.T) {
	const service = "/system.slice/containerd.service/"
	for path, want := range map[string]gpreempt.Cgroup{
		// A container of Podman in the unit of a service; not one of another runtime.
		"/system.slice/a.service/libpod-payload-" + inner: {Unit: "a.service", Slice: "system.slice", Runtime: "podman", ContainerID: inner},
		"/system.slice/a.service/docker-" + inner:         {Unit: "a.service", Slice: "system.slice"},
		// A service of a runtime makes pods, others do not.
		service + podSlice + ":cri-containerd:" + inner:                    {Unit: "containerd.service", Slice: "system.slice", Runtime: "containerd", ContainerID: inner, PodUID: pod},
		"/system.slice/a.service/" + podSlice + ":cri-containerd:" + inner: {Unit: "a.service", Slice: "system.slice"},
		"/" + podSlice + ":cri-containerd:" + inner:                        {Runtime: "containerd", ContainerID: inner, PodUID: pod},
		"/batch/" + podSlice + ":cri-containerd:" + inner:                  {Runtime: "containerd", ContainerID: inner},
		// Seen from the cgroup namespace of another pod, or of a host's own service.
		"/../pod" + pod + "/" + inner:                                {ContainerID: inner, PodUID: pod},
		"/../../" + podSlice + "/cri-containerd-" + inner + ".scope": {Unit: "cri-containerd-" + inner + ".scope", Slice: podSlice, Runtime: "containerd", ContainerID: inner, PodUID: pod},
		"/../../user.slice/user-7.slice/user@7.service/x.service":    {Unit: "user@7.service", Slice: "user-7.slice", UserUnit: "x.service"},
		// The pod's name alone is no pod where the kubelet has none.
		"/batch/pod" + pod + "/" + inner: {ContainerID: inner},
		"/user@1000.service/a.service":   {Unit: "user@1000.service", UserUnit: "a.service"},
		"/system.slice/user@x.service":   {Unit: "user@x.service", Slice: "system.slice"},
		"/a.slice/b/c.slice/d.service":   {Slice: "a.slice"},
		"/service":                       {},
		"/.service":                      {Unit: ".service"},
	} {
		want.Path = path
		if want.ContainerID != "" {
			want.ContainerPath = path
		}
		if diff := cmp.Diff(want, discovery.ParseCgroup([]byte("0::"+path+"\n"))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
	}
}
