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

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

const pid = 4242

func (k *fakeKernel) options() Options {
	return Options{FS: k, Symbols: k.symbols(), Duration: 10 * time.Second, PID: pid}
}

// ignoreClock leaves out what the wall clock decides.
var ignoreClock = cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "Began" }, cmp.Ignore())

func exactly(name, group string, took ...time.Duration) FunctionCalls {
	var h histogram
	for _, d := range took {
		h.add(d)
	}
	return FunctionCalls{Name: name, Group: group, Latency: h.latency()}
}

const graphText = `   10.000000 |   0)    gpctl-4242  |               |  /* gpreempt: begin */
   10.100000 |   1)    train-77    |               |  pqm_create_queue [amdgpu]() {
   10.100100 |   1)    train-77    |   20.500 us   |    init_mqd [amdgpu]();
   10.100200 |   1)    train-77    | ! 300.000 us  |    execute_queues_cpsch.constprop.0 [amdgpu]();
   10.100600 |   1)    train-77    | ! 700.000 us  |  } /* pqm_create_queue [amdgpu] */
   10.200000 |   0)   <idle>-0     |               |  /* amdgpu_iv: ih:0 client_id:0 */
   10.300000 |   1)    train-77    |               |  pqm_destroy_queue [amdgpu]() {
`

func TestDriverIsRecordedByGraph(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		var during []string
		k.trace = []func() string{func() string {
			dir := "instances/gpreempt-4242/"
			for _, name := range []string{
				"tracing_on", "trace_clock", "buffer_size_kb", "current_tracer", "set_ftrace_filter", "options/raw", "options/irq-info",
				"events/amdgpu/amdgpu_iv/enable", "events/sched/sched_switch/enable", "trace_marker",
			} {
				during = append(during, name+" "+k.get(dir+name))
			}
			during = append(during, "top "+k.get("current_tracer"), "top "+k.get("options/funcgraph-tail"))
			return graphText
		}}
		var raw bytes.Buffer
		o := k.options()
		o.Raw = &raw
		var started string
		o.Started = func(by string) { started = by }
		got, err := Record(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		want := &Report{
			BeganClock: 10 * time.Second, Duration: 10 * time.Second, FunctionsBy: ByGraph, Followed: 4, Lines: 7,
			Buffer: Buffer{PerCPUKiB: 1026, CPUs: 2},
			Functions: []FunctionCalls{
				exactly("pqm_create_queue", GroupQueue, 700*time.Microsecond),
				{Name: "pqm_destroy_queue", Group: GroupQueue, Torn: 1},
				exactly("execute_queues_cpsch", GroupScheduler, 300*time.Microsecond),
				exactly("init_mqd", GroupMQD, 20500),
			},
			Events: []EventCount{{"amdgpu_iv", 1}}, Queues: []QueueChange{}, Warnings: []string{},
			MissingEvents: got.MissingEvents, MissingFunctions: got.MissingFunctions,
		}
		if diff := cmp.Diff(want, got, ignoreClock); diff != "" {
			t.Errorf("report (-want +got):\n%s", diff)
		}
		if started != ByGraph {
			t.Errorf("started with %q", started)
		}
		wantDuring := []string{
			"tracing_on 1", "trace_clock mono", "buffer_size_kb 1026", "current_tracer function_graph",
			"set_ftrace_filter pqm_create_queue [amdgpu]\npqm_destroy_queue [amdgpu]\ninit_mqd [amdgpu]\ninit_mqd [amdgpu]\nexecute_queues_cpsch.constprop.0 [amdgpu]",
			"options/raw 0", "options/irq-info 1", "events/amdgpu/amdgpu_iv/enable 1", "events/sched/sched_switch/enable 0",
			"trace_marker gpreempt: begin", "top nop", "top 1",
		}
		if diff := cmp.Diff(wantDuring, during); diff != "" {
			t.Errorf("while recording (-want +got):\n%s", diff)
		}
		if raw.String() != graphText {
			t.Errorf("raw is %q", raw.String())
		}
		if !slices.Contains(got.MissingEvents, "amdkfd:kfd_evict_process_worker_start") || !slices.Contains(got.MissingFunctions, "load_mqd*") ||
			slices.Contains(got.MissingEvents, "gpu_scheduler:drm_sched_job_run") { // it is there by its former name
			t.Errorf("missing: %v %v", got.MissingEvents, got.MissingFunctions)
		}
		if left := residue(t, k); left != nil {
			t.Errorf("left in the kernel: %v", left)
		}
	})
}

