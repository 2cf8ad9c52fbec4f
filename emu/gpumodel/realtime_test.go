package gpumodel

import (
	"context"
	"errors"
	"io/fs"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func startRealtime(t testing.TB, m *Machine) *Realtime {
	t.Helper()
	timer, err := hrtimer.New()
	if err != nil {
		t.Fatal(err)
	}
	rt := Start(m, timer)
	t.Cleanup(func() {
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	})
	return rt
}

// await submits a packet and waits for its end.
func await(t testing.TB, rt *Realtime, key gpreempt.ProcessKey, queue uint32, k Packet) span {
	t.Helper()
	ended := make(chan span, 1)
	k.Done = func(started, end time.Duration) { ended <- span{started, end, 1} }
	if err := rt.Submit(key, queue, k); err != nil {
		t.Fatal(err)
	}
	return <-ended
}

func TestRealtimeRunsPacketsNotBeforeTheirTime(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	rt := startRealtime(t, r.Machine)
	for _, d := range []time.Duration{300 * us, 5 * ms} {
		began := time.Now()
		s := await(t, rt, a, 0, Packet{Duration: d, Occupancy: 1})
		if took := time.Since(began); took < d {
			t.Errorf("a kernel of %v was over after %v", d, took)
		}
		if s.Ended-s.Started != d {
			t.Errorf("a kernel of %v took %v of virtual time", d, s.Ended-s.Started)
		}
	}
}

func TestRealtimeGoesOnFromTheMachinesTime(t *testing.T) {
	r := newRig(t, hws(), 1)
	r.AdvanceTo(time.Hour)
	rt := startRealtime(t, r.Machine)
	if now := rt.Now(); now < time.Hour || now > 2*time.Hour {
		t.Errorf("now = %v, want a little more than an hour", now)
	}
}

func TestRealtimeSuspendWaitsForTheMachine(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 2, 0)
	r.start("other", 1, 0)
	rt := startRealtime(t, r.Machine)
	began := time.Now()
	results, err := rt.Suspend(t.Context(), a, nil)
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < 150*us {
		t.Errorf("the suspend took %v, less than the model's 150µs", took)
	}
	gpu := rt.GPUs()[0].ID
	if diff := cmp.Diff([]QueueResult{{ID: 0, GPU: gpu}, {ID: 1, GPU: gpu}}, results); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	if err := rt.Submit(a, 0, Packet{Duration: us, Occupancy: 1}); err != nil {
		t.Fatal(err)
	}
	b, err := rt.Backlog(a)
	if err != nil || b.Packets != 1 {
		t.Errorf("backlog = %+v, %v; want the packet to wait", b, err)
	}
	if n, err := rt.QueueBacklog(a, 0); n != 1 || err != nil {
		t.Errorf("backlog of queue 0 = %d, %v; want the packet to wait", n, err)
	}
	if _, err := rt.QueueBacklog(a, 2); !errors.Is(err, ErrNoQueue) {
		t.Errorf("backlog of a queue that does not exist: %v", err)
	}
	if err := rt.SetQueuePriority(a, 0, gpreempt.PriorityHigh); err != nil {
		t.Error(err)
	}
	if _, err := rt.Resume(t.Context(), a, []uint32{0, 1}); err != nil {
		t.Fatal(err)
	}
	await(t, rt, a, 0, Packet{Duration: us, Occupancy: 1})
}

