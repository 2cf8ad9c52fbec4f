package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// crashPoints is how often a daemon is killed at least, on all machines together, without
// GPREEMPT_CRASHES.
const crashPoints = 500

// shortCrashes is how often it is killed on each machine where a change is tested.
const shortCrashes = 20

// The daemon is killed before and after every call it makes of the driver, in every step
// that the hardware does for it, and at random times.
func TestSoakDaemonKilledAnywhereLeavesEveryQueueRunning(t *testing.T) {
	machines := []kfdemu.Config{
		// One thread has to trace a target all the time, and the runlist is HWS's.
		{Machine: "mi300x", GPUs: 2, Profile: "6.12"},
		// It has not, and MES schedules queue by queue.
		{Machine: "rx7900xtx", GPUs: 2, Profile: "7.2"},
	}
	for _, cfg := range machines {
		t.Run(cfg.Machine+" "+cfg.Profile, func(t *testing.T) {
			c := newCrashes(t, cfg)
			points := c.observe()
			t.Logf("%d calls and steps to be killed at", len(points))
			for range max(testutil.Number(t, "GPREEMPT_CRASHES", crashPoints)/len(machines)-len(points), 40) {
				points = append(points, c.random())
			}
			points = some(shortCrashes, points)
			c.r.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
			for _, p := range points {
				c.kill(p)
			}
			for until := time.Now().Add(soakLength(t) / time.Duration(len(machines))); time.Now().Before(until) && !t.Failed(); {
				c.m.log.forgetEvents()
				c.kill(c.random())
			}
			c.finish()
		})
	}
}

// everyGPU has the daemon suspend on GPUs on which that is known to be a hazard.
const everyGPU = `safety:
  hazards:
    - id: emulated
      gfx: ["gfx*"]
      action: allow
      why: It is emulated.
`

// soakLength is what GPREEMPT_SOAK gives, 0 without.
func soakLength(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv(soakEnv)
	if text == "" {
		return 0
	}
	length, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("%s: %v", soakEnv, err)
	}
	return length
}

// crashes is a machine, the jobs on it, and the daemons that died there.
type crashes struct {
	t    *testing.T
	m    *emulated
	name string
	// gpreemptd is the binary: a killed process tells of no races.
	gpreemptd string
	dir       string
	r         *rand.Rand
	// jobs are offline, and have the same queues all the time; all are those and others.
	jobs, all []*worker
	reign     *reign // the daemon there is
	// wrote also takes what all daemons write.
	wrote io.Writer

	died             map[stage]int
	missed           []string
	outlived         int // answers that a daemon's death made untrue before they were checked
	served, tookOver []time.Duration
}

func newCrashes(t *testing.T, cfg kfdemu.Config) *crashes {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	c := &crashes{
		t: t, m: emulate(t, cfg), name: cfg.Machine + ", driver of " + cfg.Profile,
		gpreemptd: withoutDetector(t), dir: testutil.TempSocketDir(t),
		r: rand.New(rand.NewPCG(seed, 0)), died: map[stage]int{},
	}
	if err := os.WriteFile(filepath.Join(c.dir, "gpreemptd.yaml"), []byte(soakConfig(0)+everyGPU), 0o600); err != nil {
		t.Fatal(err)
	}
	load := []string{"--runtime", "--duration", "700", "--occupancy", "300000", "--rate", "100"}
	c.jobs = []*worker{
		c.m.work(append(load, "--queues", "2")...),
		c.m.work(append(load, "--queues", "1", "--sdma", "--wait", "poll")...),
	}
	c.all = append(slices.Clone(c.jobs),
		c.m.work(append(load, "--queues", "1", "--churn", "--wait", "poll")...),
		c.m.serve(append(load, "--queues", "1")...))
	return c
}

// reign is a daemon from its start to its end.
type reign struct {
	*exec.Cmd
	log    *lines
	began  time.Time
	exited context.Context
	conn   *grpc.ClientConn
	online gpreemptv1.OnlineServiceClient
}

