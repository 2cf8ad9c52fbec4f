package seccomp

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// measured is the durations of calls in nanoseconds.
type measured struct {
	P50, P99 int64
	// Rate is calls per second of all threads together.
	Rate float64
}

// measure makes n calls on the calling thread.
func measure(n int, call func()) measured {
	took := make([]int64, n)
	start := time.Now()
	last := start
	for i := range took {
		call()
		now := time.Now()
		took[i] = int64(now.Sub(last))
		last = now
	}
	slices.Sort(took)
	return measured{
		P50: took[n/2], P99: took[n*99/100],
		Rate: float64(n) / last.Sub(start).Seconds(),
	}
}

// allowed is an ioctl that no filter here selects; it fails.
func allowed() { _, _ = unix.IoctlGetInt(-1, unix.TIOCOUTQ) }

func echo() { call(nrEcho, 1) }

// report reports the distribution, and its ratio to the native call of the same run.
func (m measured) report(b *testing.B, native measured) {
	b.ReportMetric(float64(m.P50), "p50-ns")
	b.ReportMetric(float64(m.P99), "p99-ns")
	b.ReportMetric(float64(m.P50)/float64(native.P50), "x-native")
	b.ReportMetric(0, "ns/op") // p50 is more useful
}

// callsPerRound is long enough for a p99.
const callsPerRound = 2000

// BenchmarkCall compares, each in the same run as the native call:
//
//   - allowed: the filter checks the call and allows it
//   - answered: the supervisor answers it
//   - continued: the supervisor makes the kernel execute it
//   - descriptor: it is answered with a descriptor, which is closed
//
// Program and supervisor are threads of one process.
func BenchmarkCall(b *testing.B) {
	d := newDevice(b)
	for _, bc := range []struct {
		name string
		call func()
	}{
		{"allowed", allowed},
		{"answered", echo},
		{"continued", func() { call(nrPass, 0) }},
		{"descriptor", func() {
			fd, _ := call(nrFile, 1)
			unix.Close(int(fd))
		}},
	} {
		b.Run(bc.name, func(b *testing.B) {
			native := measure(callsPerRound, allowed)
			var rounds []measured
			inProcess(b, d, func(*Listener) {
				for b.Loop() {
					rounds = append(rounds, measure(callsPerRound, bc.call))
				}
			})
			medianRound(rounds).report(b, native)
		})
	}
}

// medianRound returns the round with the median p50: rounds on a busy machine do not
// count.
func medianRound(rounds []measured) measured {
	slices.SortFunc(rounds, func(a, b measured) int { return int(a.P50 - b.P50) })
	return rounds[len(rounds)/2]
}

// BenchmarkProgram measures a program in another process, with one thread and with four.
func BenchmarkProgram(b *testing.B) {
	for _, threads := range []int{1, 4} {
		b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) {
			d := newDevice(b)
			native := measure(callsPerRound, allowed)
			var rounds []measured
			for b.Loop() {
				p := launch(b, d, "measure", strconv.Itoa(threads), strconv.Itoa(callsPerRound))
				var m measured
				if err := json.Unmarshal([]byte(p.finish()), &m); err != nil {
					b.Fatal(err)
				}
				rounds = append(rounds, m)
			}
			m := medianRound(rounds)
			m.report(b, native)
			b.ReportMetric(m.Rate, "calls/s")
		})
	}
}

// BenchmarkBlockedCalls measures the supervisor's cost of waiting calls: a check of each
// every 5 ms.
func BenchmarkBlockedCalls(b *testing.B) {
	d := newDevice(b)
	inProcess(b, blocking{func(c *Call) {
		w := &watch{call: c, wake: func() {}}
		c.listener.busy.Add(1)
		for b.Loop() {
			if w.look() {
				b.Error("interrupted")
			}
		}
		d.check(c.Return(0, 0))
		w.look()
	}}, func(*Listener) { call(nrWait, 0) })
}

// clientMeasure makes args[1] calls on each of args[0] threads, and prints their times:
// those of the median thread, and the rate of all.
func clientMeasure(args []string) error {
	threads, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	calls, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	all := make([]measured, threads)
	start := time.Now()
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() {
			runtime.LockOSThread()
			all[i] = measure(calls, echo)
		})
	}
	wg.Wait()
	m := medianRound(all)
	m.Rate = float64(threads*calls) / time.Since(start).Seconds()
	return json.NewEncoder(os.Stdout).Encode(m)
}
