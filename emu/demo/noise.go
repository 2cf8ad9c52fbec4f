package demo

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/gpreempt/gpreempt/internal/hrtimer"
)

// yardstick measures the machine while an arm is played: a thread of its own asks to
// be woken every millisecond and notes how late it was. It does nothing else, so what
// makes it late is who else wants the CPUs.
type yardstick struct {
	timer *hrtimer.Timer
	late  []float64
	err   error
	ended chan struct{}

	pids  []int
	began time.Time
	cpu   time.Duration
}

// tick is how often the yardstick wants to be woken.
const tick = time.Millisecond

// layYardstick begins to measure. pids are the demo's own processes.
func layYardstick(pids ...int) (*yardstick, error) {
	timer, err := hrtimer.New()
	if err != nil {
		return nil, err
	}
	y := &yardstick{timer: timer, ended: make(chan struct{}), pids: pids, began: time.Now()}
	if y.cpu, err = cpuTime(pids); err != nil {
		return nil, errors.Join(err, timer.Close())
	}
	go y.measure()
	return y, nil
}

func (y *yardstick) measure() {
	defer close(y.ended)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		due := time.Now().Add(tick)
		if y.err = y.timer.Set(tick); y.err == nil {
			y.err = y.timer.Wait()
		}
		if y.err != nil {
			return
		}
		y.late = append(y.late, milliseconds(time.Since(due)))
	}
}

// take ends the measurement. late is how late one waking in a hundred was at least, in
// milliseconds; own is how much of the CPUs the
// demo's processes used themselves, 0 to 1.
func (y *yardstick) take() (late, own float64, err error) {
	err = y.timer.Close()
	<-y.ended
	if !errors.Is(y.err, os.ErrClosed) {
		err = errors.Join(err, y.err)
	}
	cpu, readErr := cpuTime(y.pids)
	if err := errors.Join(err, readErr); err != nil {
		return 0, 0, fmt.Errorf("measure the machine: %w", err)
	}
	if len(y.late) > 0 {
		late = percentile(y.late, 0.99)
	}
	return late, (cpu - y.cpu).Seconds() / time.Since(y.began).Seconds() / float64(runtime.NumCPU()), nil
}

// ticksPerSecond is the unit of CPU times in /proc (USER_HZ).
const ticksPerSecond = 100

// cpuTime is what processes have used so far, all threads.
func cpuTime(pids []int) (sum time.Duration, err error) {
	for _, pid := range pids {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, err
		}
		// utime and stime are the 12th and 13th after the name, which ends with the last ')'.
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		for _, field := range fields[min(11, len(fields)):min(13, len(fields))] {
			ticks, err := strconv.ParseInt(string(field), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
			}
			sum += time.Duration(ticks) * time.Second / ticksPerSecond
		}
	}
	return sum, nil
}
