package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// pidOf returns the pid in "PID@START".
func pidOf(target string) int32 {
	key, err := gpreempt.ParseProcessKey(target)
	if err != nil {
		return 0
	}
	return key.PID
}

// simulation starts and stops jobs of a simulated machine, by lines on the standard input
// of kfdemu serve-sim. Its methods may be called by several goroutines.
type simulation struct {
	mu  sync.Mutex // has one question asked at a time
	in  io.WriteCloser
	out *bufio.Reader
}

// simAnswer is how kfdemu serve-sim answers a line.
type simAnswer struct {
	Error     string                     `json:"error"`
	PID       int32                      `json:"pid"`
	Now       time.Duration              `json:"now"`
	Processes []gpumodel.ProcessCounters `json:"processes"`
}

// newSimulation connects to a process that is not started yet.
func newSimulation(t *testing.T, process *exec.Cmd) *simulation {
	t.Helper()
	in, err := process.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := process.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	return &simulation{in: in, out: bufio.NewReader(out)}
}

func (s *simulation) ask(format string, args ...any) (a simAnswer, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := fmt.Fprintf(s.in, format+"\n", args...); err != nil {
		return a, err
	}
	line, err := s.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &a)
	}
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	return a, err
}

// mustAsk is ask for what must succeed.
func (d *daemon) mustAsk(format string, args ...any) simAnswer {
	d.t.Helper()
	a, err := d.sim.ask(format, args...)
	if err != nil {
		d.t.Fatalf("kfdemu serve-sim, "+format+": %v", append(args, err)...)
	}
	return a
}

const queuesOfAJob = 2

// startJob starts a simulated job and returns its pid.
func (d *daemon) startJob(comm string) int32 {
	d.t.Helper()
	return d.mustAsk("start %s:%d:1ms", comm, queuesOfAJob).PID
}

// startOffline starts a job that may be suspended, and waits until the daemon
// has found its queues and has a mechanism for it.
func (d *daemon) startOffline() int32 {
	d.t.Helper()
	pid := d.startJob("trainer")
	d.eventually("the job can be suspended", func() bool {
		target := d.target(pid)
		return target.GetMechanism() != "" && target.GetQueueCount() == queuesOfAJob
	})
	return pid
}

// stopJob ends a job and checks that each of its packets was executed once, or was left
// on its ring.
func (d *daemon) stopJob(pid int32) {
	d.t.Helper()
	c := d.mustAsk("stop %d", pid).Processes[0]
	if !sound(&c) || c.Executed == 0 {
		d.t.Errorf("packets were lost or repeated, or none was executed: %+v", c)
	}
}

// sound reports whether each packet of a process ran once, or is still on its ring.
func sound(c *gpumodel.ProcessCounters) bool {
	return c.Lost == 0 && c.Repeated == 0 && c.Submitted == c.Executed+c.Pending+c.Abandoned
}

// executed returns how many packets of a process have been executed, and the time of the
// machine.
func (d *daemon) executed(pid int32) (packets uint64, now time.Duration) {
	d.t.Helper()
	a := d.mustAsk("counters")
	for _, c := range a.Processes {
		if c.Process.PID == pid {
			return c.Executed, a.Now
		}
	}
	d.t.Fatalf("process %d has no counters", pid)
	return 0, 0
}

// checkFrozen lets the simulated clock go on and checks that the job does not.
func (d *daemon) checkFrozen(pid int32) {
	d.t.Helper()
	before, began := d.executed(pid)
	var after uint64
	d.eventually("simulated time goes on", func() bool {
		var now time.Duration
		after, now = d.executed(pid)
		return now >= began+20*time.Millisecond
	})
	if after != before {
		d.t.Errorf("%d packets were executed while the job was suspended", after-before)
	}
}

// checkRuns waits until more packets of a job have been executed.
func (d *daemon) checkRuns(pid int32) {
	d.t.Helper()
	before, _ := d.executed(pid)
	d.eventually("the job goes on", func() bool {
		now, _ := d.executed(pid)
		return now > before
	})
}

// target returns what gpctl would show of a process; nil when it is not known.
func (d *daemon) target(pid int32) *gpreemptv1.Target {
	d.t.Helper()
	resp, err := d.admin.ListTargets(d.t.Context(), &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	return find(resp, pid)
}

func find(list *gpreemptv1.ListTargetsResponse, pid int32) *gpreemptv1.Target {
	for _, target := range list.GetTargets() {
		if target.GetPid() == pid {
			return target
		}
	}
	return nil
}

// announcement asks for all GPUs, for longer than any test takes, and waits long
// enough for a busy machine.
func announcement() *gpreemptv1.NotifyOnlineRequest {
	return &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(10 * time.Second)}
}

// announce returns a lease on quiet GPUs.
func (d *daemon) announce(ctx context.Context) *gpreemptv1.NotifyOnlineResponse {
	d.t.Helper()
	req := announcement()
	req.MaxWait = durationpb.New(d.waitFor(longest))
	resp, err := d.online.NotifyOnline(ctx, req)
	if err != nil {
		d.t.Fatal(err)
	}
	if !resp.GetQuiesced() {
		d.t.Fatalf("the GPUs are not quiet: %v", resp)
	}
	return resp
}

// waitFor returns a max_wait: in place of the longest one that of busyHostDaemon, which is less than the TTL.
func (d *daemon) waitFor(maxWait time.Duration) time.Duration {
	if d.busyHost && maxWait == longest {
		return 50 * time.Second
	}
	return maxWait
}

func (d *daemon) complete(lease string) *gpreemptv1.CompleteResponse {
	d.t.Helper()
	resp, err := d.online.Complete(d.t.Context(), &gpreemptv1.CompleteRequest{LeaseId: lease})
	if err != nil {
		d.t.Fatal(err)
	}
	return resp
}
