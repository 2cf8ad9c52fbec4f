package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// slurmRules is the config of a site that classifies by partition and account.
const slurmRules = `
access: {online_groups: [], admin_groups: []}
policy: {preset: strict, linger: 0s, attach_after: 0s}
rules:
  - {name: serving, match: {slurm: {partition: serving}}, class: online}
  - {name: guests, match: {slurm: {account: guests}}, class: unmanaged}
  - {name: physics, match: {slurm: {account: "phys*"}}, class: offline, priority: 2}
  - {name: batch, match: {slurm: {partition: batch}}, class: offline}
`

// general are the arguments of a job that the rule "batch" makes offline.
var general = []string{"--partition=batch", "--account=general"}

// announceGPU returns a lease on one GPU, when everything offline there is suspended.
func (d *daemon) announceGPU(gpu string) string {
	d.t.Helper()
	id, err := strconv.ParseUint(gpu, 10, 32)
	if err != nil {
		d.t.Fatal(err)
	}
	request := announcement()
	request.Gpus = []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_GpuId{GpuId: uint32(id)}}}
	request.Ttl = durationpb.New(timeout)
	resp, err := d.online.NotifyOnline(context.Background(), request)
	if err != nil || !resp.GetQuiesced() {
		d.t.Fatalf("announce GPU %s: %v, %v", gpu, resp, err)
	}
	return resp.GetLeaseId()
}

// offlineJob waits until each task of a job can be suspended, together with the others.
func (d *daemon) offlineJob(j *slurmJob) *gpreemptv1.Target {
	d.t.Helper()
	var first *gpreemptv1.Target
	d.eventually(fmt.Sprintf("the tasks of job %d are one gang that can be suspended", j.id), func() bool {
		for _, pid := range j.tasks {
			target := d.target(pid)
			if first == nil || pid == j.tasks[0] {
				first = target
			}
			if target.GetClass() != gpreemptv1.Class_CLASS_OFFLINE || target.GetMechanism() != "dbgtrap" || int(target.GetJob().GetTargetCount()) != len(j.tasks) ||
				target.GetJob().GetName() != first.GetJob().GetName() {
				return false
			}
		}
		return true
	})
	return first
}

func (c *cluster) checkAllFrozen(j *slurmJob) {
	c.t.Helper()
	for _, pid := range j.tasks {
		c.m.checkFrozen(j.as(pid))
	}
}

func (c *cluster) awaitAllRun(j *slurmJob) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("job %d runs", j.id), func() bool {
		for _, pid := range j.tasks {
			if !c.m.allOn(j.as(pid)) {
				return false
			}
		}
		return true
	})
}

func TestSlurmTasksInGroupsOfTheirOwnAreOneGangByDefault(t *testing.T) {
	c := startSlurm(t, false)
	d := c.m.start(slurmRules)
	j := c.srun(8, general...)
	groups := map[string]bool{}
	for _, pid := range j.tasks {
		groups[cgroupOf(t, pid)] = true
	}
	if len(groups) != 8 {
		t.Errorf("8 tasks have %d control groups: %v", len(groups), groups)
	}
	job := d.offlineJob(j).GetJob()
	lease := d.announceGPU(c.gpus[3])
	c.checkAllFrozen(j)
	listed := d.ctl("target", "list", "-o", "wide").Out
	if n := strings.Count(listed, job.GetName()+" "); n != 8 {
		t.Errorf("gpctl target list has %d processes of %s, want 8:\n%s", n, job.GetName(), listed)
	}
	says(t, d.ctl("target", "explain", strconv.Itoa(int(j.tasks[5]))).Out, "rule batch", `slurm.partition "batch" is "batch"`, `slurm.account "general" is not "guests"`,
		job.GetName()+": 8 processes", fmt.Sprintf(`rule slurm-v1: cgroup "/slurm_%s/uid_0/job_%d", uid 0`, slurmNode, j.id))
	d.complete(lease)
	c.awaitAllRun(j)
	for _, pid := range j.tasks {
		if n := d.target(pid).GetSuspends(); n != 1 {
			t.Errorf("task %d was suspended %d times, want once", pid, n)
		}
	}
	j.end()
	c.checkNode()
	proved(t, "8 tasks in 8 control groups of one job are one gang by default: an announcement on one GPU suspends all 8, and all run again after it")
	proved(t, "tasks without any environment are classified: the control group and the record of the prolog are enough")
	proved(t, "the epilog removes the record, and the node is idle")
}

