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

	"github.com/gpreempt/gpreempt/internal/kfdtrace"
)

// plainTracefs is a tracefs of plain files, as far as gpctl has to see one: an
// instance has these files, and its trace is text.
type plainTracefs struct {
	kfdtrace.Dir
	text string
	// removal is what removing the instance gives.
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
		"instances/.keep": "", "events/sched/sched_switch/enable": "0", "current_tracer": "nop\n",
		"available_filter_functions": "kfd_ioctl_create_queue [amdgpu]\nload_mqd_v9_4_3 [amdgpu]\n",
	})
	return p
}

func (p plainTracefs) Mkdir(dir string) error {
	if err := p.Dir.Mkdir(dir); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"tracing_on": "1", "trace_clock": "[local] mono", "buffer_size_kb": "1410\n", "available_tracers": "function_graph nop\n", "current_tracer": "nop",
		"set_ftrace_filter": "", "trace_marker": "", "trace_pipe": p.text, "options/funcgraph-abstime": "1\n", "options/funcgraph-proc": "1\n",
		"options/funcgraph-tail": "1\n", "per_cpu/cpu0/stats": "overrun: 0\n", "events/enable": "0", "events/sched/sched_switch/enable": "0",
		"events/amdgpu/amdgpu_iv/enable": "0",
	} {
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

// ReadFile returns as the filter what the kernel makes of the numbers in it.
func (p plainTracefs) ReadFile(name string) ([]byte, error) {
	if filepath.Base(name) == "set_ftrace_filter" {
		name = "available_filter_functions"
	}
	return p.Dir.ReadFile(name)
}

func (p plainTracefs) Remove(dir string) error {
	if p.removal != nil {
		return p.removal
	}
	return os.RemoveAll(filepath.Join(string(p.Dir), dir))
}

// traceRun runs gpctl trace kfd on a host and returns what it printed and how it
// ended.
type traceRun struct {
	code          int
	out, complain string
}

func runTrace(ctx context.Context, host traceHost, output string, args ...string) traceRun {
	var out, complain bytes.Buffer
	a := &app{IO: IO{Out: &out, Err: &complain, Getenv: func(string) string { return "" }, Now: time.Now}, output: output}
	cmd := a.traceKFD(host) //nolint:contextcheck // cobra hands ctx to the command, in ExecuteContext
	cmd.SetOut(&out)
	cmd.SetErr(&complain)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(append([]string{"--duration", "20ms"}, args...))
	r := traceRun{}
	if err := cmd.ExecuteContext(ctx); err != nil {
		f, ok := errors.AsType[*failure](err)
		if !ok {
			f = &failure{code: ExitFailure, message: err.Error()}
		}
		f.print(&complain)
		r.code = f.code
	}
	r.out, r.complain = out.String(), complain.String()
	return r
}

const createdOne = `   10.000000 |   0)    gpctl-4242  |               |  /* gpreempt: begin */
   10.100000 |   0)    train-77    |               |  kfd_ioctl_create_queue [amdgpu]() {
   10.100100 |   0)    train-77    |   20.000 us   |    load_mqd_v9_4_3 [amdgpu]();
   10.100200 |   0)    train-77    |               |    /* amdgpu_iv: ih:0 client_id:0 */
   10.100600 |   0)    train-77    | # 1500.000 us |  } /* kfd_ioctl_create_queue [amdgpu] */
`

func hostWith(tracing kfdtrace.FS) traceHost {
	return traceHost{
		root: fstest.MapFS{
			"proc/sys/kernel/osrelease": {Data: []byte("6.12.0-test\n")}, "sys/class/kfd/kfd/proc": {Mode: fs.ModeDir | 0o755},
			"sys/module/amdgpu/version": {Data: []byte("6.12.12\n")},
		},
		tracefs: func() (kfdtrace.FS, error) { return tracing, nil },
		symbols: "/nowhere",
	}
}

func TestTraceShowsHowLongQueueOperationsTake(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	got := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), formatTable, "--output-dir", dir)
	lines := strings.Split(got.out, "\n")
	want := append([]string{
		lines[0], // the time it took
		"Nothing was lost; the buffer was 1MiB on each of 1 CPU.",
		"",
		"GROUP  FUNCTION                CALLS    MIN   MEAN    P50    P95    P99    MAX",
		"queue  kfd_ioctl_create_queue      1  1.5ms  1.5ms  1.5ms  1.5ms  1.5ms  1.5ms",
		"mqd    load_mqd_v9_4_3             1   20µs   20µs   20µs   20µs   20µs   20µs",
		"",
		"Creating a queue took 1.5ms at p99: over the design's target of 1ms.",
		"",
		"EVENT      COUNT",
		"amdgpu_iv      1",
		"",
	}, lines[12:]...)
	if diff := cmp.Diff(want, lines); diff != "" || got.code != ExitOK {
		t.Errorf("ended with %d (-want +got):\n%s\n%s", got.code, diff, got.complain)
	}
	if !strings.HasPrefix(lines[0], "Recorded ") || !strings.HasSuffix(lines[0], "ms on Linux 6.12.0-test; 2 functions followed by function_graph.") {
		t.Errorf("begins with %q", lines[0])
	}
	if !strings.Contains(got.out, "of the events and functions are not in this kernel; -o wide names them.\n\nWritten to "+dir+": trace.txt, report.json\n") {
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

	again := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), formatTable, "--output-dir", dir)
	if again.code != ExitRefused || !strings.Contains(again.complain, dir+" holds a recording already") {
		t.Errorf("a second recording in the same place: %+v", again)
	}
}

