package discovery_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Ids and pods for the tests.
const (
	inner     = "6dd05e91f00f99281f70b1fd90a29e5cc30b0dab243cb7cfb6153d8017872394"
	outer     = "89ac90181a86fdea23d87ab993ceb698aa61528123c23135ef43fe5246a1b11e"
	pod       = "1858680e-b044-4fd5-9dd4-f137e30e2180"
	podSlice  = "kubepods-burstable-pod1858680e_b044_4fd5_9dd4_f137e30e2180.slice"
	staticPod = "99dcb84d2a34f7e338778606703258c4"
	outerPod  = "57e67067-89e4-4001-bdd4-8632d39ea02b"
)

// v1 returns the text of a host with cgroup v1 only.
func v1(path string) string {
	text := ""
	for i, controllers := range []string{
		"misc", "rdma", "pids", "hugetlb", "net_cls,net_prio", "perf_event", "memory", "freezer", "devices", "cpuset", "blkio", "cpu,cpuacct", "name=systemd",
	} {
		text += string(rune('a'+i)) + ":" + controllers + ":" + path + "\n"
	}
	return text
}

func TestCgroupHasContainerUnitAndPod(t *testing.T) {
	const (
		user  = "/user.slice/user-1000.slice/user@1000.service"
		pods  = "/kubepods.slice/kubepods-burstable.slice/" + podSlice
		nodes = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-" + podSlice
	)
	tests := map[string]struct {
		text string
		want gpreempt.Cgroup
	}{
		"in none":      {"", gpreempt.Cgroup{}},
		"v2, the root": {"0::/\n", gpreempt.Cgroup{Path: "/"}},
		"v2, a service": {
			"0::/system.slice/train.service\n",
			gpreempt.Cgroup{Path: "/system.slice/train.service", Unit: "train.service", Slice: "system.slice"},
		},
		"v2, below a service": {
			"0::/system.slice/system-gpu.slice/gpu@0.service/worker\n",
			gpreempt.Cgroup{Path: "/system.slice/system-gpu.slice/gpu@0.service/worker", Unit: "gpu@0.service", Slice: "system-gpu.slice"},
		},
		"v2, removed": {
			"0::/system.slice/train.service (deleted)\n",
			gpreempt.Cgroup{Path: "/system.slice/train.service", Unit: "train.service", Slice: "system.slice"},
		},
		"v2, not UTF-8": {"0::/caf\xe9\n", gpreempt.Cgroup{Path: "/caf\uFFFD"}},
		"v1": {
			v1("/system.slice/train.service"),
			gpreempt.Cgroup{Path: "/system.slice/train.service", Unit: "train.service", Slice: "system.slice"},
		},
		"v1 without systemd": {"3:cpu:/\n2:memory:/batch/7\n1:freezer:/x\n", gpreempt.Cgroup{Path: "/batch/7"}},
		"v1, the root":       {v1("/"), gpreempt.Cgroup{Path: "/"}},
		"hybrid, a service": {
			v1("/system.slice/train.service") + "0::/system.slice/train.service\n",
			gpreempt.Cgroup{Path: "/system.slice/train.service", Unit: "train.service", Slice: "system.slice"},
		},
		"hybrid, v2 has the root only": {v1("/batch") + "0::/\n", gpreempt.Cgroup{Path: "/batch"}},
		"hybrid, the runtime knows v1 only": {
			v1("/docker/"+inner) + "0::/system.slice/containerd.service\n",
			gpreempt.Cgroup{Path: "/system.slice/containerd.service", Runtime: "docker", ContainerID: inner, ContainerPath: "/docker/" + inner},
		},
		"v1, only some controllers are the container's": {
			"3:memory:/docker/" + inner + "\n2:cpu:/\n1:name=systemd:/user.slice/user-0.slice/session-4.scope\n",
			gpreempt.Cgroup{Path: "/user.slice/user-0.slice/session-4.scope", Runtime: "docker", ContainerID: inner, ContainerPath: "/docker/" + inner},
		},
		"Slurm, v2": {
			"0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_3\n",
			gpreempt.Cgroup{Path: "/system.slice/slurmstepd.scope/job_7/step_0/user/task_3", Unit: "slurmstepd.scope", Slice: "system.slice", SlurmJob: 7},
		},
		"Slurm, v2, one of several nodes on a host": {
			"0::/system.slice/node1_slurmstepd.scope/job_17\n",
			gpreempt.Cgroup{Path: "/system.slice/node1_slurmstepd.scope/job_17", Unit: "node1_slurmstepd.scope", Slice: "system.slice", SlurmJob: 17},
		},
		"Slurm's own processes": {
			"0::/system.slice/slurmstepd.scope/system\n",
			gpreempt.Cgroup{Path: "/system.slice/slurmstepd.scope/system", Unit: "slurmstepd.scope", Slice: "system.slice"},
		},
		"a user's cgroup with a name of Slurm": {
			"0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_7\n",
			gpreempt.Cgroup{Path: "/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_7", Unit: "user@1000.service", Slice: "user-1000.slice", UserUnit: "slurmstepd.scope"},
		},
		"another's scope with a name like Slurm's": {
			"0::/system.slice/myslurmstepd.scope/job_7\n",
			gpreempt.Cgroup{Path: "/system.slice/myslurmstepd.scope/job_7", Unit: "myslurmstepd.scope", Slice: "system.slice"},
		},
		"Slurm, v1, where systemd has the group of slurmd": {
			"6:freezer:/slurm/uid_1000/job_7/step_0\n4:memory:/slurm/uid_1000/job_7/step_0/task_3\n3:cpuset:/slurm/uid_1000/job_7/step_0\n" +
				"1:name=systemd:/system.slice/slurmd.service\n0::/system.slice/slurmd.service\n",
			gpreempt.Cgroup{Path: "/slurm/uid_1000/job_7/step_0/task_3", Unit: "slurmd.service", Slice: "system.slice", SlurmJob: 7},
		},
		"Slurm, v1, one of several nodes on a host": {
			"6:freezer:/slurm_node1/uid_0/job_4294967294/step_0\n1:name=systemd:/\n0::/\n",
			gpreempt.Cgroup{Path: "/slurm_node1/uid_0/job_4294967294/step_0", SlurmJob: 4294967294},
		},
		"names like Slurm's in v1": {
			"6:freezer:/slurmish/uid_0/job_7\n5:devices:/slurm/uid_0/job_\n4:memory:/slurm/job_7\n0::/\n",
			gpreempt.Cgroup{Path: "/slurmish/uid_0/job_7"},
		},
		"seen from another cgroup namespace": {
			"0::/../docker-" + inner + ".scope\n",
			gpreempt.Cgroup{Path: "/../docker-" + inner + ".scope", Unit: "docker-" + inner + ".scope", Runtime: "docker", ContainerID: inner},
		},
		"a session": {
			"0::/user.slice/user-1000.slice/session-3.scope\n",
			gpreempt.Cgroup{Path: "/user.slice/user-1000.slice/session-3.scope", Unit: "session-3.scope", Slice: "user-1000.slice"},
		},
		"escapes of systemd": {
			"0::/system.slice/system-gpu\\x2dtrain.slice/gpu\\x2dtrain@a\\x2fb.service\n",
			gpreempt.Cgroup{
				Path: "/system.slice/system-gpu\\x2dtrain.slice/gpu\\x2dtrain@a\\x2fb.service",
				Unit: "gpu\\x2dtrain@a\\x2fb.service", Slice: "system-gpu\\x2dtrain.slice",
			},
		},
		"a unit named like a controller": {
			"0::/_memory.slice/_cpu.service\n",
			gpreempt.Cgroup{Path: "/_memory.slice/_cpu.service", Unit: "cpu.service", Slice: "memory.slice"},
		},

		"Docker, cgroupfs, v1": {
			v1("/docker/" + inner),
			gpreempt.Cgroup{Path: "/docker/" + inner, Runtime: "docker", ContainerID: inner},
		},
		"Docker, cgroupfs, v2": {
			"0::/docker/" + inner + "\n",
			gpreempt.Cgroup{Path: "/docker/" + inner, Runtime: "docker", ContainerID: inner},
		},
		"Docker, a parent of one's own": {
			"0::/gpu-jobs/" + inner + "\n",
			gpreempt.Cgroup{Path: "/gpu-jobs/" + inner, ContainerID: inner},
		},
		"Docker, systemd": {
			"0::/system.slice/docker-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: "/system.slice/docker-" + inner + ".scope", Unit: "docker-" + inner + ".scope", Slice: "system.slice",
				Runtime: "docker", ContainerID: inner,
			},
		},
		"Docker, rootless": {
			"0::" + user + "/user.slice/docker-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: user + "/user.slice/docker-" + inner + ".scope", Unit: "user@1000.service", Slice: "user-1000.slice",
				UserUnit: "docker-" + inner + ".scope",
			},
		},
		"Docker's own service": {
			"0::/system.slice/docker.service\n",
			gpreempt.Cgroup{Path: "/system.slice/docker.service", Unit: "docker.service", Slice: "system.slice"},
		},
		"docker-in-docker": {
			"0::/system.slice/docker-" + outer + ".scope/docker/" + inner + "\n",
			gpreempt.Cgroup{
				Path: "/system.slice/docker-" + outer + ".scope/docker/" + inner, Unit: "docker-" + outer + ".scope", Slice: "system.slice",
				Runtime: "docker", ContainerID: outer,
			},
		},

		"Kubernetes, cgroupfs": {
			v1("/kubepods/burstable/pod" + pod + "/" + inner),
			gpreempt.Cgroup{Path: "/kubepods/burstable/pod" + pod + "/" + inner, ContainerID: inner, PodUID: pod},
		},
		"Kubernetes, cgroupfs, guaranteed": {
			"0::/kubepods/pod" + pod + "/" + inner + "\n",
			gpreempt.Cgroup{Path: "/kubepods/pod" + pod + "/" + inner, ContainerID: inner, PodUID: pod},
		},
		"Kubernetes, containerd, systemd": {
			"0::" + pods + "/cri-containerd-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: pods + "/cri-containerd-" + inner + ".scope", Unit: "cri-containerd-" + inner + ".scope", Slice: podSlice,
				Runtime: "containerd", ContainerID: inner, PodUID: pod,
			},
		},
		"Kubernetes, a static pod": {
			"0::/kubepods.slice/kubepods-pod" + staticPod + ".slice/cri-containerd-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: "/kubepods.slice/kubepods-pod" + staticPod + ".slice/cri-containerd-" + inner + ".scope",
				Unit: "cri-containerd-" + inner + ".scope", Slice: "kubepods-pod" + staticPod + ".slice",
				Runtime: "containerd", ContainerID: inner, PodUID: staticPod,
			},
		},
		"Kubernetes, Docker, systemd": {
			"0::" + pods + "/docker-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: pods + "/docker-" + inner + ".scope", Unit: "docker-" + inner + ".scope", Slice: podSlice,
				Runtime: "docker", ContainerID: inner, PodUID: pod,
			},
		},
		"Kubernetes, containerd told of cgroupfs where the kubelet has systemd": {
			v1("/system.slice/containerd.service/" + podSlice + ":cri-containerd:" + inner),
			gpreempt.Cgroup{
				Path: "/system.slice/containerd.service/" + podSlice + ":cri-containerd:" + inner, Unit: "containerd.service", Slice: "system.slice",
				Runtime: "containerd", ContainerID: inner, PodUID: pod,
			},
		},
		"Kubernetes, systemd in the container": {
			"0::" + pods + "/cri-containerd-" + inner + ".scope/system.slice/sshd.service\n",
			gpreempt.Cgroup{
				Path: pods + "/cri-containerd-" + inner + ".scope/system.slice/sshd.service", Unit: "cri-containerd-" + inner + ".scope", Slice: podSlice,
				Runtime: "containerd", ContainerID: inner, PodUID: pod,
			},
		},
		"kind": {
			"0::/system.slice/docker-" + outer + ".scope" + nodes + "/cri-containerd-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: "/system.slice/docker-" + outer + ".scope" + nodes + "/cri-containerd-" + inner + ".scope",
				Unit: "docker-" + outer + ".scope", Slice: "system.slice",
				Runtime: "docker", ContainerID: outer,
			},
		},
		"kind, cgroupfs": {
			v1("/docker/" + outer + "/kubelet/kubepods/besteffort/pod" + pod + "/" + inner),
			gpreempt.Cgroup{Path: "/docker/" + outer + "/kubelet/kubepods/besteffort/pod" + pod + "/" + inner, Runtime: "docker", ContainerID: outer},
		},
		"kind, a node's own service": {
			"0::/system.slice/docker-" + outer + ".scope/system.slice/containerd.service\n",
			gpreempt.Cgroup{
				Path: "/system.slice/docker-" + outer + ".scope/system.slice/containerd.service", Unit: "docker-" + outer + ".scope", Slice: "system.slice",
				Runtime: "docker", ContainerID: outer,
			},
		},
		"kind in a pod": {
			"0::/kubepods/pod" + outerPod + "/" + outer + nodes + "/cri-containerd-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path:        "/kubepods/pod" + outerPod + "/" + outer + nodes + "/cri-containerd-" + inner + ".scope",
				ContainerID: outer, PodUID: outerPod,
			},
		},
		"Docker in a pod": {
			"0::" + pods + "/cri-containerd-" + outer + ".scope/docker/" + inner + "\n",
			gpreempt.Cgroup{
				Path: pods + "/cri-containerd-" + outer + ".scope/docker/" + inner, Unit: "cri-containerd-" + outer + ".scope", Slice: podSlice,
				Runtime: "containerd", ContainerID: outer, PodUID: pod,
			},
		},

		"CRI-O, systemd": {
			"0::" + pods + "/crio-" + inner + ".scope/container\n",
			gpreempt.Cgroup{
				Path: pods + "/crio-" + inner + ".scope/container", Unit: "crio-" + inner + ".scope", Slice: podSlice,
				Runtime: "cri-o", ContainerID: inner, PodUID: pod,
			},
		},
		"CRI-O, cgroupfs": {
			v1("/kubepods/burstable/pod" + pod + "/crio-" + inner),
			gpreempt.Cgroup{Path: "/kubepods/burstable/pod" + pod + "/crio-" + inner, Runtime: "cri-o", ContainerID: inner, PodUID: pod},
		},
		"CRI-O's monitor": {
			"0::" + pods + "/crio-conmon-" + inner + ".scope\n",
			gpreempt.Cgroup{Path: pods + "/crio-conmon-" + inner + ".scope", Unit: "crio-conmon-" + inner + ".scope", Slice: podSlice, PodUID: pod},
		},

		"nerdctl": {
			"0::/system.slice/nerdctl-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: "/system.slice/nerdctl-" + inner + ".scope", Unit: "nerdctl-" + inner + ".scope", Slice: "system.slice",
				Runtime: "containerd", ContainerID: inner,
			},
		},
		"nerdctl, cgroupfs":        {"0::/default/" + inner + "\n", gpreempt.Cgroup{Path: "/default/" + inner, Runtime: "containerd", ContainerID: inner}},
		"ctr":                      {"0::/default/redis-1\n", gpreempt.Cgroup{Path: "/default/redis-1", Runtime: "containerd", ContainerID: "redis-1"}},
		"ctr, systemd in it":       {"0::/default/web/init.scope\n", gpreempt.Cgroup{Path: "/default/web/init.scope", Runtime: "containerd", ContainerID: "web"}},
		"a slice below /default":   {"0::/default/a.slice\n", gpreempt.Cgroup{Path: "/default/a.slice"}},
		"a name no runtime allows": {"0::/default/-a\n", gpreempt.Cgroup{Path: "/default/-a"}},

		"Podman, systemd": {
			"0::/machine.slice/libpod-" + inner + ".scope/container\n",
			gpreempt.Cgroup{
				Path: "/machine.slice/libpod-" + inner + ".scope/container", Unit: "libpod-" + inner + ".scope", Slice: "machine.slice",
				Runtime: "podman", ContainerID: inner,
			},
		},
		"Podman, a pod": {
			"0::/machine.slice/machine-libpod_pod_" + outer + ".slice/libpod-" + inner + ".scope\n",
			gpreempt.Cgroup{
				Path: "/machine.slice/machine-libpod_pod_" + outer + ".slice/libpod-" + inner + ".scope",
				Unit: "libpod-" + inner + ".scope", Slice: "machine-libpod_pod_" + outer + ".slice", Runtime: "podman", ContainerID: inner,
			},
		},
		"Podman, cgroupfs": {
			v1("/libpod_parent/libpod-" + inner + "/ctr"),
			gpreempt.Cgroup{Path: "/libpod_parent/libpod-" + inner + "/ctr", Runtime: "podman", ContainerID: inner},
		},
		"Podman, cgroupfs, a pod": {
			v1("/libpod_parent/" + outer + "/libpod-" + inner),
			gpreempt.Cgroup{Path: "/libpod_parent/" + outer + "/libpod-" + inner, Runtime: "podman", ContainerID: inner},
		},
		"Podman, cgroupfs, a pod's monitor": {v1("/libpod_parent/" + outer + "/conmon"), gpreempt.Cgroup{Path: "/libpod_parent/" + outer + "/conmon"}},
		"Podman, rootless": {
			"0::" + user + "/user.slice/libpod-" + inner + ".scope/container\n",
			gpreempt.Cgroup{
				Path: user + "/user.slice/libpod-" + inner + ".scope/container", Unit: "user@1000.service", Slice: "user-1000.slice",
				UserUnit: "libpod-" + inner + ".scope",
			},
		},
		"Podman, Quadlet": {
			"0::/system.slice/train.service/libpod-payload-" + inner + "\n",
			gpreempt.Cgroup{
				Path: "/system.slice/train.service/libpod-payload-" + inner, Unit: "train.service", Slice: "system.slice",
				Runtime: "podman", ContainerID: inner,
			},
		},
		"Podman's monitor": {
			"0::/machine.slice/libpod-conmon-" + inner + ".scope\n",
			gpreempt.Cgroup{Path: "/machine.slice/libpod-conmon-" + inner + ".scope", Unit: "libpod-conmon-" + inner + ".scope", Slice: "machine.slice"},
		},

		"LXC": {
			"0::/lxc.payload.train/system.slice/ssh.service\n",
			gpreempt.Cgroup{Path: "/lxc.payload.train/system.slice/ssh.service"},
		},
		"systemd-nspawn": {
			"0::/machine.slice/systemd-nspawn@train.service/payload/init.scope\n",
			gpreempt.Cgroup{Path: "/machine.slice/systemd-nspawn@train.service/payload/init.scope", Unit: "systemd-nspawn@train.service", Slice: "machine.slice"},
		},
		"an id that is too short": {
			"0::/system.slice/docker-" + inner[1:] + ".scope\n",
			gpreempt.Cgroup{Path: "/system.slice/docker-" + inner[1:] + ".scope", Unit: "docker-" + inner[1:] + ".scope", Slice: "system.slice"},
		},
		"a mount of a container's": {
			"0::/system.slice/var-lib-" + inner + ".mount\n",
			gpreempt.Cgroup{Path: "/system.slice/var-lib-" + inner + ".mount", Unit: "var-lib-" + inner + ".mount", Slice: "system.slice"},
		},
		"a slice that is named like a pod's": {
			"0::/mykubepods-pod" + staticPod + ".slice\n",
			gpreempt.Cgroup{Path: "/mykubepods-pod" + staticPod + ".slice", Slice: "mykubepods-pod" + staticPod + ".slice"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			want := test.want
			if i := strings.Index(want.Path, want.ContainerID); want.ContainerID != "" && want.ContainerPath == "" {
				name, _, _ := strings.Cut(want.Path[i:], "/")
				want.ContainerPath = want.Path[:i+len(name)]
			}
			if diff := cmp.Diff(want, discovery.ParseCgroup([]byte(test.text))); diff != "" {
				t.Errorf("%s(-want +got):\n%s", test.text, diff)
			}
		})
	}
}