func TestSlurmJobsAreClassifiedByPartitionAndAccount(t *testing.T) {
	c := startSlurm(t, false)
	d := c.m.start(slurmRules)
	for _, test := range []struct {
		args  []string
		class gpreemptv1.Class
		by    string
	}{
		{[]string{"--partition=serving", "--account=physics"}, gpreemptv1.Class_CLASS_ONLINE, "rule serving"},
		{[]string{"--partition=batch", "--account=physics"}, gpreemptv1.Class_CLASS_OFFLINE, "rule physics"},
		{general, gpreemptv1.Class_CLASS_OFFLINE, "rule batch"},
		// A user's claims: what looks like another line of the record makes the value unknown, and so the job is not offline.
		{[]string{"--partition=batch", "--account=x\npartition=serving"}, gpreemptv1.Class_CLASS_UNMANAGED, "rule guests may match"},
		{[]string{"--partition=batch", "--account=guests"}, gpreemptv1.Class_CLASS_UNMANAGED, "rule guests"},
	} {
		j := c.srun(1, test.args...)
		d.eventually(fmt.Sprintf("%q is classified", test.args), func() bool { return d.target(j.tasks[0]) != nil })
		target := d.target(j.tasks[0])
		if target.GetClass() != test.class || target.GetDecidedBy() != test.by {
			t.Errorf("%q: %v by %q, want %v by %q\n%s", test.args, target.GetClass(), target.GetDecidedBy(), test.class, test.by,
				d.ctl("target", "explain", strconv.Itoa(int(j.tasks[0]))).Out)
		}
		j.end()
	}
	c.checkNode()
	proved(t, "jobs are online, offline or unmanaged by partition and by account; an account that looks like another line of the record is not recorded")
}

// An array is jobs of their own.
func TestSlurmTasksOfAnArrayAreGangsOfTheirOwn(t *testing.T) {
	c := startSlurm(t, false)
	d := c.m.start(slurmRules)
	script := filepath.Join(c.dir, "array.sh")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec env -i "+trainBinary+" work --runtime --gpus "+c.gpus[0]+" --duration 2000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.run("sbatch", append([]string{"--array=1-2", "--output=/dev/null"}, append(general, script)...)...)
	var targets []*gpreemptv1.Target
	d.eventually("both tasks can be suspended", func() bool {
		list, err := d.admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		targets = list.GetTargets()
		n := 0
		for _, target := range targets {
			if target.GetClass() == gpreemptv1.Class_CLASS_OFFLINE && target.GetMechanism() == "dbgtrap" {
				n++
			}
		}
		return n == 2
	})
	if a, b := targets[0].GetJob(), targets[1].GetJob(); a.GetName() == "" || a.GetName() == b.GetName() || a.GetTargetCount() != 1 || b.GetTargetCount() != 1 {
		t.Errorf("the tasks of an array have the jobs %v and %v", a, b)
	}
	c.run("scancel", "--user=root")
	c.checkNode()
	proved(t, "each task of a job array is a job of its own")
}

func TestSlurmSuspendStopsProcessesAndNotTheirKernels(t *testing.T) {
	c := startSlurm(t, false)
	d := c.m.start(slurmRules)
	j := &slurmJob{worker: spawn(t, c.command("srun", append(append([]string{"--wait=0"}, general...), c.task("--duration", "400000")...)...))}
	j.tasks = []int32{j.await("ready").PID}
	j.id = c.jobOf(j.tasks[0])
	pid := j.tasks[0]
	d.offlineJob(j)
	c.run("scontrol", "suspend", strconv.Itoa(j.id))
	c.eventually("the process is stopped", func() bool { return isStopped(t, pid) })
	before := c.m.executed()[pid]
	c.eventually("kernels end while their process is stopped", func() bool { return c.m.executed()[pid] > before })
	if !isStopped(t, pid) {
		t.Error("the process does not stay stopped")
	}
	if !c.m.allOn(j.as(pid)) {
		t.Error("scontrol suspend took the queue off the GPU")
	}
	lease := d.announceGPU(c.gpus[0])
	c.checkAllFrozen(j)
	d.complete(lease)
	c.awaitAllRun(j)
	c.run("scontrol", "resume", strconv.Itoa(j.id))
	c.eventually("the process runs", func() bool { return !isStopped(t, pid) })
	lease = d.announceGPU(c.gpus[0])
	c.checkAllFrozen(j)
	if isStopped(t, pid) {
		t.Error("gpreempt stopped the process on the CPU")
	}
	d.complete(lease)
	j.end()
	c.checkNode()
	proved(t, "scontrol suspend stops the process and leaves its queue on the GPU, where kernels go on and end; an announcement takes the queue off, and the process runs")
	proved(t, "a job that Slurm has suspended can be suspended and resumed by gpreempt as well")
}

// isStopped reports whether every thread of a process is stopped by a signal, which for a traced one is a stop of its
// tracer, too.
func isStopped(t *testing.T, pid int32) bool {
	t.Helper()
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(stats) == 0 {
		t.Fatalf("process %d has no threads: %v", pid, err)
	}
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if state := b[bytes.LastIndexByte(b, ')')+2]; state != 'T' && state != 't' {
			return false
		}
	}
	return true
}

