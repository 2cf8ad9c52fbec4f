package gpumodel

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// bubbleTimer is a Timer in fake time.
type bubbleTimer struct {
	*time.Timer
	closed chan struct{}
}

func newBubbleTimer() bubbleTimer {
	timer := time.NewTimer(0)
	timer.Stop()
	return bubbleTimer{timer, make(chan struct{})}
}

func (t bubbleTimer) Set(d time.Duration) error { t.Reset(d); return nil }

func (t bubbleTimer) Wait() error {
	select {
	case <-t.C:
		return nil
	case <-t.closed:
		return os.ErrClosed
	}
}

func (t bubbleTimer) Close() error { close(t.closed); return nil }

// wallClock runs a machine of one process in fake time. ended has the wall clock's time of each
// kernel's end since the start.
func wallClock(t *testing.T, f func(rt *Realtime, run func(Packet), ended func() []time.Duration)) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, hws(), 1)
		a := r.start("a", 1, 0)
		began := time.Now()
		rt := Start(r.Machine, newBubbleTimer())
		var ended []time.Duration
		run := func(k Packet) {
			also := k.Done
			k.Occupancy = 1
			k.Done = func(from, to time.Duration) {
				ended = append(ended, time.Since(began))
				if also != nil {
					also(from, to)
				}
			}
			rt.Do(func(m *Machine) { r.ok(m.Submit(a, 0, k)) })
		}
		f(rt, run, func() (all []time.Duration) {
			synctest.Wait()
			rt.Do(func(*Machine) { all = ended })
			return all
		})
		if err := rt.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestTimeStandsStillWhileTheMachineIsPaused(t *testing.T) {
	wallClock(t, func(rt *Realtime, run func(Packet), ended func() []time.Duration) {
		run(Packet{Duration: 5 * ms})
		time.Sleep(2 * ms)
		before := rt.Now()
		rt.Do((*Machine).Pause)
		rt.Do((*Machine).Pause)
		time.Sleep(100 * ms)
		rt.Do((*Machine).Resume)
		time.Sleep(100 * ms)
		if now := rt.Now(); now != before {
			t.Errorf("paused at %v, it is %v", before, now)
		}
		rt.Do((*Machine).Resume)
		if now := rt.Now(); now != before {
			t.Errorf("paused at %v, it went on from %v", before, now)
		}
		time.Sleep(10 * ms)
		if diff := cmp.Diff([]time.Duration{205 * ms}, ended()); diff != "" {
			t.Errorf("ends of kernels (-want +got):\n%s", diff)
		}
		if got, want := rt.Now(), before+10*ms; got != want {
			t.Errorf("it is %v, want %v", got, want)
		}
	})
}

// What reports an end late does not let time run on.
func TestPauseWhileAnEndIsReportedStopsTimeAtTheEnd(t *testing.T) {
	wallClock(t, func(rt *Realtime, run func(Packet), ended func() []time.Duration) {
		start := rt.Now()
		var first, second time.Duration
		run(Packet{Duration: 5 * ms, Done: func(_, to time.Duration) { first = to; rt.m.Pause() }})
		run(Packet{Duration: 5 * ms, Done: func(_, to time.Duration) { second = to }})
		time.Sleep(50 * ms)
		if diff := cmp.Diff([]time.Duration{5 * ms}, ended()); diff != "" {
			t.Errorf("ends before the resume (-want +got):\n%s", diff)
		}
		rt.Do((*Machine).Resume)
		time.Sleep(50 * ms)
		if diff := cmp.Diff([]time.Duration{5 * ms, 55 * ms}, ended()); diff != "" {
			t.Errorf("ends (-want +got):\n%s", diff)
		}
		if got, want := [2]time.Duration{first - start, second - start}, [2]time.Duration{5 * ms, 10 * ms}; got != want {
			t.Errorf("the kernels ended at %v of virtual time, want %v", got, want)
		}
	})
}
