package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// debuggerMain obeys lines on stdin:
//
//	seize PID      traces the process, as gdb and strace do
//	leave          ends the trace
//	enable PID     debugs it on the GPU, as rocgdb does
//	disable PID    ends that
//	suspend PID    suspends all queues of it, as rocgdb does at each stop
//
// and answers each with "ok", or the errno's name or what else was wrong.
func debuggerMain(in io.Reader, out io.Writer) int {
	ctx := context.Background()
	device, err := kfd.Open()
	if err != nil {
		fmt.Fprintln(out, err)
		return 1
	}
	d := &debugger{device: device}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var verb string
		var pid int32
		if _, err := fmt.Sscanf(lines.Text()+" 0", "%s %d", &verb, &pid); err != nil {
			fmt.Fprintln(out, err)
			continue
		}
		answer := "ok"
		if err := d.do(ctx, verb, pid); err != nil {
			answer = strings.ReplaceAll(err.Error(), "\n", "; ")
			if errno, ok := errors.AsType[syscall.Errno](err); ok {
				answer = errnoNames[errno] + ": " + answer
			}
		}
		fmt.Fprintln(out, answer)
	}
	return 0
}

var errnoNames = map[syscall.Errno]string{syscall.EPERM: "EPERM", syscall.EALREADY: "EALREADY", syscall.ESRCH: "ESRCH", syscall.EINVAL: "EINVAL"}

type debugger struct {
	device *kfd.Device
	thread *proc.Tracer
	// events is what the driver tells of the process, which nobody reads.
	events, tell *os.File
}

func (d *debugger) do(ctx context.Context, verb string, pid int32) (err error) {
	switch verb {
	case "seize":
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return err
		}
		stat, err := discovery.ParseProcStat(text)
		if err != nil {
			return err
		}
		d.thread, err = proc.Trace(ctx, pid, stat.Start)
		return err
	case "leave":
		err := d.thread.Detach(ctx)
		d.thread = nil
		return err
	}
	// The driver may listen to the tracing thread only.
	on := func(f func() error) error { return f() }
	if d.thread != nil {
		on = func(f func() error) error { return d.thread.Do(ctx, f) }
	}
	switch verb {
	case "enable":
		if d.events == nil {
			if d.events, d.tell, err = os.Pipe(); err != nil {
				return err
			}
		}
		return on(func() error {
			_, err := d.device.Enable(pid, kfd.Exceptions(kfd.ECProcessRuntime), int(d.tell.Fd()))
			return err
		})
	case "disable":
		return on(func() error { return d.device.Disable(pid) })
	case "suspend":
		return on(func() error {
			snapshot, err := d.device.Snapshot(pid, kfd.ECQueueNew.Mask())
			if err != nil {
				return err
			}
			var ids []uint32
			for i := range snapshot {
				ids = append(ids, snapshot[i].QueueID)
			}
			_, err = d.device.Suspend(pid, ids)
			return err
		})
	}
	return fmt.Errorf("no such verb: %s", verb)
}

// debug starts a debugger on the machine.
func (m *emulated) debug() *process {
	m.t.Helper()
	return debug(m.t, m.Command(context.Background(), os.Args[0]))
}

// debug starts a command of this program as a debugger.
func debug(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	cmd.Env, cmd.Stderr = environment(debuggerEnv+"=1"), os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, cmd: cmd, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(p.end)
	return p
}

// obey makes a debugger execute a command, and checks the beginning of its answer.
func (p *process) obey(want, format string, args ...any) {
	p.t.Helper()
	if got := p.do(format, args...); !strings.HasPrefix(got, want) {
		p.t.Fatalf("debugger: %s: %s, want %s", fmt.Sprintf(format, args...), got, want)
	}
}

// Who was there first keeps the job, as long as it wants to. The daemon says who that
// is, and takes the job over afterwards, by itself.
func TestJobUnderADebuggerIsAttachedAfterTheDebuggerEnds(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		t.Parallel()
		m := emulate(t, kfdemu.Config{Profile: profile})
		traced := m.work("--queues", "2", "--duration", "500", "--runtime")
		debugged := m.work("--queues", "2", "--duration", "500", "--runtime")
		tracer, rocgdb := m.debug(), m.debug()
		tracer.obey("ok", "seize %d", traced.PID)
		rocgdb.obey("ok", "seize %d", debugged.PID)
		rocgdb.obey("ok", "enable %d", debugged.PID)

		d := m.start(atOnce)
		for _, c := range []struct {
			job *worker
			by  *process
		}{{traced, tracer}, {debugged, rocgdb}} {
			why := fmt.Sprintf("process %d (%s) traces it", c.by.cmd.Process.Pid, comm(t, c.by.cmd.Process.Pid))
			d.eventually("the daemon says that it cannot suspend the job", func() bool { return strings.Contains(d.target(c.job.PID).GetAttachError(), why) })
			d.check(0, "cannot be suspended: dbgtrap: resisted: tracer: "+why, "target", "list")
			d.check(0, "end that debugger or tracer", "target", "explain", fmt.Sprint(c.job.PID))
		}
		lease, answer := d.ask(10 * time.Second)
		checkSaid(t, "of jobs that are debugged by others", said{false, cannotSuspend, 0}, answer)
		m.checkDebugs(d, 0)
		for _, job := range []*worker{traced, debugged} {
			m.checkEach(job, 2, onGPU)
			m.awaitProgress(job)
		}

		tracer.obey("ok", "leave")
		rocgdb.obey("ok", "disable %d", debugged.PID)
		rocgdb.obey("ok", "leave")
		for _, job := range []*worker{traced, debugged} {
			d.awaitTarget(job.PID, 0, suspended)
			m.checkEach(job, 2, offGPU)
		}
		m.checkDebugs(d, 2)
		d.complete(lease)
		for _, job := range []*worker{traced, debugged} {
			m.awaitEach(job, 2, onGPU)
		}
		m.stays(d, traced, debugged)
		traced.stop()
		debugged.stop()
	})
}