func TestRealtimeSuspendEndsWithItsContext(t *testing.T) {
	r := newRig(t, ZeroCost(hws()), 1)
	a := r.start("a", 1, 0)
	r.ok(r.SetFault(Fault{Kind: FaultSuspendStuck, GPU: r.facts[0].ID, Delay: time.Hour}))
	rt := startRealtime(t, r.Machine)
	why := errors.New("long enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	stuck := make(chan error)
	go func() {
		_, err := rt.Suspend(ctx, a, nil)
		stuck <- err
	}()
	cancel(why)
	if err := <-stuck; !errors.Is(err, why) {
		t.Errorf("Suspend = %v, want the cause", err)
	}
	if _, err := rt.Suspend(ctx, a, nil); !errors.Is(err, why) {
		t.Errorf("Suspend with an ended context = %v, want the cause", err)
	}
}

func TestRealtimeSuspendEndsWithTheProcessAndTheMachine(t *testing.T) {
	r := newRig(t, hws(), 1)
	a, b := r.start("a", 1, 0), r.start("b", 1, 0)
	r.ok(r.SetFault(Fault{Kind: FaultSuspendStuck, GPU: r.facts[0].ID, Delay: 20 * ms}))
	rt := startRealtime(t, r.Machine)
	gone := make(chan error, 1)
	go func() {
		_, err := rt.Suspend(t.Context(), a, nil)
		gone <- err
	}()
	// The suspend is under way when it has a request on the process.
	for underWay := false; !underWay; {
		rt.Do(func(m *Machine) { underWay = len(m.byKey[a].requests) > 0 })
	}
	if err := rt.EndProcess(a); err != nil {
		t.Fatal(err)
	}
	if err := <-gone; !errors.Is(err, ErrNoProcess) {
		t.Errorf("Suspend of what ended meanwhile = %v, want ErrNoProcess", err)
	}
	if _, err := rt.Suspend(t.Context(), a, nil); !errors.Is(err, ErrNoProcess) {
		t.Errorf("Suspend of what has ended = %v, want ErrNoProcess", err)
	}

	if err := rt.SetFault(Fault{Kind: FaultSuspendStuck, GPU: rt.GPUs()[0].ID, Delay: time.Hour}); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() {
		_, err := rt.Suspend(t.Context(), b, nil)
		closed <- err
	}()
	if err := rt.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-closed; !errors.Is(err, ErrClosed) {
		t.Errorf("Suspend on a closed machine = %v, want ErrClosed", err)
	}
}

func TestRealtimeFromManyGoroutines(t *testing.T) {
	spec := hws()
	spec.Costs = Costs{Unmap: 5 * us, Map: 5 * us, Save: 5 * us, Restore: 5 * us, Jitter: 0.2}
	r := newRig(t, spec, 2)
	var keys []gpreempt.ProcessKey
	for _, comm := range []string{"a", "b", "c", "d"} {
		keys = append(keys, r.start(comm, 2, 0, 1))
	}
	rt := startRealtime(t, r.Machine)

	var wg sync.WaitGroup
	for _, key := range keys {
		wg.Go(func() {
			for i := range uint32(60) {
				await(t, rt, key, i%4, Packet{Duration: 50 * us, Occupancy: 0.3})
			}
		})
		wg.Go(func() {
			for range 30 {
				if _, err := rt.Suspend(t.Context(), key, nil); err != nil {
					t.Error(err)
				}
				if _, err := rt.Resume(t.Context(), key, nil); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 50 {
			rt.Counters()
			rt.GPUCounters()
			if _, err := fs.Glob(rt.FS(), "sys/class/kfd/kfd/proc/*/queues/*/gpuid"); err != nil {
				t.Error(err)
			}
			for _, name := range []string{"mqds", "hqds", "rls"} {
				if _, err := fs.ReadFile(rt.FS(), "sys/kernel/debug/kfd/"+name); err != nil {
					t.Error(err)
				}
			}
		}
	})
	wg.Wait()
	for _, c := range rt.Counters() {
		if c.Executed != 60 || c.Lost != 0 || c.Repeated != 0 || c.Pending != 0 {
			t.Errorf("counters = %+v, want 60 executed and nothing else", c)
		}
	}
}

// A machine with more to do than can be simulated still answers.
func TestRealtimeThatCannotKeepUpAnswers(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	rt := startRealtime(t, r.Machine)
	rt.Do(func(m *Machine) {
		k := Packet{Duration: 1, Occupancy: 1}
		k.Done = func(_, _ time.Duration) {
			if err := m.Submit(a, 0, k); err != nil {
				t.Error(err)
			}
		}
		if err := m.Submit(a, 0, k); err != nil {
			t.Error(err)
		}
	})
	for range 20 {
		if c, ok := rt.ProcessCounters(a); !ok || c.Pending != 1 {
			t.Errorf("counters = %+v, %v", c, ok)
		}
	}
}

func TestRealtimeFS(t *testing.T) {
	r := inhabited(t)
	rt := startRealtime(t, r.Machine)
	if err := fstest.TestFS(rt.FS(), "sys/class/kfd/kfd/proc/42/queues/0/type"); err != nil {
		t.Error(err)
	}
}

func TestCloseIsIdempotentAndStopsTime(t *testing.T) {
	rt := startRealtime(t, New(hws(), 1, 1))
	if err := rt.Close(); err != nil {
		t.Fatal(err)
	}
	if err := rt.Close(); err != nil {
		t.Fatal(err)
	}
	if first, second := rt.Now(), rt.Now(); first != second {
		t.Errorf("time went on from %v to %v", first, second)
	}
}