const probeText = `           gpctl-4242    [000] .....   10.000000: tracing_mark_write: gpreempt: begin
           train-77      [001] .....   10.100000: enter_pqm_create_queue: (pqm_create_queue+0x4/0xf0 [amdgpu])
           train-77      [001] .....   10.100100: enter_init_mqd__2: (init_mqd+0x4/0xf0 [amdgpu])
           other-78      [000] .....   10.100110: enter_pqm_create_queue: (pqm_create_queue+0x4/0xf0 [amdgpu])
           train-77      [001] .....   10.100120: leave_init_mqd__2: (pqm_create_queue+0xbf/0x240 <- init_mqd)
           train-77      [000] .....   10.100700: leave_pqm_create_queue: (kfd_ioctl+0xbf/0x240 <- pqm_create_queue)
CPU:1 [LOST 5 EVENTS]
           other-78      [000] .....   10.200000: leave_pqm_create_queue: (kfd_ioctl+0xbf/0x240 <- pqm_create_queue)
           <idle>-0      [001] d.h..   10.300000: amdgpu_iv: ih:0 client_id:0
`

func (k *fakeKernel) withoutGraph() *fakeKernel {
	k.tracers = "function nop"
	return k
}

func TestOlderKernelsFollowFunctionsByProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t).withoutGraph()
		var defined []string
		k.trace = []func() string{func() string {
			defined = strings.Split(k.get(kprobeEvents), "\n")
			if k.get("instances/gpreempt-4242/events/gpreempt_4242/enable") != "1" || k.get("events/gpreempt_4242/enable") != "0" {
				t.Error("the probes are not on in the instance alone")
			}
			return probeText
		}}
		got, err := Record(t.Context(), k.options())
		if err != nil {
			t.Fatal(err)
		}
		want := &Report{
			BeganClock: 10 * time.Second, Duration: 10 * time.Second, FunctionsBy: ByProbes, Followed: 4, Lines: 9, Lost: 5,
			Buffer: Buffer{PerCPUKiB: 2054, CPUs: 2, Grown: 1},
			Functions: []FunctionCalls{
				{
					Name: "pqm_create_queue", Group: GroupQueue, Torn: 2, // the lost one, and the end without a beginning
					Latency: exactly("", "", 700*time.Microsecond).Latency,
				},
				exactly("init_mqd", GroupMQD, 20*time.Microsecond),
			},
			Events: []EventCount{{"amdgpu_iv", 1}}, Queues: []QueueChange{}, Warnings: []string{},
			MissingEvents: got.MissingEvents, MissingFunctions: got.MissingFunctions,
		}
		if diff := cmp.Diff(want, got, ignoreClock); diff != "" {
			t.Errorf("report (-want +got):\n%s", diff)
		}
		wantDefined := []string{
			"p:gpreempt_4242/enter_pqm_create_queue 0xffffffffc0700040", "r10:gpreempt_4242/leave_pqm_create_queue 0xffffffffc0700040",
			"p:gpreempt_4242/enter_pqm_destroy_queue 0xffffffffc0700080", "r10:gpreempt_4242/leave_pqm_destroy_queue 0xffffffffc0700080",
			"p:gpreempt_4242/enter_init_mqd 0xffffffffc07000c0", "r10:gpreempt_4242/leave_init_mqd 0xffffffffc07000c0",
			"p:gpreempt_4242/enter_init_mqd__2 0xffffffffc0700100", "r10:gpreempt_4242/leave_init_mqd__2 0xffffffffc0700100",
			"p:gpreempt_4242/enter_execute_queues_cpsch 0xffffffffc0700140", "r10:gpreempt_4242/leave_execute_queues_cpsch 0xffffffffc0700140",
		}
		if diff := cmp.Diff(wantDefined, defined); diff != "" {
			t.Errorf("probes (-want +got):\n%s", diff)
		}
		if left := residue(t, k); left != nil {
			t.Errorf("left in the kernel: %v", left)
		}
	})
}