// comm returns the name of a process.
func comm(t *testing.T, pid int) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// The daemon traces what it holds where the driver listens to who traces only: there a
// debugger gets EPERM, and the job does not notice.
func TestLaterDebuggerIsRefusedByTheTrace(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{Profile: "6.12"})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	gdb := m.debug()
	for _, leased := range []bool{false, true} {
		lease, want := "", onGPU
		if leased {
			lease, want = d.announce(t.Context()).GetLeaseId(), offGPU
		}
		from := m.now()
		gdb.obey("EPERM", "seize %d", job.PID)
		gdb.obey("EPERM", "enable %d", job.PID)
		gdb.obey("EPERM", "suspend %d", job.PID)
		m.checkEach(job, 2, want)
		if leased {
			m.checkNoResume(job, from)
			m.checkStill(job)
			d.complete(lease)
		}
		m.awaitEach(job, 2, onGPU)
		m.awaitProgress(job)
	}
	m.stays(d, job)
	job.stop()
}

// Where the driver listens to who enabled debugging, too, programs that trace the CPU
// side work on a job that is held, suspended or not.
func TestLaterTracerDoesNotAffectTheDaemon(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{Profile: "6.12.103"})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	strace := m.debug()
	for range 2 {
		strace.obey("ok", "seize %d", job.PID)
		lease := d.announce(t.Context())
		m.checkEach(job, 2, offGPU)
		m.checkStill(job)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 2, onGPU)
		lease = d.announce(t.Context())
		strace.obey("ok", "leave")
		m.checkEach(job, 2, offGPU)
		strace.obey("ok", "seize %d", job.PID)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 2, onGPU)
		strace.obey("ok", "leave")
	}
	m.stays(d, job)
	job.stop()
}

// A debugger that the driver refuses has the right to debug all the same
// (kfd_dbg_trap_enable). The daemon gets it back when that one releases the job, and
// until then says that it cannot suspend the job, or resume it.
func TestRightToDebugIsTakenBackFromALaterDebugger(t *testing.T) {
	t.Parallel()
	for _, leased := range []bool{false, true} {
		t.Run(fmt.Sprintf("suspended=%v", leased), func(t *testing.T) {
			t.Parallel()
			m := emulate(t, kfdemu.Config{Profile: "6.12.103"})
			job := m.work("--queues", "2", "--duration", "500", "--runtime")
			d := m.start(atOnce)
			d.offlineTarget(job, 2)
			lease := ""
			if leased {
				lease = d.announce(t.Context()).GetLeaseId()
			}
			rocgdb := m.debug()
			rocgdb.obey("ok", "seize %d", job.PID)
			rocgdb.obey("EALREADY", "enable %d", job.PID)
			if leased {
				m.checkEach(job, 2, offGPU)
				m.checkStill(job)
				d.complete(lease)
			} else {
				var answer said
				lease, answer = d.ask(10 * time.Second)
				checkSaid(t, "of a job that a debugger has", said{false, cannotSuspend, 0}, answer)
				m.checkEach(job, 2, onGPU)
				d.complete(lease)
			}
			d.eventually("the daemon says that it does not have the job", func() bool {
				return strings.Contains(d.target(job.PID).GetAttachError(), "another debugger holds the process on the GPU")
			})
			d.check(0, "cannot be suspended: process", "target", "list")
			d.check(0, fmt.Sprintf("process %d (%s) traces it", rocgdb.cmd.Process.Pid, comm(t, rocgdb.cmd.Process.Pid)), "target", "explain", fmt.Sprint(job.PID))

			rocgdb.obey("ok", "leave")
			m.awaitEach(job, 2, onGPU)
			m.awaitProgress(job)
			d.eventually("the job counts as running", func() bool {
				state := d.target(job.PID).GetState()
				return state == running || state == quarantined
			})
			m.checkDebugs(d, 0)
			// What failed is left alone for a while. Others are not.
			job.stop()
			m.gone(d, job.PID)
			m.stays(d)
		})
	}
}
