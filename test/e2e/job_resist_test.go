package e2e

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

const cannotSuspend = gpreemptv1.QuiesceReason_QUIESCE_REASON_CANNOT_SUSPEND

// tracerMain keeps others from tracing a process and lets no SIGSTOP through.
func tracerMain(pid int) error {
	runtime.LockOSThread() // the tracer is a thread
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return err
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			return err
		}
		if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, unix.PTRACE_O_TRACECLONE, 0, 0); errno != 0 { //nolint:forbidigo // it stands for a program of a user
			return fmt.Errorf("seize %d: %w", tid, errno)
		}
	}
	fmt.Println("ok")
	for {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WALL, nil)
		switch {
		case err == unix.EINTR || err == nil && !status.Stopped():
			continue
		case err != nil:
			return err
		}
		signal := 0
		if s := status.StopSignal(); s != unix.SIGSTOP && s != unix.SIGTRAP {
			signal = int(s)
		}
		if err := unix.PtraceCont(tid, signal); err != nil && err != unix.ESRCH { //nolint:forbidigo // as above
			return fmt.Errorf("continue %d: %w", tid, err)
		}
	}
}

// traceJob has a process of the job's user trace it.
func (m *emulated) traceJob(job *worker) {
	m.t.Helper()
	cmd := m.Command(context.Background(), os.Args[0])
	cmd.Env, cmd.Stderr = environment(fmt.Sprintf("%s=%d", tracerEnv, job.PID)), os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	if lines := bufio.NewScanner(out); !lines.Scan() || lines.Text() != "ok" {
		m.t.Fatalf("the tracer says %q", lines.Text())
	}
}

// ran returns how many packets the GPU has taken from the queues of a job, which need not run.
func (m *emulated) ran(job *worker) (packets uint64) {
	m.t.Helper()
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", job.PID))
	if err != nil {
		m.t.Fatal(err)
	}
	defer memory.Close()
	for _, p := range m.Driver().Processes() {
		for _, q := range p.Queues {
			var index [8]byte
			if p.PID != job.PID {
				continue
			}
			if _, err := memory.ReadAt(index[:], int64(q.Read)); err != nil {
				m.t.Fatal(err)
			}
			packets += binary.LittleEndian.Uint64(index[:])
		}
	}
	return packets
}

// time returns the time of the GPUs.
func (m *emulated) time() (at time.Duration) {
	m.Machine(func(machine *gpumodel.Machine) { at = machine.Now() })
	return at
}

// announced returns the answer to an announcement that waits as long as it takes.
func (d *daemon) announced() *gpreemptv1.NotifyOnlineResponse {
	d.t.Helper()
	req := announcement()
	req.MaxWait = durationpb.New(10 * time.Second)
	resp, err := d.online.NotifyOnline(d.t.Context(), req)
	if err != nil {
		d.t.Fatal(err)
	}
	return resp
}

// unifiedCgroup returns the cgroup of a process in the hierarchy of version 2.
func unifiedCgroup(t *testing.T, pid int32) (path string) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	return discovery.CgroupV2Path(text)
}

// A job that is traced by a program of its own before the daemon attaches cannot be suspended by a
// debugger or by SIGSTOP. What happens then is what its rule says.
func TestJobThatATracerProtects(t *testing.T) {
	t.Parallel()
	for _, onResist := range []string{"report", "stop", "{kill: 1}"} {
		for _, mechanisms := range []string{"[dbgtrap]", "[dbgtrap, criu, freezer]"} {
			t.Run(onResist+" "+mechanisms, func(t *testing.T) {
				m := emulate(t, kfdemu.Config{})
				job := m.work("--queues", "2", "--duration", "500", "--runtime")
				m.traceJob(job)
				home := unifiedCgroup(t, job.PID)
				begin, before := m.time(), m.ran(job)
				m.eventually("the job runs", func() bool { return m.ran(job) >= before+400 })
				alone, took := m.ran(job)-before, m.time()-begin

				d := m.start("mechanisms: " + mechanisms + strings.ReplaceAll(atOnce, "class: offline", "class: offline\n    on_resist: "+onResist))
				d.eventually("the job is known", func() bool { return d.target(job.PID).GetQueueCount() == 2 })
				switch onResist {
				case "{kill: 1}":
					lease := d.announced()
					job.awaitEnd()
					if status := job.cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
						t.Errorf("the job ended by %v, want SIGKILL", status)
					}
					t.Logf("packets: %d alone in %v; killed in the lease", alone, took)
					d.complete(lease.GetLeaseId())
					d.eventually("an event says so", func() bool { return strings.Contains(d.ctl("events").Out, "killed") })
				case "stop":
					d.eventually("the job can be stopped", func() bool { return d.target(job.PID).GetMechanism() == "stop" })
					lease := d.announced()
					checkSaid(t, "with a job that is stopped", said{true, done, 1}, said{lease.GetQuiesced(), lease.GetReason(), lease.GetSuspendedTargets()})
					before := m.ran(job)
					m.elapse(took)
					in := m.ran(job) - before
					t.Logf("packets: %d alone in %v, %d in as long a lease", alone, took, in)
					if in > alone/20 {
						t.Errorf("%d packets ran in the lease, more than 5%% of the %d that ran alone", in, alone)
					}
					d.complete(lease.GetLeaseId())
					m.awaitProgress(job)
					if diff := cmp.Diff(home, unifiedCgroup(t, job.PID)); diff != "" {
						t.Errorf("cgroup of the job (-before +after):\n%s", diff)
					}
					job.kill()
				default:
					checkReported(t, m, d, job, mechanisms, alone, took)
				}
				d.eventually("no cgroup of the daemon's is left", func() bool {
					left, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/unified/gpreempt-stop-%d-*", job.PID))
					return err == nil && len(left) == 0
				})
			})
		}
	}
}

