package dbgtrap

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// vmFile is the file of the driver's debugfs that shows whether the job has a VM.
func (j *job) vmFile(gpu gpreempt.GPUID) string {
	return fmt.Sprintf("sys/kernel/debug/kfd/proc/%d/pasid_%d", j.PID(), gpu)
}

// gpuC is the third GPU of a machine, where a test says so.
const gpuC gpreempt.GPUID = 3000

// spawn starts a process that has opened the driver and acquired its VMs, as a ROCm program
// does.
func (f *fixture) spawn() *job {
	f.t.Helper()
	return f.spawnOn(gpuA, gpuB)
}

// spawnOn starts a process that has only opened the driver and acquired VMs on these GPUs.
func (f *fixture) spawnOn(vms ...gpreempt.GPUID) *job {
	f.t.Helper()
	j := &job{Process: f.machine.Spawn(), f: f, vms: vms}
	f.mu.Lock()
	f.jobs[j.PID()] = j
	f.mu.Unlock()
	j.writeStat('S', 0)
	j.open()
	return j
}

// showVMs puts the VMs of a process that has opened the driver in debugfs.
func (j *job) showVMs() {
	j.f.t.Helper()
	for _, gpu := range []gpreempt.GPUID{gpuA, gpuB, gpuC} {
		j.f.write(j.vmFile(gpu), "0\n")
	}
	for _, gpu := range j.vms {
		j.showVM(gpu)
	}
}

// showVM puts a VM in debugfs, which the first queue on the GPU acquires, or the first one
// anywhere.
func (j *job) showVM(gpu gpreempt.GPUID) { j.f.write(j.vmFile(gpu), "32768\n") }

// acquire acquires the VM of a GPU on which the job makes no queue.
func (j *job) acquire(gpu gpreempt.GPUID) {
	j.f.t.Helper()
	_, err := j.Main().Ioctl(j.fd, kfdabi.ReqAcquireVM, kfd.PointerTo(&kfdabi.AcquireVMArgs{GPUID: uint32(gpu)}))
	j.must("acquire a VM", err)
	j.showVM(gpu)
}

// wantRefused reports an error that is not the refusal of a process without a VM, and every
// call of SUSPEND_QUEUES. The machine ends the program if such a call crashes the kernel.
func (f *fixture) wantRefused(err error) {
	f.t.Helper()
	if got := gpreempt.ReasonOf(err); got != gpreempt.ReasonGPUWithoutVM || !final(err) {
		f.t.Errorf("reason %q of error %v, want %q, which is final", got, err, gpreempt.ReasonGPUWithoutVM)
	}
	for _, c := range f.machine.Calls() {
		if c.Op == driver.TrapOp(kfd.TrapSuspendQueues) {
			f.t.Errorf("the call %+v could crash the kernel", c)
		}
	}
}

// withOwnVMs returns a fixture whose jobs acquire no VM but those of the GPUs of their queues.
func withOwnVMs(tb testing.TB, profile string, gfx uint32) *fixture {
	tb.Helper()
	return newFixtureOf(tb, kfdtest.Config{Profile: profile, OwnVMs: true, Nodes: []driver.Node{{ID: gpuA, GFX: gfx}, {ID: gpuB, GFX: gfx}}})
}

func onEachWithOwnVMs(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	for _, profile := range []string{"6.12", "6.12.117", "7.2", "7.3"} {
		for name, gfx := range schedulers {
			t.Run(profile+" "+name, func(t *testing.T) {
				t.Parallel()
				test(t, withOwnVMs(t, profile, gfx))
			})
		}
	}
}

func TestProcessWithoutALaterVMIsNotAttachedTo(t *testing.T) {
	onEachWithOwnVMs(t, func(t *testing.T, f *fixture) {
		j := f.spawnOn(gpuA)
		j.enable()
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		_, err := f.Attach(t.Context(), j.key())
		f.wantRefused(err)
		j.wantFree()
	})
}

