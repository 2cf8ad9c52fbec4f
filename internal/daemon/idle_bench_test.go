package daemon

import (
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// BenchmarkIdle measures the share of a core and the memory of a daemon that observes jobs
// with queues, none of them offline, while nothing changes: with the default intervals, on
// a fake driver and a fake sysfs. TMPDIR should be on a tmpfs, where inode numbers are not
// reused, as on sysfs.
func BenchmarkIdle(b *testing.B) {
	for _, c := range []struct{ jobs, queuesEach int }{{10, 8}, {20, 50}} {
		b.Run(fmt.Sprintf("queues=%d", c.jobs*c.queuesEach), func(b *testing.B) {
			h := newFakeHost(b, "6.12", "")
			h.opts.Log = zap.NewNop()
			for range c.jobs {
				job := h.start("viewer") // with two
				for range c.queuesEach - 2 {
					job.create(kfd.QueueTypeComputeAQL)
				}
			}
			debug.FreeOSMemory() // without the memory of the setup
			h.serve()
			cpu := func() time.Duration {
				var u syscall.Rusage
				if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
					b.Fatal(err)
				}
				return time.Duration(u.Utime.Nano() + u.Stime.Nano())
			}
			timer := time.NewTimer(2 * time.Second) // until it is idle
			<-timer.C
			b.ResetTimer()
			began, used := time.Now(), cpu()
			for b.Loop() {
				timer.Reset(time.Second)
				<-timer.C
			}
			b.ReportMetric(100*float64(cpu()-used)/float64(time.Since(began)), "%core")
			b.ReportMetric(residentMiB(b), "resident-MiB")
		})
	}
}

// residentMiB is VmRSS of proc_pid_status(5).
func residentMiB(b *testing.B) float64 {
	b.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "\nVmRSS:")
	kib, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	if err != nil {
		b.Fatal(err)
	}
	return kib / 1024
}
