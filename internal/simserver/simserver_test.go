package simserver

import (
	"context"
	"errors"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// conn is a connection, carried in the context of the calls on it.
type conn struct {
	pid   int32
	start uint64
	end   chan struct{}
}

type connKey struct{}

var errNobody = errors.New("nobody")

func identify(ctx context.Context) (pid int32, start uint64, uid uint32, done <-chan struct{}, err error) {
	c, ok := ctx.Value(connKey{}).(*conn)
	if !ok {
		return 0, 0, 0, nil, errNobody
	}
	return c.pid, c.start, 1000, c.end, nil
}

// bench is a server with a machine.
type bench struct {
	*testing.T
	rt     *gpumodel.Realtime
	server *Server
	gpus   []gpreempt.GPU
}

func newBench(t *testing.T) *bench {
	t.Helper()
	spec, err := gpumodel.PresetByName("mi308x")
	if err != nil {
		t.Fatal(err)
	}
	timer, err := hrtimer.New()
	if err != nil {
		t.Fatal(err)
	}
	rt := gpumodel.Start(gpumodel.New(gpumodel.ZeroCost(spec), 2, 1), timer)
	b := &bench{T: t, rt: rt, server: New(rt, identify), gpus: rt.GPUs()}
	t.Cleanup(func() {
		b.server.Close()
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// connect opens a connection of a process; the second result closes it.
func (b *bench) connect(pid int32) (context.Context, func()) {
	c := &conn{pid: pid, start: 99, end: make(chan struct{})}
	return context.WithValue(b.Context(), connKey{}, c), func() { close(c.end) }
}

func (b *bench) ok(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func kernel(d time.Duration, occupancy float64) *simv1.Kernel {
	return &simv1.Kernel{Duration: durationpb.New(d), Occupancy: occupancy}
}

func (b *bench) job() *simv1.StartJobRequest {
	return &simv1.StartJobRequest{
		Comm: "train", GpuIds: []uint32{uint32(b.gpus[0].ID), uint32(b.gpus[1].ID)}, Queues: 2, Kernel: kernel(time.Millisecond, 0.1),
	}
}

// until waits for a condition that the machine or a watcher brings about.
func (b *bench) until(what string, cond func() bool) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); !cond(); runtime.Gosched() {
		if time.Now().After(deadline) {
			b.Fatalf("waited in vain for: %s", what)
		}
	}
}

func (b *bench) counters(pid int32) *simv1.ProcessCounters {
	b.Helper()
	resp, err := b.server.GetCounters(b.Context(), &simv1.GetCountersRequest{})
	b.ok(err)
	for _, p := range resp.GetProcesses() {
		if p.GetPid() == pid {
			return p
		}
	}
	return nil
}

func TestSubmitAnswersWhenTheLastKernelHasEnded(t *testing.T) {
	b := newBench(t)
	ctx, _ := b.connect(12)
	queue, err := b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{GpuId: uint32(b.gpus[1].ID)})
	b.ok(err)
	if diff := cmp.Diff(&simv1.CreateQueueResponse{QueueId: 0, GpuId: uint32(b.gpus[1].ID)}, queue, protocmp.Transform()); diff != "" {
		t.Errorf("queue (-want +got):\n%s", diff)
	}
	if key := (gpreempt.ProcessKey{PID: 12, Start: 99}); !b.rt.Alive(key) {
		t.Errorf("the caller is not on the machine as %v", key)
	}
	resp, err := b.server.Submit(ctx, &simv1.SubmitRequest{Kernels: []*simv1.Kernel{kernel(time.Millisecond, 1), kernel(2*time.Millisecond, 0.5)}})
	b.ok(err)
	want := &simv1.SubmitResponse{Waited: durationpb.New(0), Total: durationpb.New(3 * time.Millisecond)}
	if diff := cmp.Diff(want, resp, protocmp.Transform()); diff != "" {
		t.Errorf("response (-want +got):\n%s", diff)
	}
	one, err := b.server.Submit(ctx, &simv1.SubmitRequest{Kernels: []*simv1.Kernel{kernel(time.Millisecond, 1)}})
	b.ok(err)
	if got := one.GetTotal().AsDuration(); got != time.Millisecond {
		t.Errorf("one kernel took %v, want 1ms", got)
	}
	c := b.counters(12)
	want2 := &simv1.ProcessCounters{Pid: 12, Submitted: 3, Executed: 3, Work: durationpb.New(3 * time.Millisecond)}
	if diff := cmp.Diff(want2, c, protocmp.Transform()); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
}

func TestSubmitEndsWithItsCallAndItsConnection(t *testing.T) {
	b := newBench(t)
	ctx, disconnect := b.connect(12)
	_, err := b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{})
	b.ok(err)
	long := &simv1.SubmitRequest{Kernels: []*simv1.Kernel{kernel(time.Minute, 1)}}
	call, cancel := context.WithCancel(ctx)
	results := make(chan error)
	go func() {
		_, err := b.server.Submit(call, long)
		results <- err
	}()
	cancel()
	if err := <-results; !errors.Is(err, context.Canceled) {
		t.Errorf("Submit = %v, want canceled", err)
	}
	go func() {
		_, err := b.server.Submit(ctx, long)
		results <- err
	}()
	b.until("the packet is on the ring", func() bool { return b.counters(12).GetPending() == 2 })
	disconnect()
	if err := <-results; !errors.Is(err, context.Canceled) {
		t.Errorf("Submit = %v, want canceled", err)
	}
}

func TestJobKeepsItsQueuesBusyUntilItIsStopped(t *testing.T) {
	b := newBench(t)
	ctx, _ := b.connect(12)
	job, err := b.server.StartJob(ctx, b.job())
	b.ok(err)
	b.until("packets are executed", func() bool { return b.counters(job.GetPid()).GetExecuted() >= 20 })
	if got := b.counters(job.GetPid()).GetPending(); got != 8 {
		t.Errorf("%d packets on the rings, want 2 on each of 4", got)
	}
	stopped, err := b.server.StopJob(ctx, &simv1.StopJobRequest{Pid: job.GetPid()})
	b.ok(err)
	c := stopped.GetCounters()
	if c.GetSubmitted() != c.GetExecuted()+8 || c.GetPending() != 8 || c.GetLost() != 0 || c.GetRepeated() != 0 || c.GetWork().AsDuration() <= 0 {
		t.Errorf("final counters: %v", c)
	}
	again, err := b.server.StopJob(ctx, &simv1.StopJobRequest{Pid: job.GetPid()})
	b.ok(err)
	if diff := cmp.Diff(stopped, again, protocmp.Transform()); diff != "" {
		t.Errorf("stopping twice (-first +second):\n%s", diff)
	}
}

func TestJobStandsStillWhileSuspended(t *testing.T) {
	b := newBench(t)
	ctx, _ := b.connect(12)
	job, err := b.server.StartJob(ctx, b.job())
	b.ok(err)
	var key gpreempt.ProcessKey
	for _, c := range b.rt.Counters() {
		key = c.Process
	}
	if key.PID != job.GetPid() {
		t.Fatalf("the job is %v, want pid %d", key, job.GetPid())
	}
	_, err = b.rt.Suspend(t.Context(), key, nil)
	b.ok(err)
	before := b.counters(job.GetPid())
	_, err = b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{})
	b.ok(err)
	_, err = b.server.Submit(ctx, &simv1.SubmitRequest{Kernels: []*simv1.Kernel{kernel(5*time.Millisecond, 1)}})
	b.ok(err)
	if diff := cmp.Diff(before, b.counters(job.GetPid()), protocmp.Transform()); diff != "" {
		t.Errorf("counters while suspended (-before +after):\n%s", diff)
	}
	_, err = b.rt.Resume(t.Context(), key, nil)
	b.ok(err)
	b.until("it goes on", func() bool { return b.counters(job.GetPid()).GetExecuted() > before.GetExecuted() })
}

