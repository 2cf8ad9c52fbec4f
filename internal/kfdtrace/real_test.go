package kfdtrace

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// realTracefs returns the kernel's tracefs, mounted for this test alone. The test
// goes on in a mount namespace of its own, on a thread that ends with it: it must
// not start subtests.
func realTracefs(t *testing.T) Dir {
	t.Helper()
	runtime.LockOSThread() // and never unlocked
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		t.Skipf("needs the right to make a mount namespace (CAP_SYS_ADMIN): %v", err)
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		t.Skipf("needs the right to change mounts: %v", err)
	}
	dir := t.TempDir()
	if err := syscall.Mount("tracefs", dir, "tracefs", 0, ""); err != nil {
		t.Skipf("needs a kernel with tracefs that may be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	found, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	if found != Dir(dir) {
		t.Fatalf("Find gives %s, want %s, where tracefs was mounted last", found, dir)
	}
	return Dir(dir)
}

// residue lists what of ours is in the kernel's tracing.
func residue(t *testing.T, d FS) []string {
	t.Helper()
	names, err := d.List(instances)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, name := range names {
		if strings.HasPrefix(name, prefix) {
			left = append(left, instances+"/"+name)
		}
	}
	text, err := d.ReadFile(kprobeEvents)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, ":"+probeGroup(prefix)) {
			left = append(left, strings.TrimSpace(line))
		}
	}
	for _, option := range graphOptions {
		if text, err := d.ReadFile("options/" + option); err == nil && strings.TrimSpace(string(text)) != "0" {
			left = append(left, option)
		}
	}
	return left
}

// busy calls fn over and over until the test's recording is over.
func busy(fn func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			fn()
			runtime.Gosched()
		}
	}()
	return func() { cancel(); <-done }
}

func pollKFD() {
	if f, err := os.Open("/dev/kfd"); err == nil {
		_ = f.Close() // it was only looked at
	}
}

func TestRealEventsAreRecorded(t *testing.T) {
	dir := realTracefs(t)
	before := residue(t, dir)
	var raw bytes.Buffer
	stop := busy(func() { _, _ = os.Stat("/") })
	report, err := Record(t.Context(), Options{
		FS: dir, Symbols: "/proc/kallsyms", Duration: 300 * time.Millisecond, Raw: &raw, PID: os.Getpid(),
		Events: []string{"sched:sched_switch", "raw_syscalls:sys_enter", "sched:no_such_event"},
	})
	stop()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, e := range report.Events {
		got[e.Name] = e.Count > 0
	}
	want := map[string]bool{"sched_switch": true, "sys_enter": true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"sched:no_such_event"}, report.MissingEvents); diff != "" {
		t.Errorf("missing events (-want +got):\n%s", diff)
	}
	if report.BeganClock <= 0 || report.Unknown > 0 || report.Buffer.PerCPUKiB <= 0 || report.Buffer.CPUs != runtime.NumCPU() || raw.Len() == 0 {
		t.Errorf("got %+v", report)
	}
	if diff := cmp.Diff(before, residue(t, dir)); diff != "" {
		t.Errorf("left in the kernel (-want +got):\n%s", diff)
	}
	t.Logf("%d lines, %d lost, buffer %+v, %v", report.Lines, report.Lost, report.Buffer, report.Warnings)
}

// noGraph is a kernel whose instances cannot have the function graph tracer, such
// as those before Linux 6.11.
type noGraph struct{ Dir }

func (n noGraph) ReadFile(name string) ([]byte, error) {
	text, err := n.Dir.ReadFile(name)
	if strings.HasSuffix(name, "/available_tracers") {
		text = bytes.ReplaceAll(text, []byte(graphTracer), nil)
	}
	return text, err
}

