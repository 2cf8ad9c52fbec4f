package kfdtrace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/stat/histogram"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

func (k *fakeKernel) options() Options {
	return Options{FS: k, Symbols: k.symbols(), Duration: 10 * time.Second}
}

// ignoreClock leaves out what the wall clock decides.
var ignoreClock = cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "Began" }, cmp.Ignore())

func exactly(name, group string, took ...time.Duration) FunctionCalls {
	var h histogram.Histogram
	for _, d := range took {
		h.Add(uint64(d))
	}
	return FunctionCalls{Name: name, Group: group, Latency: latency(&h)}
}

func wantNoResidue(t *testing.T, k *fakeKernel) {
	t.Helper()
	if left := residue(t, k); left != nil {
		t.Errorf("remaining in the kernel: %v", left)
	}
}

const probeText = `           gplab-4242    [000] .....   10.000000: tracing_mark_write: gpreempt: begin
           train-77      [001] .....   10.100000: enter_pqm_create_queue: (pqm_create_queue+0x4/0xf0 [amdgpu])
           train-77      [001] .....   10.100100: enter_init_mqd__2: (init_mqd+0x4/0xf0 [amdgpu])
           other-78      [000] .....   10.100110: enter_pqm_create_queue: (pqm_create_queue+0x4/0xf0 [amdgpu])
           train-77      [001] .....   10.100120: leave_init_mqd__2: (pqm_create_queue+0xbf/0x240 <- init_mqd)
           train-77      [000] .....   10.100700: leave_pqm_create_queue: (kfd_ioctl+0xbf/0x240 <- pqm_create_queue)
CPU:1 [LOST 5 EVENTS]
           other-78      [000] .....   10.200000: leave_pqm_create_queue: (kfd_ioctl+0xbf/0x240 <- pqm_create_queue)
           <idle>-0      [001] d.h..   10.300000: amdgpu_iv: ih:0 client_id:0
            comp-90      [001] .....   10.300100: drm_run_job: entity=000000001, id=7, fence=000000002, ring=comp_1.0.0, job count:0, hw job count:1
            comp-90      [001] .....   10.300200: amdgpu_sched_run_job: sched_job=7, timeline=comp_1.0.0, context=8, seqno=1, ring_name=comp_1.0.0, num_ibs=1
            sdma-91      [001] .....   10.300300: drm_run_job: entity=000000001, id=8, fence=000000002, ring=sdma0, job count:0, hw job count:1
`

func TestDriverIsRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		var during, defined []string
		k.trace = []func() string{func() string {
			for _, name := range []string{
				"tracing_on", "trace_clock", "buffer_size_kb", "options/raw", "options/irq-info", "events/amdgpu/amdgpu_iv/enable",
				"events/sched/sched_switch/enable", "events/gpreempt/enable", "trace_marker",
			} {
				during = append(during, name+" "+k.get(instance+"/"+name))
			}
			during = append(during, "top "+k.get("events/gpreempt/enable"))
			defined = strings.Split(k.get(kprobeEvents), "\n")
			return probeText
		}}
		var raw bytes.Buffer
		o := k.options()
		o.Raw = &raw
		started := 0
		o.Started = func() { started++ }
		got, err := Record(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		compute := uint64(1) // two events say the same, and the SDMA ring does not count
		want := &Report{
			BeganClock: 10 * time.Second, Duration: 10 * time.Second, Followed: 4, Lost: 5, Buffer: Buffer{PerCPUKiB: 2048, CPUs: 2, Grown: 1},
			Functions: []FunctionCalls{
				{
					Name: "pqm_create_queue", Group: GroupQueue, Torn: 2, // the lost one, and the end without a beginning
					Latency: exactly("", "", 700*time.Microsecond).Latency,
				},
				exactly("init_mqd", GroupMQD, 20*time.Microsecond),
			},
			Events: []EventCount{{"drm_run_job", 2}, {"amdgpu_iv", 1}, {"amdgpu_sched_run_job", 1}}, KernelCompute: &compute, Queues: []QueueChange{}, Warnings: []string{},
			MissingEvents: got.MissingEvents, MissingFunctions: got.MissingFunctions,
		}
		if diff := cmp.Diff(want, got, ignoreClock); diff != "" {
			t.Errorf("report (-want +got):\n%s", diff)
		}
		wantDuring := []string{
			"tracing_on 1", "trace_clock mono", "buffer_size_kb 1024", "options/raw 0", "options/irq-info 1", "events/amdgpu/amdgpu_iv/enable 1",
			"events/sched/sched_switch/enable 0", "events/gpreempt/enable 1", "trace_marker gpreempt: begin", "top 0",
		}
		if diff := cmp.Diff(wantDuring, during); diff != "" {
			t.Errorf("while recording (-want +got):\n%s", diff)
		}
		wantDefined := []string{
			"p:gpreempt/enter_pqm_create_queue 0xffffffffc0700040", "r10:gpreempt/leave_pqm_create_queue 0xffffffffc0700040",
			"p:gpreempt/enter_pqm_destroy_queue 0xffffffffc0700080", "r10:gpreempt/leave_pqm_destroy_queue 0xffffffffc0700080",
			"p:gpreempt/enter_init_mqd 0xffffffffc07000c0", "r10:gpreempt/leave_init_mqd 0xffffffffc07000c0",
			"p:gpreempt/enter_init_mqd__2 0xffffffffc0700100", "r10:gpreempt/leave_init_mqd__2 0xffffffffc0700100",
			"p:gpreempt/enter_execute_queues_cpsch 0xffffffffc0700140", "r10:gpreempt/leave_execute_queues_cpsch 0xffffffffc0700140",
		}
		if diff := cmp.Diff(wantDefined, defined); diff != "" {
			t.Errorf("probes (-want +got):\n%s", diff)
		}
		if raw.String() != probeText || started != 1 {
			t.Errorf("started %d times, raw is %q", started, raw.String())
		}
		if !slices.Contains(got.MissingEvents, "amdkfd:kfd_evict_process_worker_start") || !slices.Contains(got.MissingFunctions, "load_mqd*") ||
			slices.Contains(got.MissingEvents, "gpu_scheduler:drm_sched_job_run") { // it exists under its former name
			t.Errorf("missing: %v %v", got.MissingEvents, got.MissingFunctions)
		}
		wantNoResidue(t, k)
	})
}