func TestFunctionsAreFollowedInTheWayThatWorks(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(k *fakeKernel, o *Options)
		by      string
		warning string
		check   func(t *testing.T, k *fakeKernel)
	}{
		"somebody looks at a graph": {
			change: func(k *fakeKernel, _ *Options) { k.put("current_tracer", "function_graph") },
			by:     ByProbes,
			check: func(t *testing.T, k *fakeKernel) {
				if slices.Contains(k.calls, "write instances/gpreempt-4242/options/funcgraph-proc") {
					t.Error("the format of somebody's graph was changed")
				}
			},
		},
		"an instance looks at a graph": {
			change: func(k *fakeKernel, _ *Options) { k.put("instances/theirs/current_tracer", "function_graph") },
			by:     ByProbes,
		},
		"somebody looks at a graph in our format": {
			change: func(k *fakeKernel, _ *Options) {
				k.put("current_tracer", "function_graph")
				for _, option := range graphOptions {
					k.put("options/"+option, "1")
				}
			},
			by: ByGraph,
			check: func(t *testing.T, k *fakeKernel) {
				if got := k.get("options/funcgraph-proc"); got != "1" {
					t.Errorf("an option that was on is %q", got)
				}
			},
		},
		"a module went": {
			change: func(k *fakeKernel, _ *Options) { k.filtered = []string{"#### all functions enabled ####"} },
			by:     ByProbes,
			check: func(t *testing.T, k *fakeKernel) {
				if slices.Contains(k.calls, "write instances/gpreempt-4242/current_tracer") {
					t.Error("the tracer was on without its filter")
				}
			},
		},
		"functions are not listed": {
			change: func(k *fakeKernel, _ *Options) { delete(k.files, functionsFile) },
			by:     ByProbes,
		},
		"no way": {
			change: func(k *fakeKernel, _ *Options) {
				k.withoutGraph()
				delete(k.files, kprobeEvents)
			},
			by:      ByNone,
			warning: "functions are not followed: not by function_graph, because instances of this kernel do not have it; not by kprobes, because this kernel has no kprobe events",
		},
		"no symbols": {
			change: func(k *fakeKernel, o *Options) {
				k.withoutGraph()
				o.Symbols += ".absent"
			},
			by: ByNone, warning: "functions are not followed: not by function_graph, because instances of this kernel do not have it; not by kprobes, because open ",
		},
		"addresses are hidden": {
			change: func(k *fakeKernel, o *Options) {
				k.withoutGraph()
				text := "0 t init_mqd\t[amdgpu]\n0 t init_mqd\t[amdgpu]\n0 T pqm_create_queue\t[amdgpu]\n"
				k.functions = []string{"init_mqd [amdgpu]", "pqm_create_queue [amdgpu]"}
				if err := os.WriteFile(o.Symbols, []byte(text), 0o600); err != nil {
					k.t.Fatal(err)
				}
			},
			by:      ByProbes,
			warning: "1 of 3 functions could not be probed: several functions are called init_mqd, and the kernel hides their addresses",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newFakeKernel(t)
				o := k.options()
				test.change(k, &o)
				before := residue(t, k)
				got, err := Record(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				if got.FunctionsBy != test.by || (test.warning == "") != (len(got.Warnings) == 0) && test.by != ByNone {
					t.Errorf("by %q, warnings %q", got.FunctionsBy, got.Warnings)
				}
				if test.warning != "" && (len(got.Warnings) != 1 || !strings.HasPrefix(got.Warnings[0], test.warning)) {
					t.Errorf("warnings %q, want %q", got.Warnings, test.warning)
				}
				if test.check != nil {
					test.check(t, k)
				}
				if diff := cmp.Diff(before, residue(t, k)); diff != "" {
					t.Errorf("left in the kernel (-before +after):\n%s", diff)
				}
			})
		})
	}
}

