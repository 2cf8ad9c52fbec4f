package e2e

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// ordinary are errnos without a special meaning, besides EINTR.
var ordinary = []syscall.Errno{syscall.EIO, syscall.ENOMEM, syscall.EBUSY}

// callsAbout are the calls the daemon makes about a job it holds, and whether it makes
// more than one of them in any case.
var callsAbout = []struct {
	op    kfd.TrapOp
	often bool
}{
	{kfd.TrapEnable, false},
	{kfd.TrapSendRuntimeEvent, false},
	{kfd.TrapGetQueueSnapshot, true},
	{kfd.TrapSuspendQueues, true},
	{kfd.TrapResumeQueues, true},
	{kfd.TrapQueryDebugEvent, true},
	{kfd.TrapQueryExceptionInfo, false},
	{kfd.TrapDisable, false},
}

// The driver refuses one of the daemon's calls about a job, before or after the call has
// taken effect, the first or the second of its kind. In every case the daemon keeps running,
// the announcement is answered correctly, other jobs are served, and nothing stays suspended
// when the lease ends.
func TestCallThatFailsLeavesNothingSuspended(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		profile string
		after   bool
	}{{"6.12", false}, {"6.12.103", true}} {
		t.Run(fmt.Sprintf("%s/after=%v", tc.profile, tc.after), func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Profile: tc.profile})
			work := func() *worker { return m.work("--duration", "500", "--rate", "200", "--runtime") }
			sound := work()
			jobs, faults := []*worker{sound}, map[*worker]*kfdemu.Injection{}
			for i, call := range callsAbout {
				for _, errno := range []syscall.Errno{syscall.EINTR, ordinary[i%len(ordinary)]} {
					job, nth := work(), 1
					if call.often && errno != syscall.EINTR {
						nth = 2
					}
					jobs = append(jobs, job)
					faults[job] = m.Inject(kfdemu.Fault{Op: driver.TrapOp(call.op), Target: job.PID, Nth: nth, Errno: errno, After: tc.after})
				}
			}
			d := m.start(atOnce)
			d.offlineTarget(sound, 1)
			for _, w := range jobs {
				d.eventually("the daemon has tried to hold each job", func() bool {
					target := d.target(w.PID)
					return target.GetMechanism() == "dbgtrap" || target.GetAttachError() != ""
				})
			}
			for round := range 2 {
				lease, answer := d.ask(10 * time.Second)
				if answer.Quiesced || answer.Reason != cannotSuspend {
					t.Errorf("the announcement is answered %+v, want not quiet, cannot suspend", answer)
				}
				m.checkFrozen(sound)
				m.checkStill(sound)
				if round == 0 {
					for _, w := range jobs {
						w.create()
					}
				}
				m.awaitEach(sound, 2, offGPU)
				d.complete(lease)
				for _, w := range jobs {
					m.eventually("every queue runs", func() bool { return m.allOn(w) })
					m.awaitProgress(w)
				}
				for _, w := range jobs {
					d.eventually("the daemon knows that each job runs", func() bool {
						return slices.Contains([]gpreemptv1.TargetState{running, quarantined}, d.target(w.PID).GetState())
					})
				}
			}
			// The runtimes of some are shut down while they are held.
			asked := func(w *worker) bool {
				return faults[w] != nil && faults[w].Op == driver.TrapOp(kfd.TrapQueryExceptionInfo)
			}
			for _, w := range jobs {
				if asked(w) {
					w.tell("rtdisable")
					w.await("rtdisabled")
					m.eventually("the daemon asks for the runtime's state", func() bool { return faults[w].Hits() > 0 })
				}
			}
			sound.stop()
			m.gone(d, sound.PID)
			d.stop()
			for _, w := range jobs[1:] {
				m.eventually("without a daemon each job runs, and nobody debugs it", func() bool {
					p, _ := m.process(w.PID)
					return !p.Enabled && m.allOn(w)
				})
				m.awaitProgress(w)
				w.stop()
			}
			for _, fault := range faults {
				if fault.Hits() != 1 {
					t.Errorf("%s number %d was refused with %v %d times, want once", fault.Op, fault.Nth, fault.Errno, fault.Hits())
				}
			}
			m.stays(m.start(atOnce))
		})
	}
}

// A daemon that cannot open the driver runs without it and reports that; a restart uses it
// once it can be opened.
func TestDriverThatCannotBeOpenedIsReportedAndUsedAfterARestart(t *testing.T) {
	t.Parallel()
	for _, errno := range []syscall.Errno{syscall.ENODEV, syscall.EPERM, syscall.ENOMEM} {
		t.Run(errno.Error(), func(t *testing.T) {
			m := emulate(t, kfdemu.Config{})
			job := m.work("--queues", "2", "--duration", "500", "--runtime")
			closed := m.Inject(kfdemu.Fault{Op: driver.OpOpen, Always: true, Errno: errno})
			d := m.start(atOnce)
			if w := d.warned("KFD_CLOSED"); w.GetSeverity() != "error" || !strings.Contains(w.GetText(), errno.Error()) || !strings.Contains(w.GetRemedy(), "restart gpreemptd") {
				t.Errorf("the daemon warns %v, want an error that says why, and to restart it", w)
			}
			d.check(0, "error KFD_CLOSED", "status")
			d.eventually("the daemon says that it cannot suspend the job", func() bool { return d.target(job.PID).GetAttachError() != "" })
			lease, answer := d.ask(10 * time.Second)
			checkSaid(t, "without the driver", said{false, cannotSuspend, 0}, answer)
			m.checkEach(job, 2, onGPU)
			m.awaitProgress(job)
			d.complete(lease)
			d.stop()

			closed.Remove()
			d = m.start(atOnce)
			d.offlineTarget(job, 2)
			m.stays(d, job)
			job.stop()
		})
	}
}

// A daemon that has the driver open does not need to open it again.
func TestRunningDaemonDoesNotReopenTheDriver(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	closed := m.Inject(kfdemu.Fault{Op: driver.OpOpen, Always: true, Errno: syscall.ENODEV})
	for range 3 {
		lease := d.announce(t.Context())
		m.checkEach(job, 2, offGPU)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 2, onGPU)
	}
	if closed.Hits() != 0 {
		t.Errorf("the driver was opened %d times", closed.Hits())
	}
	closed.Remove()
	m.stays(d, job)
	job.stop()
}