func TestEventsAreRecordedWhereFunctionsCannotBeFollowed(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(k *fakeKernel, o *Options)
		warning string
	}{
		"no kprobes": {
			change:  func(k *fakeKernel, _ *Options) { delete(k.files, kprobeEvents) },
			warning: "functions are not followed: this kernel has no kprobe events",
		},
		"no symbols": {
			change:  func(_ *fakeKernel, o *Options) { o.Symbols += ".absent" },
			warning: "functions are not followed: open ",
		},
		"addresses are hidden": {
			change: func(k *fakeKernel, o *Options) {
				if err := os.WriteFile(o.Symbols, []byte("0 t init_mqd\t[amdgpu]\n0 T pqm_create_queue\t[amdgpu]\n"), 0o600); err != nil {
					k.t.Fatal(err)
				}
			},
			warning: "functions are not followed: the kernel hides their addresses; set kernel.kptr_restrict to 1 or less",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newFakeKernel(t)
				o := k.options()
				test.change(k, &o)
				k.trace = []func() string{chunk(probeText)}
				got, err := Record(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				if got.Followed != 0 || len(got.Warnings) != 1 || !strings.HasPrefix(got.Warnings[0], test.warning) {
					t.Errorf("%d followed, warnings %q, want %q", got.Followed, got.Warnings, test.warning)
				}
				if !slices.Contains(got.Events, EventCount{"amdgpu_iv", 1}) {
					t.Errorf("events %v", got.Events)
				}
				wantNoResidue(t, k)
			})
		})
	}
}

func TestFunctionThatCannotBeProbedIsLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		o := k.options()
		if _, err := Record(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		k.fail, k.err = slices.Index(k.calls, "write "+kprobeEvents)+1, syscall.EINVAL
		k.calls = nil
		got, err := Record(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		want := "1 of 5 functions could not be probed: write kprobe_events: invalid argument"
		if diff := cmp.Diff([]string{want}, got.Warnings); diff != "" || got.Followed != 3 || !slices.Contains(got.MissingFunctions, "pqm_create_queue") {
			t.Errorf("%d followed, missing %v, warnings (-want +got):\n%s", got.Followed, got.MissingFunctions, diff)
		}
		wantNoResidue(t, k)
	})
}

