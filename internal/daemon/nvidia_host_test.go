package daemon

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	conn "github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/nvchannels"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// addNVIDIA adds a GPU of NVIDIA to a host, with a fake driver.
func addNVIDIA(t *testing.T, h *fakeHost, model string) *nvrmtest.Machine {
	t.Helper()
	const version = "580.159.04"
	h.put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "+version+"  Release Build\n")
	h.put("sys/module/nvidia/version", version+"\n")
	h.put("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t "+model+"\nDevice Minor: \t 0\n")
	m := nvrmtest.New()
	t.Cleanup(m.Close)
	h.opts.Host.RM = m.Sys()
	h.opts.Host.Supervise = func() (*os.File, *exec.Cmd, error) {
		daemon, socket, err := conn.Pair()
		if err != nil {
			return nil, nil, err
		}
		ended := make(chan error, 1)
		go func() { ended <- nvchannels.Supervise(socket, m.Sys(), time.Hour) }()
		t.Cleanup(func() {
			if err := <-ended; err != nil {
				t.Error(err)
			}
			_ = socket.Close()
		})
		return daemon, nil, nil
	}
	return m
}

// startCUDA starts a process on the fake GPU of NVIDIA.
func startCUDA(h *fakeHost, m *nvrmtest.Machine, key gpreempt.ProcessKey, comm string) *nvrmtest.Process {
	h.t.Helper()
	dir := fmt.Sprintf("proc/%d/", key.PID)
	h.put(dir+"stat", fmt.Sprintf("%d (%s) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", key.PID, comm, key.Start))
	h.put(dir+"status", "Name:\t"+comm+"\nUid:\t1000\t1000\t1000\t1000\nGid:\t100\t100\t100\t100\nTracerPid:\t0\n")
	h.put(dir+"comm", comm+"\n")
	h.put(dir+"cmdline", comm+"\x00")
	h.put(dir+"cgroup", "0::/batch\n")
	return m.Start(key)
}

// targets returns the mechanisms of the targets by process once cond holds.
func targetsOnce(t *testing.T, c *client.Client, cond func(map[int32]string) bool) map[int32]string {
	t.Helper()
	for {
		list, err := c.Admin().ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		mechanisms := map[int32]string{}
		for _, target := range list.GetTargets() {
			mechanisms[target.GetPid()] = target.GetMechanism()
		}
		if cond(mechanisms) {
			return mechanisms
		}
		runtime.Gosched()
	}
}

// off returns how many of its compute channels are off.
func off(p *nvrmtest.Process) int {
	n, _, _, _ := p.State()
	return n
}

func awaitOff(t *testing.T, p *nvrmtest.Process, n int) {
	t.Helper()
	for off(p) != n {
		if t.Context().Err() != nil {
			t.Fatalf("%d channels are off, want %d", off(p), n)
		}
		runtime.Gosched()
	}
}

const withNVIDIA = "mechanisms: [dbgtrap, nvchannels]\n" + trainersAreOffline

func TestLeaseSuspendsProcessesOfBothDrivers(t *testing.T) {
	h := newFakeHost(t, "6.12", withNVIDIA)
	m := addNVIDIA(t, h, "NVIDIA H200")
	amd := h.start("trainer")
	const first, second, viewer = 7001, 7002, 7003
	jobs := []*nvrmtest.Process{
		startCUDA(h, m, gpreempt.ProcessKey{PID: first, Start: 11}, "trainer"),
		startCUDA(h, m, gpreempt.ProcessKey{PID: second, Start: 12}, "trainer2"),
		startCUDA(h, m, gpreempt.ProcessKey{PID: viewer, Start: 13}, "viewer"),
	}
	c, stop := h.serve()
	targetsOnce(t, c, func(by map[int32]string) bool {
		return by[amd.PID()] == "dbgtrap" && by[first] == "nvchannels" && by[second] == "nvchannels"
	})

	lease, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), Label: "chat", TTL: time.Minute, MaxWait: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	got := []int{len(amd.Suspended()), off(jobs[0]), off(jobs[1]), off(jobs[2])}
	if diff := cmp.Diff([]int{2, 8, 8, 0}, got); diff != "" || !lease.Quiet() {
		t.Errorf("quiet %v; queues and channels off (-want +got):\n%s", lease.Quiet(), diff)
	}
	jobs[0].Bear(3)
	awaitOff(t, jobs[0], 11)
	if err := release(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	for _, p := range jobs {
		awaitOff(t, p, 0)
	}
	if _, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second}); err != nil {
		t.Fatal(err)
	}
	stop()
	if got := []int{len(amd.Suspended()), off(jobs[0]), off(jobs[1])}; !slices.Equal(got, []int{0, 0, 0}) {
		t.Errorf("after the daemon: %v are off", got)
	}
}

func TestAGPUOfNVIDIAThatTheHazardTableDeniesIsNotUsed(t *testing.T) {
	h := newFakeHost(t, "6.12", withNVIDIA)
	m := addNVIDIA(t, h, "NVIDIA A100-SXM4-80GB")
	const pid = 7001
	p := startCUDA(h, m, gpreempt.ProcessKey{PID: pid, Start: 11}, "trainer")
	c, _ := h.serve()
	targetsOnce(t, c, func(by map[int32]string) bool { _, known := by[pid]; return known })
	why, err := c.Admin().ExplainTarget(t.Context(), &gpreemptv1.ExplainTargetRequest{TargetId: "7001"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), MaxWait: 10 * time.Second}); err != nil {
		t.Fatal(err)
	}
	if off(p) != 0 {
		t.Errorf("%d channels are off: %v", off(p), why)
	}
}

func TestChannelsThatAnEarlierDaemonLeftDisabledAreEnabledByTheNext(t *testing.T) {
	h := newFakeHost(t, "6.12", withNVIDIA)
	m := addNVIDIA(t, h, "NVIDIA H200")
	key := gpreempt.ProcessKey{PID: 7001, Start: 11}
	p := startCUDA(h, m, key, "trainer")
	process, err := m.Sys().Open(key)
	if err != nil {
		t.Fatal(err)
	}
	defer process.Close()
	view := nvrm.NewView(m.Sys(), process)
	if err := view.Scan(); err != nil {
		t.Fatal(err)
	}
	channels, _ := view.Channels()
	if err := nvrm.Set([]nvrm.Group{{Process: process, Channels: channels}}, true); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(h.opts.Host.RunDir, 0o755); err != nil {
		t.Fatal(err)
	}
	j, err := mechanism.OpenJournal(journalDir(h.opts.Host.RunDir))
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Begin(mechanism.JournalEntry{Mechanism: mechanism.NVChannels, Target: key, At: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	h.serve()
	awaitOff(t, p, 0)
}
