package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// hideLastNode takes the render node of the last GPU away from programs that start until
// show is called, as a container with the nodes of some GPUs does. The driver lists the
// GPU for them nevertheless.
func hideLastNode(t *testing.T) (show func()) {
	t.Helper()
	nodes, err := filepath.Glob("/dev/dri/renderD*")
	if err != nil || len(nodes) < 2 {
		t.Fatalf("render nodes %v: %v", nodes, err)
	}
	last := slices.Max(nodes)
	if err := os.Rename(last, "/dev/dri/hidden"); err != nil {
		t.Fatal(err)
	}
	shown := false
	show = func() {
		if shown {
			return
		}
		if shown = true; os.Rename("/dev/dri/hidden", last) != nil {
			t.Errorf("%s stays hidden", last)
		}
	}
	t.Cleanup(show)
	return show
}

// TestSoftGPUProcessWithoutALaterVMIsNeverSuspended has a process for which SUSPEND_QUEUES
// crashes this kernel (docs/lab/upstream.md), and one that has a VM on every GPU.
func TestSoftGPUProcessWithoutALaterVMIsNeverSuspended(t *testing.T) {
	m := onSoftGPU(t)
	if len(m.gpus) < 2 {
		t.Skip("it needs two GPUs")
	}
	show := hideLastNode(t)
	without := m.work("--gpus", m.gpu(0), "--queues", "2")
	show()
	with := m.work("--gpus", m.gpu(0), "--queues", "2")
	d := m.start(atOnce)
	d.offlineTarget(with, 2)
	d.eventually("the daemon says why it cannot suspend the process", func() bool {
		return strings.Contains(d.target(without.PID).GetAttachError(), "gpu-without-vm")
	})
	for range 3 {
		lease, answer := d.ask(longest, m.gpus[0])
		checkSaid(t, "beside a process that is refused", said{false, cannotSuspend, 1}, answer)
		m.checkEach(with, 2, softOff)
		m.checkEach(without, 2, softOn)
		d.complete(lease)
		m.awaitEach(with, 2, softOn)
	}
	d.check(0, "gpu-without-vm", "target", "explain", fmt.Sprint(without.PID))
	m.awaitProgress(without)
	with.stop()
	without.stop()
}

// TestSoftGPUSuspendQueuesCrashesTheKernel shows the crash of docs/lab/upstream.md. The guest
// ends with it, so it runs only with GPREEMPT_SOFTGPU=oops.
func TestSoftGPUSuspendQueuesCrashesTheKernel(t *testing.T) {
	if os.Getenv(softGPUEnv) != "oops" {
		t.Skip("it crashes the guest: set GPREEMPT_SOFTGPU=oops to run it")
	}
	m := onSoftGPU(t)
	show := hideLastNode(t)
	job := m.work("--gpus", m.gpu(0), "--queues", "1")
	show()
	rocgdb := debug(t, exec.Command(os.Args[0]))
	rocgdb.obey("ok", "seize %d", job.PID)
	rocgdb.obey("ok", "enable %d", job.PID)
	if _, err := fmt.Fprintf(rocgdb.in, "suspend %d\n", job.PID); err != nil {
		t.Fatal(err)
	}
	// The guest panics at the oops, which is on its console.
	if rocgdb.out.Scan() {
		t.Errorf("the kernel survived SUSPEND_QUEUES: %s", rocgdb.out.Text())
	}
}