func TestProcessWithoutAnEarlierVMIsSuspended(t *testing.T) {
	onEachWithOwnVMs(t, func(t *testing.T, f *fixture) {
		j := f.spawnOn(gpuB)
		j.enable()
		j.create(gpuB, kfd.QueueTypeComputeAQL)
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

// TestQueueBeforeAMissingVMResumesTheTarget has a target that becomes dangerous while it is
// suspended.
func TestQueueBeforeAMissingVMResumesTheTarget(t *testing.T) {
	for name, gfx := range schedulers {
		t.Run(name, func(t *testing.T) {
			f := newFixtureOf(t, kfdtest.Config{Profile: "7.2", OwnVMs: true, Nodes: []driver.Node{{ID: gpuA, GFX: gfx}, {ID: gpuB, GFX: gfx}, {ID: gpuC, GFX: gfx}}})
			j := f.spawnOn(gpuA, gpuC)
			j.enable()
			j.create(gpuC, kfd.QueueTypeComputeAQL)
			s := f.attach(j)
			f.must("suspend", s.Suspend(t.Context(), nil))
			j.wantSuspended()
			j.create(gpuA, kfd.QueueTypeComputeAQL)
			err := receive(f, "the session ends", f.lost)
			if got := gpreempt.ReasonOf(err); got != gpreempt.ReasonGPUWithoutVM {
				t.Errorf("reason %q of error %v, want %q", got, err, gpreempt.ReasonGPUWithoutVM)
			}
			j.wantFree()
		})
	}
}

func TestVMThatIsAcquiredLaterAllowsSuspending(t *testing.T) {
	onEachWithOwnVMs(t, func(t *testing.T, f *fixture) {
		j := f.spawnOn(gpuA)
		j.enable()
		s := f.attach(j) // it has no queue
		j.acquire(gpuB)
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

func TestFirstQueueBeforeAMissingVMEndsTheSession(t *testing.T) {
	onEachWithOwnVMs(t, func(t *testing.T, f *fixture) {
		j := f.spawnOn(gpuA)
		j.enable()
		s := f.attach(j) // it has no queue
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		f.wantRefused(receive(f, "the session ends", f.lost))
		f.wantRefused(s.Suspend(t.Context(), nil))
		j.wantFree()
	})
}

func TestTableMayAllowAMissingVM(t *testing.T) {
	f := withOwnVMs(t, "6.12", schedulers["HWS"])
	f.cfg.Crashes = func(gpu gpreempt.GPUID) bool { return gpu != gpuB }
	j := f.spawnOn(gpuA)
	j.enable()
	j.create(gpuA, kfd.QueueTypeComputeAQL)
	s := f.attach(j)
	f.must("suspend", s.Suspend(t.Context(), nil))
	j.wantSuspended()
}

func TestProbeRefusesAProcessWithoutALaterVM(t *testing.T) {
	for name, tc := range map[string]struct {
		vms   []gpreempt.GPUID
		found string
		want  mechanism.Evidence
	}{
		"VM on both GPUs":       {[]gpreempt.GPUID{gpuA, gpuB}, "", mechanism.Evidence{Check: "VMs", Found: "on every GPU that needs one", OK: true}},
		"none on the later GPU": {[]gpreempt.GPUID{gpuA}, "on GPU 2000", mechanism.Evidence{Check: "VMs", Reason: gpreempt.ReasonGPUWithoutVM}},
	} {
		t.Run(name, func(t *testing.T) {
			f, _ := healthy(t)
			j := f.spawnOn(tc.vms...)
			for i, gpu := range []gpreempt.GPUID{gpuA, gpuB} {
				node := fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/", i+1)
				f.write(node+"gpu_id", fmt.Sprintln(gpu))
				f.write(node+"name", "gfx942\n")
				f.write(node+"properties", "gfx_target_version 90402\n")
				f.write(fmt.Sprintf("sys/class/kfd/kfd/proc/%d/vram_%d", j.PID(), gpu), "0\n")
			}
			var got mechanism.Evidence
			for _, e := range f.Probe(t.Context(), j.key()).Evidence {
				if e.Check == "VMs" {
					got = e
				}
			}
			if !strings.Contains(got.Found, tc.found) {
				t.Errorf("found %q, want %q in it", got.Found, tc.found)
			}
			if !got.OK {
				got.Found, got.Remedy = "", ""
			}
			diff(t, "evidence", tc.want, got)
		})
	}
}
