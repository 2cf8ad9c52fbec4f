package e2e

// The tests named TestSoftGPU run in a guest with the real driver of Linux 6.12, on GPU
// nodes without a GPU (emu/softgpu): make vm-softgpu. The driver's own code creates,
// suspends, resumes and evicts the queues; kfdemu softgpu executes their packets while the
// driver has them mapped. Durations are EMULATED.

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// softGPUGuest is the value of guestEnv in that guest.
	softGPUGuest = "softgpu"
	// softGPUEnv decides how long the tests are: see softGPU.times.
	softGPUEnv = "GPREEMPT_SOFTGPU"
	// softGPUDir is the module's folder in debugfs.
	softGPUDir = "/sys/kernel/debug/softgpu"
)

// softGPUMain is TestMain in that guest, where the binaries are installed.
func softGPUMain(m *testing.M) int {
	timeout = guestTimeout
	gpreemptd, gpctl, gpaccept, kfdemuBinary, trainBinary = "/bin/gpreemptd", "/bin/gpctl", "/bin/gpaccept", "/bin/kfdemu", "/bin/train"
	if err := os.Link(kfdemuBinary, trainBinary); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	return testutil.VerifyMain(m)
}

// softGPU is the machine that the test runs on, with the driver's nodes.
type softGPU struct {
	t    *testing.T
	gpus []gpreempt.GPUID
	// slow counts the announcements that were repeated: see announce.
	slow int
}

// onSoftGPU returns this machine. Its packets run until the test has ended.
func onSoftGPU(t *testing.T) *softGPU {
	t.Helper()
	if os.Getenv(guestEnv) != softGPUGuest {
		t.Skip("it needs the driver's nodes without a GPU: make vm-softgpu runs it in a guest")
	}
	m := &softGPU{t: t}
	for _, line := range m.lines("nodes") {
		m.gpus = append(m.gpus, gpreempt.GPUID(line.number(t, "gpu")))
	}
	processor := spawn(t, exec.Command(kfdemuBinary, "softgpu"))
	processor.await("ready")
	t.Cleanup(func() {
		processor.signal(syscall.SIGTERM)
		end := processor.await("done")
		processor.awaitEnd()
		var packets struct{ Executed, Lost, Repeated uint64 }
		if err := json.Unmarshal([]byte(end.Line), &packets); err != nil || packets.Lost+packets.Repeated > 0 {
			t.Errorf("the packets of the GPUs: %s, %v", end.Line, err)
		}
		if log := processor.log.String(); log != "" {
			t.Errorf("kfdemu softgpu had trouble:\n%s", log)
		}
	})
	return m
}

// times returns how often a test repeats something: as often as the project's goals say
// with GPREEMPT_SOFTGPU=full, and else as often as CI has time for.
func (m *softGPU) times(full, short int) int {
	if os.Getenv(softGPUEnv) == "full" {
		return full
	}
	return short
}

// fields are the names and values of a line of the module's files.
type fields map[string]string

func (f fields) number(t *testing.T, name string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(f[name], 0, 64)
	if err != nil {
		t.Fatalf("%s: %v in %v", name, err, f)
	}
	return n
}

// lines reads a file of the module: names and values are separated by a space or "=".
func (m *softGPU) lines(name string) (all []fields) {
	m.t.Helper()
	text, err := os.ReadFile(filepath.Join(softGPUDir, name))
	if err != nil {
		m.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(strings.ReplaceAll(line, "=", " "))
		f := fields{}
		for i := 0; i+1 < len(words); i += 2 {
			f[words[i]] = words[i+1]
		}
		all = append(all, f)
	}
	return all
}

// unmaps returns how often the driver has unmapped queues of each GPU.
func (m *softGPU) unmaps() (all []uint64) {
	m.t.Helper()
	for _, line := range m.lines("nodes") {
		all = append(all, line.number(m.t, "unmaps"))
	}
	return all
}

// softState is where a queue stands: by the driver, and Running by the runlist.
type softState struct{ Suspended, Running, Evicted, Destroying bool }

var (
	softOn  = softState{Running: true}
	softOff = softState{Suspended: true}
)

// softQueue names a queue of a process.
type softQueue struct {
	GPU gpreempt.GPUID
	ID  uint32
}

// queues returns where the queues of a process stand.
func (m *softGPU) queues(pid int32) map[softQueue]softState {
	m.t.Helper()
	all := map[softQueue]softState{}
	for _, line := range m.lines("queues") {
		if line["pid"] != fmt.Sprint(pid) {
			continue
		}
		q := softQueue{gpreempt.GPUID(line.number(m.t, "gpu")), uint32(line.number(m.t, "queue"))}
		all[q] = softState{line["suspended"] == "1", line["running"] == "1", line["evicted"] == "1", line["destroying"] == "1"}
	}
	return all
}

