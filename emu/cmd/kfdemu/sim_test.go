package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// world is a machine with a daemon on it.
type world struct {
	*Machine
	t      *testing.T
	client *client.Client
}

const simConfig = `
access: {online_groups: [], admin_groups: []}
policy: {preset: strict, linger: 0s, attach_after: 0s}
limits: {requests_per_user: 1000000}
rules:
  - {name: training, match: {comm: "train*"}, class: offline}
`

func newWorld(t *testing.T, cfg Config) *world {
	t.Helper()
	var err error
	if cfg.Spec.Name == "" {
		if cfg.Spec, err = gpumodel.PresetByName("mi300x"); err != nil {
			t.Fatal(err)
		}
	}
	w := &world{t: t}
	if w.Machine, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.must(w.Machine.Close()) })
	dir := testutil.TempSocketDir(t)
	path, socket := filepath.Join(dir, "d.yaml"), filepath.Join(dir, "d.sock")
	w.must(os.WriteFile(path, []byte(simConfig), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- daemon.Run(ctx, daemon.Options{ConfigPath: path, ConfigGiven: true, Socket: socket, Host: w.Host(), Log: zaptest.NewLogger(t)})
	}()
	t.Cleanup(func() { cancel(); w.must(<-ended) })
	if w.client, err = client.Dial(socket, client.FailClosed()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.must(w.client.Close()) })
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// eventually waits until cond holds.
func (w *world) eventually(what string, cond func() bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.t.Fatalf("%s: not within a minute", what)
		}
	}
}

// job starts a training job of two queues and waits until the daemon can suspend it.
func (w *world) job() *Process {
	w.t.Helper()
	p, err := w.StartJob(Job{Comm: "trainer", Queues: 2, Kernel: gpumodel.Packet{Duration: time.Millisecond, Occupancy: 0.5}})
	w.must(err)
	w.eventually("the job can be suspended", func() bool { return w.target(p).GetMechanism() == "dbgtrap" })
	return p
}

// target returns what the daemon lists of a process, nil for nothing.
func (w *world) target(p *Process) *gpreemptv1.Target {
	list, err := w.client.Admin().ListTargets(w.t.Context(), &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return nil // it does not serve yet
	}
	for _, t := range list.GetTargets() {
		if t.GetPid() == p.Key().PID {
			return t
		}
	}
	return nil
}

func (w *world) executed(p *Process) uint64 {
	w.t.Helper()
	c, err := p.Counters()
	w.must(err)
	return c.Executed
}

// now returns the machine's time.
func (w *world) now() time.Duration {
	now, _, _ := w.Counters()
	return now
}

func (w *world) runs(p *Process) {
	w.t.Helper()
	before := w.executed(p)
	w.eventually("the job runs", func() bool { return w.executed(p) > before })
}

// frozen lets the machine's clock go on and checks that the job does not.
func (w *world) frozen(p *Process) {
	w.t.Helper()
	before, began := w.executed(p), w.now()
	w.eventually("the machine's time goes on", func() bool { return w.now() >= began+20*time.Millisecond })
	if after := w.executed(p); after != before {
		w.t.Errorf("%d packets ran while the job was suspended", after-before)
	}
}

// end ends a job and checks that each of its packets ran once or was left on its ring.
func (w *world) end(p *Process) {
	w.t.Helper()
	c, err := p.End()
	w.must(err)
	if c.Lost != 0 || c.Repeated != 0 || c.Submitted != c.Executed+c.Abandoned+c.Pending || c.Executed == 0 {
		w.t.Errorf("packets were lost or repeated, or none ran: %+v", c)
	}
}

