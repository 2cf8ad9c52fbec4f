package kfdemu

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Where programs find procDir and nodesDir.
const (
	shownProcDir  = classDir + "/proc"
	shownNodesDir = classDir + "/topology/nodes"
)

// contents returns the files below a directory by their path.
func contents(tb testing.TB, files fs.FS, dir string) map[string]string {
	tb.Helper()
	all := map[string]string{}
	err := fs.WalkDir(files, dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(files, name)
		all[strings.TrimPrefix(name, dir+"/")] = string(b)
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	return all
}

func TestTheTreeHasTheFilesOfTheMachine(t *testing.T) {
	emulated, m, _ := newTree(t)
	on := os.DirFS(emulated.Dir())
	dirs := map[string]string{"sys/kernel/debug/kfd": "sys/kernel/debug/kfd", shownProcDir: shownProcDir}
	for i, gpu := range m.GPUs() {
		dirs[fmt.Sprintf("%s/%d", shownNodesDir, gpu.Node)] = fmt.Sprintf("%s/%d", shownNodesDir, cpuNodes(t)+i)
	}
	for inMachine, inTree := range dirs {
		want, got := contents(t, m.FS(), inMachine), contents(t, on, inTree)
		maps.DeleteFunc(want, func(name, _ string) bool { return strings.HasPrefix(name, "proc/") }) // what Tree.VMs writes
		maps.DeleteFunc(got, func(name, _ string) bool { _, ok := want[name]; return !ok })          // the tree's own files
		for _, all := range []map[string]string{want, got} {
			if text, ok := all["properties"]; ok {
				all["properties"] = counts.ReplaceAllString(text, "")
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-machine +tree):\n%s", inTree, diff)
		}
	}
}

// counts are properties that are larger in the tree than in gpumodel.
var counts = regexp.MustCompile(`(?m)^(caches|io_links)_count \d+\n`)

func cpuNodes(tb testing.TB) int {
	tb.Helper()
	n, err := CPUNodes()
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// The thunk looks for each CPU node of the topology among the host's NUMA nodes.
func TestCPUNodesAreTheHosts(t *testing.T) {
	emulated, m, _ := newTree(t)
	numa, err := filepath.Glob("/sys/devices/system/node/node[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	want := max(len(numa), 1)
	if got := cpuNodes(t); got != want {
		t.Errorf("%d CPU nodes, the host has %d", got, want)
	}
	nodes, err := names(emulated.Dir() + "/" + shownNodesDir)
	if err != nil {
		t.Fatal(err)
	}
	if len(nodes) != want+len(m.GPUs()) {
		t.Errorf("nodes %v, want %d CPUs and %d GPUs", nodes, want, len(m.GPUs()))
	}
	cores := 0
	for i := range want {
		var n int
		text := contents(t, os.DirFS(emulated.Dir()), fmt.Sprintf("%s/%d", shownNodesDir, i))["properties"]
		if _, err := fmt.Sscanf(text, "cpu_cores_count %d\nsimd_count 0\n", &n); err != nil {
			t.Errorf("node %d: %v: %s", i, err, text)
		}
		cores += n
	}
	if cores < runtime.NumCPU() {
		t.Errorf("the CPU nodes have %d cores, the host %d or more", cores, runtime.NumCPU())
	}
}

// ROCm's tools read files that the driver has and gpumodel does not have.
func TestTheTreeHasTheFilesThatROCmReads(t *testing.T) {
	emulated, _, queues := newTree(t)
	at := func(name string) string { return filepath.Join(emulated.Dir(), name) }
	const bank = "heap_type 1\nsize_in_bytes 206158430208\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
	process := fmt.Sprintf("%s/%d/", shownProcDir, queues[0].Process.PID)
	gpu := queues[0].GPU.String()
	want := map[string]string{
		"sys/class/kfd/kfd/dev":                                         "236:0\n",
		"sys/class/drm/renderD128/dev":                                  "226:128\n",
		"sys/class/drm/card0/device/vendor":                             "0x1002\n",
		"sys/class/drm/card1/device/device":                             "0x74a1\n",
		"sys/dev/char/226:129/device/uevent":                            "DRIVER=amdgpu\nPCI_CLASS=120000\nPCI_ID=1002:74A1\nPCI_SUBSYS_ID=1002:74A1\nPCI_SLOT_NAME=0000:11:00.0\n",
		"sys/dev/char/236:0/dev":                                        "236:0\n",
		"sys/module/amdgpu/initstate":                                   "live\n",
		"sys/module/amdgpu/version":                                     "emulated\n",
		"sys/devices/pci0000:10/0000:10:00.0/current_compute_partition": "SPX\n",
		process + "sdma_" + gpu:                                         "0\n",
		process + "stats_" + gpu + "/evicted_ms":                        "0\n",
		process + "counters_" + gpu + "/page_in":                        "0\n",
	}
	want[fmt.Sprintf("%s/%d/mem_banks/0/properties", shownNodesDir, cpuNodes(t))] = bank
	got := map[string]string{}
	for name := range want {
		b, err := os.ReadFile(at(name))
		if err != nil {
			t.Error(err)
		}
		got[name] = string(b)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	// The numbers are those in the properties.
	nodes, err := names(at(shownNodesDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		dir := shownNodesDir + "/" + node
		b, err := os.ReadFile(at(dir + "/properties"))
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"mem_banks", "caches", "io_links", "p2p_links"} {
			entries, err := names(at(dir + "/" + kind))
			if err != nil {
				t.Fatal(err)
			}
			if line := fmt.Sprintf("%s_count %d\n", kind, len(entries)); !strings.Contains(string(b), line) {
				t.Errorf("node %s has %d of %s, its properties say another number", node, len(entries), kind)
			}
		}
	}
}

func TestTargetsOfLinksExist(t *testing.T) {
	emulated, _, _ := newTree(t)
	links := 0
	err := filepath.WalkDir(emulated.Dir(), func(name string, d fs.DirEntry, err error) error {
		// These belong to the host, or point there.
		if err != nil || d.Type() != fs.ModeSymlink || d.Name() == "subsystem" || d.Name() == "driver" {
			return err
		}
		links++
		_, err = os.Stat(name)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if links == 0 {
		t.Error("there are no links")
	}
}

// The emulator may be started with a strict umask.
func TestAllUsersCanReadTheFiles(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	emulated, m, queues := newTree(t)
	if _, err := m.CreateQueue(queues[0].Process, queues[0].GPU, gpreempt.QueueCompute, 64); err != nil {
		t.Fatal(err)
	}
	if err := emulated.Processes(); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(filepath.Join(emulated.Dir(), "sys"), func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.Type() == fs.ModeSymlink {
			return err
		}
		info, err := d.Info()
		want := fs.FileMode(0o444)
		if d.IsDir() {
			want = fs.ModeDir | 0o755
		}
		if err == nil && info.Mode() != want {
			t.Errorf("%s: %v, want %v", name, info.Mode(), want)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestDevicesAreThoseOfTheTopology(t *testing.T) {
	emulated, m, _ := newTree(t)
	want := RenderNode{
		PCIID: 0x74a1, GFX: 90402, SIMDs: 1216, SIMDsPerCU: 4, Arrays: 32, ArraysPerEngine: 1, CUsPerArray: 10, WaveSize: 64,
		EngineMHz: 2100, MemoryMHz: 1300, MemoryWidth: 8192, VRAM: 192 << 30, GTT: 256 << 30,
	}
	for _, gpu := range m.GPUs() {
		got, ok := emulated.RenderNode(uint32(gpu.RenderMinor))
		if diff := cmp.Diff(want, got); !ok || diff != "" {
			t.Errorf("render node %d: %v (-want +got):\n%s", gpu.RenderMinor, ok, diff)
		}
	}
	if _, ok := emulated.RenderNode(127); ok {
		t.Error("there is a GPU behind a render node that does not exist")
	}
}

// Every preset has a tree, up to the largest machine.
func TestEveryKindOfMachineHasATree(t *testing.T) {
	for i, spec := range gpumodel.Presets() {
		for _, gpus := range [][]int{{1, 64}, {8}}[min(i, 1)] {
			t.Run(fmt.Sprintf("%s-%d", spec.Name, gpus), func(t *testing.T) {
				m := gpumodel.New(spec, gpus, 1)
				emulated, err := NewTree(func() fs.FS { return m.FS() })
				if err != nil {
					t.Fatal(err)
				}
				defer emulated.Close()
				got, err := host(t, emulated).GPUs()
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(gpusOf(t, m), got); diff != "" {
					t.Errorf("GPUs (-machine +tree):\n%s", diff)
				}
			})
		}
	}
}

func TestAMachineThatCannotBeReadLeavesNoFiles(t *testing.T) {
	trees := func() []string {
		t.Helper()
		all, err := names(tmpfs())
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(all, func(name string) bool { return !strings.HasPrefix(name, fmt.Sprintf("kfdemu-%d-", os.Getpid())) })
	}
	before := trees()
	broken := errors.New("the machine is broken")
	if _, err := NewTree(func() fs.FS { return failing{broken} }); !errors.Is(err, broken) {
		t.Errorf("got %v, want %v", err, broken)
	}
	if diff := cmp.Diff(before, trees()); diff != "" {
		t.Errorf("trees (-before +after):\n%s", diff)
	}
}

type failing struct{ err error }

func (f failing) Open(string) (fs.File, error) { return nil, f.err }

func TestAClosedTreeReturnsErrors(t *testing.T) {
	emulated, _, _ := newTree(t)
	if err := errors.Join(emulated.Close(), emulated.Close()); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{emulated.Processes(), emulated.Debugfs(), emulated.Merge()} {
		if !errors.Is(err, fs.ErrClosed) {
			t.Errorf("got %v, want %v", err, fs.ErrClosed)
		}
	}
}