func TestBufferIsAsSmallAsWorks(t *testing.T) {
	lossy := func(n int) []func() string {
		var list []func() string
		for range n {
			list = append(list, chunk("CPU:0 [LOST 10 EVENTS]\n"))
		}
		return list
	}
	for name, test := range map[string]struct {
		cpus, memoryKiB, losses int
		want                    Buffer
		failed                  bool
	}{
		"enough":              {cpus: 2, memoryKiB: 8 << 10, want: Buffer{PerCPUKiB: 1026, CPUs: 2}},
		"many CPUs":           {cpus: 64, memoryKiB: 1 << 20, want: Buffer{PerCPUKiB: 66, CPUs: 64}},
		"more CPUs than room": {cpus: 1024, memoryKiB: 1 << 20, want: Buffer{PerCPUKiB: 10, CPUs: 1024}},
		"a quarter":           {cpus: 2, memoryKiB: 700, want: Buffer{PerCPUKiB: 258, CPUs: 2, Limited: true}},
		"none":                {cpus: 2, memoryKiB: 15, failed: true},
		"grows":               {cpus: 2, memoryKiB: 1 << 20, losses: 3, want: Buffer{PerCPUKiB: (((1026*2+2)*2 + 2) * 2) + 2, CPUs: 2, Grown: 3}},
		"may not grow":        {cpus: 2, memoryKiB: 3 << 10, losses: 3, want: Buffer{PerCPUKiB: 1026, CPUs: 2, Limited: true}},
		"grows to the most":   {cpus: 2, memoryKiB: 1 << 30, losses: 20, want: Buffer{PerCPUKiB: mostTotalKiB/2 + 2, CPUs: 2, Grown: 7, Limited: true}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newFakeKernel(t)
				k.cpus, k.memoryKiB, k.trace = test.cpus, test.memoryKiB, lossy(test.losses)
				k.lost = 1000
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
					if got.Lost != 1000 {
						t.Errorf("%d lost, want what the buffers count", got.Lost)
					}
				}
				if left := residue(t, k); left != nil {
					t.Errorf("left in the kernel: %v", left)
				}
			})
		})
	}
}

func TestInterruptEndsTheRecordingEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		ctx, cancel := context.WithCancel(t.Context())
		k.trace = []func() string{func() string { cancel(); return graphText }, chunk("CPU:1 [LOST 1 EVENTS]")}
		got, err := Record(ctx, k.options())
		if err != nil {
			t.Fatal(err)
		}
		if !got.Interrupted || got.Duration != 0 || got.Lines != 8 || got.Lost != 1 { // what was left in the buffer is read
			t.Errorf("got %+v", got)
		}
		if left := residue(t, k); left != nil {
			t.Errorf("left in the kernel: %v", left)
		}
	})
}

func TestWhatCannotBeRecordedIsSaid(t *testing.T) {
	for name, test := range map[string]struct {
		change func(k *fakeKernel, o *Options)
		want   string
		is     error
	}{
		"no driver": {
			change: func(k *fakeKernel, _ *Options) {
				k.events, k.functions = nil, []string{"vfs_read"}
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
		"bad event":        {change: func(_ *fakeKernel, o *Options) { o.Events = []string{"sched:../x"} }, want: `"sched:../x" is not the name of a trace event`},
		"bad function":     {change: func(_ *fakeKernel, o *Options) { o.Functions = []string{"a b"} }, want: `"a b" is not the name of a kernel function`},
		"bad pattern":      {change: func(_ *fakeKernel, o *Options) { o.Functions = []string{"a["} }, want: `"a[" is not the name of a kernel function`},
		"no root":          {change: func(k *fakeKernel, _ *Options) { k.fail, k.err = 1, syscall.EACCES }, want: "the kernel's tracing cannot be set up: lock instances: permission denied", is: fs.ErrPermission},
		"no memory at all": {change: func(k *fakeKernel, _ *Options) { k.fail, k.err = 4, syscall.ENOMEM }, want: "the kernel has no memory for another trace buffer", is: syscall.ENOMEM},
		"too many functions": {
			change: func(k *fakeKernel, o *Options) {
				for i := range maxFunctions {
					k.functions = append(k.functions, fmt.Sprintf("f%d", i))
				}
				o.Functions = []string{"*"}
			},
			want: fmt.Sprintf("the names stand for %d functions of the kernel, more than the 500 one recording takes", maxFunctions+7),
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
					t.Errorf("%v does not say what to do", err)
				}
				if left := residue(t, k); left != nil {
					t.Errorf("left in the kernel: %v", left)
				}
			})
		})
	}
}

