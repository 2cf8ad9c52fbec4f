package kfdemu

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheDriverIsAmongTheLoadedModulesOnce(t *testing.T) {
	const others = "amdgpu_sched 4096 1 amdgpu, Live 0x0000000000000000\next4 831488 1 - Live 0x0000000000000000\n"
	const driver = "amdgpu 1 0 - Live 0x0000000000000000\n"
	for _, loaded := range []string{others, "amdgpu 19693568 8 - Live 0x0000000000000000\n" + others} {
		if diff := cmp.Diff(driver+others, withDriver(loaded)); diff != "" {
			t.Errorf("modules (-want +got):\n%s", diff)
		}
	}
}

// The GPUs follow the host's NUMA nodes, of which there may be more or fewer than in the
// model.
func TestGPUsFollowTheHostsNodes(t *testing.T) {
	cpu := node{files: map[string]string{"properties": "cpu_cores_count 8\nsimd_count 0\ncpu_core_id_base 8\n"}, Props: map[string]uint64{
		"cpu_cores_count": 8, "simd_count": 0, "cpu_core_id_base": 8,
	}}
	gpu := node{Number: 1, files: map[string]string{"properties": "cpu_cores_count 0\nsimd_count 4\ncaches_count 0\nio_links_count 1\n"}, Props: map[string]uint64{
		"cpu_cores_count": 0, "simd_count": 4, "caches_count": 0, "io_links_count": 1,
	}}
	var got []string
	for _, n := range onHost([]node{cpu, gpu}, []hostNode{{cpus: 2}, {cpus: 3, firstCPU: 2}}) {
		got = append(got, n.files["properties"])
		if n.Number != len(got)-1 {
			t.Errorf("node %d is the %d.", n.Number, len(got)-1)
		}
	}
	want := []string{
		"cpu_cores_count 2\nsimd_count 0\ncpu_core_id_base 0\n",
		"cpu_cores_count 3\nsimd_count 0\ncpu_core_id_base 2\n",
		"cpu_cores_count 0\nsimd_count 4\ncaches_count 3\nio_links_count 2\n",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("properties (-want +got):\n%s", diff)
	}
}

func TestErrorNamesTheSettingThatForbidsUserNamespaces(t *testing.T) {
	for _, test := range []struct {
		settings map[string]int
		want     string
	}{
		{map[string]int{"user/max_user_namespaces": 100, "kernel/unprivileged_userns_clone": 1, "kernel/apparmor_restrict_unprivileged_userns": 0}, ""},
		{map[string]int{}, ""},
		{map[string]int{"user/max_user_namespaces": 0}, "/proc/sys/user/max_user_namespaces is 0: set it to a number above 0"},
		{map[string]int{"kernel/unprivileged_userns_clone": 0}, "/proc/sys/kernel/unprivileged_userns_clone is 0: set it to 1"},
		{map[string]int{"kernel/apparmor_restrict_unprivileged_userns": 1}, "/proc/sys/kernel/apparmor_restrict_unprivileged_userns is 1: set it to 0"},
	} {
		err := obstacle(func(name string) (int, bool) {
			n, ok := test.settings[name]
			return n, ok
		})
		if test.want == "" {
			if err != nil {
				t.Errorf("%v: %v", test.settings, err)
			}
			continue
		}
		if !errors.Is(err, ErrPrivilege) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: got %v, want %q", test.settings, err, test.want)
		}
	}
}
