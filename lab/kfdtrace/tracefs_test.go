package kfdtrace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

func TestPipeNeverWaits(t *testing.T) {
	dir := Dir(t.TempDir())
	path := filepath.Join(string(dir), "trace_pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := dir.OpenPipe("trace_pipe")
	if err != nil {
		t.Fatal(err)
	}
	read := func() string {
		t.Helper()
		buf := make([]byte, 5)
		n, err := p.ReadSome(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:n])
	}
	got := []string{read()} // nobody has it open to write: as trace_pipe while tracing is off
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, read())
	if _, err := w.WriteString("1234567"); err != nil {
		t.Fatal(err)
	}
	got = append(got, read(), read(), read())
	if diff := cmp.Diff([]string{"", "", "12345", "67", ""}, got); diff != "" {
		t.Errorf("reads (-want +got):\n%s", diff)
	}
	if err := errors.Join(p.Close(), w.Close()); err != nil {
		t.Error(err)
	}
	if _, err := dir.OpenPipe("absent"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent pipe: %v", err)
	}
}

func TestControlFilesAreNotEmptiedFirst(t *testing.T) {
	dir := Dir(t.TempDir())
	if err := os.WriteFile(filepath.Join(string(dir), "kprobe_events"), []byte("p:theirs/f g\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := dir.Write("kprobe_events", "p"); err != nil {
		t.Fatal(err)
	}
	if text, err := dir.ReadFile("kprobe_events"); err != nil || string(text) != "p:theirs/f g\n" {
		t.Errorf("what others defined is now %q, %v", text, err)
	}
	if err := dir.Write("absent", "1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent file: %v", err)
	}
}

func TestLockIsReleasedOnClose(t *testing.T) {
	dir := Dir(t.TempDir())
	if err := dir.Mkdir("one"); err != nil {
		t.Fatal(err)
	}
	first, err := dir.Lock("one")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dir.Lock("one"); !errors.Is(err, ErrLocked) {
		t.Errorf("taken twice: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := dir.Lock("one")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(again.Close(), dir.Remove("one")); err != nil {
		t.Error(err)
	}
	if _, err := dir.Lock("one"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a removed directory: %v", err)
	}
	if err := dir.Remove("one"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed twice: %v", err)
	}
}

func TestFunctionsAreChosenByName(t *testing.T) {
	wanted := []wantedFunction{{"pqm_create_queue", GroupQueue, driver}, {"init_mqd*", GroupMQD, driver}, {"vfs_*", GroupOther, ""}}
	got, err := readSymbols(strings.NewReader(`1 t pqm_create_queue	[amdgpu]
2 t pqm_create_queue_not	[amdgpu]
3 t init_mqd	[amdgpu]
4 t init_mqd	[amdgpu]
5 t init_mqd_sdma.isra.0	[amdgpu]
6 t init_mqd.cold	[amdgpu]
7 t init_mqd.part.0	[amdgpu]
8 t __pfx_init_mqd	[amdgpu]
9 t pqm_create_queue	[other]
ffffffff81000000 T vfs_read
ffffffff81000040 d vfs_data
ffffffffc0000000 t vfs_prog	[bpf]
ffffffffc0000100 t vfs_trampoline	[__builtin__ftrace]
ffffffffc0000200 W vfs_weak	[nfs]
short
`), wanted)
	if err != nil {
		t.Fatal(err)
	}
	want := []function{
		{name: "pqm_create_queue", module: driver, group: GroupQueue, address: 1},
		{name: "init_mqd", module: driver, group: GroupMQD, address: 3},
		{name: "init_mqd", module: driver, group: GroupMQD, address: 4},
		{name: "init_mqd_sdma", module: driver, group: GroupMQD, address: 5},
		{name: "vfs_read", group: GroupOther, address: 0xffffffff81000000},
		{name: "vfs_weak", module: "nfs", group: GroupOther, address: 0xffffffffc0000200},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(function{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := readSymbols(strings.NewReader("zz T vfs_read\n"), wanted); err == nil {
		t.Error("an invalid address was accepted")
	}
}

// A host without the list of KFD processes results in a warning, and the trace.
func TestQueuesAreWatchedWhileRecording(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		o := k.options()
		o.Host = discovery.NewFS(fstest.MapFS{})
		got, err := Record(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Warnings) != 1 || !strings.HasPrefix(got.Warnings[0], "queues were not watched all the time") {
			t.Errorf("warnings %q", got.Warnings)
		}

		k = newFakeKernel(t)
		tree := fstest.MapFS{"sys/class/kfd/kfd/proc": {Mode: fs.ModeDir | 0o755}}
		o = k.options()
		o.Duration = time.Second
		o.Host = discovery.NewFS(tree)
		if got, err = Record(t.Context(), o); err != nil || len(got.Warnings) > 0 {
			t.Errorf("warnings %q, %v", got.Warnings, err)
		}
	})
}