// TestRealTracefs follows functions of the real amdgpu driver where it is loaded,
// as in the guest of emu/vm, in both ways.
func TestRealTracefs(t *testing.T) {
	dir := realTracefs(t)
	if _, err := os.Stat("/dev/kfd"); err != nil {
		t.Skipf("needs the amdgpu driver, as in make vm-kfd: %v", err)
	}
	before := residue(t, dir)
	// An emulated CPU needs a minute for the probes of all of them.
	only := map[string][]string{ByProbes: {"kfd_open", "kfd_release", "init_mqd"}}
	group := map[string]string{ByGraph: GroupProcess, ByProbes: GroupOther}
	for by, tracing := range map[string]FS{ByGraph: dir, ByProbes: noGraph{dir}} {
		var raw bytes.Buffer
		stop := busy(pollKFD)
		began := time.Now()
		report, err := Record(t.Context(), Options{
			FS: tracing, Symbols: "/proc/kallsyms", Duration: 500 * time.Millisecond, Raw: &raw, PID: os.Getpid(), Functions: only[by],
		})
		stop()
		if err != nil {
			t.Fatalf("%s: %v", by, err)
		}
		t.Logf("%s: %.1f s for %v; %d lines, %d lost, buffer %+v", by, time.Since(began).Seconds(), report.Duration, report.Lines, report.Lost, report.Buffer)
		t.Logf("missing %v %v; warnings %v", report.MissingEvents, report.MissingFunctions, report.Warnings)
		if report.FunctionsBy != by {
			t.Errorf("functions are followed by %s, want %s", report.FunctionsBy, by)
		}
		i := slices.IndexFunc(report.Functions, func(f FunctionCalls) bool { return f.Name == "kfd_open" })
		if i < 0 {
			t.Fatalf("%s: no call of kfd_open in %+v", by, report.Functions)
		}
		if f := report.Functions[i]; f.Group != group[by] || f.Count == 0 || f.Min > f.P50 || f.P50 > f.P99 || f.P99 > f.Max || f.Max <= 0 || f.Max > time.Second {
			t.Errorf("%s: got %+v", by, f)
		}
		for _, f := range report.Functions {
			if f.Group != group[by] {
				t.Errorf("%s: %s is of group %s, want %s", by, f.Name, f.Group, group[by])
			}
		}
		if report.Unknown > 0 || report.BeganClock <= 0 || len(report.MissingFunctions) > 0 || len(report.Warnings) > 0 {
			t.Errorf("%s: got %+v", by, report)
		}
		if diff := cmp.Diff(before, residue(t, dir)); diff != "" {
			t.Fatalf("%s: left in the kernel (-want +got):\n%s", by, diff)
		}
	}
}

// victimEnv makes a test process record in the tracefs at the path until it is
// killed.
const victimEnv = "GPREEMPT_TEST_TRACEFS"

// TestVictim is the process that TestRealDeadRunIsClearedAway kills.
func TestVictim(t *testing.T) {
	dir := os.Getenv(victimEnv)
	if dir == "" {
		t.Skip("not a test: a process for another one")
	}
	_, err := Record(t.Context(), Options{
		FS: Dir(dir), Symbols: "/proc/kallsyms", Duration: time.Hour, Raw: os.Stdout, PID: os.Getpid(), Events: []string{"sched:sched_switch"},
	})
	t.Fatal(err)
}

func TestRealDeadRunIsClearedAway(t *testing.T) {
	dir := realTracefs(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	victim := exec.Command(self, "-test.run=^TestVictim$")
	victim.Env = append(os.Environ(), victimEnv+"="+string(dir))
	out, err := victim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if first, err := lines.ReadString('\n'); err != nil || parseLine(strings.TrimSpace(first)).kind == kindUnknown {
		t.Errorf("the other process says %q, %v", first, err)
	}
	instance := instances + "/" + prefix + strconv.Itoa(victim.Process.Pid)
	record := func() {
		t.Helper()
		_, err := Record(t.Context(), Options{
			FS: dir, Symbols: "/proc/kallsyms", Duration: 50 * time.Millisecond, PID: os.Getpid(), Events: []string{"sched:sched_switch"},
		})
		if err != nil {
			t.Error(err)
		}
	}
	record()
	if left := residue(t, dir); !slices.Contains(left, instance) {
		t.Errorf("the instance of a living process is gone: %v", left)
	}
	if err := victim.Process.Kill(); err != nil {
		t.Error(err)
	}
	_, _ = io.Copy(io.Discard, lines)
	_ = victim.Wait() // killed
	if left := residue(t, dir); !slices.Contains(left, instance) {
		t.Errorf("the killed process left nothing behind: %v", left)
	}
	record()
	if left := residue(t, dir); slices.Contains(left, instance) {
		t.Errorf("the instance of a dead process is still there: %v", left)
	}
}
