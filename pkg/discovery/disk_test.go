package discovery_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// onDisk writes a tree to a directory, where files have inode numbers.
func onDisk(tb testing.TB, m fstest.MapFS) string {
	tb.Helper()
	dir := tb.TempDir()
	if err := os.CopyFS(dir, m); err != nil {
		tb.Fatal(err)
	}
	return dir
}

// counting counts the files opened.
type counting struct {
	fs.FS
	mu     sync.Mutex // guards opened
	opened []string
}

func (c *counting) Open(path string) (fs.File, error) {
	if !strings.HasSuffix(path, "/stat") {
		if info, err := fs.Stat(c.FS, path); err == nil && !info.IsDir() {
			c.mu.Lock()
			c.opened = append(c.opened, path)
			c.mu.Unlock()
		}
	}
	return c.FS.Open(path)
}

func (c *counting) Stat(path string) (fs.FileInfo, error)      { return fs.Stat(c.FS, path) }
func (c *counting) ReadDir(path string) ([]fs.DirEntry, error) { return fs.ReadDir(c.FS, path) }
func (c *counting) ReadLink(path string) (string, error)       { return fs.ReadLink(c.FS, path) }
func (c *counting) Lstat(path string) (fs.FileInfo, error)     { return fs.Lstat(c.FS, path) }

func TestScanReadsOnlyWhatIsNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := onDisk(t, tree(t, "host.txt"))
		c := &counting{FS: os.DirFS(dir)}
		f := newFS(c)
		first := scan(t, f)
		for n := range first.Processes {
			if len(first.Processes[n].Incarnations) != len(first.Processes[n].Queues) {
				t.Fatalf("%d incarnations of %d queues", len(first.Processes[n].Incarnations), len(first.Processes[n].Queues))
			}
			first.Processes[n].Incarnations, first.Processes[n].InOrder = nil, false
		}
		if diff := cmp.Diff(discovery.Snapshot{Processes: host()}, first); diff != "" {
			t.Fatalf("snapshot (-want +got):\n%s", diff)
		}

		c.opened = nil
		for range 100 {
			scan(t, f)
		}
		if len(c.opened) != 0 {
			t.Errorf("100 scans of an unchanged host opened %v", c.opened)
		}
		// The facts of each process are read again once in 10 s: 4 files each, of which
		// pid 1200 has only one.
		for range 15 {
			time.Sleep(time.Second)
			scan(t, f)
		}
		if len(c.opened) != 9 {
			t.Errorf("15 s without changes opened %d files, want 9: %v", len(c.opened), c.opened)
		}

		c.opened = nil
		queue := filepath.Join(dir, procs, "4211/queues/2")
		if err := os.CopyFS(queue, os.DirFS(filepath.Join(dir, procs, "4211/queues/1"))); err != nil {
			t.Fatal(err)
		}
		got := scan(t, f).Processes[2]
		want := host()[2].Queues
		born := want[1]
		born.ID = 2
		want = append(want[:2:2], born, want[2])
		if diff := cmp.Diff(want, got.Queues); diff != "" {
			t.Errorf("queues with a new one (-want +got):\n%s", diff)
		}
		for _, path := range c.opened {
			if strings.Contains(path, "/queues/") && !strings.Contains(path, "4211/queues/2/") {
				t.Errorf("opened %s again", path)
			}
		}
	})
}

