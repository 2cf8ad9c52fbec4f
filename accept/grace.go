package accept

import (
	"context"
	"fmt"
	"math"

	"github.com/gpreempt/gpreempt/accept/workload"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The grace periods that the design document S4 compares, as it writes them. The driver keeps 8 bits, so
// that the long one is 232 of its unit, 1000 GPU clocks (pm_config_dequeue_wait_counts_v9).
const (
	graceShort = 100
	graceLong  = 1000
)

// gracePeriods measures both with the daemon's grace period and with those of S4, and says how much the
// latter differ.
func gracePeriods(ctx context.Context, r *result) error {
	work := workload.Config{Queues: 2}
	if waves(r.b) == "" { // endless kernels: the firmware waits for the whole period
		work.Kernel, work.Groups = true, r.b.gpu.CUs
	}
	took := map[uint32]Measure{}
	for _, grace := range []uint32{kfd.GraceMin, graceShort, graceLong} {
		name := fmt.Sprintf("grace %d", grace)
		var suspends, all [][]float64
		for range repeats {
			suspend, gap, err := r.gaps(ctx, r.b.attachWith(grace), work)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			suspends, all = append(suspends, suspend), append(all, gap)
		}
		took[grace] = r.samples("SUSPEND with "+name, suspends)
		r.samples("gap with "+name, all)
	}
	short, long := took[graceShort], took[graceLong]
	r.note("%s", graceFinding(short.P50, long.P50, max(short.Spread, long.Spread), r.b.machine(), work.Kernel))
	return nil
}

// graceFinding says whether the grace period is a factor, by the medians of SUSPEND with the short and the
// long one and how much those of the repeats differ, in µs.
func graceFinding(short, long, spread float64, machine string, kernels bool) string {
	text := fmt.Sprintf("SUSPEND takes %.0f µs with grace %d and %.0f µs with grace %d at the median: a difference of %.0f µs, where repeats differ by %.0f µs",
		short, graceShort, long, graceLong, long-short, spread)
	switch {
	case machine != hardware:
		return text + "; EMULATED, on " + machine + ": no difference by its rule: a grace period waits only for kernels that run, and the job has none"
	case !kernels:
		return text + "; the job runs no kernel, so that there is nothing to wait for"
	case math.Abs(long-short) <= spread:
		return text + ": no difference, the grace period is no factor"
	}
	return text + ": the grace period is a factor"
}
