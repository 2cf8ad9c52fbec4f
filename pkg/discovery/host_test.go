package discovery_test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func TestHostIsAFileSystem(t *testing.T) {
	m := tree(t, "host.txt")
	maps.DeleteFunc(m, func(_ string, file *fstest.MapFile) bool { return file.Mode != 0 }) // broken links
	if err := fstest.TestFS(discovery.Host(onDisk(t, m)), slices.Collect(maps.Keys(m))...); err != nil {
		t.Error(err)
	}
}

func TestHostScansLikeOtherFileSystems(t *testing.T) {
	m := tree(t, "host.txt")
	for name, dir := range map[string]string{"disk": onDisk(t, m), "memory": inMemory(t, m)} {
		f := newFS(discovery.Host(dir))
		f.SetEnv(variables)
		for range 3 {
			s := scan(t, f)
			for n, p := range s.Processes {
				if len(p.Incarnations) != len(p.Queues) {
					t.Errorf("%s: %d incarnations of %d queues", name, len(p.Incarnations), len(p.Queues))
				}
				s.Processes[n].Incarnations, s.Processes[n].InOrder = nil, false
			}
			if diff := cmp.Diff(discovery.Snapshot{Processes: hostEnv()}, s); diff != "" {
				t.Fatalf("%s (-want +got):\n%s", name, diff)
			}
		}
	}
}

func TestHostErrorsNameTheFile(t *testing.T) {
	m := tree(t, "host.txt")
	delete(m, procs+"1200/pasid")
	m[procs+"1200"] = &fstest.MapFile{}
	delete(m, procs+"977/queues/0/gpuid")
	delete(m, procs+"977/queues/0/size")
	delete(m, procs+"977/queues/0/type")
	m[procs+"977/queues/0"] = &fstest.MapFile{Data: []byte("no directory")}
	want := []string{
		"queue 0 of process 977 omitted: open " + procs + "977/queues/0/gpuid: not a directory",
		"process 1200 omitted: open " + procs + "1200: not a directory",
	}
	if diff := cmp.Diff(want, scan(t, newFS(discovery.Host(onDisk(t, m)))).Warnings); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	f := newFS(discovery.Host(t.TempDir()))
	for _, read := range []func() error{
		func() error { _, err := f.Scan(); return err },
		func() error { _, err := f.Changed(); return err },
	} {
		const want = "list the KFD processes: open sys/class/kfd/kfd/proc: no such file or directory: check that the amdgpu driver is loaded"
		if err := read(); err == nil || err.Error() != want {
			t.Errorf("error %v\nwant  %s", err, want)
		}
	}
}

func TestChangedDetectsProcessesThatAppearAndDisappear(t *testing.T) {
	dir := inMemory(t, tree(t, "host.txt"))
	f := newFS(discovery.Host(dir))
	check := func(when string, want bool) {
		t.Helper()
		if got, err := f.Changed(); got != want || err != nil {
			t.Errorf("%s: Changed() = %v, %v, want %v", when, got, err, want)
		}
	}
	check("before the first scan", true)
	scan(t, f)
	check("after it", false)
	steps := []struct {
		when string
		do   func(path string) error
	}{
		{"a process disappeared", func(path string) error { return os.Rename(path, filepath.Join(dir, "gone")) }},
		{"it reappeared", func(path string) error { return os.Rename(filepath.Join(dir, "gone"), path) }},
		{"another one has its pid", func(path string) error {
			if err := os.CopyFS(filepath.Join(dir, "new"), os.DirFS(path)); err != nil {
				return err
			}
			return os.Rename(path, filepath.Join(dir, "old"))
		}},
		{"and exists", func(path string) error { return os.Rename(filepath.Join(dir, "new"), path) }},
	}
	for n, step := range steps {
		if err := step.do(filepath.Join(dir, procs, "4211")); err != nil {
			t.Fatal(err)
		}
		check(step.when, true)
		if n != 2 { // that the pid was free in between is not detected
			scan(t, f)
			check("after a scan", false)
		}
	}
	if err := os.RemoveAll(filepath.Join(dir, procs, "4211/queues/1")); err != nil {
		t.Fatal(err)
	}
	check("a queue left", false)
}