// Each call to the kernel fails once, in either way of following functions, with
// errors of each kind. Nothing is left; where undoing itself failed, the error says
// so and the next run clears it away.
func TestNothingIsLeftAfterAnyFailure(t *testing.T) {
	for _, graph := range []bool{true, false} {
		for _, errno := range []error{syscall.EIO, syscall.EBUSY, syscall.ENOMEM, syscall.EINVAL, syscall.EPERM} {
			for fail := 1; ; fail++ {
				calls := 0
				synctest.Test(t, func(t *testing.T) {
					k := newFakeKernel(t)
					if !graph {
						k.withoutGraph()
					}
					k.trace, k.fail, k.err = []func() string{chunk(graphText + "CPU:1 [LOST 1 EVENTS]\n")}, fail, errno
					o := k.options()
					o.Duration = 2 * readEvery // each read is a call
					_, err := Record(t.Context(), o)
					calls = len(k.calls)
					what := "nothing"
					if fail <= calls {
						what = k.calls[fail-1]
					}
					k.fail = 0
					left := residue(t, k)
					if left == nil {
						return
					}
					e, ok := errors.AsType[*Error](err)
					if !ok || !strings.Contains(e.What, "is left in the kernel's tracing") {
						t.Errorf("%s failed with %v: it left %v, and the error is %v", what, errno, left, err)
					}
					// What cannot be removed is off.
					if dir := "instances/gpreempt-4242"; strings.HasPrefix(what, "rmdir ") {
						got := []string{k.get(dir + "/tracing_on"), k.get(dir + "/current_tracer"), k.get(dir + "/events/amdgpu/amdgpu_iv/enable")}
						if diff := cmp.Diff([]string{"0", "nop", "0"}, got); diff != "" {
							t.Errorf("left on (-want +got):\n%s", diff)
						}
					}
					o.PID++
					if _, err := Record(t.Context(), o); err != nil {
						t.Errorf("the run after %s failed: %v", what, err)
					}
					left = slices.DeleteFunc(residue(t, k), func(s string) bool { return strings.HasPrefix(s, "funcgraph-") })
					if len(left) > 0 {
						t.Errorf("%s failed with %v: the next run left %v", what, errno, left)
					}
				})
				if fail > calls {
					break
				}
			}
		}
	}
}

func TestLivingRunsAreLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		var inner *Report
		var innerErr error
		k.trace = []func() string{func() string { // another process of the same pid, in another pid namespace
			k.trace = append(k.trace, func() string {
				if left := residue(t, k); !slices.Contains(left, "instances/gpreempt-4242") || !slices.Contains(left, "instances/gpreempt-4242-2") {
					t.Errorf("the instances are %v", left)
				}
				return ""
			})
			k.piped-- // its pipe is not that of the instance that is removed
			inner, innerErr = Record(t.Context(), k.options())
			k.piped++
			return ""
		}}
		if _, err := Record(t.Context(), k.options()); err != nil || innerErr != nil || inner == nil {
			t.Fatal(err, innerErr)
		}
	})
}

func TestDeadRunsAreClearedAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		if err := k.Mkdir("instances/gpreempt-1"); err != nil {
			t.Fatal(err)
		}
		for _, theirs := range []string{"somebody", "gpreempt-lab", "gpreempt-"} {
			if err := k.Mkdir("instances/" + theirs); err != nil {
				t.Fatal(err)
			}
		}
		for _, probe := range []string{"p:gpreempt_1/enter_f 0x1", "p:gpreempt_12/enter_f 0x1", "p:gpreempt_lab/f 0x1"} {
			if err := k.Write(kprobeEvents, probe); err != nil {
				t.Fatal(err)
			}
		}
		if err := k.Write("instances/gpreempt-1/events/gpreempt_1/enable", "1"); err != nil {
			t.Fatal(err)
		}
		if _, err := Record(t.Context(), k.options()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"gpreempt-", "gpreempt-lab", "somebody"}, k.list(instances)); diff != "" {
			t.Errorf("instances (-want +got):\n%s", diff)
		}
		// Those of 12 have no instance any more.
		if diff := cmp.Diff("p:gpreempt_lab/f 0x1", k.get(kprobeEvents)); diff != "" {
			t.Errorf("probes (-want +got):\n%s", diff)
		}
	})
}

func TestAnotherRunThatIsStartingIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		lock, err := k.Lock(instances)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := Record(t.Context(), k.options()); !errors.Is(err, ErrLocked) || time.Since(began) != cleanFor {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if _, err := Record(ctx, k.options()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("interrupted: %v", err)
		}
		cancel()
		time.AfterFunc(time.Second, func() { _ = lock.Close() }) // it was only read
		if _, err := Record(t.Context(), k.options()); err != nil {
			t.Error(err)
		}
	})
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestFullDiskEndsTheRecording(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel(t)
		k.trace = []func() string{chunk(graphText)}
		o := k.options()
		o.Raw = brokenWriter{}
		if _, err := Record(t.Context(), o); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("error %v", err)
		}
		if left := residue(t, k); left != nil {
			t.Errorf("left in the kernel: %v", left)
		}
	})
}
