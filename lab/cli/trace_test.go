package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
)

// plainTracefs is a tracefs of plain files: an instance has the files that gplab uses,
// and its trace is text.
type plainTracefs struct {
	kfdtrace.Dir
	text string
	// removal is the error of removing the instance.
	removal error
}

func (p plainTracefs) put(t *testing.T, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(string(p.Dir), name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func newPlainTracefs(t *testing.T, text string) plainTracefs {
	t.Helper()
	p := plainTracefs{Dir: kfdtrace.Dir(t.TempDir()), text: text}
	p.put(t, map[string]string{
		"instances/.keep": "", "events/sched/sched_switch/enable": "0", "events/amdgpu/enable": "0", "kprobe_events": "",
		"kallsyms": "1 t kfd_ioctl_create_queue\t[amdgpu]\n2 t load_mqd_v9_4_3\t[amdgpu]\n",
	})
	return p
}

func (p plainTracefs) Mkdir(dir string) error {
	if err := p.Dir.Mkdir(dir); err != nil {
		return err
	}
	files := map[string]string{
		"tracing_on": "1", "trace_clock": "[local] mono", "buffer_size_kb": "1410\n", "trace_marker": "", "trace_pipe": p.text,
		"per_cpu/cpu0/stats": "", "events/enable": "0", "events/sched/sched_switch/enable": "0", "events/gpreempt/enable": "0",
	}
	if _, err := p.List("events/amdgpu"); err == nil {
		files["events/amdgpu/amdgpu_iv/enable"] = "0"
	}
	for name, text := range files {
		path := filepath.Join(string(p.Dir), dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (p plainTracefs) Remove(dir string) error {
	if p.removal != nil {
		return p.removal
	}
	return os.RemoveAll(filepath.Join(string(p.Dir), dir))
}

// traceRun runs gplab trace kfd on a host and returns what it printed and how it
// ended.
type traceRun struct {
	code          int
	out, complain string
}

func runTrace(ctx context.Context, host traceHost, output string, args ...string) traceRun {
	var out, complain bytes.Buffer
	a := &term.App{IO: term.IO{Out: &out, Err: &complain, Getenv: func(string) string { return "" }, Now: time.Now}, Output: output}
	cmd := traceKFD(a, host) //nolint:contextcheck // cobra hands ctx to the command, in ExecuteContext
	cmd.SetOut(&out)
	cmd.SetErr(&complain)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(append([]string{"--duration", "20ms"}, args...))
	r := traceRun{}
	if err := cmd.ExecuteContext(ctx); err != nil {
		f, ok := errors.AsType[*term.Failure](err)
		if !ok {
			f = &term.Failure{Code: term.ExitFailure, Message: err.Error()}
		}
		f.Print(&complain, Program.Name)
		r.code = f.Code
	}
	r.out, r.complain = out.String(), complain.String()
	return r
}

const createdOne = `           gplab-4242    [000] .....   10.000000: tracing_mark_write: gpreempt: begin
           train-77      [000] .....   10.100000: enter_kfd_ioctl_create_queue: (kfd_ioctl_create_queue+0x4/0xf0 [amdgpu])
           train-77      [000] .....   10.100100: enter_load_mqd_v9_4_3: (load_mqd_v9_4_3+0x4/0xf0 [amdgpu])
           train-77      [000] .....   10.100120: leave_load_mqd_v9_4_3: (pqm_create_queue+0xbf/0x240 <- load_mqd_v9_4_3)
          <idle>-0       [000] d.h..   10.100200: amdgpu_iv: ih:0 client_id:0
           train-77      [000] .....   10.101500: leave_kfd_ioctl_create_queue: (kfd_ioctl+0xbf/0x240 <- kfd_ioctl_create_queue)
`

func hostWith(tracing plainTracefs) traceHost {
	return traceHost{
		root: fstest.MapFS{
			"proc/sys/kernel/osrelease": {Data: []byte("6.12.0-test\n")}, "sys/class/kfd/kfd/proc": {Mode: fs.ModeDir | 0o755},
			"sys/module/amdgpu/version": {Data: []byte("6.12.12\n")},
		},
		tracefs: func() (kfdtrace.FS, error) { return tracing, nil },
		symbols: filepath.Join(string(tracing.Dir), "kallsyms"),
	}
}

func TestTraceShowsHowLongQueueOperationsTake(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	got := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), term.FormatTable, "--output-dir", dir)
	lines := strings.Split(got.out, "\n")
	want := append([]string{
		lines[0], // the time it took
		"No events were lost; the buffer was 1MiB on each of 1 CPU.",
		"",
		"GROUP  FUNCTION                CALLS    MIN   MEAN    P50    P95    P99    MAX",
		"queue  kfd_ioctl_create_queue      1  1.5ms  1.5ms  1.5ms  1.5ms  1.5ms  1.5ms",
		"mqd    load_mqd_v9_4_3             1   20µs   20µs   20µs   20µs   20µs   20µs",
		"",
		"Queue creation took 1.5ms at p99: over the target of 1ms.",
		"",
		"EVENT      COUNT",
		"amdgpu_iv      1",
		"",
	}, lines[12:]...)
	if diff := cmp.Diff(want, lines); diff != "" || got.code != term.ExitOK {
		t.Errorf("ended with %d (-want +got):\n%s\n%s", got.code, diff, got.complain)
	}
	if !strings.HasPrefix(lines[0], "Recorded ") || !strings.HasSuffix(lines[0], "ms on Linux 6.12.0-test; 2 functions followed.") {
		t.Errorf("begins with %q", lines[0])
	}
	if !strings.Contains(got.out, "of the events and functions (-o wide for their names).\n\nWritten to "+dir+": trace.txt, report.json\n") {
		t.Errorf("ends with %q", lines[12:])
	}
	text, err := os.ReadFile(filepath.Join(dir, traceText))
	if err != nil || string(text) != createdOne {
		t.Errorf("trace.txt is %q, %v", text, err)
	}
	report, err := os.ReadFile(filepath.Join(dir, traceReport))
	if err != nil {
		t.Fatal(err)
	}
	var kept kfdRecording
	if err := json.Unmarshal(report, &kept); err != nil || kept.Kernel != "6.12.0-test" || kept.Driver != "6.12.12" || len(kept.Functions) != 2 || kept.Functions[0].Max != 1500*time.Microsecond {
		t.Errorf("report.json is %s, %v", report, err)
	}

	again := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), term.FormatTable, "--output-dir", dir)
	if again.code != term.ExitRefused || !strings.Contains(again.complain, dir+" already contains a recording") {
		t.Errorf("a second recording in the same place: %+v", again)
	}
}

func TestTraceForPrograms(t *testing.T) {
	inJSON := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), term.FormatJSON)
	var r kfdRecording
	if err := json.Unmarshal([]byte(inJSON.out), &r); err != nil || inJSON.code != term.ExitOK || len(r.Functions) != 2 {
		t.Errorf("%+v, %v", inJSON, err)
	}
	inYAML := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), term.FormatYAML)
	if inYAML.code != term.ExitOK || !strings.HasPrefix(inYAML.out, "kernel: 6.12.0-test\ndriver_version: 6.12.12\nbegan: ") || !strings.Contains(inYAML.out, "max_ns: 1500000\n") {
		t.Errorf("%+v", inYAML)
	}
	wide := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), term.FormatWide)
	if wide.code != term.ExitOK || !strings.Contains(wide.out, "This kernel has no event amdkfd:kfd_evict_process_worker_start.\n") {
		t.Errorf("%+v", wide)
	}
}