// launch starts a daemon, to be killed by a fault if there is one.
func (c *crashes) launch(fault *kfdemu.Fault) *kfdemu.Injection {
	c.t.Helper()
	if c.reign != nil {
		if err := c.reign.conn.Close(); err != nil {
			c.t.Error(err)
		}
	}
	socket := filepath.Join(c.dir, "gpreemptd.sock")
	r := &reign{
		Cmd: c.m.Command(context.Background(), c.gpreemptd, "serve", "--socket", socket, "--config", filepath.Join(c.dir, "gpreemptd.yaml")),
		log: &lines{}, began: time.Now(),
	}
	r.Env, r.Stderr = environment("RUNTIME_DIRECTORY="+c.dir), io.Writer(r.log)
	if c.wrote != nil {
		r.Stderr = io.MultiWriter(r.log, c.wrote)
	}
	var err error
	if r.conn, err = connect(socket); err != nil {
		c.t.Fatal(err)
	}
	r.online = gpreemptv1.NewOnlineServiceClient(r.conn)
	if err := r.Start(); err != nil {
		c.t.Fatal(err)
	}
	// It is the shim yet, which makes no calls.
	strikes := c.arm(r, fault)
	exited, end := context.WithCancel(context.Background())
	r.exited = exited
	go func() {
		_ = r.Wait() // its end is checked by ProcessState
		end()
	}()
	c.reign = r
	c.t.Cleanup(func() {
		_ = r.Process.Kill() // it has ended, unless the test failed
		<-r.exited.Done()
		_ = r.conn.Close() // it was, if the daemon is not the last
		if c.t.Failed() && c.reign == r {
			c.t.Logf("what the last gpreemptd wrote:\n%s", r.log)
		}
	})
	return strikes
}

// arm puts a fault in that is the daemon's end, and returns what reports whether it struck.
func (c *crashes) arm(r *reign, fault *kfdemu.Fault) *kfdemu.Injection {
	if fault == nil {
		return nil
	}
	f := *fault
	f.Caller = int32(r.Process.Pid)
	if f.Step != "" {
		f.Do = func() { _ = r.Process.Kill() } // it may be dead already
	}
	return c.m.Inject(f)
}

// buried waits for the daemon's end.
func (c *crashes) buried(how string) *os.ProcessState {
	c.t.Helper()
	select {
	case <-c.reign.exited.Done():
	case <-time.After(timeout):
		_ = c.reign.Process.Signal(syscall.SIGQUIT) // it writes the stacks of its goroutines
		c.t.Fatalf("%s: gpreemptd did not end within %v", how, timeout)
	}
	return c.reign.ProcessState
}

func (c *crashes) announce() (*gpreemptv1.NotifyOnlineResponse, bool) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.reign.exited, timeout)
	defer cancel()
	resp, err := c.reign.online.NotifyOnline(ctx, announcement(), grpc.WaitForReady(true))
	return resp, c.judge("announce", err)
}

func (c *crashes) complete(lease string) bool {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.reign.exited, timeout)
	defer cancel()
	_, err := c.reign.online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: lease})
	return c.judge("complete", err)
}

// judge reports whether a call went well: only the daemon's death excuses one that did
// not.
func (c *crashes) judge(what string, err error) bool {
	c.t.Helper()
	if err == nil {
		return true
	}
	select {
	case <-c.reign.exited.Done(): // the end of a connection is seen before that of its process
	case <-time.After(timeout):
		c.t.Fatalf("%s: %v", what, err)
	}
	return false
}

// takeOver waits until the daemon has suspended all jobs for a lease, and ends that.
// False: it has died before.
func (c *crashes) takeOver(measure bool) bool {
	c.t.Helper()
	late := time.Now().Add(timeout)
	for first := true; ; first = false {
		announced := c.m.now()
		lease, ok := c.announce()
		if !ok {
			return false
		}
		took := time.Since(c.reign.began)
		if first && measure {
			c.served = append(c.served, took)
		}
		held := !slices.ContainsFunc(c.jobs, func(w *worker) bool { return !c.m.frozen(w) })
		states := c.m.Driver().Processes()
		events, _, _ := c.m.log.since(announced)
		if held && measure {
			c.tookOver = append(c.tookOver, took)
		}
		untrue := first && lease.GetQuiesced() && !held
		if !c.complete(lease.GetLeaseId()) {
			if untrue { // it has died after its answer, so the driver has resumed them
				c.outlived++
			}
			return false
		}
		if untrue {
			c.t.Errorf("gpreemptd answers %v, and not all jobs are suspended: %+v; since the announcement the machine had %+v; gpreemptd wrote:\n%s",
				lease, states, events, c.reign.log)
		}
		if held {
			return true
		}
		if time.Now().After(late) {
			c.t.Fatalf("gpreemptd did not suspend all jobs within %v", timeout)
		}
	}
}

