package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/evidence"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// stat is what /proc/PID/stat says of a process.
type stat struct {
	state         byte // a letter, Z for a zombie
	parent, group int
	ticks         uint64 // of the processors, in 1/userHZ s
	pages         uint64
}

// userHZ is the unit of times in /proc, on every architecture that has AMD GPUs.
const userHZ = 100

// readStat reads /proc/PID/stat.
func readStat(pid int) (s stat, ok bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return s, false
	}
	return parseStat(string(text))
}

// parseStat parses PID (COMM) STATE PPID PGRP ...: the name may contain anything.
func parseStat(text string) (s stat, ok bool) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 22 {
		return s, false
	}
	var errs []error
	number := func(i int) uint64 {
		v, err := strconv.ParseUint(fields[i], 10, 64)
		errs = append(errs, err)
		return v
	}
	s = stat{state: fields[0][0], parent: int(number(1)), group: int(number(2)), ticks: number(11) + number(12), pages: number(21)}
	return s, errors.Join(errs...) == nil
}

// below reports whether a process is one of the roots, in the group of one, or below one. read
// is readStat, or what was read before.
func below(pid int, roots []int, read func(int) (stat, bool)) bool {
	const deepest = 1000 // the chain may change while it is read
	for range deepest {
		if slices.Contains(roots, pid) {
			return true
		}
		s, ok := read(pid)
		if !ok {
			return false
		}
		if slices.Contains(roots, s.group) {
			return true
		}
		if s.parent == 0 {
			return false
		}
		pid = s.parent
	}
	return false
}

// usage is what processes used of the host.
type usage struct {
	ticks uint64
	mib   float64
}

// readStats reads the stat of all processes, each once: a trial must not use the processors that
// its work needs.
func readStats() map[int]stat {
	names, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		panic(err) // the pattern is invalid
	}
	all := make(map[int]stat, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(filepath.Base(name))
		if err != nil {
			continue
		}
		if s, ok := readStat(pid); ok {
			all[pid] = s
		}
	}
	return all
}

// usageOf sums what the processes below the roots, and those with the pids, have used.
func usageOf(all map[int]stat, roots []int, pids []int) (u usage) {
	read := func(pid int) (s stat, ok bool) { s, ok = all[pid]; return s, ok }
	for pid, s := range all {
		if slices.Contains(pids, pid) || below(pid, roots, read) {
			u.ticks += s.ticks
			u.mib += float64(s.pages) * float64(os.Getpagesize()) / (1 << 20)
		}
	}
	return u
}

// processors names the processors of the host.
func processors() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return strconv.Itoa(runtime.NumCPU())
	}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return fmt.Sprintf("%d, %s", runtime.NumCPU(), strings.TrimSpace(value))
		}
	}
	return strconv.Itoa(runtime.NumCPU())
}

// gpuBusy returns the largest gpu_busy_percent of GPUs, by their render minors. ok is false where
// the driver has none.
func gpuBusy(minors []uint32) (percent float64, ok bool) {
	for _, minor := range minors {
		text, err := os.ReadFile(fmt.Sprintf("/sys/class/drm/renderD%d/device/gpu_busy_percent", minor))
		if err != nil {
			continue
		}
		if v, err := strconv.ParseFloat(strings.TrimSpace(string(text)), 64); err == nil {
			percent, ok = max(percent, v), true
		}
	}
	return percent, ok
}

// sleep waits, unless ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// isUnknownTarget reports that a target has exited.
func isUnknownTarget(err error) bool {
	return gpreempt.ReasonOf(api.FromStatus(err)) == gpreempt.ReasonUnknownTarget
}

func compareSpans(a, b *evidence.Span) int {
	switch {
	case a.From < b.From:
		return -1
	case a.From > b.From:
		return 1
	}
	return strings.Compare(a.Name, b.Name)
}
