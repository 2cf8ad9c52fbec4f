package e2e

import (
	"context"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
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

// kernel is a dispatch that fills half of a GPU.
func kernel(d time.Duration) *simv1.Kernel {
	return &simv1.Kernel{Duration: durationpb.New(d), Occupancy: 0.5}
}

// startJob starts a simulated job of two queues and returns its pid.
func (d *daemon) startJob(comm string) int32 {
	d.t.Helper()
	resp, err := d.sim.StartJob(d.t.Context(), &simv1.StartJobRequest{Comm: comm, Queues: 2, Kernel: kernel(time.Millisecond)})
	if err != nil {
		d.t.Fatal(err)
	}
	return resp.GetPid()
}

// startOffline starts a job that may be suspended, and waits until the daemon
// has a mechanism for it.
func (d *daemon) startOffline() int32 {
	d.t.Helper()
	pid := d.startJob("trainer")
	d.eventually("the job can be suspended", func() bool { return d.target(pid).GetMechanism() != "" })
	return pid
}

// stopJob ends a job and checks that each of its packets was executed once, or
// is still on its ring.
func (d *daemon) stopJob(pid int32) {
	d.t.Helper()
	resp, err := d.sim.StopJob(d.t.Context(), &simv1.StopJobRequest{Pid: pid})
	if err != nil {
		d.t.Fatal(err)
	}
	checkCounters(d.t, resp.GetCounters())
}

func checkCounters(t *testing.T, c *simv1.ProcessCounters) {
	t.Helper()
	if c.GetLost() != 0 || c.GetRepeated() != 0 || c.GetSubmitted() != c.GetExecuted()+c.GetPending() || c.GetExecuted() == 0 {
		t.Errorf("packets were lost or repeated, or none was executed: %v", c)
	}
}

// executed returns how many packets of a process have been executed.
func (d *daemon) executed(pid int32) uint64 {
	d.t.Helper()
	resp, err := d.sim.GetCounters(d.t.Context(), &simv1.GetCountersRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	for _, c := range resp.GetProcesses() {
		if c.GetPid() == pid {
			return c.GetExecuted()
		}
	}
	d.t.Fatalf("process %d has no counters", pid)
	return 0
}

// checkFrozen lets the simulated clock go on and checks that the job does not.
func (d *daemon) checkFrozen(pid int32) {
	d.t.Helper()
	before, began := d.executed(pid), d.simulatedTime()
	d.eventually("simulated time goes on", func() bool { return d.simulatedTime() >= began+20*time.Millisecond })
	if after := d.executed(pid); after != before {
		d.t.Errorf("%d packets were executed while the job was suspended", after-before)
	}
}

// checkRuns waits until more packets of a job have been executed.
func (d *daemon) checkRuns(pid int32) {
	d.t.Helper()
	before := d.executed(pid)
	d.eventually("the job goes on", func() bool { return d.executed(pid) > before })
}

func (d *daemon) simulatedTime() time.Duration {
	d.t.Helper()
	resp, err := d.sim.GetCounters(d.t.Context(), &simv1.GetCountersRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	return resp.GetNow().AsDuration()
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
	resp, err := d.online.NotifyOnline(ctx, announcement())
	if err != nil {
		d.t.Fatal(err)
	}
	if !resp.GetQuiesced() {
		d.t.Fatalf("the GPUs are not quiet: %v", resp)
	}
	return resp
}

func (d *daemon) complete(lease string) *gpreemptv1.CompleteResponse {
	d.t.Helper()
	resp, err := d.online.Complete(d.t.Context(), &gpreemptv1.CompleteRequest{LeaseId: lease})
	if err != nil {
		d.t.Fatal(err)
	}
	return resp
}
