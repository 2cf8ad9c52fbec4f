package discovery_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	procs = "sys/class/kfd/kfd/proc/"
	nodes = "sys/class/kfd/kfd/topology/nodes/"
)

// tree parses a text of testdata: files after lines "-- path --". In cmdline and environ a
// tilde represents the zero byte; queue files lose their newline, since the kernel's have
// none; exe is a link.
func tree(t *testing.T, name string) fstest.MapFS {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	m := fstest.MapFS{}
	path := ""
	for line := range bytes.Lines(b) {
		if head, found := strings.CutPrefix(string(line), "-- "); found {
			path = strings.TrimSuffix(head, " --\n")
			m[path] = &fstest.MapFile{}
		} else if path != "" {
			m[path].Data = append(m[path].Data, line...)
		}
	}
	for path, file := range m {
		switch {
		case strings.Contains(path, "/queues/"):
			file.Data = bytes.TrimSuffix(file.Data, []byte("\n"))
		case strings.HasSuffix(path, "/exe"):
			file.Mode = fs.ModeSymlink
			file.Data = bytes.TrimSuffix(file.Data, []byte("\n"))
		case strings.HasSuffix(path, "/cmdline"), strings.HasSuffix(path, "/environ"):
			file.Data = bytes.ReplaceAll(bytes.TrimSuffix(file.Data, []byte("\n")), []byte("~"), []byte{0})
		}
	}
	return m
}

// onOpen is a file system that calls a function when a file is opened.
type onOpen struct {
	fs.FS
	hook func(path string) error
}

func (o onOpen) Open(path string) (fs.File, error) {
	if err := o.hook(path); err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return o.FS.Open(path)
}

func (o onOpen) ReadLink(path string) (string, error) {
	if err := o.hook(path); err != nil {
		return "", &fs.PathError{Op: "readlink", Path: path, Err: err}
	}
	return fs.ReadLink(o.FS, path)
}

func (o onOpen) Lstat(path string) (fs.FileInfo, error) { return fs.Lstat(o.FS, path) }

// failing makes one file fail to open.
func failing(m fs.FS, path string, err error) fs.FS {
	return onOpen{m, func(opened string) error {
		if opened == path {
			return err
		}
		return nil
	}}
}

// newFS returns a reader that waits for all answers, however busy the machine is.
func newFS(root fs.FS) *discovery.FS {
	f := discovery.NewFS(root)
	f.SetAnswerWait(time.Minute)
	return f
}