func TestRecreatedQueueIsAnotherOnEveryRoot(t *testing.T) {
	for name, dir := range map[string]string{"disk": onDisk(t, tree(t, "host.txt")), "memory": inMemory(t, tree(t, "host.txt"))} {
		f := newFS(discovery.Host(dir))
		before := scan(t, f).Processes[2]
		queue := filepath.Join(dir, procs, "4211/queues/1")
		if name == "memory" { // removed at once: its number is not reused
			if err := os.RemoveAll(queue); err != nil {
				t.Fatal(err)
			}
		} else if err := os.Rename(queue, filepath.Join(dir, "destroyed")); err != nil {
			t.Fatal(err)
		}
		if err := os.CopyFS(queue, os.DirFS(filepath.Join(dir, procs, "4211/queues/0"))); err != nil {
			t.Fatal(err)
		}
		after := scan(t, f).Processes[2]
		want := slices.Clone(before.Queues)
		want[1].Type, want[1].RingBytes = want[0].Type, want[0].RingBytes
		if diff := cmp.Diff(want, after.Queues); diff != "" {
			t.Errorf("%s: queues (-want +got):\n%s", name, diff)
		}
		for n, changed := range []bool{false, true, false} {
			if (before.Incarnations[n] != after.Incarnations[n]) != changed {
				t.Errorf("%s: queue %d: incarnation %d, then %d", name, n, before.Incarnations[n], after.Incarnations[n])
			}
		}
	}
}

// The number of contexts does not change, only the missing one shows it.
func TestContextThatReplacesAnotherIsDetectedAtOnce(t *testing.T) {
	dir := inMemory(t, tree(t, "host.txt"))
	f := newFS(discovery.Host(dir))
	scan(t, f)
	process := filepath.Join(dir, procs, "977")
	if err := os.Rename(filepath.Join(process, "context_2"), filepath.Join(process, "context_5")); err != nil {
		t.Fatal(err)
	}
	want := host()[0].Queues
	want[2].ID = discovery.ContextQueueID(5, 0)
	if diff := cmp.Diff(want, scan(t, f).Processes[0].Queues); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if err := os.RemoveAll(filepath.Join(process, "context_0")); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(slices.Delete(want, 1, 2), scan(t, f).Processes[0].Queues); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
}

