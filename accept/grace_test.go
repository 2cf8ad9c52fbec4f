package accept

import "testing"

// The grace period is a factor only on hardware, with kernels to wait for, and beyond what repeats differ by.
func TestGracePeriodIsAFactorOnlyIfItIsMeasured(t *testing.T) {
	const measured = "SUSPEND takes 300 µs with grace 100 and 390 µs with grace 1000 at the median: a difference of 90 µs, where repeats differ by "
	for _, tc := range []struct {
		name    string
		spread  float64
		machine string
		kernels bool
		want    string
	}{
		{"more than the repeats differ", 89, hardware, true, measured + "89 µs: the grace period is a factor"},
		{"as much as the repeats differ", 90, hardware, true, measured + "90 µs: no difference, the grace period is no factor"},
		{"without kernels", 10, hardware, false, measured + "10 µs; the job runs no kernel, so that there is nothing to wait for"},
		{
			"emulated", 10, "a model", false,
			measured + "10 µs; EMULATED, on a model: no difference by its rule: a grace period waits only for kernels that run, and the job has none",
		},
	} {
		if got := graceFinding(300, 390, tc.spread, tc.machine, tc.kernels); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}