// each reports whether a process has n queues, and each stands so.
func (m *softGPU) each(pid int32, n int, want softState) bool {
	m.t.Helper()
	all := m.queues(pid)
	for _, got := range all {
		if got != want {
			return false
		}
	}
	return len(all) == n
}

// checkEach checks that a worker has n queues, and each stands so.
func (m *softGPU) checkEach(w *worker, n int, want softState) {
	m.t.Helper()
	if !m.each(w.PID, n, want) {
		m.t.Errorf("process %d has the queues %+v, want %d, each %+v", w.PID, m.queues(w.PID), n, want)
	}
}

// awaitEach waits until a worker has n queues, and each stands so.
func (m *softGPU) awaitEach(w *worker, n int, want softState) {
	m.t.Helper()
	m.eventually(fmt.Sprintf("process %d has %d queues, each %+v", w.PID, n, want), func() bool { return m.each(w.PID, n, want) })
}

// eventually waits until cond holds.
func (m *softGPU) eventually(what string, cond func() bool) {
	m.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(timeout); ; {
		if cond() {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			m.t.Fatalf("%s: not within %v; the driver has %v", what, timeout, m.lines("queues"))
		}
	}
}

// checkStill checks that no queue of a worker progresses while another process's does.
func (m *softGPU) checkStill(w, other *worker) {
	m.t.Helper()
	before := w.stands()
	m.awaitProgress(other)
	if diff := cmp.Diff(before, w.stands()); diff != "" {
		m.t.Errorf("packets of worker %d ran while it was suspended (-before +after):\n%s", w.PID, diff)
	}
}

// awaitProgress waits until each queue of a worker ran more.
func (m *softGPU) awaitProgress(w *worker) {
	m.t.Helper()
	before := w.stands()
	m.eventually("each queue of a worker goes on", func() bool {
		for id, count := range w.stands() {
			if count <= before[id] {
				return false
			}
		}
		return true
	})
}

// gone waits until driver and daemon know nothing of a process.
func (m *softGPU) gone(d *daemon, pid int32) {
	m.t.Helper()
	m.awaitEach(&worker{PID: pid}, 0, softState{})
	d.eventually("the daemon has forgotten the process", func() bool { return d.target(pid) == nil })
}

// work starts the proof program as an offline job, and serve as one that no rule names.
func (m *softGPU) work(args ...string) *worker  { return m.workAs(trainBinary, args...) }
func (m *softGPU) serve(args ...string) *worker { return m.workAs(kfdemuBinary, args...) }

func (m *softGPU) workAs(program string, args ...string) *worker {
	m.t.Helper()
	w := spawn(m.t, exec.Command(program, append([]string{"work", "--duration", "2000", "--rate", "20", "--runtime"}, args...)...))
	w.await("ready")
	return w
}

// start runs the shipped daemon and waits until it serves. It knows nothing of another's
// runtime directory.
func (m *softGPU) start(config string) *daemon {
	m.t.Helper()
	return m.startIn(testutil.TempSocketDir(m.t), config)
}

// startIn is start with the runtime directory given.
func (m *softGPU) startIn(dir, config string) *daemon {
	m.t.Helper()
	d := prepare(m.t, dir, config, onHost)
	// A helper whose call does not return keeps the daemon's standard error open.
	d.process.WaitDelay = 10 * time.Second
	d.process.Env = environment("RUNTIME_DIRECTORY=" + dir)
	d.run()
	d.awaitServing()
	d.events = watchEvents(m.t, d.admin)
	return d
}

// announce returns a lease on quiet GPUs, on all without an argument. On an emulated CPU beside other work the driver
// may take 2 s for a call. The daemon then opens the breakers and everything runs: the
// announcement is repeated when they have closed.
func (m *softGPU) announce(d *daemon, gpus ...gpreempt.GPUID) (lease string) {
	m.t.Helper()
	for {
		lease, answer := d.ask(longest, gpus...)
		if answer.Quiesced {
			return lease
		}
		if answer.Reason != unsafeNow {
			m.t.Fatalf("the GPUs are not quiet: %+v", answer)
		}
		m.slow++
		d.complete(lease)
		d.eventually("the breakers have closed", func() bool {
			return !slices.ContainsFunc(m.gpus, d.breaker)
		})
	}
}

// gpu returns the flag of the proof program for one GPU.
func (m *softGPU) gpu(index int) string { return fmt.Sprint(m.gpus[index]) }
