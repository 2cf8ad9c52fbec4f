package e2e

import (
	"cmp"
	"errors"
	"io"
	"os"
	"regexp"
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
	own := controlGroups(t)
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
		if text := string(record[:n]); isAboutUs(text, own) {
			t.Errorf("the kernel log says: %s", text)
		}
	}
	t.Logf("the kernel log has %d new lines", lines)
}

// controlGroups returns the paths of the control groups of this test, and so of its daemons; none
// for the root of a hierarchy, which has no limits.
func controlGroups(t *testing.T) (own []string) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 && parts[2] != "/" {
			own = append(own, parts[2])
		}
	}
	return own
}

var (
	// fromDriver is the beginning of a message of amdgpu or KFD.
	fromDriver = regexp.MustCompile(`^(?:\[drm[^\]]*\] )?\*?(?:amdgpu|kfd)\b|\[amdgpu\]`)
	// ofControlGroup is a message about a limit of a control group, which it names (mem_cgroup_print_oom_context,
	// pids_can_fork). The line with the process that was killed follows the first, and names none.
	ofControlGroup = regexp.MustCompile(`(?:memcg=|pids controller in |Memory cgroup )`)
)

// isAboutUs reports whether a record of the kernel log is of the driver, or names the daemon, its
// unit or one of its control groups. Limits of the groups of others are not about us,
// whatever the processes there are called.
func isAboutUs(record string, own []string) bool {
	_, text, _ := strings.Cut(record, ";")
	text, _, _ = strings.Cut(text, "\n")
	named := slices.ContainsFunc(own, func(path string) bool {
		return regexp.MustCompile(`(?:=|in |for )` + regexp.QuoteMeta(path) + `(?:[/,:]|$)`).MatchString(text)
	})
	return named || fromDriver.MatchString(text) || strings.Contains(text, "gpreemptd") && !ofControlGroup.MatchString(text)
}

func TestOnlyOurLinesOfTheKernelLogCount(t *testing.T) {
	own := []string{"/system.slice/ci.service"}
	for record, want := range map[string]bool{
		"3,1,2,-;amdgpu 0000:03:00.0: amdgpu: GPU reset begin!\n SUBSYSTEM=pci\n":                                                         true,
		"3,1,2,-;amdgpu: qcm fence wait loop timeout expired\n":                                                                           true,
		"3,1,2,-;[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx timeout\n":                                                           true,
		"3,1,2,-;kfd kfd: amdgpu: added device 1002:74a1\n":                                                                               true,
		"3,1,2,-;INFO: task gpreemptd:4242 blocked for more than 120 seconds.\n":                                                          true,
		"6,1,2,-;gpreemptd[4242]: segfault at 0 ip 0 sp 0 error 4\n":                                                                      true,
		"4,1,2,-;CPU: 1 PID: 4242 Comm: gpreemptd Not tainted 6.12.0\n":                                                                   true,
		"6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/system.slice/ci.service,task_memcg=/system.slice/ci.service/a,task=go\n": true,
		"6,1,2,-;cgroup: fork rejected by pids controller in /system.slice/ci.service\n":                                                  true,
		"6,1,2,-;cgroup: fork rejected by pids controller in /system.slice/ci.service2\n":                                                 false,
		"6,1,2,-;cgroup: fork rejected by pids controller in /builds/gpreempt/other\n":                                                    false,
		"6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/gpreempt/other,task_memcg=/gpreempt/other,task=gpreemptd,pid=7\n":        false,
		"3,1,2,-;Memory cgroup out of memory: Killed process 7 (gpreemptd) total-vm:1kB\n":                                                false,
		"4,1,2,-;INFO: task jbd2:9 blocked for more than 120 seconds.\n":                                                                  false,
		"12,1,2,-;a test of gpreempt writes\n":                                                                                            false,
	} {
		if got := isAboutUs(record, own); got != want {
			t.Errorf("isAboutUs(%q) = %v, want %v", record, got, want)
		}
	}
}