// Writing to a cgroup needs the name that the kernel uses now.
func TestCgroupV2PathIsTheKernels(t *testing.T) {
	for text, want := range map[string]string{
		"0::/a/b.slice\n":                          "/a/b.slice",
		"2:cpu:/x\n1:name=systemd:/y\n0::/":        "/",
		"2:cpu:/x\n1:name=systemd:/y\n":            "",
		"0::/system.slice/job.service (deleted)\n": "/system.slice/job.service (deleted)",
	} {
		if got := discovery.CgroupV2Path([]byte(text)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func FuzzParseCgroup(f *testing.F) {
	f.Add([]byte(v1("/kubepods/burstable/pod" + pod + "/" + inner)))
	f.Add([]byte("0::/system.slice/docker-" + outer + ".scope/kubelet.slice/" + podSlice + "/cri-containerd-" + inner + ".scope (deleted)\n"))
	f.Add([]byte("0::/system.slice/containerd.service/" + podSlice + ":cri-containerd:" + inner + "\n"))
	f.Add([]byte("0::/default/redis-1\n"))
	f.Add([]byte(":0:/default/"))
	f.Add([]byte("1:name=systemd:/_cpu.service\n0::/\xff"))
	f.Add([]byte("0::relative\n:::\n::\n"))
	f.Add([]byte("6:freezer:/slurm_n/uid_0/job_7/step_0\n1:name=systemd:/system.slice/slurmd.service\n0::/\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := discovery.ParseCgroup(b)
		text := strings.ToValidUTF8(string(b), "\uFFFD")
		for what, s := range map[string]string{"path": c.Path, "unit": c.Unit, "slice": c.Slice, "user's unit": c.UserUnit, "container": c.ContainerID} {
			if !utf8.ValidString(s) || !strings.Contains(text, s) {
				t.Errorf("%s %q is not in %q", what, s, b)
			}
			if what != "path" && strings.ContainsAny(s, "/\n") {
				t.Errorf("%s %q of %q", what, s, b)
			}
		}
		if c.Path != "" && c.Path[0] != '/' {
			t.Errorf("path %q of %q", c.Path, b)
		}
		if c.ContainerID == "" && (c.Runtime != "" || c.ContainerPath != "") {
			t.Errorf("%+v without a container, of %q", c, b)
		}
		if c.Conflict != "" && (c.ContainerID != "" || c.PodUID != "" || c.SlurmJob != 0) {
			t.Errorf("%+v has ids in spite of a conflict, of %q", c, b)
		}
		if c.PodUID != "" && len(c.PodUID) != 32 && len(c.PodUID) != 36 {
			t.Errorf("pod %q of %q", c.PodUID, b)
		}
		if c.SlurmJob != 0 && !strings.Contains(c.Path, "/job_") {
			t.Errorf("Slurm job %d, and path %q of %q", c.SlurmJob, c.Path, b)
		}
		// The path alone is sufficient, if it is the source.
		if again := discovery.ParseCgroup([]byte("0::" + c.Path + "\n")); again.ContainerID != "" && c.ContainerID == "" && c.Conflict == "" {
			t.Errorf("%q: %+v, its path alone %+v", b, c, again)
		}
		// Nothing below a delegation changes what is above.
		name, _, _ := strings.Cut(text, "\n")
		for where, at := range delegations {
			got, want := discovery.ParseCgroup([]byte("0::"+at.path+"/"+name+"\n")), at.Cgroup
			want.Path, want.UserUnit = got.Path, got.UserUnit
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%q below %s (-want +got):\n%s", name, where, diff)
			}
		}
	})
}
