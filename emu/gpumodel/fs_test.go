package gpumodel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// inhabited is a machine with two processes, known by pid.
func inhabited(t *testing.T) rig {
	t.Helper()
	s, err := PresetByName("mi308x")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, s, 8)
	for _, spec := range []ProcSpec{
		{PID: 42, Start: 777, Comm: "a process) with a long name", UID: 1000, GID: 100},
		{PID: 7, Start: 555, Comm: "online"},
	} {
		key, err := r.StartProcess(spec)
		r.ok(err)
		r.queue(key, 1, gpreempt.QueueCompute)
		r.queue(key, 0, gpreempt.QueueSDMA)
		r.queue(key, 2, gpreempt.QueueSDMAXGMI)
	}
	r.rest()
	return r
}

func TestFSBehavesLikeAFileSystem(t *testing.T) {
	err := fstest.TestFS(inhabited(t).FS(),
		"sys/class/kfd/kfd/topology/system_properties",
		"sys/class/kfd/kfd/topology/nodes/0/properties",
		"sys/class/kfd/kfd/topology/nodes/9/gpu_id",
		"sys/class/kfd/kfd/proc/42/queues/0/gpuid",
		"proc/7/stat",
		"proc/7/exe",
		"sys/kernel/debug/kfd/mqds",
		"sys/kernel/debug/kfd/hqds",
	)
	if err != nil {
		t.Error(err)
	}
}

func TestFSShowsProcessesAsTheKernelDoes(t *testing.T) {
	r := inhabited(t)
	want := map[string]string{
		"sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0\n",
		"sys/class/kfd/kfd/topology/nodes/2/gpu_id": "63420\n",
		"sys/class/kfd/kfd/topology/nodes/2/name":   "ip discovery\n",
		"sys/class/kfd/kfd/topology/nodes/9/gpu_id": "50161\n",
		"sys/class/kfd/kfd/proc/42/pasid":           "32769\n",
		"sys/class/kfd/kfd/proc/42/vram_61531":      "48861184\n",
		"sys/class/kfd/kfd/proc/42/vram_63420":      "4096\n",
		"sys/class/kfd/kfd/proc/42/vram_50797":      "0\n",
		"sys/class/kfd/kfd/proc/42/queues/0/gpuid":  "61531",
		"sys/class/kfd/kfd/proc/42/queues/0/size":   "4096",
		"sys/class/kfd/kfd/proc/42/queues/0/type":   "0",
		"sys/class/kfd/kfd/proc/42/queues/1/type":   "1",
		"sys/class/kfd/kfd/proc/42/queues/2/type":   "4",
		"proc/42/comm":   "a process) with\n",
		"proc/7/environ": "",
		"proc/7/cgroup":  "0::/\n",
		"proc/7/cmdline": "online\x00",
		"sys/class/kfd/kfd/topology/nodes/10/gpu_id":          "",
		"sys/class/kfd/kfd/proc/43/pasid":                     "",
		"sys/class/kfd/kfd/proc/042/pasid":                    "",
		"sys/class/kfd/kfd/proc/42/queues/3/type":             "",
		"sys/class/kfd/kfd/proc/42/queues/0/gpuid/none":       "",
		"sys/class/kfd/kfd/topology/nodes/2/properties/other": "",
	}
	got := map[string]string{}
	for name := range want {
		data, err := fs.ReadFile(r.FS(), name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		got[name] = string(data)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}

	stat, err := fs.ReadFile(r.FS(), "proc/42/stat")
	r.ok(err)
	fields := strings.Fields(string(stat)[strings.LastIndexByte(string(stat), ')')+1:])
	if len(fields) != 50 || fields[19] != "777" {
		t.Errorf("stat = %q: want 52 fields, 777 as the 22nd", stat)
	}
	status, err := fs.ReadFile(r.FS(), "proc/42/status")
	r.ok(err)
	for _, line := range []string{
		"Name:\ta process) with\n", "Uid:\t1000\t1000\t1000\t1000\n", "Gid:\t100\t100\t100\t100\n", "NSpid:\t42\n",
	} {
		if !strings.Contains(string(status), line) {
			t.Errorf("status lacks %q:\n%s", line, status)
		}
	}
	status, err = fs.ReadFile(r.FS(), "proc/7/status")
	r.ok(err)
	if line := "\nNSpid:\t7\n"; !strings.Contains(string(status), line) {
		t.Errorf("status lacks %q:\n%s", line, status)
	}
	for name, want := range map[string]string{"proc/7/exe": "/usr/bin/online"} {
		if got, err := r.FS().ReadLink(name); err != nil || got != want {
			t.Errorf("%s leads to %q, %v, want %q", name, got, err, want)
		}
	}
	if _, err := r.FS().ReadLink("proc/7/comm"); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("ReadLink of a file = %v", err)
	}
	if _, err := r.FS().ReadLink("proc/8/exe"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ReadLink of nothing = %v", err)
	}
}

