package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// soakEnv gives the duration of TestSoak.
const soakEnv = "GPREEMPT_SOAK"

const (
	soakReport = 10 * time.Second
	// What RSS, descriptors and threads may grow by from the first third of the
	// soak to the last: what is live at a moment is random.
	rssSlack, fdSlack, threadSlack = 48 << 10, 16, 16
)

// soak is a daemon under random load.
type soak struct {
	*daemon
	seed uint64
	// ctx ends with the load.
	ctx context.Context

	mu       sync.Mutex // guards all below
	did      map[string]int
	failures []string
}

func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv(soakEnv))
	if err != nil {
		t.Skipf("%s is no duration (make soak sets it): %v", soakEnv, err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	d := start(t, soakConfig(0), "--sim", "mi300x", "--sim-gpus", "2")
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	s := &soak{daemon: d, seed: seed, ctx: ctx, did: map[string]int{}}
	before, fds := d.status(), d.fds()

	var load sync.WaitGroup
	for n := range uint64(3) {
		load.Go(func() { s.repeat(10+n, s.announcements) })
	}
	load.Go(func() { s.repeat(20, s.sessions) })
	load.Go(func() { s.repeat(30, s.jobs) })
	load.Go(func() { s.repeat(31, s.jobs) })
	load.Go(func() { s.repeat(40, s.kills) })
	load.Go(func() { s.repeat(50, s.admins) })
	samples := s.sample()
	load.Wait()

	t.Logf("did %v", s.did)
	for _, f := range s.failures {
		t.Error(f)
	}
	checkGrowth(t, samples)
	// Nothing of the load is left.
	d.check(0, "", "policy", "set", "strict")
	d.check(0, "", "drain", "off")
	d.eventually("no leases, jobs or suspensions are left", func() bool {
		st := d.status()
		return st.GetLeaseCount() == 0 && st.GetSuspendedCount() == 0 && st.GetTargetCount() == before.GetTargetCount()
	})
	d.eventually(fmt.Sprintf("back to %d descriptors", fds), func() bool { return d.fds() == fds })
	counters, err := d.sim.GetCounters(t.Context(), &simv1.GetCountersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range counters.GetProcesses() {
		if !sound(c) {
			t.Errorf("packets were lost or repeated: %v", c)
		}
	}
}

func soakConfig(n uint64) string {
	return atOnce + fmt.Sprintf("    priority: %d\nlimits:\n  requests_per_second: 100000\n  burst: 100000\n", n)
}

func sound(c *simv1.ProcessCounters) bool {
	return c.GetLost() == 0 && c.GetRepeated() == 0 && c.GetSubmitted() == c.GetExecuted()+c.GetPending()
}

// repeat does something at random until the soak is over.
func (s *soak) repeat(stream uint64, do func(*rand.Rand)) {
	r := rand.New(rand.NewPCG(s.seed, stream))
	for s.ctx.Err() == nil {
		do(r)
	}
}

// count notes what was done.
func (s *soak) count(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.did[what]++
}

// fail notes what must not be. Refusals of the daemon are no failures: the load
// provokes them.
func (s *soak) fail(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.failures) < 20 {
		s.failures = append(s.failures, fmt.Sprintf(format, args...))
	}
}

// result counts a call by how it ended, and notes what no load excuses.
func (s *soak) result(what string, err error) {
	code := status.Code(err)
	s.count(what + " " + code.String())
	if code == codes.Internal || code == codes.Unknown || code == codes.Unavailable && s.ctx.Err() == nil {
		s.fail("%s: %v", what, err)
	}
}

func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(r.Int64N(int64(most-least)))
}

// rest waits as a client would between two pieces of work.
func (s *soak) rest(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.ctx.Done():
	}
}

func (s *soak) request(r *rand.Rand) *gpreemptv1.NotifyOnlineRequest {
	req := &gpreemptv1.NotifyOnlineRequest{
		Ttl: durationpb.New(between(r, time.Millisecond, 200*time.Millisecond)), MaxWait: durationpb.New(between(r, 0, 20*time.Millisecond)),
		Priority: new(r.Uint32N(16)),
	}
	if r.IntN(2) == 0 {
		req.Eta = durationpb.New(between(r, 0, 5*time.Millisecond))
		req.Slo = durationpb.New(between(r, 5*time.Millisecond, 50*time.Millisecond))
	}
	if r.IntN(4) == 0 {
		req.RequestId = strconv.Itoa(r.IntN(100))
	}
	return req
}