func TestEverythingOfAProcessGoesWithItsLastConnection(t *testing.T) {
	b := newBench(t)
	first, closeFirst := b.connect(12)
	second, closeSecond := b.connect(12)
	other, _ := b.connect(13)
	job, err := b.server.StartJob(first, b.job())
	b.ok(err)
	_, err = b.server.CreateQueue(second, &simv1.CreateQueueRequest{})
	b.ok(err)
	kept, err := b.server.StartJob(other, b.job())
	b.ok(err)

	closeFirst()
	b.until("the first connection has been seen to end", func() bool {
		b.server.mu.Lock()
		defer b.server.mu.Unlock()
		return len(b.server.clients[gpreempt.ProcessKey{PID: 12, Start: 99}].connections) == 1
	})
	before := b.counters(job.GetPid()).GetExecuted()
	b.until("the job goes on", func() bool { return b.counters(job.GetPid()).GetExecuted() > before })

	closeSecond()
	alive := func(pid int32) bool {
		alive := false
		for _, c := range b.rt.Counters() {
			alive = alive || c.Process.PID == pid && !c.Ended
		}
		return alive
	}
	b.until("the caller and its job have ended", func() bool { return !alive(12) && !alive(job.GetPid()) })
	if !alive(kept.GetPid()) {
		t.Error("the job of another process has ended, too")
	}
	// It may come back.
	third, _ := b.connect(12)
	_, err = b.server.CreateQueue(third, &simv1.CreateQueueRequest{})
	b.ok(err)
}

