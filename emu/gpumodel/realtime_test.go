package gpumodel

import (
	"io/fs"
	"sync"
	"testing"
	"testing/fstest"
	"time"

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
	var err error
	rt.Do(func(m *Machine) { err = m.Submit(key, queue, k) })
	if err != nil {
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

// cycles has the runlist of a GPU taken off and put on again n times, by processes that
// take turns.
func cycles(t *testing.T, rt *Realtime, gpu gpreempt.GPUID, refs []QueueRef, n int) {
	t.Helper()
	wait := func(change func(m *Machine, done func()) error) {
		done := make(chan struct{})
		var err error
		rt.Do(func(m *Machine) { err = change(m, func() { close(done) }) })
		if err != nil {
			t.Error(err)
			return
		}
		<-done
	}
	for range n {
		wait(func(m *Machine, done func()) error { return m.Unmap(gpu, 0, done) })
		wait(func(m *Machine, done func()) error { return m.Map(gpu, refs, done) })
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
	refs := make([][]QueueRef, 2) // by GPU
	for _, key := range keys {
		for id := range uint32(4) {
			refs[id/2] = append(refs[id/2], QueueRef{key, id})
		}
	}
	rt := startRealtime(t, r.Machine)

	var wg sync.WaitGroup
	for _, key := range keys {
		wg.Go(func() {
			for i := range uint32(60) {
				await(t, rt, key, i%4, Packet{Duration: 50 * us, Occupancy: 0.3})
			}
		})
	}
	for i, g := range rt.GPUs() {
		wg.Go(func() { cycles(t, rt, g.ID, refs[i], 60) })
	}
	wg.Go(func() {
		for range 50 {
			rt.Do(func(m *Machine) { m.Counters(); m.GPUCounters() })
			if _, err := fs.Glob(rt.FS(), "sys/class/kfd/kfd/proc/*/queues/*/gpuid"); err != nil {
				t.Error(err)
			}
			for _, name := range []string{"mqds", "hqds"} {
				if _, err := fs.ReadFile(rt.FS(), "sys/kernel/debug/kfd/"+name); err != nil {
					t.Error(err)
				}
			}
		}
	})
	wg.Wait()
	rt.Do(func(m *Machine) {
		for _, c := range m.Counters() {
			if c.Executed != 60 || c.Lost != 0 || c.Repeated != 0 || c.Pending != 0 {
				t.Errorf("counters = %+v, want 60 executed and nothing else", c)
			}
		}
	})
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
		rt.Do(func(m *Machine) {
			if c, ok := m.ProcessCounters(a); !ok || c.Pending != 1 {
				t.Errorf("counters = %+v, %v", c, ok)
			}
		})
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