func TestBufferIsAsSmallAsWorks(t *testing.T) {
	for name, test := range map[string]struct {
		cpus, memoryKiB, losses int
		want                    Buffer
		failed                  bool
	}{
		"enough":              {cpus: 2, memoryKiB: 8 << 10, want: Buffer{PerCPUKiB: 1024, CPUs: 2}},
		"many CPUs":           {cpus: 64, memoryKiB: 1 << 20, want: Buffer{PerCPUKiB: 64, CPUs: 64}},
		"more CPUs than room": {cpus: 1024, memoryKiB: 1 << 20, want: Buffer{PerCPUKiB: 8, CPUs: 1024}},
		"a quarter":           {cpus: 2, memoryKiB: 700, want: Buffer{PerCPUKiB: 256, CPUs: 2, Limited: true}},
		"none":                {cpus: 2, memoryKiB: 15, failed: true},
		"grows":               {cpus: 2, memoryKiB: 1 << 20, losses: 3, want: Buffer{PerCPUKiB: 8 << 10, CPUs: 2, Grown: 3}},
		"may not grow":        {cpus: 2, memoryKiB: 3 << 10, losses: 3, want: Buffer{PerCPUKiB: 1024, CPUs: 2, Limited: true}},
		"grows to the most":   {cpus: 2, memoryKiB: 1 << 30, losses: 20, want: Buffer{PerCPUKiB: mostTotalKiB / 2, CPUs: 2, Grown: 7, Limited: true}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newFakeKernel(t)
				k.cpus, k.memoryKiB = test.cpus, test.memoryKiB
				k.trace = slices.Repeat([]func() string{chunk("CPU:0 [LOST 10 EVENTS]\n")}, test.losses)
				got, err := Record(t.Context(), k.options())
				if test.failed {
					if !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), "no memory for a trace buffer") {
						t.Errorf("error %v", err)
					}
				} else {
					if err != nil {
						t.Fatal(err)
					}
					if diff := cmp.Diff(test.want, got.Buffer); diff != "" {
						t.Errorf("buffer (-want +got):\n%s", diff)
					}
					if got.Lost != uint64(10*test.losses) {
						t.Errorf("%d lost", got.Lost)
					}
				}
				wantNoResidue(t, k)
			})
		})
	}
}

func TestInterruptEndsTheRecordingEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		ctx, cancel := context.WithCancel(t.Context())
		k.trace = []func() string{func() string { cancel(); return probeText }, chunk("CPU:1 [LOST 1 EVENTS]")}
		got, err := Record(ctx, k.options())
		if err != nil {
			t.Fatal(err)
		}
		if !got.Interrupted || got.Duration != 0 || got.Lost != 6 { // what remained in the buffer is read
			t.Errorf("got %+v", got)
		}
		wantNoResidue(t, k)
	})
}

func TestWhatCannotBeRecordedIsAnError(t *testing.T) {
	for name, test := range map[string]struct {
		change func(k *fakeKernel, o *Options)
		want   string
		is     error
	}{
		"no driver": {
			change: func(k *fakeKernel, o *Options) {
				k.events, k.functions = nil, []string{"vfs_read"}
				o.Symbols = k.symbols()
				maps.DeleteFunc(k.files, func(name, _ string) bool { return strings.HasPrefix(name, "events/") })
			},
			want: "there is nothing to record: the amdgpu driver is not loaded", is: ErrNoDriver,
		},
		"unknown names": {
			change: func(_ *fakeKernel, o *Options) { o.Events, o.Functions = []string{"no:such"}, []string{"nothing"} },
			want:   "there is nothing to record: the kernel has no event no:such; the kernel has no function nothing",
		},
		"an event that instances cannot have": {
			change: func(k *fakeKernel, o *Options) { k.unfit, o.Events = "sched_switch", []string{"sched:sched_switch"} },
			want:   "there is nothing to record: the kernel has no event sched:sched_switch",
		},
		"bad event":        {change: func(_ *fakeKernel, o *Options) { o.Events = []string{"sched:../x"} }, want: `invalid trace event "sched:../x"`},
		"bad function":     {change: func(_ *fakeKernel, o *Options) { o.Functions = []string{"a b"} }, want: `invalid kernel function "a b"`},
		"bad pattern":      {change: func(_ *fakeKernel, o *Options) { o.Functions = []string{"a["} }, want: `invalid kernel function "a["`},
		"no root":          {change: func(k *fakeKernel, _ *Options) { k.fail, k.err = 1, syscall.EACCES }, want: "the kernel's tracing cannot be set up: mkdir instances/gpreempt: permission denied", is: fs.ErrPermission},
		"no memory at all": {change: func(k *fakeKernel, _ *Options) { k.fail, k.err = 1, syscall.ENOMEM }, want: "the kernel has no memory for another trace buffer", is: syscall.ENOMEM},
		"too many functions": {
			change: func(k *fakeKernel, o *Options) {
				for i := range maxFunctions {
					k.functions = append(k.functions, fmt.Sprintf("f%d", i))
				}
				o.Symbols, o.Functions = k.symbols(), []string{"[!_]*"}
			},
			want: fmt.Sprintf("the names match %d functions of the kernel; a recording follows at most 500", maxFunctions+7),
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newFakeKernel(t)
				o := k.options()
				test.change(k, &o)
				_, err := Record(t.Context(), o)
				if err == nil || !strings.HasPrefix(err.Error(), test.want) || test.is != nil && !errors.Is(err, test.is) {
					t.Errorf("error %v, want %s", err, test.want)
				}
				if e, ok := errors.AsType[*Error](err); !ok || e.Next == "" && test.is != nil {
					t.Errorf("%v has no advice", err)
				}
				wantNoResidue(t, k)
			})
		})
	}
}