func TestLeaseSuspendsSimulatedJobsByTheDriversRules(t *testing.T) {
	for _, tc := range []struct{ machine, profile string }{
		{"mi300x", "6.12"}, {"mi300x", "6.12.103"}, {"mi308x", "7.2"}, {"rx7900xtx", "6.12"}, {"mi250x", "amd-dkms"},
	} {
		t.Run(tc.machine+" "+tc.profile, func(t *testing.T) {
			spec, err := gpumodel.PresetByName(tc.machine)
			if err != nil {
				t.Fatal(err)
			}
			w := newWorld(t, Config{Spec: spec, GPUs: 2, Profile: tc.profile})
			job := w.job()
			w.runs(job)
			lease, err := w.client.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second})
			w.must(err)
			if !lease.Quiet() || lease.SuspendedTargets() != 1 {
				t.Errorf("quiet %v, %d targets suspended; want the job suspended", lease.Quiet(), lease.SuspendedTargets())
			}
			w.frozen(job)
			w.must(lease.Release(t.Context()))
			w.runs(job)
			w.end(job)
			w.eventually("the daemon forgets the job", func() bool { return w.target(job) == nil })
		})
	}
}

func TestJobThatStartsDuringALeaseIsSuspended(t *testing.T) {
	w := newWorld(t, Config{Profile: "7.2"})
	w.end(w.job()) // the daemon serves
	lease, err := w.client.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second})
	w.must(err)
	job, err := w.StartJob(Job{Comm: "trainer", Queues: 2, Kernel: gpumodel.Packet{Duration: time.Millisecond, Occupancy: 0.5}})
	w.must(err)
	w.eventually("the job is suspended", func() bool { return w.target(job).GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED })
	w.frozen(job)
	w.must(lease.Release(t.Context()))
	w.runs(job)
	w.end(job)
}

func TestLeaseEndsWhenTheQueuesOfItsOwnerHadWorkAndDrained(t *testing.T) {
	w := newWorld(t, Config{})
	job := w.job()
	server, err := w.Join("server")
	w.must(err)
	queue, err := server.CreateQueue(w.GPUs()[0].ID)
	w.must(err)
	lease, err := w.client.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), CompleteOnIdle: true, NoRenew: true, TTL: time.Minute, MaxWait: 10 * time.Second})
	w.must(err)
	w.eventually("the daemon knows the queue", func() bool { return w.target(server).GetQueueCount() == 1 })
	w.frozen(job) // an idle queue that had no work yet ends nothing
	work := gpumodel.Packet{Duration: 20 * time.Millisecond, Occupancy: 0.5}
	began := w.now()
	w.must(server.Run(t.Context(), queue, work, work))
	if took := w.now() - began; took < 2*work.Duration {
		t.Errorf("two kernels of %v took %v", work.Duration, took)
	}
	w.runs(job)
	end, err := w.client.Online().Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: lease.ID()})
	w.must(err)
	if got := end.GetEnd(); got != gpreemptv1.LeaseEnd_LEASE_END_IDLE {
		t.Errorf("the lease ended as %v, want idle", got)
	}
	w.end(job)
}

func TestMachineThatCannotBeIsRefused(t *testing.T) {
	spec, err := gpumodel.PresetByName("mi300x")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, cfg := range []Config{{Spec: spec, GPUs: 65}, {Spec: spec, Profile: "5.4"}} {
		_, err := New(cfg)
		if err == nil {
			t.Fatalf("%+v is a machine", cfg)
		}
		got = append(got, err.Error())
	}
	want := []string{
		"simulated machine: a simulated machine has 1 to 64 GPUs, not 65",
		`simulated machine: no driver profile "5.4"; there are ["6.5" "6.12" "6.12.103" "6.12.117" "amd-dkms" "7.2" "7.3"]`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Requests that come together, after a stall of the host, are more than a ring has room for.
func TestPacketsWaitForRoomOnTheRing(t *testing.T) {
	w := newWorld(t, Config{})
	p, err := w.Start("server")
	w.must(err)
	queue, err := p.CreateQueue(w.GPUs()[0].ID)
	w.must(err)
	const calls, packets = 4, 300
	ended := make(chan error)
	for range calls {
		go func() {
			ended <- p.Run(t.Context(), queue, slices.Repeat([]gpumodel.Packet{{Duration: 1, Occupancy: 0.5}}, packets)...)
		}()
	}
	for range calls {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if n := w.executed(p); n != calls*packets {
		t.Errorf("%d packets ran, want %d", n, calls*packets)
	}
}
