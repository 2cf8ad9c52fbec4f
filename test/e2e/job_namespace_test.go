package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// workInNamespace starts a job that is process 1 of a pid namespace of its own.
func (m *emulated) workInNamespace(args ...string) *worker {
	m.t.Helper()
	cmd := m.Command(context.Background(), trainBinary, append([]string{"work"}, args...)...)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWPID
	w := m.spawn(cmd)
	if ready := w.await("ready"); ready.PID != 1 {
		m.t.Fatalf("the job takes itself for process %d, want 1", ready.PID)
	}
	return w
}

// queuesFound checks what gpctl queue find says: the pid on the host, and queues.
func (d *daemon) queuesFound(pid int32, queues int, args ...string) {
	d.t.Helper()
	r := d.ctl(append([]string{"queue", "find"}, args...)...)
	if r.Code != 0 {
		d.t.Fatalf("gpctl queue find %v: exit status %d: %s%s", args, r.Code, r.Out, r.Err)
	}
	says(d.t, r.Out, fmt.Sprint(pid))
	var list gpreemptv1.ListQueuesResponse
	d.ctlJSON(&list, "queue", "list", "--target", fmt.Sprint(pid))
	if n := len(list.GetQueues()); n != queues {
		d.t.Errorf("gpctl lists %d queues of process %d, want %d", n, pid, queues)
	}
}

func TestJobInAPIDNamespaceIsKnownByBothItsPIDs(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m := emulate(t, kfdemu.Config{Profile: profile})
		job := m.workInNamespace("--queues", "2", "--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(job, 2)
		if diff := cmp.Diff([]int32{1}, d.target(job.PID).GetNamespacePids()); diff != "" {
			t.Errorf("its pids in namespaces (-want +got):\n%s", diff)
		}
		d.queuesFound(job.PID, 2, fmt.Sprint(job.PID))
		d.queuesFound(job.PID, 2, "--pid", "1")
		lease := d.announce(t.Context())
		m.checkEach(job, 2, offGPU)
		job.create()
		m.awaitEach(job, 3, offGPU)
		m.checkStill(job)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 3, onGPU)
		m.awaitProgress(job)
		job.stop()
		m.gone(d, job.PID)
		m.checkDebugs(d, 0)
	})
}

// Two containers have a process 1 each; a third job is inside two namespaces, one in the
// other.
func TestJobsInSeveralPIDNamespacesAreDistinguished(t *testing.T) {
	t.Parallel()
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		t.Skip("unshare of util-linux is not there")
	}
	m := emulate(t, kfdemu.Config{})
	one := m.workInNamespace("--duration", "500", "--runtime")
	other := m.workInNamespace("--queues", "2", "--duration", "500", "--runtime")
	outer := m.spawn(m.Command(context.Background(), unshare, "--pid", "--fork", "--kill-child",
		unshare, "--pid", "--fork", "--kill-child", trainBinary, "work", "--queues", "3", "--duration", "500", "--runtime"))
	if ready := outer.await("ready"); ready.PID != 1 {
		t.Errorf("the inner job takes itself for process %d, want 1", ready.PID)
	}
	var inner int32
	for _, p := range m.Driver().Processes() {
		if p.PID != one.PID && p.PID != other.PID {
			inner = p.PID
		}
	}
	d := m.start(atOnce)
	d.offlineTarget(one, 1)
	d.offlineTarget(other, 2)
	d.eventually("the inner job can be suspended", func() bool { return d.target(inner).GetMechanism() == "dbgtrap" })
	if diff := cmp.Diff([]int32{2, 1}, d.target(inner).GetNamespacePids()); diff != "" {
		t.Errorf("the pids of the inner job in its namespaces, the outer first (-want +got):\n%s", diff)
	}
	r := d.ctl("queue", "find", "--pid", "1")
	if r.Code == 0 {
		t.Errorf("gpctl chose one of three processes 1:\n%s", r.Out)
	}
	says(t, r.Err, "3 processes have it", fmt.Sprintf("%d@", one.PID), fmt.Sprintf("%d@", other.PID), fmt.Sprintf("%d@", inner))
	d.queuesFound(inner, 3, fmt.Sprint(inner))

	lease := d.announce(t.Context())
	if n := lease.GetSuspendedTargets(); n != 3 {
		t.Errorf("%d targets are suspended, want 3", n)
	}
	m.checkEach(one, 1, offGPU)
	m.checkEach(other, 2, offGPU)
	if !m.each(inner, 3, offGPU) {
		t.Errorf("the inner job's queues are %+v", m.flags(inner))
	}
	// The end of a namespace's process 1 is that of all in it.
	one.kill()
	m.gone(d, one.PID)
	m.checkEach(other, 2, offGPU)
	d.complete(lease.GetLeaseId())
	m.awaitEach(other, 2, onGPU)
	m.eventually("the inner job runs", func() bool { return m.each(inner, 3, onGPU) })
	other.stop()
	outer.stop()
	m.gone(d, inner)
	m.checkDebugs(d, 0)
}