func TestQueueWithAReusedIDIsAnotherIncarnation(t *testing.T) {
	dir := onDisk(t, tree(t, "host.txt"))
	f := newFS(os.DirFS(dir))
	before := scan(t, f).Processes[2]

	// While the old directory exists the new one cannot get its inode number.
	queue := filepath.Join(dir, procs, "4211/queues/1")
	reborn := filepath.Join(dir, "reborn")
	if err := os.CopyFS(reborn, os.DirFS(queue)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(queue, filepath.Join(dir, "destroyed")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(reborn, queue); err != nil {
		t.Fatal(err)
	}

	after := scan(t, f).Processes[2]
	if diff := cmp.Diff(before.Queues, after.Queues); diff != "" {
		t.Errorf("queues (-before +after):\n%s", diff)
	}
	for n, changed := range []bool{false, true, false} {
		if (before.Incarnations[n] != after.Incarnations[n]) != changed {
			t.Errorf("queue %d: incarnation %d, then %d", n, before.Incarnations[n], after.Incarnations[n])
		}
	}
}

func TestDestroyedQueueDisappears(t *testing.T) {
	dir := onDisk(t, tree(t, "host.txt"))
	f := newFS(os.DirFS(dir))
	before := scan(t, f)
	if err := os.RemoveAll(filepath.Join(dir, procs, "4211/queues/0")); err != nil {
		t.Fatal(err)
	}
	after := scan(t, f)
	if diff := cmp.Diff(before.Processes[2].Queues[1:], after.Processes[2].Queues); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if len(before.Processes[2].Queues) != 3 {
		t.Error("the older snapshot changed")
	}
}

func TestReusedPidIsAnotherProcess(t *testing.T) {
	dir := onDisk(t, tree(t, "host.txt"))
	f := newFS(os.DirFS(dir))
	scan(t, f)
	files := map[string]string{
		"stat":    stat(4211, "python (train) x", 'S', 64, 999999),
		"cmdline": "python3\x00infer.py\x00",
	}
	for file, text := range files {
		if err := os.WriteFile(filepath.Join(dir, "proc/4211", file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := host()[2]
	want.Key.Start = 999999
	want.Cmdline = "python3 infer.py"
	for n := range want.Queues {
		want.Queues[n].Process = want.Key
	}
	got := scan(t, f).Processes[2]
	got.Incarnations, got.InOrder = nil, false
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("process (-want +got):\n%s", diff)
	}
}

// captures returns the directory of texts captured on real hosts.
func captures(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("GPREEMPT_CAPTURES"); dir != "" {
		return dir
	}
	up := ""
	for range 6 {
		if dir := filepath.Join(up, "shared", "captures"); isDir(dir) {
			return dir
		}
		up = filepath.Join(up, "..")
	}
	t.Skip("no captures from real hosts here: set GPREEMPT_CAPTURES to a directory that has rocm/trace_rocprof.sysinfo.txt")
	return ""
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// rocminfo reads the same topology files; we must read the same from an MI308X host.
func TestFactsAgreeWithRocminfoOnARealHost(t *testing.T) {
	path := filepath.Join(captures(t), "rocm", "trace_rocprof.sysinfo.txt")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Skipf("the capture is not readable: %v", err)
	}
	var truth struct {
		Truth struct {
			CUs int               `json:"cu_per_gpu"`
			BDF map[string]string `json:"bdf"`
		} `json:"truth"`
	}
	if sidecar, err := os.ReadFile(path + ".truth.json"); err != nil {
		t.Fatal(err)
	} else if err := json.Unmarshal(sidecar, &truth); err != nil {
		t.Fatal(err)
	}

	m := fstest.MapFS{}
	for agent := range strings.SplitSeq(string(b), "*******") {
		fact := func(name string) string {
			found := regexp.MustCompile(`(?m)^\s*` + name + `:\s*([^\s(]+)`).FindStringSubmatch(agent)
			if found == nil {
				return ""
			}
			return found[1]
		}
		if fact("Device Type") != "GPU" {
			continue
		}
		cus, err := strconv.Atoi(fact("Compute Unit"))
		if err != nil {
			t.Fatal(err)
		}
		perCU, err := strconv.Atoi(fact("SIMDs per CU"))
		if err != nil {
			t.Fatal(err)
		}
		node := nodes + fact("Internal Node ID")
		m[node+"/gpu_id"] = &fstest.MapFile{Data: []byte("1" + fact("Internal Node ID") + "\n")}
		m[node+"/name"] = &fstest.MapFile{Data: []byte("ip discovery\n")}
		m[node+"/properties"] = &fstest.MapFile{Data: fmt.Appendf(nil,
			"simd_count %d\nsimd_per_cu %d\nlocation_id %s\ngfx_target_version 90402\n", cus*perCU, perCU, fact("BDFID"))}
	}
	gpus, err := newFS(m).GPUs()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, gpu := range gpus {
		got[strconv.Itoa(gpu.Node)] = strings.TrimPrefix(gpu.BDF, "0000:")
		if gpu.CUs != truth.Truth.CUs || gpu.Name != "gfx942" {
			t.Errorf("node %d: %s with %d CUs, want gfx942 with %d", gpu.Node, gpu.Name, gpu.CUs, truth.Truth.CUs)
		}
	}
	if diff := cmp.Diff(truth.Truth.BDF, got); diff != "" {
		t.Errorf("PCI addresses by node (-want +got):\n%s", diff)
	}
}
