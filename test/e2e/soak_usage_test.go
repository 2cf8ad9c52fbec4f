package e2e

import (
	"cmp"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
)

const (
	// soakReport is the time between two looks at the daemon.
	soakReport = 10 * time.Second
	// rssGrowth is what resident memory may grow by after the first third, if that is
	// warmUp at least: the runtime and what the daemon keeps fill up meanwhile.
	rssGrowth = 0.05
	warmUp    = time.Minute
	// flutter is what descriptors, goroutines and threads may differ by under load: what
	// is live at a moment is random.
	flutter = 16
	// newThreads is what threads may grow by from one rest to the last: the runtime makes
	// one when all are in system calls at once, and keeps it.
	newThreads = 4
)

// usage is what the daemon takes of the host.
type usage struct {
	at                            time.Duration // since the first look
	rss, fds, goroutines, threads int           // rss in KiB
}

func (d *daemon) usage() usage {
	d.t.Helper()
	return usage{rss: d.procStatus("VmRSS"), fds: d.fds(), goroutines: int(d.status().GetGoroutineCount()), threads: d.procStatus("Threads")}
}

const (
	usageHead = "%10s  %-6s  %9s  %5s  %10s  %7s  %5s"
	usageRow  = "%10v  %-6s  %9d  %5d  %10d  %7d  %4d%%"
)

// sample looks at the daemon until the load is over.
func (s *soak) sample() []usage {
	s.t.Helper()
	return s.sampleUntil(s.ctx.Done(), soakReport)
}

// sampleUntil looks at the daemon now and then, and prints what it sees.
func (s *soak) sampleUntil(over <-chan struct{}, every time.Duration) []usage {
	s.t.Helper()
	tick := time.NewTicker(every)
	defer tick.Stop()
	var samples []usage
	s.t.Logf(usageHead, "time", "phase", "RSS KiB", "files", "goroutines", "threads", "CPU")
	began, spent := time.Now(), s.cpu()
	for {
		select {
		case <-over:
			return samples
		case <-s.exited:
			s.t.Error("gpreemptd is gone")
			return samples
		case <-tick.C:
		}
		u := s.usage()
		u.at = time.Since(began)
		samples = append(samples, u)
		now := s.cpu()
		s.t.Logf(usageRow, u.at.Round(time.Second), *cmp.Or(s.doing.Load(), new("load")), u.rss, u.fds, u.goroutines, u.threads,
			(now-spent)*10*100/int(every.Milliseconds()))
		spent = now
	}
}

// middle returns the median of a figure.
func middle(part []usage, of func(usage) int) int {
	all := make([]int, len(part))
	for i, u := range part {
		all[i] = of(u)
	}
	return stat.Median(all)
}

// checkGrowth compares what is usual in the last third of a load with what is in the
// middle one; the first is for what is allocated once. The median is what is usual: one
// sample shows where in its cycle the garbage collector was.
func checkGrowth(t *testing.T, samples []usage) {
	t.Helper()
	third := len(samples) / 3
	if third < 2 {
		t.Logf("%d samples are too few to tell growth", len(samples))
		return
	}
	warm := samples[third].at >= warmUp && !racing()
	if !warm {
		t.Logf("the growth of resident memory is not judged: it takes 3 minutes, without the race detector")
	}
	t.Logf("%-10s  %12s  %12s  %8s", "under load", "middle third", "last third", "growth")
	for _, figure := range []struct {
		name string
		of   func(usage) int
	}{
		{"RSS KiB", func(u usage) int { return u.rss }},
		{"files", func(u usage) int { return u.fds }},
		{"goroutines", func(u usage) int { return u.goroutines }},
		{"threads", func(u usage) int { return u.threads }},
	} {
		first, last := middle(samples[third:2*third], figure.of), middle(samples[2*third:], figure.of)
		growth := float64(last-first) / float64(first)
		t.Logf("%-10s  %12d  %12d  %+7.1f%%", figure.name, first, last, 100*growth)
		switch {
		case figure.name != "RSS KiB" && last > first+flutter, figure.name == "RSS KiB" && growth >= rssGrowth && warm:
			t.Errorf("the daemon grows: %s from %d to %d", figure.name, first, last)
		}
	}
}

// checkRests compares what the daemon takes when nothing is going on, after each cycle
// of the load. That is exact for descriptors and goroutines: one more is a leak.
func checkRests(t *testing.T, rests []usage) {
	t.Helper()
	t.Logf("%-10s  %9s  %5s  %10s  %7s", "at rest", "RSS KiB", "files", "goroutines", "threads")
	for i, u := range rests {
		t.Logf("%-10d  %9d  %5d  %10d  %7d", i+1, u.rss, u.fds, u.goroutines, u.threads)
	}
	first, last := rests[1], rests[len(rests)-1] // the first time warms up
	t.Logf("%-10s  %+8.1f%%  %+5d  %+10d  %+7d", "growth", 100*float64(last.rss-first.rss)/float64(first.rss),
		last.fds-first.fds, last.goroutines-first.goroutines, last.threads-first.threads)
	if last.fds != first.fds || last.goroutines != first.goroutines || last.threads > first.threads+newThreads {
		t.Errorf("the daemon leaks: %+v at the second rest, %+v at the last", first, last)
	}
}

// kernelLog is that of the host, from when it was opened.
type kernelLog struct{ file *os.File }

func openKernelLog(t *testing.T) kernelLog {
	t.Helper()
	fd, err := syscall.Open("/dev/kmsg", syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Logf("the kernel log is not watched: %v", err)
		return kernelLog{}
	}
	file := os.NewFile(uintptr(fd), "/dev/kmsg")
	t.Cleanup(func() { _ = file.Close() }) // it was read only
	if _, err := syscall.Seek(fd, 0, io.SeekEnd); err != nil {
		t.Logf("the kernel log is not watched: %v", err)
		return kernelLog{}
	}
	return kernelLog{file}
}

// check looks for what no daemon should cause.
func (k kernelLog) check(t *testing.T) {
	t.Helper()
	if k.file == nil {
		return
	}
	if err := k.file.SetReadDeadline(time.Now().Add(time.Second)); err != nil && !errors.Is(err, os.ErrNoDeadline) {
		t.Fatal(err)
	}
	record := make([]byte, 8192)
	lines := 0
	for {
		n, err := k.file.Read(record)
		if errors.Is(err, syscall.EPIPE) { // some were overwritten
			continue
		}
		if err != nil {
			break // no more
		}
		lines++
		text := string(record[:n])
		if strings.Contains(text, "a test of gpreempt") {
			continue // others try the reading of this log
		}
		if slices.ContainsFunc([]string{"gpreempt", "amdgpu", "kfd", "BUG:", "Oops", "blocked for more than"}, func(s string) bool { return strings.Contains(text, s) }) {
			t.Errorf("the kernel log says: %s", text)
		}
	}
	t.Logf("the kernel log has %d new lines", lines)
}