// Each call to the kernel fails once, with errors of each kind. Nothing remains; where
// the removal itself failed, the error reports it and the next run removes the rest.
func TestNothingRemainsAfterAnyFailure(t *testing.T) {
	for _, errno := range []error{syscall.EIO, syscall.EBUSY, syscall.ENOMEM, syscall.EINVAL, syscall.EPERM} {
		for fail := 1; ; fail++ {
			calls := 0
			synctest.Test(t, func(t *testing.T) {
				k := newFakeKernel(t)
				k.trace, k.fail, k.err = []func() string{chunk(probeText)}, fail, errno
				o := k.options()
				o.Duration = 2 * readEvery // each read is a call
				_, err := Record(t.Context(), o)
				calls = len(k.calls)
				failed := "nothing"
				if fail <= calls {
					failed = k.calls[fail-1]
				}
				k.fail = 0
				left := residue(t, k)
				if left == nil {
					return
				}
				e, ok := errors.AsType[*Error](err)
				if !ok || !strings.Contains(e.What, "remain in the kernel's tracing") {
					t.Errorf("%s failed with %v: %v remains, and the error is %v", failed, errno, left, err)
				}
				if strings.HasPrefix(failed, "rmdir ") { // what cannot be removed is off
					got := []string{k.get(instance + "/tracing_on"), k.get(instance + "/events/amdgpu/amdgpu_iv/enable")}
					if diff := cmp.Diff([]string{"0", "0"}, got); diff != "" {
						t.Errorf("still on (-want +got):\n%s", diff)
					}
				}
				if _, err := Record(t.Context(), o); err != nil {
					t.Errorf("the run after %s failed: %v", failed, err)
				}
				if left = residue(t, k); len(left) > 0 {
					t.Errorf("%s failed with %v: after the next run %v remains", failed, errno, left)
				}
			})
			if fail > calls {
				break
			}
		}
	}
}

func TestOneRecordingAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		var second error
		k.trace = []func() string{func() string {
			_, second = Record(t.Context(), k.options())
			return probeText
		}}
		got, err := Record(t.Context(), k.options())
		if err != nil || len(got.Functions) == 0 {
			t.Errorf("the first recording: %+v, %v", got, err)
		}
		if !errors.Is(second, ErrLocked) || !strings.HasPrefix(second.Error(), "another gplab trace kfd is recording on this host") {
			t.Errorf("the second recording: %v", second)
		}
		wantNoResidue(t, k)
	})
}

func TestKilledRunIsRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		for _, dir := range []string{instance, "instances/somebody", "instances/gpreempt-lab"} {
			if err := k.Mkdir(dir); err != nil {
				t.Fatal(err)
			}
		}
		for _, probe := range []string{"p:gpreempt/enter_f 0x1", "p:gpreempt_lab/f 0x1"} {
			if err := k.Write(kprobeEvents, probe); err != nil {
				t.Fatal(err)
			}
		}
		if err := k.Write(instance+"/events/gpreempt/enable", "1"); err != nil {
			t.Fatal(err)
		}
		if _, err := Record(t.Context(), k.options()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"gpreempt-lab", "somebody"}, k.list("instances")); diff != "" {
			t.Errorf("instances (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff("p:gpreempt_lab/f 0x1", k.get(kprobeEvents)); diff != "" {
			t.Errorf("probes (-want +got):\n%s", diff)
		}
	})
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestFullDiskEndsTheRecording(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		k.trace = []func() string{chunk(probeText)}
		o := k.options()
		o.Raw = brokenWriter{}
		if _, err := Record(t.Context(), o); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("error %v", err)
		}
		wantNoResidue(t, k)
	})
}