func TestTraceOfWhatIsNamed(t *testing.T) {
	got := runTrace(t.Context(), hostWith(newPlainTracefs(t, "CPU:0 [LOST 7 EVENTS]\n")), term.FormatTable, "--events", "sched:sched_switch")
	for _, want := range []string{
		"0 functions followed.\nEvents lost: 7; calls are missing below; the buffer was 2MiB on each of 1 CPU.\n",
		"\nNo call of a followed function was recorded.\n",
	} {
		if !strings.Contains(got.out, want) || got.code != term.ExitOK {
			t.Errorf("%+v, want %q", got, want)
		}
	}
}

func TestTraceEndsAsItsErrorsDo(t *testing.T) {
	bare := newPlainTracefs(t, "")
	noDriver := newPlainTracefs(t, "")
	noDriver.removeDriver(t)
	for name, test := range map[string]struct {
		host traceHost
		args []string
		code int
		want string
	}{
		"no driver": {
			host: hostWith(noDriver), code: term.ExitNoGPU,
			want: "there is nothing to record: the amdgpu driver is not loaded\n  try: gpctl doctor checks this host; --events and --functions select something else\n",
		},
		"no tracefs": {
			host: traceHost{root: fstest.MapFS{}, tracefs: func() (kfdtrace.FS, error) {
				return nil, &kfdtrace.Error{What: "tracefs is not mounted", Next: "mount it", Err: fs.ErrNotExist}
			}},
			code: term.ExitFailure, want: "gplab: tracefs is not mounted: file does not exist\n  try: mount it\n",
		},
		"no root": {
			host: traceHost{root: fstest.MapFS{}, tracefs: func() (kfdtrace.FS, error) { return nil, &fs.PathError{Op: "open", Err: syscall.EACCES} }},
			code: term.ExitDenied, want: "permission denied",
		},
		"bad event":    {host: hostWith(bare), args: []string{"--events", "a b"}, code: term.ExitUsage, want: `invalid trace event "a b"`},
		"bad duration": {host: hostWith(bare), args: []string{"--duration", "2h"}, code: term.ExitUsage, want: "--duration must be more than 0 and at most 1h"},
		"not removed": {
			host: hostWith(plainTracefs{Dir: newPlainTracefs(t, "").Dir, text: createdOne, removal: syscall.EBUSY}), code: term.ExitFailure,
			want: "parts of the recording remain in the kernel's tracing, in instances/gpreempt",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := runTrace(t.Context(), test.host, term.FormatTable, test.args...)
			if got.code != test.code || !strings.Contains(got.complain, test.want) {
				t.Errorf("ended with %d: %s\nwant %d: %s", got.code, got.complain, test.code, test.want)
			}
			if name == "not removed" != strings.Contains(got.out, "kfd_ioctl_create_queue") {
				t.Errorf("printed %q", got.out)
			}
		})
	}
}

// removeDriver makes the tracefs that of a host without the driver.
func (p plainTracefs) removeDriver(t *testing.T) {
	t.Helper()
	p.put(t, map[string]string{"kallsyms": "1 t vfs_read\n"})
	if err := os.RemoveAll(filepath.Join(string(p.Dir), "events/amdgpu")); err != nil {
		t.Fatal(err)
	}
}

func TestRecordingThatCannotBeginWritesNoFiles(t *testing.T) {
	dir := t.TempDir()
	tracing := newPlainTracefs(t, "")
	tracing.removeDriver(t)
	got := runTrace(t.Context(), hostWith(tracing), term.FormatTable, "--output-dir", dir)
	if got.code != term.ExitNoGPU {
		t.Errorf("%+v", got)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) > 0 {
		t.Errorf("left %v, %v", files, err)
	}
	fresh := filepath.Join(dir, "fresh")
	if got := runTrace(t.Context(), hostWith(tracing), term.FormatTable, "--output-dir", filepath.Join(fresh, "deep")); got.code != term.ExitNoGPU {
		t.Errorf("%+v", got)
	}
	if _, err := os.Stat(fresh); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory that it made: %v, want that it is gone", err)
	}
}