func TestSysfsIsTheKernels(t *testing.T) {
	r := inhabited(t)
	files := []string{"pasid", "queues/0/type", "queues/1/type", "queues/2/type"}
	got := map[Kernel][]string{}
	for _, k := range []Kernel{Linux612, Linux61, Linux72, Linux73, DKMS} {
		// Linux612 is what it is without being told.
		if k != Linux612 {
			r.SetKernel(k)
		}
		for _, name := range files {
			data, err := fs.ReadFile(r.FS(), "sys/class/kfd/kfd/proc/42/"+name)
			r.ok(err)
			got[k] = append(got[k], string(data))
		}
		data, err := fs.ReadFile(r.FS(), "sys/class/kfd/kfd/topology/nodes/2/properties")
		r.ok(err)
		if has := strings.Contains(string(data), "\ncapability2 1\ndebug_prop "); has != k.is7() {
			t.Errorf("%v: capability2 is there: %v", k, has)
		}
	}
	want := map[Kernel][]string{
		Linux61:  {"32769\n", "0", "1", "4"},
		Linux612: {"32769\n", "0", "1", "4"},
		Linux72:  {"0\n", "0", "1", "3"},
		Linux73:  {"0\n", "0", "1", "3"},
		DKMS:     {"0\n", "0", "1", "4"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%v (-want +got):\n%s", files, diff)
	}
}

func TestFSFollowsTheMachine(t *testing.T) {
	r := inhabited(t)
	names := func(dir string) string {
		entries, err := fs.ReadDir(r.FS(), dir)
		r.ok(err)
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return strings.Join(names, " ")
	}
	if got := names("sys/class/kfd/kfd/proc"); got != "42 7" {
		t.Errorf("processes = %q", got)
	}
	key := gpreempt.ProcessKey{PID: 42, Start: 777}
	entries, err := fs.ReadDir(r.FS(), "sys/class/kfd/kfd/proc/42/queues")
	r.ok(err)
	r.ok(r.DestroyQueue(key, 0))
	if got := names("sys/class/kfd/kfd/proc/42/queues"); got != "1 2" {
		t.Errorf("queues = %q", got)
	}
	// What was listed has vanished by the time it is looked at.
	if _, err := entries[0].Info(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Info of a queue that is gone = %v", err)
	}
	r.ok(r.EndProcess(key))
	if got := names("proc"); got != "7" {
		t.Errorf("processes = %q", got)
	}
}

// The names and their order as the kernel prints them.
const gpuPropertyNames = `cpu_cores_count simd_count mem_banks_count caches_count io_links_count p2p_links_count cpu_core_id_base
simd_id_base max_waves_per_simd lds_size_in_kb gds_size_in_kb num_gws wave_front_size array_count simd_arrays_per_engine
cu_per_simd_array simd_per_cu max_slots_scratch_cu gfx_target_version vendor_id device_id location_id domain drm_render_minor
hive_id num_sdma_engines num_sdma_xgmi_engines num_sdma_queues_per_engine num_cp_queues cwsr_size ctl_stack_size
max_engine_clk_fcompute local_mem_size fw_version capability debug_prop sdma_fw_version unique_id num_xcc max_engine_clk_ccompute`

func TestPropertiesAreTheKernelsInItsOrder(t *testing.T) {
	r := inhabited(t)
	read := func(node string) (names []string, values map[string]string) {
		data, err := fs.ReadFile(r.FS(), "sys/class/kfd/kfd/topology/nodes/"+node+"/properties")
		r.ok(err)
		values = map[string]string{}
		for line := range strings.Lines(string(data)) {
			name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			names = append(names, name)
			values[name] = value
		}
		return names, values
	}
	all := strings.Fields(gpuPropertyNames)
	names, values := read("3")
	if diff := cmp.Diff(all, names); diff != "" {
		t.Errorf("GPU properties (-want +got):\n%s", diff)
	}
	want := map[string]string{
		"simd_count": "320", "array_count": "16", "gfx_target_version": "90402", "vendor_id": "4098", "device_id": "29858",
		"location_id": "32768", "domain": "0", "drm_render_minor": "129", "num_cp_queues": "24", "num_xcc": "4",
		"num_sdma_engines": "2", "num_sdma_xgmi_engines": "6", "cwsr_size": "12214272", "ctl_stack_size": "8192",
		"max_engine_clk_fcompute": "1420",
	}
	for name := range values {
		if _, ok := want[name]; !ok {
			delete(values, name)
		}
	}
	if diff := cmp.Diff(want, values); diff != "" {
		t.Errorf("GPU properties (-want +got):\n%s", diff)
	}

	names, values = read("1")
	cpu := slices.Concat(all[:31], all[len(all)-1:])
	if diff := cmp.Diff(cpu, names); diff != "" {
		t.Errorf("CPU properties (-want +got):\n%s", diff)
	}
	if values["simd_count"] != "0" || values["cpu_cores_count"] == "0" {
		t.Errorf("CPU node: %v", values)
	}
}

// The numbers of nodes in hqds are those of the topology.
func TestNodesFollowTheCPUNodes(t *testing.T) {
	r := newRig(t, hws(), 2)
	for _, cpus := range []int{2, 1, 4} {
		if cpus != 2 {
			r.SetCPUNodes(cpus)
		}
		text, err := fs.ReadFile(r.FS(), "sys/kernel/debug/kfd/hqds")
		if err != nil {
			t.Fatal(err)
		}
		for i, g := range r.GPUs() {
			if g.Node != cpus+i || !strings.Contains(string(text), fmt.Sprintf("Node %d, gpu_id %x:", g.Node, uint32(g.ID))) {
				t.Errorf("with %d CPU nodes GPU %d is node %d in the topology, and another in hqds", cpus, i, g.Node)
			}
			id, err := fs.ReadFile(r.FS(), fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/gpu_id", g.Node))
			if err != nil || string(id) != fmt.Sprintf("%d\n", g.ID) {
				t.Errorf("node %d: gpu_id %q, %v", g.Node, id, err)
			}
		}
	}
}

// Which GPUs announce that the driver may reset one queue, by kernel.
func TestResetsOfQueuesAreAnnounced(t *testing.T) {
	type bits struct{ Compute, SDMA bool }
	got := map[string]bits{}
	for _, k := range []Kernel{Linux61, Linux612, Linux72, Linux73, DKMS} {
		for _, s := range Presets() {
			one, two := k.resets(&s)
			if is := (bits{one&queueReset != 0, two&sdmaQueueReset != 0}); is != (bits{}) {
				got[k.String()+" "+s.Name] = is
			}
		}
	}
	want := map[string]bits{
		"7.2 mi300x": {true, true}, "7.2 mi308x": {true, true}, "7.2 mi250x": {true, false}, "7.2 mi210": {true, false}, "7.2 mi100": {true, false},
		"7.2 mi325x": {true, true}, "7.2 mi350x": {true, true}, "7.2 mi355x": {true, true},
		"7.3 mi300x": {true, true}, "7.3 mi308x": {true, true}, "7.3 mi325x": {true, true}, "7.3 mi350x": {true, true}, "7.3 mi355x": {true, true},
		"7.3 rx7900xtx": {true, false}, "7.3 gfx1201": {true, false},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestMI350XHasTheCapturedTopology compares the preset with the properties of a real node. What
// is of the host and not of the GPU differs.
func TestMI350XHasTheCapturedTopology(t *testing.T) {
	const captured = "../../../shared/findings/inputs/k14-mi350x-node-properties.txt"
	text, err := os.ReadFile(captured)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("the capture is not here: ", captured)
	}
	if err != nil {
		t.Fatal(err)
	}
	spec, err := PresetByName("mi350x")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, spec, 1)
	r.SetKernel(Linux73)
	modelled, err := fs.ReadFile(r.FS(), "sys/class/kfd/kfd/topology/nodes/2/properties")
	r.ok(err)
	values := func(text []byte) map[string]string {
		all := map[string]string{}
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			all[name] = value
		}
		for _, name := range []string{
			"caches_count", "io_links_count", "p2p_links_count", "simd_id_base", "location_id", "unique_id", "max_engine_clk_ccompute",
		} {
			delete(all, name)
		}
		return all
	}
	want, got := values(text), values(modelled)
	for _, added := range []string{"cwsr_size", "ctl_stack_size"} { // later than the capture
		delete(got, added)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-captured +modelled):\n%s", diff)
	}
}