// On sysfs exec removes KFD's directory of the process; the new program may open KFD again
// before the next scan.
func TestEnvironmentIsReadAgainAfterExec(t *testing.T) {
	dir := inMemory(t, tree(t, "host.txt"))
	f := newFS(discovery.Host(dir))
	f.SetEnv(variables)
	scan(t, f)
	process := filepath.Join(dir, procs, "4211")
	for path, text := range map[string]string{"environ": "GPREEMPT_CLASS=online\x00", "cmdline": "bash\x00"} {
		if err := os.WriteFile(filepath.Join(dir, "proc/4211", path), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(process, filepath.Join(dir, "old")); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(process, os.DirFS(filepath.Join(dir, "old"))); err != nil {
		t.Fatal(err)
	}
	want := hostEnv()[2]
	want.Cmdline, want.Env = "bash", map[string]string{"GPREEMPT_CLASS": "online"}
	got := scan(t, f).Processes[2]
	got.Incarnations, got.InOrder = nil, false
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("process (-want +got):\n%s", diff)
	}
}

func TestDirectoryOfADeadProcessDoesNotBelongToItsSuccessor(t *testing.T) {
	dir := inMemory(t, tree(t, "host.txt"))
	f := newFS(discovery.Host(dir))
	f.SetEnv(variables)
	write := func(start uint64, state byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "proc/4211/stat"), []byte(stat(4211, "x", state, 1, start)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string, want ...discovery.Proc) {
		t.Helper()
		got := scan(t, f).Processes
		for n := range got {
			got[n].Incarnations, got[n].InOrder = nil, false
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	others := without(hostEnv(), 4211)
	check("at first", hostEnv()...)
	write(987654, 'Z')
	check("dead", others...)
	write(999999, 'S')
	check("its pid used again", others...)
	check("still", others...)
	// KFD removes the old one, and the new one opens KFD.
	process := filepath.Join(dir, procs, "4211")
	if err := os.CopyFS(filepath.Join(dir, "new"), os.DirFS(process)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(process, filepath.Join(dir, "old")); err != nil {
		t.Fatal(err)
	}
	check("forgotten", others...)
	if err := os.Rename(filepath.Join(dir, "new"), process); err != nil {
		t.Fatal(err)
	}
	want := hostEnv()
	want[2].Key.Start = 999999
	for n := range want[2].Queues {
		want[2].Queues[n].Process = want[2].Key
	}
	check("with KFD itself", want...)
}

// A FIFO without a writer keeps a thread in the kernel, like FUSE.
func TestReadThatHangsInTheKernelDoesNotBlockTheScan(t *testing.T) {
	dir := onDisk(t, tree(t, "host.txt"))
	path := filepath.Join(dir, "proc/4211/cmdline")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f := discovery.NewFS(discovery.Host(dir))
	for range 3 {
		if got := scan(t, f).Processes[2]; got.Cmdline != "" || len(got.Queues) != 3 {
			t.Errorf("%v is shown with %q and %d queues", got.Key, got.Cmdline, len(got.Queues))
		}
	}
	fifo, err := os.OpenFile(path, os.O_WRONLY, 0) // waits for the reader
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fifo.WriteString("python3\x00train.py\x00"); err != nil {
		t.Fatal(err)
	}
	if err := fifo.Close(); err != nil {
		t.Fatal(err)
	}
	for cmdline := ""; cmdline == ""; cmdline = scan(t, f).Processes[2].Cmdline {
		if t.Context().Err() != nil {
			t.Fatal("the command line is never read")
		}
	}
}

// TestRandomTreesAreScannedAlike changes a tree at random and compares each scan of a Host
// with that of a new reader.
func TestRandomTreesAreScannedAlike(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	dir := inMemory(t, fstest.MapFS{procs + "x": {}})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	known := map[string]*discovery.FS{"host": newFS(discovery.Host(dir)), "any": newFS(os.DirFS(dir))}
	for range 150 {
		for range 1 + r.IntN(4) {
			pid := 100 + r.IntN(4)
			process := filepath.Join(dir, procs, strconv.Itoa(pid))
			context := []string{"queues", "context_1/queues", "context_2/queues"}[r.IntN(3)]
			queue := filepath.Join(process, context, strconv.Itoa(r.IntN(3)))
			switch r.IntN(8) {
			case 0:
				must(os.RemoveAll(process))
			case 1:
				must(os.RemoveAll(filepath.Dir(queue)))
			case 2, 3:
				must(os.RemoveAll(queue))
			default:
				must(os.RemoveAll(queue))
				must(os.MkdirAll(queue, 0o700))
				must(os.WriteFile(filepath.Join(queue, "gpuid"), []byte("63420"), 0o600))
				must(os.WriteFile(filepath.Join(queue, "size"), strconv.AppendInt(nil, int64(1+r.IntN(1<<20)), 10), 0o600))
				must(os.WriteFile(filepath.Join(queue, "type"), []byte("0"), 0o600))
			}
			proc := filepath.Join(dir, "proc", strconv.Itoa(pid))
			must(os.MkdirAll(proc, 0o700))
			must(os.WriteFile(filepath.Join(proc, "stat"), []byte(stat(pid, "x", 'S', 1, 1)), 0o600))
			must(os.WriteFile(filepath.Join(proc, "status"), []byte("Uid:\t1\t1\t1\t1\nGid:\t1\t1\t1\t1\n"), 0o600))
		}
		clean := func(s discovery.Snapshot) discovery.Snapshot {
			for n := range s.Processes {
				s.Processes[n].Incarnations, s.Processes[n].InOrder = nil, false
			}
			return s
		}
		want := clean(scan(t, newFS(os.DirFS(dir))))
		for name, f := range known {
			if diff := cmp.Diff(want, clean(scan(t, f))); diff != "" {
				t.Fatalf("seed %d, %s (-want +got):\n%s", seed, name, diff)
			}
		}
	}
}

// FuzzParseDirents checks that valid entries are parsed, and that other bytes are not read
// beyond their end.
func FuzzParseDirents(f *testing.F) {
	f.Add("4211", "queues", uint64(1)<<40, []byte{})
	f.Add(".", "..", uint64(0), []byte{0})
	f.Add("a", "b", uint64(7), []byte("\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x14\x00\x04x"))
	f.Fuzz(func(t *testing.T, a, b string, inode uint64, more []byte) {
		type found struct {
			name  string
			inode uint64
		}
		var text []byte
		var want []found
		for n, name := range []string{a, b} {
			if name == "" || len(name) > 255 || slices.Contains([]byte(name), 0) {
				return
			}
			length := (19 + len(name) + 1 + 7) &^ 7
			at := len(text)
			text = append(text, make([]byte, length)...)
			binary.NativeEndian.PutUint64(text[at:], inode+uint64(n))
			binary.NativeEndian.PutUint16(text[at+16:], uint16(length))
			copy(text[at+19:], name)
			if name != "." && name != ".." {
				want = append(want, found{name, inode + uint64(n)})
			}
		}
		read := func(b []byte) (all []found, whole bool) {
			whole = discovery.ParseDirents(b, func(name []byte, inode uint64) { all = append(all, found{string(name), inode}) })
			return all, whole
		}
		if got, whole := read(text); !whole || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%q, %q gave %v, %v", a, b, got, whole)
		}
		if got, _ := read(append(text, more...)); len(got) < len(want) || len(got) > len(want)+len(more)/20 {
			t.Errorf("with %q behind it: %v", more, got)
		}
	})
}
