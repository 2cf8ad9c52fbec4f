package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/internal/stat"
)

// jitterProbe measures this machine during a run: a thread of its own asks to be woken
// every millisecond and records how late it was. It does nothing else, so other load on the
// CPUs makes it late.
type jitterProbe struct {
	timer *hrtimer.Timer
	late  []float64
	err   error
	ended chan struct{}

	pids  []int
	began time.Time
	cpu   time.Duration
}

// tick is the time between two wake-ups of a probe.
const tick = time.Millisecond

// startJitterProbe begins to measure. pids are the demo's own processes; one may be named
// twice.
func startJitterProbe(pids ...int) (*jitterProbe, error) {
	slices.Sort(pids)
	pids = slices.Compact(pids)
	timer, err := hrtimer.New()
	if err != nil {
		return nil, err
	}
	p := &jitterProbe{timer: timer, ended: make(chan struct{}), pids: pids, began: time.Now()}
	if p.cpu, err = cpuTime(pids); err != nil {
		return nil, errors.Join(err, timer.Close())
	}
	go p.measure()
	return p, nil
}

func (p *jitterProbe) measure() {
	defer close(p.ended)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		due := time.Now().Add(tick)
		if p.err = p.timer.Set(tick); p.err == nil {
			p.err = p.timer.Wait()
		}
		if p.err != nil {
			return
		}
		p.late = append(p.late, milliseconds(time.Since(due)))
	}
}

// stop ends the measurement. late is the 99th percentile of how late the wake-ups were, in
// milliseconds; own is the share of all CPUs that the demo's processes used, 0 to 1.
func (p *jitterProbe) stop() (late, own float64, err error) {
	err = p.timer.Close()
	<-p.ended
	if !errors.Is(p.err, os.ErrClosed) {
		err = errors.Join(err, p.err)
	}
	cpu, readErr := cpuTime(p.pids)
	if err := errors.Join(err, readErr); err != nil {
		return 0, 0, fmt.Errorf("measure the machine: %w", err)
	}
	slices.Sort(p.late)
	return stat.Quantile(p.late, 0.99), (cpu - p.cpu).Seconds() / time.Since(p.began).Seconds() / float64(runtime.NumCPU()), nil
}

// ticksPerSecond is the unit of CPU times in /proc (USER_HZ).
const ticksPerSecond = 100

// cpuTime returns the CPU time that processes have used so far, all threads.
func cpuTime(pids []int) (sum time.Duration, err error) {
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, err
		}
		// utime and stime are the 12th and 13th after the name, which ends with the last ')'.
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
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