func TestCloseEndsJobsAndRefusesCalls(t *testing.T) {
	b := newBench(t)
	ctx, _ := b.connect(12)
	job, err := b.server.StartJob(ctx, b.job())
	b.ok(err)
	b.server.Close()
	for _, c := range b.rt.Counters() {
		if c.Process.PID == job.GetPid() && !c.Ended {
			t.Error("the job lives on")
		}
	}
	if _, err := b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{}); gpreempt.ReasonOf(err) != gpreempt.ReasonShuttingDown {
		t.Errorf("CreateQueue = %v, want %v", err, gpreempt.ReasonShuttingDown)
	}
}

func TestCallersWithoutIdentityAreRefused(t *testing.T) {
	b := newBench(t)
	_, err := b.server.CreateQueue(t.Context(), &simv1.CreateQueueRequest{})
	if !errors.Is(err, errNobody) {
		t.Errorf("CreateQueue = %v, want what identify said", err)
	}
	if _, err := b.server.StartJob(t.Context(), b.job()); !errors.Is(err, errNobody) {
		t.Errorf("StartJob = %v, want what identify said", err)
	}
}

func TestWhatTheModelRefuses(t *testing.T) {
	b := newBench(t)
	ctx, _ := b.connect(12)
	stranger, _ := b.connect(13)
	_, err := b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{})
	b.ok(err)
	job, err := b.server.StartJob(stranger, b.job())
	b.ok(err)

	startJob := func(change func(*simv1.StartJobRequest)) func() error {
		return func() error {
			req := b.job()
			change(req)
			_, err := b.server.StartJob(ctx, req)
			return err
		}
	}
	submit := func(ctx context.Context, req *simv1.SubmitRequest) func() error {
		return func() error {
			_, err := b.server.Submit(ctx, req)
			return err
		}
	}
	kernels := func(ks ...*simv1.Kernel) *simv1.SubmitRequest { return &simv1.SubmitRequest{Kernels: ks} }
	many := make([]*simv1.Kernel, maxKernels+1)
	for i := range many {
		many[i] = kernel(time.Millisecond, 1)
	}
	calls := map[string]func() error{
		"queue on an unknown GPU": func() error {
			_, err := b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{GpuId: 1})
			return err
		},
		"submit nothing":              submit(ctx, kernels()),
		"submit too much":             submit(ctx, kernels(many...)),
		"submit without a duration":   submit(ctx, kernels(&simv1.Kernel{Occupancy: 1})),
		"submit too short a kernel":   submit(ctx, kernels(kernel(time.Microsecond, 1))),
		"submit too long a kernel":    submit(ctx, kernels(kernel(time.Hour, 1))),
		"submit an overflow":          submit(ctx, kernels(&simv1.Kernel{Duration: &durationpb.Duration{Seconds: math.MaxInt64}, Occupancy: 1})),
		"submit no occupancy":         submit(ctx, kernels(kernel(time.Millisecond, 0))),
		"submit too much occupancy":   submit(ctx, kernels(kernel(time.Millisecond, 1.01))),
		"submit NaN":                  submit(ctx, kernels(kernel(time.Millisecond, math.NaN()))),
		"submit to no queue":          submit(ctx, &simv1.SubmitRequest{QueueId: 3, Kernels: many[:1]}),
		"submit without a process":    submit(stranger, kernels(many[:1]...)),
		"job without a name":          startJob(func(r *simv1.StartJobRequest) { r.Comm = "" }),
		"job with a long name":        startJob(func(r *simv1.StartJobRequest) { r.Comm = "sixteen bytes ab" }),
		"job with a control code":     startJob(func(r *simv1.StartJobRequest) { r.Comm = "a\nb" }),
		"job on an unknown GPU":       startJob(func(r *simv1.StartJobRequest) { r.GpuIds = []uint32{1} }),
		"job on a GPU twice":          startJob(func(r *simv1.StartJobRequest) { r.GpuIds[1] = r.GpuIds[0] }),
		"job without queues":          startJob(func(r *simv1.StartJobRequest) { r.Queues = 0 }),
		"job with too many queues":    startJob(func(r *simv1.StartJobRequest) { r.Queues = 65 }),
		"job with 2^32-1 queues":      startJob(func(r *simv1.StartJobRequest) { r.Queues = math.MaxUint32 }),
		"job that is too deep":        startJob(func(r *simv1.StartJobRequest) { r.Depth = 65 }),
		"job without a kernel":        startJob(func(r *simv1.StartJobRequest) { r.Kernel = nil }),
		"stop what was never started": func() error { _, err := b.server.StopJob(ctx, &simv1.StopJobRequest{Pid: 4}); return err },
		"stop the job of another":     func() error { _, err := b.server.StopJob(ctx, &simv1.StopJobRequest{Pid: job.GetPid()}); return err },
	}
	processes := len(b.rt.Counters())
	for name, call := range calls {
		var refused *gpreempt.Error
		switch err := call(); {
		case !errors.As(err, &refused):
			t.Errorf("%s: %v, want a *gpreempt.Error", name, err)
		case refused.Reason != gpreempt.ReasonSimulationRejected || refused.Code != gpreempt.CodeInvalidArgument || refused.Next == "":
			t.Errorf("%s: %+v", name, refused)
		}
	}
	if got := len(b.rt.Counters()); got != processes {
		t.Errorf("refused calls left %d processes behind", got-processes)
	}
	if c := b.counters(12); c.GetSubmitted() != 0 {
		t.Errorf("refused calls submitted %d packets", c.GetSubmitted())
	}
}

