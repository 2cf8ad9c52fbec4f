package hrtimer

import (
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newTimer(t testing.TB) *Timer {
	t.Helper()
	timer, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := timer.Close(); err != nil {
			t.Error(err)
		}
	})
	return timer
}

func set(t testing.TB, timer *Timer, d time.Duration) {
	t.Helper()
	if err := timer.Set(d); err != nil {
		t.Fatal(err)
	}
}

func wait(t testing.TB, timer *Timer) {
	t.Helper()
	if err := timer.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestFiresNotBeforeItsTime(t *testing.T) {
	timer := newTimer(t)
	for _, d := range []time.Duration{1, 100 * time.Microsecond, 3 * time.Millisecond} {
		start := time.Now()
		set(t, timer, d)
		wait(t, timer)
		if took := time.Since(start); took < d {
			t.Errorf("Set(%v) fired after %v", d, took)
		}
	}
}

func TestSetWhileSomebodyWaitsMovesTheFiring(t *testing.T) {
	for _, first := range []time.Duration{0, time.Hour} {
		timer := newTimer(t)
		set(t, timer, first)
		fired := make(chan error, 1)
		go func() { fired <- timer.Wait() }()
		start := time.Now()
		set(t, timer, 2*time.Millisecond)
		if err := <-fired; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 2*time.Millisecond || took > time.Minute {
			t.Errorf("Set(%v) then Set(2ms) fired after %v", first, took)
		}
	}
}

func TestSetLaterTakesBackAFiringNobodySaw(t *testing.T) {
	timer := newTimer(t)
	// The second timer fires after the first one has.
	other := newTimer(t)
	set(t, timer, time.Nanosecond)
	set(t, other, time.Millisecond)
	wait(t, other)

	start := time.Now()
	set(t, timer, 5*time.Millisecond)
	wait(t, timer)
	if took := time.Since(start); took < 5*time.Millisecond {
		t.Errorf("the old firing was delivered after %v", took)
	}
}

func TestZeroDisarms(t *testing.T) {
	timer, other := newTimer(t), newTimer(t)
	set(t, timer, 2*time.Millisecond)
	set(t, timer, 0)
	fired := make(chan error, 1)
	go func() { fired <- timer.Wait() }()
	set(t, other, 10*time.Millisecond)
	wait(t, other)
	select {
	case err := <-fired:
		t.Errorf("a disarmed timer fired: %v", err)
	default:
	}
	if err := timer.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-fired; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Wait after Close = %v, want os.ErrClosed", err)
	}
}

func TestCloseEndsWaitAndEveryLaterCall(t *testing.T) {
	timer := newTimer(t)
	woken := make(chan error, 1)
	go func() { woken <- timer.Wait() }()
	if err := timer.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-woken; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Wait = %v, want os.ErrClosed", err)
	}
	if err := timer.Wait(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("second Wait = %v, want os.ErrClosed", err)
	}
	if err := timer.Set(1); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Set = %v, want os.ErrClosed", err)
	}
	if err := timer.Close(); err != nil {
		t.Errorf("second Close = %v", err)
	}
}

// The lateness of a 300 µs sleep, which no step of a millisecond divides.
const sleep = 300 * time.Microsecond

func reportLateness(b *testing.B, late []time.Duration) {
	b.Helper()
	slices.Sort(late)
	b.ReportMetric(float64(late[len(late)/2].Microseconds()), "late-p50-µs")
	b.ReportMetric(float64(late[len(late)*99/100].Microseconds()), "late-p99-µs")
}

func BenchmarkLateness(b *testing.B) {
	timer := newTimer(b)
	var late []time.Duration
	for b.Loop() {
		start := time.Now()
		set(b, timer, sleep)
		wait(b, timer)
		late = append(late, time.Since(start)-sleep)
	}
	reportLateness(b, late)
}

func BenchmarkLatenessOfGoTimer(b *testing.B) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var late []time.Duration
	for b.Loop() {
		start := time.Now()
		timer.Reset(sleep)
		<-timer.C
		late = append(late, time.Since(start)-sleep)
	}
	reportLateness(b, late)
}
