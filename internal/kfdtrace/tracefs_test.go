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

func TestLockIsFreeWhenItsHolderIsGone(t *testing.T) {
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

func TestTracefsIsFoundAmongTheMounts(t *testing.T) {
	for mounts, want := range map[string]string{
		"": "",
		"proc /proc proc rw 0 0\ntracefs /sys/kernel/tracing tracefs rw,relatime 0 0\n": "/sys/kernel/tracing",
		"nodev /a\\040b\\134c tracefs rw 0 0\n":                                         `/a b\c`,
		"tracefs /tracefs tmpfs rw 0 0\nshort\n":                                        "",
		"t /old tracefs rw 0 0\nt /new tracefs rw 0 0\n":                                "/new",
		"t /a\\9zz tracefs rw 0 0\n":                                                    `/a\9zz`,
	} {
		if got := mountedAt(mounts); got != want {
			t.Errorf("%q: got %q, want %q", mounts, got, want)
		}
	}
}

func TestFunctionsAreChosenByName(t *testing.T) {
	c := newChooser([]wantedFunction{
		{"pqm_create_queue", GroupQueue, driver}, {"init_mqd*", GroupMQD, driver}, {"vfs_*", GroupOther, ""}, {"gone", GroupQueue, driver},
	})
	for i, symbol := range []string{
		"pqm_create_queue", "pqm_create_queue_not", "init_mqd", "init_mqd", "init_mqd_sdma.isra.0", "init_mqd.cold", "init_mqd.part.0", "__pfx_init_mqd",
	} {
		c.see(function{symbol: symbol, module: driver, index: i + 1})
	}
	c.see(function{symbol: "pqm_create_queue", module: "other", index: 20})
	c.see(function{symbol: "vfs_read", index: 21})
	want := []function{
		{symbol: "pqm_create_queue", module: driver, group: GroupQueue, index: 1},
		{symbol: "init_mqd", module: driver, group: GroupMQD, index: 3},
		{symbol: "init_mqd", module: driver, group: GroupMQD, index: 4},
		{symbol: "init_mqd_sdma.isra.0", module: driver, group: GroupMQD, index: 5},
		{symbol: "vfs_read", group: GroupOther, index: 21},
	}
	if diff := cmp.Diff(want, c.found, cmp.AllowUnexported(function{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"gone"}, c.missing()); diff != "" {
		t.Errorf("missing (-want +got):\n%s", diff)
	}
}

func TestSymbolsThatAreNoFunctionsAreLeftOut(t *testing.T) {
	c, err := readSymbols(strings.NewReader(`ffffffff81000000 T vfs_read
ffffffff81000040 d vfs_data
ffffffffc0000000 t vfs_prog	[bpf]
ffffffffc0000100 t vfs_trampoline	[__builtin__ftrace]
ffffffffc0000200 W vfs_weak	[nfs]
short
`), []wantedFunction{{"vfs_*", GroupOther, ""}})
	if err != nil {
		t.Fatal(err)
	}
	want := []function{
		{symbol: "vfs_read", group: GroupOther, address: 0xffffffff81000000},
		{symbol: "vfs_weak", module: "nfs", group: GroupOther, address: 0xffffffffc0000200},
	}
	if diff := cmp.Diff(want, c.found, cmp.AllowUnexported(function{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := readSymbols(strings.NewReader("zz T vfs_read\n"), nil); err == nil {
		t.Error("an address that is no number is taken")
	}
}

// A host without the list of KFD processes gives a warning, and the trace.
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