func TestRingThatIsFullTakesNothing(t *testing.T) {
	b := newBench(t)
	ctx, disconnect := b.connect(12)
	_, err := b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{})
	b.ok(err)
	full := make([]*simv1.Kernel, maxKernels)
	for i := range full {
		full[i] = kernel(time.Minute, 1)
	}
	over := make(chan error)
	go func() {
		_, err := b.server.Submit(ctx, &simv1.SubmitRequest{Kernels: full})
		over <- err
	}()
	b.until("the ring is full", func() bool { return b.counters(12).GetPending() == maxKernels })
	_, err = b.server.Submit(ctx, &simv1.SubmitRequest{Kernels: full[:1]})
	if gpreempt.ReasonOf(err) != gpreempt.ReasonSimulationRejected {
		t.Errorf("Submit = %v, want a refusal", err)
	}
	disconnect()
	<-over
}

func TestCallerMayHaveSoManyJobs(t *testing.T) {
	b := newBench(t)
	ctx, _ := b.connect(12)
	req := &simv1.StartJobRequest{Comm: "idle", Queues: 1, Kernel: kernel(time.Minute, 0.001), Depth: 1}
	var last *simv1.StartJobResponse
	for range maxJobs {
		var err error
		last, err = b.server.StartJob(ctx, req)
		b.ok(err)
	}
	if _, err := b.server.StartJob(ctx, req); gpreempt.ReasonOf(err) != gpreempt.ReasonSimulationRejected {
		t.Errorf("StartJob = %v, want a refusal", err)
	}
	_, err := b.server.StopJob(ctx, &simv1.StopJobRequest{Pid: last.GetPid()})
	b.ok(err)
	_, err = b.server.StartJob(ctx, req)
	b.ok(err)
}

func TestGPUCountersAreInNodeOrder(t *testing.T) {
	b := newBench(t)
	ctx, _ := b.connect(12)
	_, err := b.server.CreateQueue(ctx, &simv1.CreateQueueRequest{})
	b.ok(err)
	_, err = b.server.Submit(ctx, &simv1.SubmitRequest{Kernels: []*simv1.Kernel{kernel(time.Millisecond, 1)}})
	b.ok(err)
	resp, err := b.server.GetCounters(ctx, &simv1.GetCountersRequest{})
	b.ok(err)
	want := []*simv1.GpuCounters{
		{GpuId: uint32(b.gpus[0].ID), SchedulerCycles: 1, Busy: durationpb.New(time.Millisecond)},
		{GpuId: uint32(b.gpus[1].ID), Busy: durationpb.New(0)},
	}
	if diff := cmp.Diff(want, resp.GetGpus(), protocmp.Transform()); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if resp.GetNow().AsDuration() <= 0 {
		t.Errorf("now = %v", resp.GetNow())
	}
}
