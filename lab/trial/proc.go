package trial

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// readStat reads /proc/PID/stat.
func readStat(pid int32) (s discovery.ProcStat, ok bool) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, false
	}
	s, err = discovery.ParseProcStat(text)
	return s, err == nil
}

// below reports whether a process is one of the roots, in the group of one, or below one. read
// is readStat, or what was read before.
func below(pid int32, roots []int32, read func(int32) (discovery.ProcStat, bool)) bool {
	const deepest = 1000 // the chain may change while it is read
	for range deepest {
		if slices.Contains(roots, pid) {
			return true
		}
		s, ok := read(pid)
		if !ok {
			return false
		}
		if slices.Contains(roots, s.Group) {
			return true
		}
		if s.Parent == 0 {
			return false
		}
		pid = s.Parent
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
func readStats() map[int32]discovery.ProcStat {
	names, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		panic(err) // the pattern is invalid
	}
	all := make(map[int32]discovery.ProcStat, len(names))
	for _, name := range names {
		pid, err := strconv.ParseInt(filepath.Base(name), 10, 32)
		if err != nil {
			continue
		}
		if s, ok := readStat(int32(pid)); ok {
			all[s.PID] = s
		}
	}
	return all
}

// usageOf sums what the processes below the roots, and those with the pids, have used.
func usageOf(all map[int32]discovery.ProcStat, roots, pids []int32) (u usage) {
	read := func(pid int32) (s discovery.ProcStat, ok bool) { s, ok = all[pid]; return s, ok }
	for pid, s := range all {
		if slices.Contains(pids, pid) || below(pid, roots, read) {
			u.ticks += s.Ticks
			u.mib += float64(s.Pages) * float64(os.Getpagesize()) / (1 << 20)
		}
	}
	return u
}

// daemonPID returns the pid of the daemon that listens on a socket, 0 if it is not known: it may be in
// another pid namespace.
func daemonPID(ctx context.Context, socket string, all map[int32]discovery.ProcStat) int32 {
	c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", socket)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn() //nolint:forcetypeassert // of the network unix
	if err != nil {
		return 0
	}
	var peer *syscall.Ucred
	if raw.Control(func(fd uintptr) {
		peer, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}) != nil || err != nil {
		return 0
	}
	if _, here := all[peer.Pid]; here && peer.Pid > 1 {
		return peer.Pid
	}
	// A service manager made the socket.
	var pid int32
	for _, s := range all {
		if s.Comm == "gpreemptd" && s.Parent == 1 {
			if pid != 0 {
				return 0
			}
			pid = s.PID
		}
	}
	return pid
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
	return gpreempt.ReasonOf(client.FromStatus(err)) == gpreempt.ReasonUnknownTarget
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