func scan(t *testing.T, f *discovery.FS) discovery.Snapshot {
	t.Helper()
	s, err := f.Scan()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var mi300x = gpreempt.GPU{
	ID: 63420, Node: 2, Name: "gfx942", GFX: 90402, BDF: "0001:0a:00.0",
	RenderMinor: 128, XCCs: 8, CUs: 304, QueueSlots: 24, DebugFirmware: true,
}

// The topology of an MI350X.
func TestMI350XIsReadFromItsTopology(t *testing.T) {
	properties := testutil.Input(t, "k14-mi350x-node-properties.txt")
	p, err := discovery.ParseNodeProperties(bytes.NewReader(properties))
	if err != nil {
		t.Fatal(err)
	}
	want := discovery.NodeProperties{
		SIMDs: 1024, SIMDsPerCU: 4, GFX: 90500, Location: 1280, RenderMinor: 128, CPQueues: 24, XCCs: 8,
		Capability: 2889327232, Firmware: 30, SDMAFirmware: 20,
	}
	if diff := cmp.Diff(want, p); diff != "" {
		t.Errorf("properties (-want +got):\n%s", diff)
	}
	got, err := newFS(fstest.MapFS{
		nodes + "1/gpu_id":     {Data: []byte("4711\n")},
		nodes + "1/name":       {Data: []byte("ip discovery\n")},
		nodes + "1/properties": {Data: properties},
	}).GPUs()
	gpus := []gpreempt.GPU{{
		ID: 4711, Node: 1, Name: "gfx950", GFX: 90500, BDF: "0000:05:00.0", RenderMinor: 128, XCCs: 8, CUs: 256, QueueSlots: 24,
		DebugFirmware: true,
	}}
	if diff := cmp.Diff(gpus, got); diff != "" || err != nil {
		t.Errorf("GPUs: %v (-want +got):\n%s", err, diff)
	}
}

// The capability is one bit of the topology, as kfd_sysfs.h numbers it.
func TestDebugFirmwareIsOneBit(t *testing.T) {
	for text, want := range map[string]bool{"capability 536870912\n": true, "capability 1073741824\n": false, "capability 3758096383\n": false} {
		p, err := discovery.ParseNodeProperties(strings.NewReader(text))
		if got := p.DebugFirmware(); got != want || err != nil {
			t.Errorf("%q: %t, %v, want %t", text, got, err, want)
		}
	}
}

func TestGPUsAreReadFromTheTopology(t *testing.T) {
	m := tree(t, "mi300x.txt")
	maps.Copy(m, fstest.MapFS{
		nodes + "10/gpu_id":     {Data: []byte("3183\n")},
		nodes + "10/name":       {Data: []byte("navi31\n")},
		nodes + "10/properties": {Data: []byte("simd_count 192\nsimd_per_cu 2\ngfx_target_version 110000\nlocation_id 779\ndrm_render_minor 129\nnum_cp_queues 8\n")},

		"sys/class/drm/renderD128/device/product_name": {Data: []byte("AMD Instinct MI300X OAM\n")},
		"sys/class/drm/renderD129/device/product_name": {Data: []byte("\n")},
	})
	got, err := newFS(m).GPUs()
	if err != nil {
		t.Fatal(err)
	}
	named := mi300x
	named.Name = "AMD Instinct MI300X OAM"
	want := []gpreempt.GPU{named, {
		ID: 3183, Node: 10, Name: "navi31", GFX: 110000, BDF: "0000:03:01.3",
		RenderMinor: 129, XCCs: 1, CUs: 96, QueueSlots: 8, MES: true,
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestQueueSlotsAreThoseOfOneXCC(t *testing.T) {
	tests := []struct{ cpQueues, xccs, want int }{
		{24, 8, 24},  // mainline: already per XCC
		{30, 4, 30},  // mainline with num_kcq=2
		{120, 4, 30}, // AMD's driver: the sum
		{192, 8, 24},
		{24, 1, 24},
		{24, 0, 24}, // before num_xcc
		{0, 1, 0},
	}
	for _, test := range tests {
		m := tree(t, "mi300x.txt")
		properties := m[nodes+"2/properties"]
		properties.Data = bytes.Replace(properties.Data, []byte("num_cp_queues 24"), fmt.Appendf(nil, "num_cp_queues %d", test.cpQueues), 1)
		properties.Data = bytes.Replace(properties.Data, []byte("num_xcc 8"), fmt.Appendf(nil, "num_xcc %d", test.xccs), 1)
		got, err := newFS(m).GPUs()
		if err != nil {
			t.Fatal(err)
		}
		want := mi300x
		want.QueueSlots = test.want
		want.XCCs = max(test.xccs, 1)
		if diff := cmp.Diff([]gpreempt.GPU{want}, got); diff != "" {
			t.Errorf("%d queues, %d XCCs (-want +got):\n%s", test.cpQueues, test.xccs, diff)
		}
	}
}

func TestGPUDeniedByTheCgroupBecomesAWarning(t *testing.T) {
	f := newFS(failing(tree(t, "mi300x.txt"), nodes+"2/gpu_id", syscall.EPERM))
	gpus, err := f.GPUs()
	if err != nil || len(gpus) != 0 {
		t.Errorf("GPUs: %v, %v; want none and no error", gpus, err)
	}
	want := []string{"node 2: open " + nodes + "2/gpu_id: operation not permitted: allow the daemon its GPU in the devices cgroup"}
	if diff := cmp.Diff(want, f.Omitted()); diff != "" {
		t.Errorf("omitted (-want +got):\n%s", diff)
	}
}

func TestOmittedNodeNamesFileAndLine(t *testing.T) {
	m := tree(t, "mi300x.txt")
	m[nodes+"2/properties"].Data = []byte("domain 0\nnum_xcc eight\n")
	f := newFS(m)
	if gpus, err := f.GPUs(); err != nil || len(gpus) != 0 {
		t.Errorf("GPUs: %v, %v; want none and no error", gpus, err)
	}
	want := []string{"node 2: " + nodes + `2/properties:2: num_xcc is "eight", want a decimal number below 2^32` + badNode}
	if diff := cmp.Diff(want, f.Omitted()); diff != "" {
		t.Errorf("omitted (-want +got):\n%s", diff)
	}
}

// badNode ends the reason why a node is omitted.
const badNode = ": see what the driver says of its GPU (dmesg | grep -i amdgpu), and compare with rocminfo"

func TestVanishedNodeIsOmittedSilently(t *testing.T) {
	for _, err := range []error{syscall.ENOENT, syscall.ENODEV} {
		f := newFS(failing(tree(t, "mi300x.txt"), nodes+"2/properties", err))
		if gpus, err := f.GPUs(); err != nil || len(gpus) != 0 {
			t.Errorf("GPUs: %v, %v; want none and no error", gpus, err)
		}
	}
}

func TestErrorsMentionTheMissingDriver(t *testing.T) {
	f := newFS(fstest.MapFS{})
	for _, read := range []func() error{
		func() error { _, err := f.GPUs(); return err },
		func() error { _, err := f.Scan(); return err },
	} {
		if err := read(); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "check that the amdgpu driver is loaded") {
			t.Errorf("error %v", err)
		}
	}
}

var (
	vllm = gpreempt.ProcessKey{PID: 977, Start: 500}
	info = gpreempt.ProcessKey{PID: 1200, Start: 600}
	job  = gpreempt.ProcessKey{PID: 4211, Start: 987654}
)

// host is the content of testdata/host.txt.
func host() []discovery.Proc {
	return []discovery.Proc{
		{
			Process: gpreempt.Process{Key: vllm, Comm: "vllm", Cmdline: "vllm serve", Exe: "/opt/vllm", Cgroup: gpreempt.Cgroup{Path: "/"}},
			Queues: []gpreempt.Queue{
				{Process: vllm, ID: 0, GPU: 3183, Type: gpreempt.QueueCompute, RingBytes: 4096},
				{Process: vllm, ID: 1 << 16, GPU: 3183, Type: gpreempt.QueueSDMAXGMI, RingBytes: 8192},
				{Process: vllm, ID: 3 << 16, GPU: 63420, Type: gpreempt.QueueSDMA, RingBytes: 16384},
			},
		},
		{
			Process: gpreempt.Process{Key: info, Comm: "rocminfo", UID: 5, GID: 6},
		},
		{
			Process: gpreempt.Process{
				Key: job, Comm: "python (train) x", Cmdline: "python3 -m train.main --epochs 90",
				Exe: "/usr/bin/python3.11", UID: 1001, GID: 101, NamespacePIDs: []int32{318, 1}, Cgroup: gpreempt.Cgroup{Path: "/kubepods.slice/pod1/training", Slice: "kubepods.slice"},
			},
			Queues: []gpreempt.Queue{
				{Process: job, ID: 0, GPU: 63420, Type: gpreempt.QueueCompute, RingBytes: 1 << 20},
				{Process: job, ID: 1, GPU: 63420, Type: gpreempt.QueueSDMA, RingBytes: 256 << 10},
				{Process: job, ID: 10, GPU: 3183, Type: gpreempt.QueueCompute, RingBytes: 1 << 20},
			},
		},
	}
}

// without removes the processes with the given pids.
func without(procs []discovery.Proc, pids ...int32) []discovery.Proc {
	return slices.DeleteFunc(procs, func(p discovery.Proc) bool { return slices.Contains(pids, p.Key.PID) })
}

func TestScanFindsProcessesAndQueues(t *testing.T) {
	f := newFS(tree(t, "host.txt"))
	for range 3 {
		if diff := cmp.Diff(discovery.Snapshot{Processes: host()}, scan(t, f)); diff != "" {
			t.Fatalf("snapshot (-want +got):\n%s", diff)
		}
	}
}

func TestWhatVanishesDuringAScanIsOmittedSilently(t *testing.T) {
	jobWithout := func(queue uint32) []discovery.Proc {
		h := host()
		h[2].Queues = slices.DeleteFunc(h[2].Queues, func(q gpreempt.Queue) bool { return q.ID == queue })
		return h
	}
	jobUnknown := func(forget func(*discovery.Proc)) []discovery.Proc {
		h := host()
		forget(&h[2])
		return h
	}
	jobWithoutQueues := host()
	jobWithoutQueues[2].Queues = nil
	tests := []struct {
		path string
		want []discovery.Proc
	}{
		{procs + "4211", without(host(), 4211)},
		{procs + "4211/queues", jobWithoutQueues},
		{procs + "4211/queues/1", jobWithout(1)},
		{procs + "4211/queues/1/gpuid", jobWithout(1)},
		{procs + "4211/queues/10/size", jobWithout(10)},
		{procs + "4211/queues/0/type", jobWithout(0)},
		{"proc/4211/stat", without(host(), 4211)},
		{"proc/4211/status", without(host(), 4211)},
		{"proc/4211/cmdline", jobUnknown(func(p *discovery.Proc) { p.Cmdline = "" })},
		{"proc/4211/exe", jobUnknown(func(p *discovery.Proc) { p.Exe = "" })},
	}
	for _, errno := range []error{syscall.ENOENT, syscall.ENODEV, syscall.ESRCH} {
		for _, test := range tests {
			t.Run(errno.Error()+"/"+test.path, func(t *testing.T) {
				f := newFS(failing(tree(t, "host.txt"), test.path, errno))
				if diff := cmp.Diff(discovery.Snapshot{Processes: test.want}, scan(t, f)); diff != "" {
					t.Errorf("snapshot (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestWhatCannotBeReadIsAWarning(t *testing.T) {
	m := tree(t, "host.txt")
	m[procs+"977/queues/0/size"].Data = []byte("many")
	m["proc/1200/status"].Data = []byte("Name:\tx\nUid:\t1\n")
	f := newFS(failing(m, "proc/4211/stat", syscall.EACCES))
	want := discovery.Snapshot{Processes: without(host(), 1200, 4211), Warnings: []string{
		"queue 0 of process 977 omitted: " + procs + `977/queues/0/size:1: "many" is not a decimal number of 64 bits`,
		"process 1200 omitted: proc/1200/status:2: Uid has 1 numbers, want 4",
		"process 4211 omitted: open proc/4211/stat: permission denied",
	}}
	want.Processes[0].Queues = want.Processes[0].Queues[1:]
	if diff := cmp.Diff(want, scan(t, f)); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
}

func TestWarningsAreBounded(t *testing.T) {
	m := fstest.MapFS{}
	for pid := range 100 {
		m[procs+strconv.Itoa(pid+1)+"/pasid"] = &fstest.MapFile{}
		m["proc/"+strconv.Itoa(pid+1)+"/stat"] = &fstest.MapFile{}
	}
	got := scan(t, newFS(m)).Warnings
	if len(got) != 33 || got[32] != "68 more warnings of this kind" {
		t.Errorf("%d warnings, the last %q", len(got), got[len(got)-1])
	}
}

func TestDirectoryThatOutlivesItsProcessIsSkipped(t *testing.T) {
	m := tree(t, "host.txt")
	m["proc/4211/stat"].Data = []byte(stat(4211, "python", 'Z', 1, 987654))
	delete(m, "proc/977/stat")
	if diff := cmp.Diff(discovery.Snapshot{Processes: without(host(), 977, 4211)}, scan(t, newFS(m))); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
}

func TestPidReusedDuringAScanIsSkipped(t *testing.T) {
	m := tree(t, "host.txt")
	f := newFS(onOpen{m, func(path string) error {
		if path == "proc/4211/cgroup" {
			m["proc/4211/stat"] = &fstest.MapFile{Data: []byte(stat(4211, "bash", 'S', 1, 999999))}
		}
		return nil
	}})
	if diff := cmp.Diff(discovery.Snapshot{Processes: without(host(), 4211)}, scan(t, f)); diff != "" {
		t.Fatalf("snapshot (-want +got):\n%s", diff)
	}
	next := scan(t, f).Processes[2].Key
	if want := (gpreempt.ProcessKey{PID: 4211, Start: 999999}); next != want {
		t.Errorf("the next scan has %v, want %v", next, want)
	}
}

func TestWithoutInodeNumbersQueuesAreReadEachTime(t *testing.T) {
	m := tree(t, "host.txt")
	f := newFS(m)
	scan(t, f)
	m[procs+"4211/queues/1/gpuid"].Data = []byte("3183")
	want := host()
	want[2].Queues[1].GPU = 3183
	if diff := cmp.Diff(discovery.Snapshot{Processes: want}, scan(t, f)); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
}

func TestChangedFactsAreReadWithin15Seconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := tree(t, "host.txt")
		f := newFS(m)
		scan(t, f)
		m["proc/4211/cgroup"].Data = []byte("0::/moved\n")
		m["proc/4211/cmdline"].Data = []byte("a title")
		m["proc/977/stat"].Data = bytes.Replace(m["proc/977/stat"].Data, []byte("vllm"), []byte("sglang"), 1)
		m["proc/977/comm"].Data = []byte("sglang\n")
		want := host()
		want[0].Comm = "sglang" // at once: the stat file contains it
		want[2].Cgroup = gpreempt.Cgroup{Path: "/moved"}
		want[2].Cmdline = "a title"
		for range 15 {
			if got := scan(t, f).Processes; got[0].Comm != "sglang" {
				t.Fatalf("comm is %q", got[0].Comm)
			}
			time.Sleep(time.Second)
		}
		if diff := cmp.Diff(want, scan(t, f).Processes); diff != "" {
			t.Errorf("after 15 s (-want +got):\n%s", diff)
		}
	})
}

func TestLongCommandLinesAreCut(t *testing.T) {
	m := tree(t, "host.txt")
	m["proc/977/cmdline"].Data = bytes.Repeat([]byte("x"), 1<<20)
	got := scan(t, newFS(m)).Processes[0].Cmdline
	if got != strings.Repeat("x", 4096) {
		t.Errorf("%d bytes, want 4096", len(got))
	}
}

func TestNonProcessEntriesAreSkipped(t *testing.T) {
	m := tree(t, "host.txt")
	for _, dir := range []string{"self", "-1", "0", "4211/queues/x", "4211/queues/-1", "4211/context_/queues/2", "4211/context_x/queues/2", "4211/context_65535/queues/2"} {
		for file, text := range map[string]string{"gpuid": "63420", "size": "4096", "type": "0"} {
			m[procs+dir+"/"+file] = &fstest.MapFile{Data: []byte(text)}
		}
	}
	if diff := cmp.Diff(discovery.Snapshot{Processes: host()}, scan(t, newFS(m))); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
}