func TestSlurmJobThatEndsWhileItIsSuspendedLeavesNothing(t *testing.T) {
	c := startSlurm(t, false)
	d := c.m.start(slurmRules)
	j := c.srun(8, general...)
	d.offlineJob(j)
	lease := d.announceGPU(c.gpus[0])
	c.checkAllFrozen(j)
	c.run("scancel", strconv.Itoa(j.id))
	j.awaitEnd()
	c.checkNode()
	// The others that the driver has are gpreemptd's.
	for _, p := range c.m.Driver().Processes() {
		if slices.Contains(j.tasks, p.PID) {
			t.Errorf("the driver still has task %d: %+v", p.PID, p)
		}
	}
	d.complete(lease)
	proved(t, "scancel of a suspended job: its processes end, the epilog cleans up, the node is idle")

	// A job that is requeued has the same number, another record, and is suspended again by the same lease.
	script := filepath.Join(c.dir, "again.sh")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec env -i "+trainBinary+" work --runtime --gpus "+c.gpus[0]+" --duration 2000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	id := c.run("sbatch", append([]string{"--requeue", "--parsable", "--output=/dev/null"}, append(general, script)...)...)
	first := c.onlyTarget(d, 0)
	lease = d.announceGPU(c.gpus[0])
	c.m.checkFrozen(&worker{t: t, PID: first})
	c.run("scontrol", "requeue", id)
	second := c.onlyTarget(d, first)
	if got := strconv.Itoa(c.jobOf(second)); got != id {
		t.Errorf("the job is %s after requeue, want %s", got, id)
	}
	d.eventually("it is suspended by the same lease", func() bool { return d.target(second).GetState() == suspended })
	d.complete(lease)
	c.eventually("it runs", func() bool { return c.m.allOn(&worker{t: t, PID: second}) })
	c.run("scancel", id)
	c.checkNode()
	proved(t, "requeue of a suspended job: it starts again with the same number, is classified again, suspended while the lease lives, and runs after it")
}

// onlyTarget waits until one process, which is not before, can be suspended, and returns its pid.
func (c *cluster) onlyTarget(d *daemon, before int32) (pid int32) {
	c.t.Helper()
	d.eventually("one process can be suspended", func() bool {
		list, err := d.admin.ListTargets(c.t.Context(), &gpreemptv1.ListTargetsRequest{})
		if err != nil {
			c.t.Fatal(err)
		}
		all := list.GetTargets()
		if len(all) != 1 || all[0].GetMechanism() != "dbgtrap" || all[0].GetPid() == before {
			return false
		}
		pid = all[0].GetPid()
		return all[0].GetClass() == gpreemptv1.Class_CLASS_OFFLINE
	})
	return pid
}

func TestSlurmJobOutlivesDaemonsThatAreKilledWhileItIsSuspended(t *testing.T) {
	c := startSlurm(t, false)
	d := c.m.start(slurmRules)
	j := c.srun(8, general...)
	d.offlineJob(j)
	lease := d.announceGPU(c.gpus[0])
	c.checkAllFrozen(j)
	if err := c.node.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-c.node.done
	c.checkAllFrozen(j)
	d.complete(lease)
	c.awaitAllRun(j)
	c.startNode()
	proved(t, "slurmd is killed while a job is suspended: the job stays suspended while the lease lives, and runs after it")

	d.announceGPU(c.gpus[0])
	c.checkAllFrozen(j)
	d.kill()
	c.awaitAllRun(j)
	proved(t, "gpreemptd is killed while a job is suspended: all 8 tasks run")

	second := c.m.startIn(testutil.TempSocketDir(t), slurmRules)
	second.offlineJob(j)
	lease = second.announceGPU(c.gpus[7])
	c.checkAllFrozen(j)
	second.complete(lease)
	c.awaitAllRun(j)
	j.end()
	c.checkNode()
	proved(t, "the next gpreemptd classifies the running job by the record, and suspends it")
}

func TestSlurmNodeIsNotDrainedWhateverTheProlog(t *testing.T) {
	c := startSlurm(t, false)
	// No daemon, and nothing that a record can be written to.
	if err := os.MkdirAll(filepath.Dir(slurmRecordDir), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(slurmRecordDir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(slurmRecordDir, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(slurmRecordDir); err != nil {
			t.Error(err)
		}
	})
	j := c.srun(8, general...)
	c.awaitAllRun(j)
	// A daemon that starts later does not know what the job is, and suspends nothing.
	d := c.m.start(slurmRules)
	d.eventually("the tasks are known", func() bool { return d.target(j.tasks[7]) != nil })
	for _, pid := range j.tasks {
		if target := d.target(pid); target.GetClass() != gpreemptv1.Class_CLASS_UNMANAGED {
			t.Errorf("without a record, task %d is %v by %s", pid, target.GetClass(), target.GetDecidedBy())
		}
	}
	says(t, d.ctl("target", "explain", strconv.Itoa(int(j.tasks[0]))).Out, fmt.Sprintf("the prolog has not recorded it of Slurm job %d", j.id))
	j.end()
	c.checkNode()
	proved(t, "without gpreemptd, and with a prolog that cannot write its record, a job runs, is not suspended, and the node is not drained")
}
