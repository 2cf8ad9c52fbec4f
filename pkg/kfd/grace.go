package kfd

import "fmt"

// MaxGracePeriod is the longest grace period, in units of 1000 GPU core clocks.
const MaxGracePeriod = 255

// GracePeriod is how long the GPU waits for waves to end before it saves them to memory.
// With the zero value waves are saved at once.
//
// The field in the ioctl has 32 bits, of which the hardware uses 8, and there 0 means
// infinite. The driver replaces 0 by 1, but a multiple of 256 is infinite, and the call
// then waits for kernels to end, up to the preemption timeout and a GPU reset. A
// GracePeriod cannot be such a number.
type GracePeriod struct{ field uint32 }

// DefaultGracePeriod keeps the GPU's own setting (USE_DEFAULT_GRACE_PERIOD of the driver).
func DefaultGracePeriod() GracePeriod { return GracePeriod{field: 0xffffffff} }

// NewGracePeriod returns a grace period of n times 1000 GPU core clocks; n is 0 to
// [MaxGracePeriod], anything else is an error. Drivers for GPUs whose firmware
// schedules queue by queue (gfx11 and later) ignore it.
func NewGracePeriod(n int) (GracePeriod, error) {
	if n < 0 || n > MaxGracePeriod {
		return GracePeriod{}, fmt.Errorf("grace period %d: want 0 to %d, in units of 1000 GPU core clocks", n, MaxGracePeriod)
	}
	return GracePeriod{field: uint32(n)}, nil
}

// String returns the grace period in words.
func (g GracePeriod) String() string {
	switch g.field {
	case 0:
		return "none"
	case DefaultGracePeriod().field:
		return "the GPU's default"
	}
	return fmt.Sprintf("%d000 GPU core clocks", g.field)
}
