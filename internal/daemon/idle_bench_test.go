package daemon

import (
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// BenchmarkIdle tells what share of a core a whole daemon takes that watches 10
// processes with 8 queues each, none of them offline, while nothing changes: with
// the default intervals, on a fake driver and a fake sysfs on disk.
func BenchmarkIdle(b *testing.B) {
	h := newFakeHost(b, "6.12", "")
	h.opts.Log = zap.NewNop()
	for range 10 {
		job := h.start("viewer")
		for range 6 {
			job.create(kfd.QueueTypeComputeAQL)
		}
	}
	h.serve()
	cpu := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	timer := time.NewTimer(5 * time.Second) // it settles
	<-timer.C
	b.ResetTimer()
	began, used := time.Now(), cpu()
	for b.Loop() {
		timer.Reset(time.Second)
		<-timer.C
	}
	b.ReportMetric(100*float64(cpu()-used)/float64(time.Since(began)), "%core")
}
