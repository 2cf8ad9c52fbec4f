package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/workload"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// holderMain is a job like kfdemu work that can make the driver wait for it: "hold" has it
// hold its own lock in the driver permanently. It says "held" then.
func holderMain(args []string, in io.Reader, out io.Writer) int {
	commands, forward := io.Pipe()
	go func() {
		defer forward.Close()
		for lines := bufio.NewScanner(in); lines.Scan(); {
			if lines.Text() != "hold" {
				fmt.Fprintln(forward, lines.Text())
				continue
			}
			m := workload.Message{Event: "held"}
			// The driver has one object for the process, however often it is opened.
			fd, err := kfd.Kernel().Open(kfd.DevicePath, unix.O_RDWR|unix.O_CLOEXEC)
			if err == nil {
				_, err = testutil.HoldDriverLock(fd)
			}
			if err != nil {
				m = workload.Message{Event: "error", What: err.Error()}
			}
			_ = json.NewEncoder(out).Encode(m) // the test waits for it
		}
	}()
	return workload.Main(context.Background(), workload.Kernel(), args, commands, out, os.Stderr)
}

// hold starts an offline job with a queue on a GPU that holds its own lock in the driver
// until it is killed.
func (m *softGPU) hold(gpu int) *worker {
	m.t.Helper()
	self, err := os.Executable()
	if err != nil {
		m.t.Fatal(err)
	}
	name := filepath.Join(filepath.Dir(trainBinary), "trainholder")
	if err := os.Link(self, name); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { _ = os.Remove(name) })
	cmd := exec.Command(name, "--duration", "2000", "--rate", "20", "--runtime", "--gpus", m.gpu(gpu))
	cmd.Env = []string{roleEnv + "=holder"}
	w := spawn(m.t, cmd)
	w.await("ready")
	w.tell("hold")
	w.await("held")
	return w
}

// waiting returns the processes of a list that wait for the lock of a target in the driver.
func waiting(pids []int32) []int32 {
	return slices.DeleteFunc(slices.Clone(pids), func(pid int32) bool {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", pid))
		return !slices.ContainsFunc(tasks, func(path string) bool {
			where, err := os.ReadFile(path)
			return err == nil && string(where) == dbgtrap.TargetLock
		})
	})
}

// A job that holds its own lock in the driver blocks its debugger, and SIGKILL does not end
// the call. The debugger is a helper of the daemon. The daemon ends, what it had suspended or
// only held is free, and the next one starts.
func TestSoftGPUJobThatHoldsItsLockKeepsNothingElse(t *testing.T) {
	m := onSoftGPU(t)
	if len(m.gpus) < 2 {
		t.Skip("it needs two GPUs")
	}
	stuck := m.hold(0)
	held := m.work("--gpus", m.gpu(0))
	job := m.work("--gpus", m.gpu(1), "--queues", "2")
	config := atOnce
	dir := testutil.TempSocketDir(t)
	d := m.startIn(dir, config)
	d.offlineTarget(held, 1)
	d.offlineTarget(job, 2)
	var helper []int32
	d.eventually("a helper waits for the lock of the job", func() bool {
		helper = waiting(d.helpers())
		return len(helper) > 0
	})
	m.announce(d, m.gpus[1])
	m.checkEach(job, 2, softOff)

	began := time.Now()
	d.signal(syscall.SIGKILL)
	m.eventually("the daemon has ended", func() bool {
		return errors.Is(syscall.Kill(d.process.Process.Pid, 0), syscall.ESRCH)
	})
	ended := time.Since(began)
	m.awaitEach(job, 2, softOn)
	t.Logf("the daemon had ended %v after SIGKILL, and what it had suspended ran after %v", ended, time.Since(began))
	d.checkExit(-1)
	if still := waiting(helper); !slices.Equal(still, helper) {
		t.Errorf("of the helpers %v, which waited, %v wait: the job should hold its lock", helper, still)
	}
	for _, w := range []*worker{held, job} {
		rocgdb := debug(t, exec.Command(os.Args[0]))
		rocgdb.obey("ok", "seize %d", w.PID)
		rocgdb.obey("ok", "enable %d", w.PID) // nobody debugs it
		rocgdb.obey("ok", "disable %d", w.PID)
		rocgdb.obey("ok", "leave")
		m.awaitProgress(w)
	}

	next := m.startIn(dir, config)
	next.offlineTarget(held, 1)
	next.offlineTarget(job, 2)
	lease := m.announce(next, m.gpus[1])
	m.checkEach(job, 2, softOff)
	next.complete(lease)
	m.awaitEach(job, 2, softOn)
	stuck.kill()
	m.gone(next, stuck.PID)
	next.stop()
	held.stop()
	job.stop()
}

// Reading mqds waits for the lock of each process, and while it waits no process of the driver can end. The daemon
// does not read while a job holds its own: others start and end at once, and the daemon names the job. It reads
// again when the job has ended.
func TestSoftGPUJobThatHoldsItsLockDelaysNobodysEnd(t *testing.T) {
	m := onSoftGPU(t)
	stuck := m.hold(0)
	d := m.startIn(testutil.TempSocketDir(t), nothingSet)
	mqds := func() (found *gpreemptv1.Source) {
		for _, s := range d.status().GetSources() {
			if s.GetName() == "mqds" {
				found = s
			}
		}
		return found
	}
	named := fmt.Sprintf("process %d is in a call of the driver", stuck.PID)
	d.eventually("the daemon says why it does not read", func() bool { return strings.Contains(mqds().GetNote(), named) })
	for range 10 { // each has the daemon want to read
		readings := mqds().GetReadings()
		job := m.work("--gpus", m.gpu(0), "--queues", "2")
		d.eventually("the daemon has looked again", func() bool { return mqds().GetReadings() > readings })
		began := time.Now()
		job.stop()
		m.gone(d, job.PID)
		t.Logf("a job had ended %v after its order", time.Since(began))
	}
	if s := mqds(); s.GetAvailable() || !strings.Contains(s.GetNote(), named) {
		t.Errorf("while the job holds its lock: %v", s)
	}
	stuck.kill()
	job := m.work("--gpus", m.gpu(0), "--queues", "3")
	d.eventually("the queues of a job have addresses", func() bool {
		var list gpreemptv1.ListQueuesResponse
		d.ctlJSON(&list, "queue", "list", "--target", fmt.Sprint(job.PID))
		unknown := slices.ContainsFunc(list.GetQueues(), func(q *gpreemptv1.Queue) bool { return q.GetRingAddress() == 0 })
		return len(list.GetQueues()) == 3 && !unknown
	})
	job.stop()
	d.stop()
}
