package proc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// soakEnv sets the duration of TestSoak; the default is a few seconds.
const soakEnv = "GPREEMPT_SOAK"

// soak sums up the storms and the cycles of all targets.
type soak struct {
	mu             sync.Mutex // guards all below
	queued         int64      // signals with a value, each of which counts
	merged         int64      // standard signals, of which those pending at once are one
	received       int64      // of the queued ones
	stops          int64
	attach, detach []time.Duration
}

// Eight programs receive bursts of signals while they are attached to and detached
// from: each signal arrives once, and no thread or descriptor leaks.
func TestSoak(t *testing.T) {
	length := 3 * time.Second
	if text := os.Getenv(soakEnv); text != "" {
		var err error
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatalf("%s: %v", soakEnv, err)
		}
	}
	requirePtrace(t)
	const targets = 8
	seed := uint64(time.Now().UnixNano())
	before := use(t)
	s := &soak{}
	t.Run("storm", func(t *testing.T) {
		var xs []*target
		for range targets {
			x := startTarget(t)
			x.count(countedSignal)
			x.count(unix.SIGUSR1)
			xs = append(xs, x)
		}
		ctx, cancel := context.WithTimeout(t.Context(), length)
		defer cancel()
		// What fails the test in one of them leaves the others at work.
		var all sync.WaitGroup
		for i, x := range xs {
			n := uint64(i)
			all.Go(func() { s.storm(ctx, x, rand.New(rand.NewPCG(seed, n))) })
			all.Go(func() { s.cycle(ctx, x, rand.New(rand.NewPCG(seed, targets+n))) })
		}
		all.Wait()
		for _, x := range xs {
			if tracer := x.tracer(); tracer != 0 {
				t.Errorf("process %d is still traced, by %d", x.pid, tracer)
			}
			x.tell("exit 7")
			x.expect(x.events, "exited 7")
		}
	})
	after := use(t)
	t.Logf("%v, seed %d: %d queued signals sent, %d received; %d standard signals sent; %d stops", length, seed, s.queued, s.received, s.merged, s.stops)
	t.Logf("%d cycles: attach p50 %v, p99 %v; detach p50 %v, p99 %v", len(s.attach),
		quantile(s.attach, 50), quantile(s.attach, 99), quantile(s.detach, 50), quantile(s.detach, 99))
	t.Logf("before: %+v; after: %+v", before, after)
	if s.queued == 0 || s.queued != s.received || len(s.attach) < targets {
		t.Error("signals were lost, or nothing happened")
	}
	// The runtime keeps the threads it once needed for waiting, a few for each target.
	if after.Descriptors > before.Descriptors+2 || after.Threads > before.Threads+4*targets {
		t.Error("threads or descriptors are left over")
	}
}

// storm sends signals in bursts and compares the counts after each, once at least.
func (s *soak) storm(ctx context.Context, x *target, r *rand.Rand) {
	var queued, sum, merged, nudged, stops int64
	for first := true; first || ctx.Err() == nil; first = false {
		stop := r.IntN(4) == 0
		if stop {
			x.signal(unix.SIGSTOP)
			x.expect(x.events, "stopped 19")
			stops++
		}
		nudges := int64(r.IntN(4))
		for range nudges {
			if err := unix.Tgkill(int(x.pid), int(x.pid), unix.SIGUSR1); err != nil {
				x.tb.Fatal(err)
			}
			x.signal(unix.SIGWINCH) // ignored
		}
		merged += 2 * nudges
		for range r.IntN(200) {
			value := r.Int32()
			x.queue(countedSignal, value)
			queued++
			sum += int64(value)
		}
		if stop {
			x.signal(unix.SIGCONT)
			x.expect(x.events, "continued")
		}
		// It answers when it has handled all of them.
		if got, total := x.counted(countedSignal); got != queued || total != sum {
			x.tb.Fatalf("%d signals with the sum %d were sent, %d with %d came", queued, sum, got, total)
		}
		now, _ := x.counted(unix.SIGUSR1)
		if came := now - nudged; came > nudges || came == 0 && nudges > 0 {
			x.tb.Fatalf("%d standard signals were sent, %d came", nudges, came)
		}
		nudged = now
	}
	received, _ := x.counted(countedSignal)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queued, s.received, s.merged, s.stops = s.queued+queued, s.received+received, s.merged+merged, s.stops+stops
}

// cycle attaches, runs some closures, and detaches, until ctx ends, once at least.
func (s *soak) cycle(ctx context.Context, x *target, r *rand.Rand) {
	background := context.WithoutCancel(ctx)
	var attaches, detaches []time.Duration
	for first := true; first || ctx.Err() == nil; first = false {
		begun := time.Now()
		thread, err := Trace(background, x.pid, x.start)
		if err != nil {
			x.tb.Fatal(err)
		}
		attaches = append(attaches, time.Since(begun))
		for range r.IntN(20) {
			if err := thread.Do(background, func() error { return nil }); err != nil {
				x.tb.Fatal(err)
			}
		}
		begun = time.Now()
		if err := thread.Detach(background); err != nil {
			x.tb.Fatal(err)
		}
		detaches = append(detaches, time.Since(begun))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attach, s.detach = append(s.attach, attaches...), append(s.detach, detaches...)
}

// expect takes a line and compares it.
func (x *target) expect(from lines, want string) {
	x.tb.Helper()
	if diff := cmp.Diff(want, from.next(x.tb)); diff != "" {
		x.tb.Fatalf("(-want +got):\n%s", diff)
	}
}

// resources are what this process holds.
type resources struct{ Threads, Descriptors int }

func use(tb testing.TB) resources {
	tb.Helper()
	descriptors, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return resources{statOf(tb, gpreempt.ProcessKey{PID: int32(os.Getpid())}).Threads, len(descriptors)}
}

func quantile(durations []time.Duration, percent int) string {
	if len(durations) == 0 {
		return "none"
	}
	slices.Sort(durations)
	return fmt.Sprint(stat.Quantile(durations, float64(percent)/100))
}
