package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// helpers returns the helper processes of a daemon, ascending. Processes of the machine are
// this machine's.
func (d *daemon) helpers() []int32 {
	d.t.Helper()
	return helpersOf(d.t, int32(d.process.Process.Pid))
}

func helpersOf(t *testing.T, daemon int32) (pids []int32) {
	t.Helper()
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range all {
		pid, err := strconv.ParseInt(entry.Name(), 10, 32)
		if err == nil && parent(int32(pid)) == daemon {
			pids = append(pids, int32(pid))
		}
	}
	slices.Sort(pids)
	return pids
}

// helperOf returns the helper that debugs a job.
func (m *emulated) helperOf(w *worker) int32 {
	m.t.Helper()
	p, ok := m.process(w.PID)
	if !ok || p.Debugger == 0 {
		m.t.Fatalf("nobody debugs worker %d: %+v", w.PID, p)
	}
	return p.Debugger
}

// A helper whose call of the driver does not return outlives its daemon. Nothing waits for it:
// the daemon ends, and everything else runs.
func TestKilledDaemonWithAHelperInTheDriverReleasesEverythingElse(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		t.Parallel()
		m := emulate(t, kfdemu.Config{GPUs: 2, Profile: profile})
		stuckGPU, gpu := m.GPUs()[0].ID, m.GPUs()[1].ID
		stuck := m.work("--gpus", m.gpuFlag(0), "--duration", "500", "--runtime")
		job := m.work("--gpus", m.gpuFlag(1), "--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(stuck, 1)
		d.offlineTarget(job, 1)
		_, answer := d.ask(10*time.Second, gpu)
		checkSaid(t, "before a helper hangs", said{true, done, 1}, answer)
		reached, release := make(chan struct{}), make(chan struct{})
		m.Inject(kfdemu.Fault{Op: driver.TrapOp(kfd.TrapSuspendQueues), Target: stuck.PID, Do: func() { close(reached); <-release }})
		_, answer = d.ask(300*time.Millisecond, stuckGPU)
		checkSaid(t, "while a helper hangs", said{false, tooLong, 0}, answer)
		<-reached
		m.checkEach(job, 1, offGPU)

		d.kill()
		m.awaitEach(job, 1, onGPU)
		m.awaitProgress(job)
		m.awaitEach(stuck, 1, onGPU) // the driver's cycles for the job take it off for moments
		// The emulator has the next program that opens the driver wait for the call.
		close(release)
		next := m.start(atOnce)
		next.offlineTarget(job, 1)
		next.offlineTarget(stuck, 1)
		lease, answer := next.ask(10*time.Second, gpu)
		checkSaid(t, "by the next daemon", said{true, done, 1}, answer)
		m.checkEach(job, 1, offGPU)
		next.complete(lease)
		m.awaitEach(job, 1, onGPU)
		job.stop()
		stuck.stop()
	})
}

// What a helper holds ends with it, however it ends, and the daemon attaches again.
func TestHelperThatIsKilledReleasesItsJobWhichIsAttachedAgain(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		t.Parallel()
		m := emulate(t, kfdemu.Config{Profile: profile})
		first, second := m.work("--duration", "500", "--runtime"), m.work("--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(first, 1)
		d.offlineTarget(second, 1)
		lease := d.announce(t.Context()).GetLeaseId()
		victim := m.helperOf(first)
		if victim == m.helperOf(second) {
			t.Fatalf("helper %d has two jobs", victim)
		}
		if err := syscall.Kill(int(victim), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		m.eventually("another helper debugs the job", func() bool {
			p, _ := m.process(first.PID)
			return p.Debugger != 0 && p.Debugger != victim
		})
		m.checkEach(second, 1, offGPU)
		d.complete(lease)
		m.awaitEach(first, 1, onGPU)
		m.awaitEach(second, 1, onGPU)
		m.checkDebugs(d, 2)
		first.stop()
		second.stop()
		m.gone(d, first.PID)
	})
}

// A helper has what it needs for one job: it inherits neither the daemon's locks nor its
// connections. The daemon and its helpers are no processes that use a GPU.
func TestHelperHasNoDescriptorOfTheDaemon(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{Profile: "7.2"})
	job := m.work("--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 1)
	got := map[string]int{}
	dir := fmt.Sprintf("/proc/%d/fd", m.helperOf(job))
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		file, err := os.Readlink(filepath.Join(dir, entry.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		kind, _, _ := strings.Cut(file, ":[")
		if entry.Name() == "2" {
			kind = "standard error"
		}
		if strings.HasPrefix(kind, fmt.Sprintf("/proc/%d", job.PID)) {
			kind = "the job's proc"
		}
		got[kind]++
	}
	want := map[string]int{
		"/dev/null": 2, "standard error": 1, "socket": 1,
		"/memfd:kfd (deleted)": 1, // the emulated driver
		"pipe":                 1, // of the driver's events
		"the job's proc":       2,
		"anon_inode":           2, // epoll and eventfd of Go
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("descriptors of a helper (-want +got), %v:\n%s", slices.Sorted(maps.Keys(got)), diff)
	}
	listed := m.Driver().Processes()
	for _, pid := range append(d.helpers(), int32(d.process.Process.Pid)) {
		if !slices.ContainsFunc(listed, func(p driver.ProcessState) bool { return p.PID == pid }) {
			continue // started ahead, and has not opened the driver yet
		}
		if d.target(pid) != nil {
			t.Errorf("process %d of the daemon is listed as one that uses a GPU", pid)
		}
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.helperOf(job)))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "RssAnon") || strings.HasPrefix(line, "Threads") {
			t.Log("a helper: ", strings.TrimSpace(line))
		}
	}
	d.stop()
	m.eventually("the helpers have ended", func() bool {
		return !slices.ContainsFunc(m.Driver().Processes(), func(p driver.ProcessState) bool { return p.PID != job.PID })
	})
	job.stop()
}