func TestTraceForPrograms(t *testing.T) {
	inJSON := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), formatJSON)
	var r kfdRecording
	if err := json.Unmarshal([]byte(inJSON.out), &r); err != nil || inJSON.code != ExitOK || len(r.Functions) != 2 {
		t.Errorf("%+v, %v", inJSON, err)
	}
	inYAML := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), formatYAML)
	if inYAML.code != ExitOK || !strings.HasPrefix(inYAML.out, "kernel: 6.12.0-test\ndriver_version: 6.12.12\nbegan: ") || !strings.Contains(inYAML.out, "max_ns: 1500000\n") {
		t.Errorf("%+v", inYAML)
	}
	wide := runTrace(t.Context(), hostWith(newPlainTracefs(t, createdOne)), formatWide)
	if wide.code != ExitOK || !strings.Contains(wide.out, "This kernel has no event amdkfd:kfd_evict_process_worker_start.\n") {
		t.Errorf("%+v", wide)
	}
}

func TestTraceOfWhatIsNamed(t *testing.T) {
	got := runTrace(t.Context(), hostWith(newPlainTracefs(t, "CPU:0 [LOST 7 EVENTS]\n")), formatTable, "--events", "sched:sched_switch")
	for _, want := range []string{
		"functions were not followed.\n7 events were lost, so calls are missing below; the buffer was 2MiB on each of 1 CPU, grown once.\n",
		"\nNo function that is followed was called.\n",
	} {
		if !strings.Contains(got.out, want) || got.code != ExitOK {
			t.Errorf("%+v, want %q", got, want)
		}
	}
}

func TestTraceEndsAsItsErrorsDo(t *testing.T) {
	bare := newPlainTracefs(t, "")
	noDriver := plainWithout{bare}
	for name, test := range map[string]struct {
		host traceHost
		args []string
		code int
		want string
	}{
		"no driver": {
			host: hostWith(noDriver), code: ExitNoGPU,
			want: "there is nothing to record: the amdgpu driver is not loaded\n  try: gpctl doctor tells about this host; --events and --functions record something else\n",
		},
		"no tracefs": {
			host: traceHost{root: fstest.MapFS{}, tracefs: func() (kfdtrace.FS, error) {
				return nil, &kfdtrace.Error{What: "tracefs is not mounted", Next: "mount it", Err: fs.ErrNotExist}
			}},
			code: ExitFailure, want: "gpctl: tracefs is not mounted: file does not exist\n  try: mount it\n",
		},
		"no root": {
			host: traceHost{root: fstest.MapFS{}, tracefs: func() (kfdtrace.FS, error) { return nil, &fs.PathError{Op: "open", Err: syscall.EACCES} }},
			code: ExitDenied, want: "permission denied",
		},
		"bad event":    {host: hostWith(bare), args: []string{"--events", "a b"}, code: ExitUsage, want: `"a b" is not the name of a trace event`},
		"bad duration": {host: hostWith(bare), args: []string{"--duration", "2h"}, code: ExitUsage, want: "--duration must be more than 0 and at most 1h"},
		"left behind": {
			host: hostWith(plainTracefs{Dir: newPlainTracefs(t, "").Dir, text: createdOne, removal: syscall.EBUSY}), code: ExitFailure,
			want: "something of the recording is left in the kernel's tracing, in instances/gpreempt-",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := runTrace(t.Context(), test.host, formatTable, test.args...)
			if got.code != test.code || !strings.Contains(got.complain, test.want) {
				t.Errorf("ended with %d: %s\nwant %d: %s", got.code, got.complain, test.code, test.want)
			}
			if name == "left behind" != strings.Contains(got.out, "kfd_ioctl_create_queue") {
				t.Errorf("printed %q", got.out)
			}
		})
	}
}

// plainWithout is a host without the driver.
type plainWithout struct{ plainTracefs }

func (p plainWithout) ReadFile(name string) ([]byte, error) {
	if name == "available_filter_functions" {
		return []byte("vfs_read\n"), nil
	}
	return p.plainTracefs.ReadFile(name)
}

func (p plainWithout) Write(name, data string) error {
	if strings.Contains(name, "/events/amdgpu/") {
		return fs.ErrNotExist
	}
	return p.plainTracefs.Write(name, data)
}

func TestNoTraceIsLeftOfARecordingThatCouldNotBegin(t *testing.T) {
	dir := t.TempDir()
	got := runTrace(t.Context(), hostWith(plainWithout{newPlainTracefs(t, "")}), formatTable, "--output-dir", dir)
	if got.code != ExitNoGPU {
		t.Errorf("%+v", got)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) > 0 {
		t.Errorf("left %v, %v", files, err)
	}
}
