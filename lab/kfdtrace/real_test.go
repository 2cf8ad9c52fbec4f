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
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// realTracefs returns the kernel's tracefs, mounted for this test alone. The test
// continues in a mount namespace of its own, on a thread that ends with it: it must
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
	return Dir(dir)
}

// residue lists what of ours is in the kernel's tracing.
func residue(t *testing.T, d FS) []string {
	t.Helper()
	var left []string
	if _, err := d.ReadFile(instance + "/tracing_on"); err == nil {
		left = append(left, instance)
	}
	text, err := d.ReadFile(kprobeEvents)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, ":"+probeGroup+"/") {
			left = append(left, strings.TrimSpace(line))
		}
	}
	return left
}

// busy calls fn repeatedly until stop is called.
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

// seen is the raw trace. It ends the recording when all texts have been written to it, one after the
// other.
type seen struct {
	bytes.Buffer
	texts []string
	end   func()
}

func (s *seen) Write(b []byte) (int, error) {
	for rest, found := b, true; found && len(s.texts) > 0; {
		if _, rest, found = bytes.Cut(rest, []byte(s.texts[0])); found {
			s.texts = s.texts[1:]
		}
	}
	if len(s.texts) == 0 {
		s.end()
	}
	return s.Buffer.Write(b)
}

// untilSeen returns a context that ends when all texts have been written to the trace.
func untilSeen(t *testing.T, texts ...string) (context.Context, *seen) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return ctx, &seen{texts: texts, end: cancel}
}

func TestRealEventsAreRecorded(t *testing.T) {
	dir := realTracefs(t)
	before := residue(t, dir)
	ctx, raw := untilSeen(t, ": sched_switch: ", ": sys_enter: ")
	stop := busy(func() { _, _ = os.Stat("/") })
	report, err := Record(ctx, Options{
		FS: dir, Symbols: "/proc/kallsyms", Duration: time.Minute, Raw: raw,
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
	// A name of another process may contain a newline, which makes two lines of its own.
	for l := range strings.Lines(raw.String()) {
		if strings.Contains(l, "kfdtrace.test-") && parseLine(strings.TrimSuffix(l, "\n")).kind == kindUnknown {
			t.Errorf("not understood: %q", l)
			break
		}
	}
	if report.BeganClock <= 0 || report.Buffer.PerCPUKiB <= 0 || report.Buffer.CPUs != runtime.NumCPU() || raw.Len() == 0 {
		t.Errorf("got %+v", report)
	}
	if diff := cmp.Diff(before, residue(t, dir)); diff != "" {
		t.Errorf("remaining in the kernel (-want +got):\n%s", diff)
	}
	t.Logf("%d lost, buffer %+v, %v", report.Lost, report.Buffer, report.Warnings)
}

// TestRealTracefs follows functions of the real amdgpu driver where it is loaded, as in
// the guest of emu/vm, and checks that the driver has all that are followed by default.
func TestRealTracefs(t *testing.T) {
	dir := realTracefs(t)
	if _, err := os.Stat("/dev/kfd"); err != nil {
		t.Skipf("needs the amdgpu driver, as in make vm-kfd: %v", err)
	}
	_, functions := byDefault()
	if _, missing, err := findFunctions("/proc/kallsyms", functions); err != nil || len(missing) > 0 {
		t.Errorf("the driver lacks %v, %v", missing, err)
	}
	before := residue(t, dir)
	// The first call may have begun before the probe of its begin was there.
	ctx, raw := untilSeen(t, ": leave_kfd_open: ", ": leave_kfd_open: ")
	stop := busy(pollKFD)
	began := time.Now()
	report, err := Record(ctx, Options{
		FS: dir, Symbols: "/proc/kallsyms", Duration: time.Minute, Raw: raw,
		Functions: []string{"kfd_open", "kfd_release", "init_mqd"}, // an emulated CPU needs a minute for the probes of all of them
	})
	stop()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%.1f s for %v; %d lost, buffer %+v", time.Since(began).Seconds(), report.Duration, report.Lost, report.Buffer)
	i := slices.IndexFunc(report.Functions, func(f FunctionCalls) bool { return f.Name == "kfd_open" })
	if i < 0 {
		t.Fatalf("no call of kfd_open in %+v", report.Functions)
	}
	if f := report.Functions[i]; f.Group != GroupOther || f.Count == 0 || f.Min > f.P50 || f.P50 > f.P99 || f.P99 > f.Max || f.Max <= 0 {
		t.Errorf("got %+v", f)
	}
	if report.Followed != 3 || report.Unknown > 0 || report.BeganClock <= 0 || len(report.MissingFunctions) > 0 || len(report.Warnings) > 0 {
		t.Errorf("got %+v", report)
	}
	if diff := cmp.Diff(before, residue(t, dir)); diff != "" {
		t.Fatalf("remaining in the kernel (-want +got):\n%s", diff)
	}
}

// victimEnv makes a test process record in the tracefs at the path until it is killed.
const victimEnv = "GPREEMPT_TEST_TRACEFS"

// TestVictim is the process that TestRealKilledRunIsRemoved kills.
func TestVictim(t *testing.T) {
	dir := os.Getenv(victimEnv)
	if dir == "" {
		t.Skip("not a test: a process for another one")
	}
	_, err := Record(t.Context(), Options{
		FS: Dir(dir), Symbols: "/proc/kallsyms", Duration: time.Hour, Raw: os.Stdout, Events: []string{"sched:sched_switch"},
	})
	t.Fatal(err)
}

func TestRealKilledRunIsRemoved(t *testing.T) {
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
		t.Errorf("the other process wrote %q, %v", first, err)
	}
	record := func() error {
		_, err := Record(t.Context(), Options{
			FS: dir, Symbols: "/proc/kallsyms", Duration: 50 * time.Millisecond, Events: []string{"sched:sched_switch"},
		})
		return err
	}
	if err := record(); !errors.Is(err, ErrLocked) {
		t.Errorf("while the other process records: %v", err)
	}
	if err := victim.Process.Kill(); err != nil {
		t.Error(err)
	}
	_, _ = io.Copy(io.Discard, lines)
	_ = victim.Wait() // killed
	if left := residue(t, dir); !slices.Contains(left, instance) {
		t.Errorf("the killed process has no instance: %v", left)
	}
	if err := record(); err != nil {
		t.Error(err)
	}
	if left := residue(t, dir); slices.Contains(left, instance) {
		t.Errorf("the instance of the killed process still exists: %v", left)
	}
}