// checkReported checks what is said of a job that cannot be suspended.
func checkReported(t *testing.T, m *emulated, d *daemon, job *worker, mechanisms string, alone uint64, took time.Duration) {
	t.Helper()
	d.eventually("the attach was tried", func() bool {
		target := d.target(job.PID)
		return target.GetAttachError() != "" || target.GetMechanism() != ""
	})
	lease := d.announced()
	before := m.ran(job)
	m.elapse(took)
	t.Logf("packets: %d alone in %v, %d in as long a lease", alone, took, m.ran(job)-before)
	want := &gpreemptv1.NotifyOnlineResponse{Reason: cannotSuspend, CannotSuspendTargets: 1}
	got := &gpreemptv1.NotifyOnlineResponse{Quiesced: lease.GetQuiesced(), Reason: lease.GetReason(), SuspendedTargets: lease.GetSuspendedTargets(), CannotSuspendTargets: lease.GetCannotSuspendTargets()}
	if want.String() != got.String() {
		t.Errorf("the answer with %s is %v, want %v", mechanisms, got, want)
	}
	if n := d.status().GetCannotSuspendCount(); n != 1 {
		t.Errorf("the status counts %d targets that cannot be suspended, want 1", n)
	}
	says(t, d.ctl("status").Out, "1 cannot be suspended", "CANNOT_SUSPEND: 1 target: process "+fmt.Sprint(job.PID))
	d.complete(lease.GetLeaseId())
	m.awaitProgress(job)
	job.kill()
}

// The kernel goes on stopping a job when the daemon is killed. The next daemon, or gpreemptd
// --cleanup, has the job run, in the cgroup that it had.
func TestStoppedJobRunsAgainAfterTheDaemonIsKilled(t *testing.T) {
	t.Parallel()
	for _, undo := range []string{"the next daemon", "gpreemptd --cleanup"} {
		t.Run(undo, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{})
			job := m.work("--queues", "2", "--duration", "500", "--runtime")
			m.traceJob(job)
			home := unifiedCgroup(t, job.PID)
			dir, config := testutil.TempSocketDir(t), strings.ReplaceAll(atOnce, "class: offline", "class: offline\n    on_resist: stop")
			d := m.startIn(dir, config)
			d.eventually("the job can be stopped", func() bool { return d.target(job.PID).GetMechanism() == "stop" })
			lease := d.announced()
			checkSaid(t, "with a job that is stopped", said{true, done, 1}, said{lease.GetQuiesced(), lease.GetReason(), lease.GetSuspendedTargets()})
			d.kill()
			before := m.ran(job)
			m.elapse(20 * time.Millisecond)
			if n := m.ran(job) - before; n > 2 || unifiedCgroup(t, job.PID) == home { // two may have been in the pipe
				t.Errorf("after the daemon's death %d packets ran, in cgroup %s: nothing is left to undo", n, unifiedCgroup(t, job.PID))
			}
			if undo == "the next daemon" {
				m.startIn(dir, config)
			} else if got := cleanup(dir); got != (result{Out: oneRunsAgain}) {
				t.Errorf("gpreemptd --cleanup: %+v, want %q", got, oneRunsAgain)
			}
			m.eventually("the job is in its cgroup again", func() bool { return unifiedCgroup(t, job.PID) == home })
			m.awaitProgress(job)
			m.eventually("no cgroup of the daemon's is left", func() bool {
				left, err := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup/unified/gpreempt-stop-%d-*", job.PID))
				return err == nil && len(left) == 0
			})
			job.kill()
		})
	}
}
