package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// soakEnv returns the duration of TestSoak.
const soakEnv = "GPREEMPT_SOAK"

const (
	// soakCycles is how often the phases of the load come, one after the other. The
	// first time is for what is allocated once.
	soakCycles = 6
	// soakQueues is how many queues the job has that is there all the time.
	soakQueues = 10
	// stressEvery is the time between two announcements under stress.
	stressEvery = 10 * time.Millisecond
)

// soak is a daemon under random load.
type soak struct {
	*daemon
	seed uint64
	// ctx ends with the load.
	ctx context.Context
	// doing names the phase, or is nil.
	doing   atomic.Pointer[string]
	streams uint64 // of random numbers given out

	mu       sync.Mutex // guards all below
	did      map[string]int
	failures []string
}

func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv(soakEnv))
	if err != nil {
		t.Skipf("invalid duration in %s (make soak sets it): %v", soakEnv, err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	d := start(t, soakConfig(0), "--gpus", "2")
	s := &soak{daemon: d, seed: seed, ctx: t.Context(), did: map[string]int{}}
	kmsg := openKernelLog(t)
	job := d.mustAsk("start trainer:%d:1ms", soakQueues).PID
	d.eventually("the job is known", func() bool { return d.status().GetQueueCount() == soakQueues })
	before := d.status()

	over, sampled := make(chan struct{}), make(chan []usage, 1)
	go func() {
		defer close(sampled)
		sampled <- s.sampleUntil(over, max(time.Second, min(soakReport, length/60)))
	}()
	var rests []usage
	for range soakCycles {
		cycle := length / soakCycles
		s.phase("gaps", cycle*5/12, s.gaps)
		s.phase("stress", cycle/6, s.stress)
		s.phase("chaos", cycle*5/12, s.announcements, s.announcements, s.announcements, s.sessions, s.jobs, s.jobs, s.kills, s.admins)
		rests = append(rests, s.rested(before, rests))
	}
	close(over)
	samples := <-sampled

	t.Logf("did %v", s.did)
	for _, f := range s.failures {
		t.Error(f)
	}
	checkGrowth(t, samples)
	checkRests(t, rests)
	kmsg.check(t)
	for _, c := range d.mustAsk("counters").Processes {
		if !sound(&c) {
			t.Errorf("packets were lost or repeated: %+v", c)
		}
	}
	d.stopJob(job)
}

// phase has the daemon under a kind of load for a while.
func (s *soak) phase(name string, length time.Duration, loads ...func(*rand.Rand)) {
	ctx, cancel := context.WithTimeout(s.t.Context(), length)
	defer cancel()
	s.ctx = ctx
	s.doing.Store(&name)
	var all sync.WaitGroup
	for n, load := range loads {
		s.streams++
		stream := s.streams<<8 + uint64(n)
		all.Go(func() { s.repeat(stream, load) })
	}
	all.Wait()
}

// rested waits until nothing of the load is left, and returns what the daemon takes then.
// After the first time that is the same descriptors and goroutines.
func (s *soak) rested(before *gpreemptv1.GetStatusResponse, earlier []usage) usage {
	s.t.Helper()
	s.doing.Store(new("rest"))
	s.check(0, "", "policy", "set", "strict")
	s.check(0, "", "drain", "off")
	s.eventually("the time is over that a job was promised by an earlier policy", func() bool {
		lease, answer := s.ask(time.Second)
		s.complete(lease)
		return answer.Quiesced
	})
	s.eventually("no leases, jobs or suspensions are left", func() bool {
		st := s.status()
		return st.GetLeaseCount() == 0 && st.GetSuspendedCount() == 0 && st.GetTargetCount() == before.GetTargetCount() && !st.GetDraining()
	})
	var now usage
	for late := time.Now().Add(timeout); time.Now().Before(late); {
		now = s.usage()
		if len(earlier) > 0 && now.fds == earlier[0].fds && now.goroutines == earlier[0].goroutines {
			break
		}
		next, ctx := s.events.next(), s.t.Context() // or a moment
		select {
		case <-next:
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
		if len(earlier) == 0 && time.Until(late) < timeout-5*time.Second {
			break
		}
	}
	return now
}

// gaps is online work that comes now and then.
func (s *soak) gaps(r *rand.Rand) {
	s.work(between(r, 50*time.Millisecond, 500*time.Millisecond))
	s.rest(between(r, time.Second, 10*time.Second))
}

// stress is online work that comes all the time.
func (s *soak) stress(*rand.Rand) {
	tick := time.NewTicker(stressEvery)
	defer tick.Stop()
	for s.ctx.Err() == nil {
		s.work(stressEvery / 4)
		select {
		case <-tick.C:
		case <-s.ctx.Done():
		}
	}
}

// work is one announcement, for which everything leaves the GPUs, and its end.
func (s *soak) work(length time.Duration) {
	lease, err := s.online.NotifyOnline(s.ctx, announcement())
	s.result("work", err)
	if err != nil {
		return
	}
	if !lease.GetQuiesced() {
		s.fail("online work found the GPUs busy: %v", lease)
	}
	s.rest(length)
	_, err = s.online.Complete(s.t.Context(), &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()})
	s.result("work done", err)
}

func soakConfig(n uint64) string {
	return atOnce + fmt.Sprintf("    priority: %d\nlimits:\n  requests_per_user: 200000\n", n)
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
			return // the soak has ended
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

// jobs starts some jobs, stops them after a while and checks their packets.
func (s *soak) jobs(r *rand.Rand) {
	var pids []int32
	for range 1 + r.IntN(3) {
		a, err := s.sim.ask("start %s:%d:%v:%d", []string{"trainer", "train-big", "viewer"}[r.IntN(3)], 1+r.IntN(3),
			between(r, 200*time.Microsecond, 5*time.Millisecond), 1+r.IntN(2))
		s.result("start job", err)
		if err == nil {
			pids = append(pids, a.PID)
		}
	}
	s.rest(between(r, 100*time.Millisecond, 3*time.Second))
	for _, pid := range pids {
		a, err := s.sim.ask("stop %d", pid)
		s.result("stop job", err)
		if err == nil && !sound(&a.Processes[0]) {
			s.fail("packets were lost or repeated: %+v", a.Processes[0])
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
			s.fail("a process that announced was answered %q", lease)
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
		// Also when the phase is over, here and below: a call that is given up may come later.
		_, err = s.admin.SetPolicy(s.t.Context(), &gpreemptv1.SetPolicyRequest{Preset: preset})
	case 2:
		what = "drain"
		_, err = s.admin.SetDrain(s.t.Context(), &gpreemptv1.SetDrainRequest{Drain: true, Wait: true})
		s.result("drain on", err)
		s.rest(between(r, 0, 200*time.Millisecond))
		_, err = s.admin.SetDrain(s.t.Context(), &gpreemptv1.SetDrainRequest{})
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