// announcements is a connection that announces for a while.
func (s *soak) announcements(r *rand.Rand) {
	conn, err := connect(s.socket)
	if err != nil {
		s.fail("%v", err)
		return
	}
	defer conn.Close()
	online := gpreemptv1.NewOnlineServiceClient(conn)
	for range 1 + r.IntN(200) {
		ctx, cancel := s.ctx, context.CancelFunc(func() {})
		if r.IntN(20) == 0 { // some give up
			ctx, cancel = context.WithTimeout(ctx, between(r, 0, time.Millisecond))
		}
		resp, err := online.NotifyOnline(ctx, s.request(r))
		cancel()
		s.result("announce", err)
		if err != nil {
			continue
		}
		s.rest(between(r, 0, 5*time.Millisecond))
		switch r.IntN(10) {
		case 0: // left to expire
		case 1:
			_, err := online.Renew(s.ctx, &gpreemptv1.RenewRequest{LeaseId: resp.GetLeaseId(), Ttl: durationpb.New(between(r, 1, time.Second))})
			s.result("renew", err)
		default:
			_, err := online.Complete(s.ctx, &gpreemptv1.CompleteRequest{LeaseId: resp.GetLeaseId()})
			s.result("complete", err)
		}
	}
}

// sessions is a session that announces for a while, and ends one way or another.
func (s *soak) sessions(r *rand.Rand) {
	conn, err := connect(s.socket)
	if err != nil {
		s.fail("%v", err)
		return
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	session, err := gpreemptv1.NewOnlineServiceClient(conn).Session(ctx)
	if err != nil {
		s.result("session", err)
		return
	}
	for tag := range 1 + r.Uint64N(100) {
		if err := session.Send(announceFrame(tag, s.request(r))); err != nil {
			return // Recv would tell why: the soak is over
		}
		resp, err := session.Recv()
		s.result("frame", err)
		if err != nil {
			return
		}
		s.rest(between(r, 0, 5*time.Millisecond))
		if lease := resp.GetAnnounced().GetLeaseId(); lease != "" && r.IntN(3) > 0 {
			frame := &gpreemptv1.SessionRequest{Tag: tag, Frame: &gpreemptv1.SessionRequest_Complete{Complete: &gpreemptv1.CompleteRequest{LeaseId: lease}}}
			if session.Send(frame) != nil {
				return
			}
			if _, err := session.Recv(); err != nil {
				s.result("frame", err)
				return
			}
		}
	}
	if r.IntN(2) == 0 {
		_ = session.CloseSend()
		for err == nil {
			_, err = session.Recv()
		}
	}
}

// jobs starts some jobs, lets them run, stops them and checks their packets.
func (s *soak) jobs(r *rand.Rand) {
	// One process, so the jobs live until they are stopped: s.conn keeps it known.
	gpus, err := s.admin.ListGpus(s.ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		s.result("list GPUs", err)
		return
	}
	var pids []int32
	for range 1 + r.IntN(3) {
		req := &simv1.StartJobRequest{
			Comm: []string{"trainer", "train-big", "viewer"}[r.IntN(3)], Queues: 1 + r.Uint32N(3),
			Kernel: kernel(between(r, 200*time.Microsecond, 5*time.Millisecond)),
		}
		for _, g := range gpus.GetGpus() {
			if r.IntN(2) == 0 {
				req.GpuIds = append(req.GpuIds, g.GetGpuId())
			}
		}
		resp, err := s.sim.StartJob(s.ctx, req)
		s.result("start job", err)
		if err == nil {
			pids = append(pids, resp.GetPid())
		}
	}
	s.rest(between(r, 100*time.Millisecond, 3*time.Second))
	for _, pid := range pids {
		// Also when the soak is over.
		resp, err := s.sim.StopJob(s.t.Context(), &simv1.StopJobRequest{Pid: pid})
		s.result("stop job", err)
		if c := resp.GetCounters(); err == nil && !sound(c) {
			s.fail("packets were lost or repeated: %v", c)
		}
	}
}

// kills is a client process that dies with leases in its hands.
func (s *soak) kills(r *rand.Rand) {
	p := s.startProcess()
	var leases []string
	for range 1 + r.IntN(3) {
		leases = append(leases, p.do("%s", []string{"announce", "session"}[r.IntN(2)]))
	}
	p.kill()
	_ = p.cmd.Wait()
	for _, lease := range leases {
		if !strings.Contains(lease, "-") {
			s.fail("a process that announced was told %q", lease)
			continue
		}
		if end := s.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED && end != gpreemptv1.LeaseEnd_LEASE_END_DISCONNECTED {
			s.fail("lease %s of a killed client ended as %v", lease, end)
		}
	}
	s.count("killed client")
	s.rest(between(r, 0, time.Second))
}

// admins changes policy, rules and classes, drains, suspends and resumes.
func (s *soak) admins(r *rand.Rand) {
	var (
		what string
		err  error
	)
	switch r.IntN(7) {
	case 0, 1:
		what = "policy"
		preset := []string{"strict", "balanced", "slo", "share", "shadow"}[r.IntN(5)]
		_, err = s.admin.SetPolicy(s.ctx, &gpreemptv1.SetPolicyRequest{Preset: preset})
	case 2:
		what = "drain"
		_, err = s.admin.SetDrain(s.ctx, &gpreemptv1.SetDrainRequest{Drain: true, Wait: true})
		s.result("drain on", err)
		s.rest(between(r, 0, 200*time.Millisecond))
		_, err = s.admin.SetDrain(s.ctx, &gpreemptv1.SetDrainRequest{})
	case 3:
		what = "reload"
		s.reload(soakConfig(r.Uint64N(10)))
	default:
		var list *gpreemptv1.ListTargetsResponse
		if list, err = s.admin.ListTargets(s.ctx, &gpreemptv1.ListTargetsRequest{}); err != nil || len(list.GetTargets()) == 0 {
			what = "list targets"
			break
		}
		target := list.GetTargets()[r.IntN(len(list.GetTargets()))].GetTargetId()
		what, err = s.steer(r, target)
	}
	s.result(what, err)
	s.rest(between(r, 0, 500*time.Millisecond))
}

// steer does something to a target, which may have left.
func (s *soak) steer(r *rand.Rand, target string) (what string, err error) {
	switch r.IntN(4) {
	case 0:
		_, err = s.admin.SuspendTarget(s.ctx, &gpreemptv1.SuspendTargetRequest{TargetId: target, Ttl: durationpb.New(between(r, 1, 300*time.Millisecond))})
		return "suspend", err
	case 1:
		_, err = s.admin.ResumeTarget(s.ctx, &gpreemptv1.ResumeTargetRequest{TargetId: target, Hold: durationpb.New(between(r, 0, 300*time.Millisecond))})
		return "resume", err
	case 2:
		_, err = s.admin.ClassifyTarget(s.ctx, &gpreemptv1.ClassifyTargetRequest{
			TargetId: target, Class: gpreemptv1.Class(1 + r.Int32N(3)), Ttl: durationpb.New(between(r, 1, time.Second)),
		})
		return "classify", err
	default:
		_, err = s.admin.ExplainTarget(s.ctx, &gpreemptv1.ExplainTargetRequest{TargetId: target})
		return "explain", err
	}
}

// usage is what the daemon takes of the host.
type usage struct{ rss, fds, threads int } // rss in KiB

// sample looks at the daemon until the soak is over.
func (s *soak) sample() []usage {
	s.t.Helper()
	tick := time.NewTicker(soakReport)
	defer tick.Stop()
	var samples []usage
	for began := time.Now(); ; {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return samples
		case <-s.exited:
			s.t.Error("gpreemptd is gone")
			return samples
		}
		u := usage{rss: s.procStatus("VmRSS"), fds: s.fds(), threads: s.procStatus("Threads")}
		samples = append(samples, u)
		s.t.Logf("%v: RSS %d KiB, %d descriptors, %d threads", time.Since(began).Round(time.Second), u.rss, u.fds, u.threads)
	}
}

// checkGrowth compares the last third with the one in the middle: the first is
// for what is allocated once.
func checkGrowth(t *testing.T, samples []usage) {
	t.Helper()
	third := len(samples) / 3
	if third < 2 {
		t.Logf("%d samples are too few to tell growth", len(samples))
		return
	}
	most := func(part []usage) (m usage) {
		for _, u := range part {
			m = usage{max(m.rss, u.rss), max(m.fds, u.fds), max(m.threads, u.threads)}
		}
		return m
	}
	before, after := most(samples[third:2*third]), most(samples[2*third:])
	if after.rss > before.rss+rssSlack || after.fds > before.fds+fdSlack || after.threads > before.threads+threadSlack {
		t.Errorf("the daemon grows: at most %+v in the middle third, %+v in the last", before, after)
	}
}