// kill kills a daemon at a point, and checks the result: the driver resumes everything, and
// the next daemon takes over.
func (c *crashes) kill(p crashPoint) {
	c.t.Helper()
	if c.t.Failed() {
		return
	}
	var strikes *kfdemu.Injection
	if p.stage == starting {
		c.stop()
		strikes = c.launch(p.fault)
	} else {
		strikes = c.arm(c.reign, p.fault)
	}
	switch {
	case p.fault == nil:
		c.underLoad(p.after)
	case p.stage == stopping:
		c.leave()
	default:
		for n := 0; n < 5 && c.takeOver(false); n++ {
		}
	}
	if strikes != nil {
		if strikes.Hits() == 0 { // a call less than was observed: the jobs did something else
			c.missed = append(c.missed, p.name)
		}
		strikes.Remove()
	}
	_ = c.reign.Process.Kill() // it is dead, if it was not missed
	if state := c.buried(p.name); state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL && !(p.stage == stopping && state.Success()) {
		c.t.Errorf("%s: gpreemptd ended with %v; it wrote:\n%s", p.name, state, c.reign.log)
	}
	c.died[p.stage]++
	if c.r.IntN(2) == 0 { // by its death alone
		c.m.awaitAll("everything runs after a death ("+p.name+")", c.all)
	}
	c.launch(nil)
	if !c.takeOver(true) {
		c.t.Errorf("%s: the next gpreemptd ended with %v", p.name, c.reign.ProcessState)
	}
	c.m.awaitAll("everything runs after a new gpreemptd took over ("+p.name+")", c.all)
	c.progress(p.name)
}

// underLoad kills a daemon after a time, while clients announce and complete.
func (c *crashes) underLoad(after time.Duration) {
	c.t.Helper()
	var clients sync.WaitGroup
	for range 2 {
		clients.Go(func() {
			for c.try() {
			}
		})
	}
	timer := time.NewTimer(after)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.reign.exited.Done():
	}
	_ = c.reign.Process.Kill()
	clients.Wait()
}

// try requests a lease and ignores the reason of a failure.
func (c *crashes) try() bool {
	lease, err := c.reign.online.NotifyOnline(c.reign.exited, announcement(), grpc.WaitForReady(true))
	if err == nil {
		_, err = c.reign.online.Complete(c.reign.exited, &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()})
	}
	return err == nil
}

// stop ends a daemon in order, in the middle of a lease.
func (c *crashes) stop() {
	c.t.Helper()
	c.leave()
	if state := c.reign.ProcessState; !state.Success() {
		c.t.Errorf("gpreemptd ended with %v; it wrote:\n%s", state, c.reign.log)
	}
}

// leave has a daemon that holds jobs suspended end, however it does.
func (c *crashes) leave() {
	c.t.Helper()
	if _, ok := c.announce(); ok {
		if err := c.reign.Process.Signal(syscall.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) { // a fault may have struck
			c.t.Fatal(err)
		}
	}
	c.buried("stop")
}

// progress waits until every process has had packets executed since now.
func (c *crashes) progress(after string) {
	c.t.Helper()
	before := c.m.executed()
	c.m.awaitThat("every process makes progress after "+after, func() string {
		now := c.m.executed()
		for _, w := range c.all {
			if now[w.PID] <= before[w.PID] {
				return fmt.Sprintf("process %d has executed %d packets as before", w.PID, now[w.PID])
			}
		}
		return ""
	})
}

// finish ends the jobs, which prove what they did, and tells the figures.
func (c *crashes) finish() {
	c.t.Helper()
	c.stop()
	for _, w := range c.all {
		w.stop()
	}
	slices.Sort(c.missed)
	c.t.Logf("%v deaths, %d not at their point %q, %d between an answer and its check; the next served after %+v and took over after %+v",
		c.died, len(c.missed), c.missed, c.outlived, spreadOf(c.served), spreadOf(c.tookOver))
	within := 0
	for _, took := range c.tookOver {
		if took <= time.Second {
			within++
		}
	}
	tellFigures(c.t, "gpreemptd killed, from the start of the next one, "+c.name, false, struct {
		Deaths map[stage]int `json:"deaths"`
		Serves spread        `json:"serves"`
		Holds  spread        `json:"suspends_all_jobs"`
		Within int           `json:"suspends_all_jobs_within_1_s"`
	}{c.died, spreadOf(c.served), spreadOf(c.tookOver), within})
}
