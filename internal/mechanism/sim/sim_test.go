package sim

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench is a machine with one target on two GPUs, and a session with it.
type bench struct {
	t       *testing.T
	rt      *gpumodel.Realtime
	gpus    []gpreempt.GPU
	target  gpreempt.ProcessKey
	session mechanism.Session
}

func newBench(t *testing.T) *bench {
	t.Helper()
	spec, err := gpumodel.PresetByName("mi300x")
	if err != nil {
		t.Fatal(err)
	}
	timer, err := hrtimer.New()
	if err != nil {
		t.Fatal(err)
	}
	rt := gpumodel.Start(gpumodel.New(gpumodel.ZeroCost(spec), 2, 1), timer)
	b := &bench{t: t, rt: rt, gpus: rt.GPUs()}
	t.Cleanup(func() { b.ok(rt.Close()) })
	b.target, err = rt.StartProcess(gpumodel.ProcSpec{Comm: "offline"})
	b.ok(err)
	b.queue(0)
	b.queue(1)
	b.session, err = New(rt).Attach(t.Context(), b.target)
	b.ok(err)
	t.Cleanup(func() { b.ok(b.session.Close()) })
	return b
}

func (b *bench) ok(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) queue(gpu int) {
	b.t.Helper()
	_, err := b.rt.CreateQueue(b.target, b.gpus[gpu].ID, gpreempt.QueueCompute, 64)
	b.ok(err)
}

func (b *bench) fault(kind gpumodel.FaultKind, delay time.Duration) {
	b.t.Helper()
	b.ok(b.rt.SetFault(gpumodel.Fault{Kind: kind, GPU: b.gpus[1].ID, Delay: delay}))
}

// frozen reports which queues do not run: which keep a short packet.
func (b *bench) frozen() []bool {
	b.t.Helper()
	backlog, err := b.rt.Backlog(b.target)
	b.ok(err)
	var ends []chan struct{}
	frozen := make([]bool, len(backlog.Queues))
	for _, q := range backlog.Queues {
		end := make(chan struct{})
		ends = append(ends, end)
		k := gpumodel.Packet{Duration: time.Microsecond, Occupancy: 0.1, Done: func(_, _ time.Duration) { close(end) }}
		b.ok(b.rt.Submit(b.target, q.ID, k))
	}
	// On a process of its own, a packet that takes much longer.
	other, err := b.rt.StartProcess(gpumodel.ProcSpec{Comm: "clock"})
	b.ok(err)
	_, err = b.rt.CreateQueue(other, b.gpus[0].ID, gpreempt.QueueCompute, 64)
	b.ok(err)
	later := make(chan struct{})
	b.ok(b.rt.Submit(other, 0, gpumodel.Packet{Duration: time.Millisecond, Occupancy: 0.1, Done: func(_, _ time.Duration) { close(later) }}))
	<-later
	b.ok(b.rt.EndProcess(other))
	for i, end := range ends {
		select {
		case <-end:
		default:
			frozen[i] = true
		}
	}
	return frozen
}

func (b *bench) wantFrozen(want ...bool) {
	b.t.Helper()
	if diff := cmp.Diff(want, b.frozen()); diff != "" {
		b.t.Errorf("frozen queues (-want +got):\n%s", diff)
	}
}

func TestSuspendFreezesEveryQueueAndResumeLetsThemRun(t *testing.T) {
	b := newBench(t)
	b.wantFrozen(false, false)
	b.ok(b.session.Suspend(t.Context()))
	b.wantFrozen(true, true)
	b.ok(b.session.Suspend(t.Context()))
	b.wantFrozen(true, true)
	b.ok(b.session.Resume(t.Context()))
	b.ok(b.session.Resume(t.Context()))
	b.wantFrozen(false, false)
}

func TestSuspendTakesInQueuesBornSince(t *testing.T) {
	b := newBench(t)
	b.ok(b.session.Suspend(t.Context()))
	b.queue(0)
	b.wantFrozen(true, true, false)
	b.ok(b.session.Suspend(t.Context()))
	b.wantFrozen(true, true, true)
}

