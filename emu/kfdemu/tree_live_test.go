package kfdemu

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// inodes returns those of a directory's entries.
func inodes(tb testing.TB, dir string) map[string]uint64 {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		tb.Fatal(err)
	}
	all := map[string]uint64{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			tb.Fatal(err)
		}
		all[e.Name()] = info.Sys().(*syscall.Stat_t).Ino
	}
	return all
}

func TestQueueDirectoriesFollowTheQueues(t *testing.T) {
	emulated, m, queues := newTree(t)
	key := queues[0].Process
	dir := fmt.Sprintf("%s/%s/%d/queues", emulated.Dir(), shownProcDir, key.PID)
	before := inodes(t, dir)
	step := func(what string, err error) {
		t.Helper()
		if err := errors.Join(err, emulated.Processes(key.PID)); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	step("destroy", m.DestroyQueue(key, 0))
	if diff := cmp.Diff(map[string]uint64{"1": before["1"]}, inodes(t, dir)); diff != "" {
		t.Errorf("directories after queue 0 was destroyed (-want +got):\n%s", diff)
	}
	id, err := m.CreateQueue(key, queues[0].GPU, gpreempt.QueueCompute, 1024)
	if id != 0 {
		t.Fatalf("the queue that was made again has id %d", id)
	}
	step("create", err)
	after := inodes(t, dir)
	if after["1"] != before["1"] {
		t.Error("the directory of a queue that stayed is another one")
	}
	if after["0"] == before["0"] || after["0"] == 0 {
		t.Errorf("the directory of the new queue is the old one's: inode %d", after["0"])
	}
	step("end", m.EndProcess(key))
	if got := inodes(t, emulated.Dir()+"/"+shownProcDir); len(got) != 0 {
		t.Errorf("processes after the last one ended: %v", got)
	}
}

// Without a call in between, another GPU or type still means another queue.
func TestAQueueOfAnotherKindIsAnotherQueue(t *testing.T) {
	emulated, m, queues := newTree(t)
	key := queues[0].Process
	dir := fmt.Sprintf("%s/%s/%d/queues", emulated.Dir(), shownProcDir, key.PID)
	before := inodes(t, dir)
	if err := m.DestroyQueue(key, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := m.CreateQueue(key, queues[0].GPU, gpreempt.QueueSDMA, 1024); err != nil {
		t.Fatal(err)
	}
	if err := emulated.Processes(); err != nil {
		t.Fatal(err)
	}
	if after := inodes(t, dir); after["0"] == before["0"] {
		t.Error("an SDMA queue has the directory of the compute queue before it")
	}
}

func TestUnchangedFilesAreNotWritten(t *testing.T) {
	emulated, m, queues := newTree(t)
	key := queues[0].Process
	dir := fmt.Sprintf("%s/%s/%d", emulated.Dir(), shownProcDir, key.PID)
	before := inodes(t, dir)
	if err := emulated.Processes(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, inodes(t, dir)); diff != "" {
		t.Errorf("the process's directory (-before +after):\n%s", diff)
	}
	// Another queue uses memory on one GPU.
	if _, err := m.CreateQueue(key, queues[0].GPU, gpreempt.QueueCompute, 64); err != nil {
		t.Fatal(err)
	}
	if err := emulated.Processes(); err != nil {
		t.Fatal(err)
	}
	after := inodes(t, dir)
	changed := []string{}
	for name := range after {
		if after[name] != before[name] {
			changed = append(changed, name)
		}
	}
	if diff := cmp.Diff([]string{"vram_" + queues[0].GPU.String()}, changed); diff != "" {
		t.Errorf("what was replaced (-want +got):\n%s", diff)
	}
}

func TestDebugfsShowsTheVMsOfProcesses(t *testing.T) {
	emulated, m, _ := newTree(t)
	gpu := m.GPUs()[1].ID
	file := fmt.Sprintf("pasid_%d", gpu)
	var got []string
	for _, all := range []map[int32][]gpreempt.GPUID{{7: nil}, {7: {gpu}, 8: nil}, {8: {gpu}}, nil} {
		if err := emulated.VMs(all); err != nil {
			t.Fatal(err)
		}
		var shown []string
		for name, text := range contents(t, os.DirFS(emulated.Dir()), "sys/kernel/debug/kfd/proc") {
			if path.Base(name) == file {
				shown = append(shown, fmt.Sprintf("%s %t", name, text != "0\n"))
			}
		}
		slices.Sort(shown)
		got = append(got, strings.Join(shown, ", "))
	}
	want := []string{"7/" + file + " false", "7/" + file + " true, 8/" + file + " false", "8/" + file + " true", ""}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files, and whether they show a VM (-want +got):\n%s", diff)
	}
}

func TestOpenDumpKeepsItsContent(t *testing.T) {
	emulated, m, queues := newTree(t)
	before := contents(t, m.FS(), "sys/kernel/debug/kfd")
	f, err := os.Open(emulated.Dir() + "/" + debugfs.MQDs)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	head := make([]byte, 100)
	if _, err := io.ReadFull(f, head); err != nil {
		t.Fatal(err)
	}
	if err := m.EndProcess(queues[0].Process); err != nil {
		t.Fatal(err)
	}
	if err := emulated.Debugfs(); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before["mqds"], string(head)+string(rest)); diff != "" {
		t.Errorf("the dump that was open (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(contents(t, m.FS(), "sys/kernel/debug/kfd"), contents(t, os.DirFS(emulated.Dir()), "sys/kernel/debug/kfd")); diff != "" {
		t.Errorf("the dumps since (-machine +tree):\n%s", diff)
	}
}

// host returns the tree as a host with the processes of this one.
func host(tb testing.TB, emulated *Tree) *discovery.FS {
	tb.Helper()
	if err := os.Symlink("/proc", emulated.Dir()+"/proc"); err != nil {
		tb.Fatal(err)
	}
	return discovery.NewFS(discovery.Host(emulated.Dir()))
}

func TestDiscoveryDistinguishesQueuesWithOneID(t *testing.T) {
	emulated, m, queues := newTree(t)
	key := queues[0].Process
	reader := host(t, emulated)
	scan := func() discovery.Proc {
		t.Helper()
		snapshot, err := reader.Scan()
		if err != nil {
			t.Fatal(err)
		}
		if len(snapshot.Processes) != 1 || len(snapshot.Warnings) > 0 {
			t.Fatalf("got %+v, want this process and no warnings", snapshot)
		}
		return snapshot.Processes[0]
	}
	first := scan()
	if diff := cmp.Diff(queues, first.Queues); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if err := errors.Join(m.DestroyQueue(key, 0), emulated.Processes(key.PID)); err != nil {
		t.Fatal(err)
	}
	if _, err := m.CreateQueue(key, queues[0].GPU, queues[0].Type, int(queues[0].RingBytes/64)); err != nil {
		t.Fatal(err)
	}
	if err := emulated.Processes(key.PID); err != nil {
		t.Fatal(err)
	}
	second := scan()
	if diff := cmp.Diff(first.Queues, second.Queues); diff != "" {
		t.Fatalf("the queues are not alike (-first +second):\n%s", diff)
	}
	same := []bool{first.Incarnations[0] == second.Incarnations[0], first.Incarnations[1] == second.Incarnations[1]}
	if diff := cmp.Diff([]bool{false, true}, same); diff != "" {
		t.Errorf("which queues count as the same (-want +got):\n%s", diff)
	}
}

// At any time, a reader finds complete directories and files.
func TestReadersFindCompleteFiles(t *testing.T) {
	emulated, m, queues := newTree(t)
	key := queues[0].Process
	reader := host(t, emulated)
	over := make(chan struct{})
	done := make(chan error)
	go func() {
		for scans := 0; ; scans++ {
			snapshot, err := reader.Scan()
			if err == nil && len(snapshot.Warnings) > 0 {
				err = errors.New(snapshot.Warnings[0])
			}
			if err == nil {
				var text []byte
				if text, err = os.ReadFile(emulated.Dir() + "/" + debugfs.MQDs); err == nil {
					var dump debugfs.MQDDump
					if dump, err = debugfs.ParseMQDs(text); err == nil && len(dump.Warnings) > 0 {
						err = fmt.Errorf("mqds: %v", dump.Warnings[0])
					}
				}
			}
			select {
			case <-over:
				if scans == 0 {
					err = errors.Join(err, errors.New("nothing was read"))
				}
				done <- err
				return
			default:
			}
			if err != nil {
				<-over
				done <- err
				return
			}
		}
	}()
	for range 50 {
		id, err := m.CreateQueue(key, m.GPUs()[1].ID, gpreempt.QueueCompute, 64)
		err = errors.Join(err, emulated.Processes(key.PID), emulated.Debugfs("mqds"), m.DestroyQueue(key, id), emulated.Processes(key.PID))
		if err != nil {
			t.Error(err)
			break
		}
	}
	close(over)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The benchmark measures the cost of creating and destroying a queue beside 80 others.
func BenchmarkCreateAndDestroyQueue(b *testing.B) {
	emulated, m, queues := newTree(b)
	key := queues[0].Process
	for range 78 {
		if _, err := m.CreateQueue(key, queues[0].GPU, gpreempt.QueueCompute, 64); err != nil {
			b.Fatal(err)
		}
	}
	if err := emulated.Processes(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		id, err := m.CreateQueue(key, queues[0].GPU, gpreempt.QueueCompute, 64)
		if err := errors.Join(err, emulated.Processes(key.PID), m.DestroyQueue(key, id), emulated.Processes(key.PID)); err != nil {
			b.Fatal(err)
		}
		m.AdvanceTo(m.Now() + 1e9)
	}
}

func BenchmarkDebugfs(b *testing.B) {
	emulated, _, _ := newTree(b)
	for _, name := range slices.Sorted(maps.Keys(contents(b, os.DirFS(emulated.Dir()), "sys/kernel/debug/kfd"))) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := emulated.Debugfs(name); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
