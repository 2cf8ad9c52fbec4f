package workload

import (
	"fmt"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// clockTick is the period of a GPU's counter: 100 MHz.
const clockTick = 10 * time.Nanosecond

// Clock is the counter of a GPU (GET_CLOCK_COUNTERS). On an emulated machine it stands still
// while the emulator works for a caller.
type Clock struct {
	d   *device
	gpu gpreempt.GPUID
}

// OpenClock opens the driver for the counter of the first GPU. The caller must Close the clock.
func OpenClock(sys Sys) (*Clock, error) {
	d, err := openDevice(sys)
	if err != nil {
		return nil, err
	}
	return &Clock{d: d, gpu: d.gpus[0].ID}, nil
}

// Now returns the time since the counter was 0.
func (c *Clock) Now() (time.Duration, error) {
	args := kfdabi.ClockCountersArgs{GPUID: uint32(c.gpu)}
	if err := c.d.ioctl(kfdabi.ReqGetClockCounters, c.gpu, kfdabi.NoQueue, kfd.PointerTo(&args)); err != nil {
		return 0, fmt.Errorf("read the clock of a GPU: %w", err)
	}
	return time.Duration(args.GPUClockCounter) * clockTick, nil
}

// Close closes the driver.
func (c *Clock) Close() error { return c.d.close() }