func TestFailedSuspendLeavesNothingSuspended(t *testing.T) {
	b := newBench(t)
	b.fault(gpumodel.FaultSuspendError, 0)
	err := b.session.Suspend(t.Context())
	var hardware *mechanism.HardwareError
	if !errors.As(err, &hardware) {
		t.Fatalf("Suspend = %v, want a *mechanism.HardwareError", err)
	}
	if diff := cmp.Diff([]gpreempt.GPUID{b.gpus[1].ID}, hardware.GPUs); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	b.wantFrozen(false, false)
	b.ok(b.session.Suspend(t.Context()))
	b.wantFrozen(true, true)
}

func TestFailedResumeIsAHardwareError(t *testing.T) {
	b := newBench(t)
	b.ok(b.session.Suspend(t.Context()))
	b.fault(gpumodel.FaultResumeError, 0)
	var hardware *mechanism.HardwareError
	if err := b.session.Resume(t.Context()); !errors.As(err, &hardware) {
		t.Errorf("Resume = %v, want a *mechanism.HardwareError", err)
	}
}

func TestSuspendGivenUpIsUndoneOnceItIsThrough(t *testing.T) {
	b := newBench(t)
	b.fault(gpumodel.FaultSuspendStuck, 20*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := b.session.Suspend(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Suspend = %v, want the deadline", err)
	}
	// Requests are carried out in turn, so this one is after the undoing.
	_, err := b.rt.Resume(t.Context(), b.target, []uint32{})
	b.ok(err)
	b.wantFrozen(false, false)
}

func TestTargetThatLeftIsGone(t *testing.T) {
	b := newBench(t)
	b.ok(b.session.Suspend(t.Context()))
	b.ok(b.rt.EndProcess(b.target))
	if err := b.session.Resume(t.Context()); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("Resume = %v, want ErrGone", err)
	}
	if err := b.session.Suspend(t.Context()); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("Suspend = %v, want ErrGone", err)
	}
	if _, err := New(b.rt).Attach(t.Context(), b.target); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("Attach = %v, want ErrGone", err)
	}
	b.ok(b.session.Close())
}

func TestCloseLetsTheTargetRun(t *testing.T) {
	b := newBench(t)
	b.ok(b.session.Suspend(t.Context()))
	b.ok(b.session.Close())
	b.ok(b.session.Close())
	b.wantFrozen(false, false)
	if err := b.session.Suspend(t.Context()); err == nil {
		t.Error("a closed session suspended its target")
	}
	b.wantFrozen(false, false)
}

func TestCloseDuringASuspendLetsTheTargetRun(t *testing.T) {
	b := newBench(t)
	b.fault(gpumodel.FaultSuspendStuck, 10*time.Millisecond)
	suspended := make(chan error)
	go func() { suspended <- b.session.Suspend(t.Context()) }()
	b.ok(b.session.Close())
	if err := <-suspended; err == nil {
		t.Error("Suspend succeeded on a session that was closed meanwhile")
	}
	_, err := b.rt.Resume(t.Context(), b.target, []uint32{})
	b.ok(err)
	b.wantFrozen(false, false)
}

// The worst order: Close has ordered its resume, and only then is the suspend
// ordered that Suspend had made ready.
func TestSuspendOrderedAfterTheResumeOfCloseIsUndone(t *testing.T) {
	b := newBench(t)
	b.fault(gpumodel.FaultSuspendStuck, 10*time.Millisecond)
	suspended := make(chan error)
	go func() { suspended <- b.session.Suspend(t.Context()) }()
	s := b.session.(*session)
	for ready := false; !ready; runtime.Gosched() {
		s.mu.Lock()
		ready = s.held
		s.closed = ready
		s.mu.Unlock()
	}
	if err := <-suspended; !errors.Is(err, errClosed) {
		t.Errorf("Suspend = %v, want that the session is closed", err)
	}
	b.wantFrozen(false, false)
}

func TestCloseOfASessionThatNeverSuspendedDisturbsNobody(t *testing.T) {
	b := newBench(t)
	before := b.rt.GPUCounters()[0].SchedulerCycles
	b.ok(b.session.Close())
	if got := b.rt.GPUCounters()[0].SchedulerCycles - before; got != 0 {
		t.Errorf("%d runlist cycles, want 0", got)
	}
}
