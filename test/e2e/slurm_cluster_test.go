package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

const (
	slurmController = "gpreemptctl"
	slurmNode       = "gpreemptnode"
)

// slurmRecordDir is where the prolog writes.
const slurmRecordDir = "/run/gpreempt/slurm"

// cluster is Slurm with one node, which is an emulated machine with 8 GPUs.
type cluster struct {
	t   *testing.T
	m   *emulated
	dir string
	// node is slurmd.
	node *slurmProcess
	gpus []string
}

// slurmProcess is a daemon of Slurm.
type slurmProcess struct {
	cmd  *exec.Cmd
	log  *lines
	done chan struct{}
}

// slurmProgram is a program and Debian's package of it.
type slurmProgram struct{ program, pkg string }

// slurmPrograms are those that every test needs.
var slurmPrograms = []slurmProgram{
	{"munged", "munge"}, {"slurmctld", "slurmctld"}, {"slurmd", "slurmd"}, {"srun", "slurm-client"}, {"scontrol", "slurm-client"},
}

// needsSlurm skips a test outside make slurm, and where a package is missing.
func needsSlurm(t *testing.T, more ...slurmProgram) {
	t.Helper()
	if os.Getenv(slurmEnv) != slurmInside {
		t.Skip("make slurm runs it, as root, in namespaces of its own")
	}
	for _, p := range append(slurmPrograms, more...) {
		if _, err := exec.LookPath(p.program); err != nil {
			t.Skipf("needs %s of Debian's package %s", p.program, p.pkg)
		}
	}
	for _, controller := range []string{"freezer", "memory"} {
		if _, err := os.Stat("/sys/fs/cgroup/" + controller + "/tasks"); err != nil {
			t.Skipf("needs the controller %s of cgroup v1: %v", controller, err)
		}
	}
}

// slurmConf is the part of slurm.conf that is the site's own. Its %[1]s is a directory, %[2]s the address, %[3]s more lines.
const slurmConf = `
ClusterName=gpreempt
SlurmctldHost=` + slurmController + `(%[2]s)
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=%[1]s/state
SlurmdSpoolDir=%[1]s/spool
SlurmctldPidFile=%[1]s/slurmctld.pid
SlurmdPidFile=%[1]s/slurmd.pid
SlurmdLogFile=%[1]s/slurmd.log
SlurmctldDebug=info
SlurmdDebug=debug
MpiDefault=none
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=1
PrologFlags=Alloc
Prolog=%[1]s/prolog.d/*
Epilog=%[1]s/epilog.d/*
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=` + slurmNode + ` NodeAddr=%[2]s CPUs=64 RealMemory=64000 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES
PartitionName=serving Nodes=ALL
%[3]s
`

// It constrains memory only; then each task has a control group of its own.
const cgroupConf = `
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
`

// startSlurm starts a cluster, with a database of accounts or without, and waits until its node is idle.
func startSlurm(t *testing.T, accounts bool) *cluster {
	t.Helper()
	needsSlurm(t)
	c := &cluster{t: t, m: emulate(t, kfdemu.Config{GPUs: 8}), dir: testutil.TempSocketDir(t)}
	conf := "AccountingStorageType=accounting_storage/none"
	if accounts {
		conf = accounting()
	}
	for index := range 8 {
		c.gpus = append(c.gpus, c.m.gpuFlag(index))
	}
	for _, dir := range []string{"munge", "state", "spool", "prolog.d", "epilog.d"} {
		if err := os.Mkdir(filepath.Join(c.dir, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	key := make([]byte, 128)
	if _, err := rand.Read(key); err != nil {
		t.Fatal(err)
	}
	c.write("munge/key", string(key))
	c.write("slurm.conf", fmt.Sprintf(slurmConf, c.dir, net.IP(slurmAddress[:]), conf))
	c.write("cgroup.conf", cgroupConf)
	// What an admin of a host installs.
	for _, script := range []string{"prolog", "epilog"} {
		source, err := filepath.Abs("../../deploy/slurm/" + script)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(source, filepath.Join(c.dir, script+".d", "50-gpreempt")); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if log, err := os.ReadFile(filepath.Join(c.dir, "slurmd.log")); t.Failed() {
			t.Logf("the log of the node (%v):\n%s", err, log)
		}
	})
	c.startMunge()
	if accounts {
		c.startAccounting()
	}
	c.daemon(exec.CommandContext(context.Background(), "slurmctld", "-D"))
	c.startNode()
	c.eventually("the node is idle", func() bool { return c.state() == "idle" })
	t.Cleanup(func() {
		cancel := exec.CommandContext(context.Background(), "scancel", "--user=root")
		cancel.Env = c.env()
		if out, err := cancel.CombinedOutput(); err != nil {
			t.Errorf("scancel: %v\n%s", err, out)
		}
		eventuallyIn(t, "all jobs have ended", timeout, func() bool { return len(c.m.Driver().Processes()) == 0 })
	})
	return c
}

func (c *cluster) write(name, text string) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o400); err != nil {
		c.t.Fatal(err)
	}
}

// env is the environment of the programs of Slurm.
func (c *cluster) env() []string {
	return environment("SLURM_CONF=" + filepath.Join(c.dir, "slurm.conf"))
}

func (c *cluster) startMunge() {
	c.t.Helper()
	at := func(name string) string { return filepath.Join(c.dir, "munge", name) }
	// The default: sacctmgr does not read where another one is.
	const socket = "/run/munge/munge.socket.2"
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		c.t.Fatal(err)
	}
	p := c.daemon(exec.CommandContext(context.Background(), "munged", "--foreground", "--force", "--key-file="+at("key"), "--socket="+socket,
		"--pid-file="+at("pid"), "--log-file="+at("log"), "--seed-file="+at("seed"), "--origin="+net.IP(slurmAddress[:]).String()))
	c.eventually("munged listens", func() bool {
		select {
		case <-p.done:
			c.t.Fatalf("munged ended: %s", p.log)
		default:
		}
		_, err := os.Stat(socket)
		return err == nil
	})
}

// startNode starts slurmd on the emulated machine: so its tasks are on it, too.
func (c *cluster) startNode() {
	c.t.Helper()
	c.node = c.daemon(c.m.Command(context.Background(), "slurmd", "-D", "-N", slurmNode))
}

// daemon starts a daemon, which ends with the test.
func (c *cluster) daemon(cmd *exec.Cmd) *slurmProcess {
	c.t.Helper()
	p := &slurmProcess{cmd: cmd, log: &lines{}, done: make(chan struct{})}
	cmd.Env, cmd.Stdout, cmd.Stderr = c.env(), p.log, p.log
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait() // the tests judge what Slurm does, not its end
		close(p.done)
	}()
	c.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case <-p.done:
		case <-time.After(20 * time.Second):
			_ = cmd.Process.Kill()
			<-p.done
		}
		if c.t.Failed() {
			c.t.Logf("what %s wrote:\n%s", filepath.Base(cmd.Path), p.log)
		}
	})
	return p
}

// command is a program of Slurm's that is not on the node.
func (c *cluster) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(c.t.Context(), name, args...)
	cmd.Env = c.env()
	cmd.Dir = "/"
	return cmd
}

// run runs a program of Slurm's, which has to succeed, and returns what it printed.
func (c *cluster) run(name string, args ...string) string {
	c.t.Helper()
	var errs bytes.Buffer
	cmd := c.command(name, args...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		c.t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, &errs)
	}
	return strings.TrimSpace(string(out))
}

// state is that of the node, such as idle and drained; "" before slurmctld answers.
func (c *cluster) state() string {
	out, err := c.command("sinfo", "--noheader", "--partition=batch", "--format=%T").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// checkNode waits until the node has no job, and checks that it is not drained.
func (c *cluster) checkNode() {
	c.t.Helper()
	c.eventually("the node is idle again", func() bool {
		state := c.state()
		if strings.HasPrefix(state, "drain") {
			c.t.Fatalf("the node is %s: %s", state, c.run("sinfo", "--list-reasons"))
		}
		return state == "idle"
	})
	if left, err := filepath.Glob(slurmRecordDir + "/*"); err != nil || len(left) > 0 {
		c.t.Errorf("records are left (%v): %q", err, left)
	}
}

func (c *cluster) eventually(what string, cond func() bool) {
	c.t.Helper()
	eventuallyIn(c.t, what, timeout, cond)
}

// eventuallyIn waits until cond holds.
func eventuallyIn(t *testing.T, what string, limit time.Duration, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(limit); ; {
		if cond() {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
}

// task is the command line of a task that keeps a GPU busy: that of its rank. It has no environment, so nothing that
// its user controls shows the job. more are arguments of kfdemu work.
func (c *cluster) task(more ...string) []string {
	script := fmt.Sprintf("set -- %s; shift $SLURM_PROCID; exec env -i %s work --runtime --gpus $1 %s", strings.Join(c.gpus, " "), trainBinary, strings.Join(more, " "))
	return []string{"sh", "-c", script}
}

// slurmJob is a running job with its tasks.
type slurmJob struct {
	*worker
	// tasks are the processes with queues.
	tasks []int32
	id    int
}

// srun starts a job of n tasks that are busy, and waits until each is ready.
func (c *cluster) srun(n int, args ...string) *slurmJob {
	c.t.Helper()
	args = append([]string{"--ntasks=" + strconv.Itoa(n), "--wait=0"}, args...)
	j := &slurmJob{worker: spawn(c.t, c.command("srun", append(args, c.task("--duration", "2000")...)...))}
	for range n {
		j.tasks = append(j.tasks, j.await("ready").PID)
	}
	j.id = c.jobOf(j.tasks[0])
	return j
}

// jobOf returns the job of a process, by its control group.
func (c *cluster) jobOf(pid int32) int {
	c.t.Helper()
	_, rest, _ := strings.Cut(cgroupOf(c.t, pid), "/job_")
	digits, _, _ := strings.Cut(rest, "/")
	id, err := strconv.Atoi(digits)
	if err != nil {
		c.t.Fatalf("process %d: no job in its control group", pid)
	}
	return id
}

// cgroupOf returns the control group of the controller memory.
func cgroupOf(t *testing.T, pid int32) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if _, path, found := strings.Cut(line, ":memory:"); found {
			return strings.TrimSpace(path)
		}
	}
	t.Fatalf("process %d is in no group of the controller memory:\n%s", pid, b)
	return ""
}

// end has the tasks finish, and checks that each packet ran exactly once.
func (j *slurmJob) end() {
	j.t.Helper()
	j.tell("stop")
	for range j.tasks {
		if done := j.await("done"); !done.OK {
			j.t.Errorf("a task of job %d: %s", j.id, done.Line)
		}
	}
	j.awaitEnd()
	if !j.cmd.ProcessState.Success() {
		j.t.Errorf("srun of job %d: %v", j.id, j.cmd.ProcessState)
	}
}

// as returns the worker of a task, for the checks of the machine.
func (j *slurmJob) as(pid int32) *worker { return &worker{t: j.t, PID: pid} }
