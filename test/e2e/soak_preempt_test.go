package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// What TestSoakPreemptions is about when make soak runs it, and how long it is without.
const (
	soakPackets     = 1_000_000
	soakPreemptions = 2_000
	shortSoak       = 5 * time.Second
)

// preemptSoak is programs on an emulated machine that are suspended and resumed at
// random.
type preemptSoak struct {
	*soak
	m *emulated
	// packets is what the programs that proved their work had run; proved counts them.
	packets, proved atomic.Uint64
}

// Programs start and end on two GPUs, create and destroy queues, compute and copy; they
// are suspended and resumed at random all the time, and prove that each of their packets
// ran exactly once and in order.
func TestSoakPreemptionsUnderLoadLoseAndRepeatNoPacket(t *testing.T) {
	length := cmp.Or(soakLength(t), shortSoak)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	m := emulate(t, kfdemu.Config{GPUs: 2, Seed: seed})
	d := m.start(soakConfig(0))
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	s := &preemptSoak{soak: &soak{daemon: d, seed: seed, ctx: ctx, did: map[string]int{}}, m: m}

	var load sync.WaitGroup
	for n := range uint64(2) {
		load.Go(func() { s.repeat(10+n, s.lease) })
	}
	load.Go(func() {
		s.repeat(20, func(r *rand.Rand) {
			s.sessions(r)
			s.rest(between(r, 0, 2*time.Second))
		})
	})
	for n := range uint64(4) {
		load.Go(func() { s.repeat(30+n, s.programs) })
	}
	load.Go(func() { s.repeat(50, s.orders) })
	load.Go(s.progress)
	samples := s.sample()
	load.Wait()

	t.Logf("did %v; gpreemptd warned of %v", s.did, s.warned())
	for _, f := range s.failures {
		t.Error(f)
	}
	checkGrowth(t, samples)
	d.eventually("no leases, jobs or suspensions are left", func() bool {
		st := d.status()
		return st.GetLeaseCount() == 0 && st.GetSuspendedCount() == 0 && st.GetTargetCount() == 0
	})
	suspends := s.suspends()
	t.Logf("%d programs proved %d packets across %d preemptions", s.proved.Load(), s.packets.Load(), suspends)
	if s.packets.Load() == 0 || suspends == 0 {
		t.Error("nothing was tested")
	}
	if length >= 10*time.Minute && (s.packets.Load() < soakPackets || suspends < soakPreemptions) {
		t.Errorf("that is less than %d packets and %d preemptions", soakPackets, soakPreemptions)
	}
	tellFigures(t, "soak", racing(), struct {
		Seconds     uint64 `json:"seconds"`
		Programs    uint64 `json:"programs_that_proved_their_packets"`
		Packets     uint64 `json:"packets"`
		Preemptions uint64 `json:"preemptions"`
	}{uint64(length.Seconds()), s.proved.Load(), s.packets.Load(), suspends})
}

// forgetEvents drops what happened on the machine, but for trouble: nobody can keep all of
// what lasts long.
func (l *eventsOfMachine) forgetEvents() {
	l.mu.Lock()
	defer l.mu.Unlock()
	var kept []kfdemu.Event
	for _, e := range l.all {
		if e.Kind == kfdemu.EventTrouble || e.Kind == kfdemu.EventGPUFault {
			kept = append(kept, e)
		}
	}
	l.all = kept
}

// lease announces for some of the GPUs, and gives them back soon.
func (s *preemptSoak) lease(r *rand.Rand) {
	req := &gpreemptv1.NotifyOnlineRequest{
		Ttl: durationpb.New(between(r, time.Millisecond, 50*time.Millisecond)), MaxWait: durationpb.New(between(r, 0, 20*time.Millisecond)),
		Priority: new(r.Uint32N(16)),
	}
	if gpus := s.m.GPUs(); r.IntN(2) == 0 {
		req.Gpus = []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_GpuId{GpuId: uint32(gpus[r.IntN(len(gpus))].ID)}}}
	}
	resp, err := s.online.NotifyOnline(s.ctx, req)
	s.result("announce", err)
	if err != nil {
		return
	}
	s.rest(between(r, 0, 10*time.Millisecond))
	if r.IntN(10) > 0 { // else it is left to expire
		_, err := s.online.Complete(s.ctx, &gpreemptv1.CompleteRequest{LeaseId: resp.GetLeaseId()})
		s.result("complete", err)
	}
	s.rest(between(r, 0, 60*time.Millisecond))
}

// orders suspends and resumes single programs, classifies them, and reads the config
// anew.
func (s *preemptSoak) orders(r *rand.Rand) {
	list, err := s.admin.ListTargets(s.ctx, &gpreemptv1.ListTargetsRequest{})
	s.result("list targets", err)
	if targets := list.GetTargets(); len(targets) > 0 {
		what, err := s.steer(r, targets[r.IntN(len(targets))].GetTargetId())
		s.result(what, err)
	}
	if r.IntN(10) == 0 {
		s.reload(soakConfig(r.Uint64N(10)))
	}
	s.rest(between(r, 0, time.Second))
}

// programs runs one program for a while, ends it in one of the ways there are and has it
// prove what it did.
func (s *preemptSoak) programs(r *rand.Rand) {
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	queues, churn := 1+r.Uint64N(3), r.IntN(4) == 0
	if churn {
		queues = 1 // what makes many all the time is hard to get hold of
	}
	args := []string{
		"--runtime", "--queues", number(queues), "--churn=" + strconv.FormatBool(churn), "--depth", number(16 + r.Uint64N(240)),
		"--duration", number(1 + r.Uint64N(100)), "--occupancy", number(50_000 + r.Uint64N(900_000)),
	}
	if r.IntN(4) > 0 { // else each packet is waited for in the driver
		args = append(args, "--wait", "poll")
	}
	if r.IntN(3) == 0 {
		args = append(args, "--sdma")
	}
	if r.IntN(3) == 0 {
		args = append(args, "--gpus", number(uint64(s.m.GPUs()[r.IntN(2)].ID)))
	}
	start := s.m.work
	if r.IntN(5) == 0 {
		start = s.m.serve // nobody suspends it
	}
	w := start(args...)
	s.count("program")
	s.rest(between(r, 100*time.Millisecond, 3*time.Second))
	if what := w.asked(r.IntN(8)); what != "" {
		s.count(what)
		return
	}
	w.tell("stop")
	if done := w.finish(); done.OK {
		s.packets.Add(done.Count)
		s.proved.Add(1)
	}
}

// asked ends a worker without proof, in one of the ways there are; "" for others.
func (w *worker) asked(way int) string {
	w.t.Helper()
	switch way {
	case 0:
		w.kill()
		return "killed program"
	case 1:
		w.tell("exit")
	default:
		return ""
	}
	w.awaitEnd()
	return "program that exited"
}

// progress describes how far it is, until the soak is over.
func (s *preemptSoak) progress() {
	tick := time.NewTicker(soakReport)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		s.m.log.forgetEvents()
		var executed, lost, repeated uint64
		s.m.Machine(func(m *gpumodel.Machine) {
			for _, p := range m.Counters() {
				executed, lost, repeated = executed+p.Executed, lost+p.Lost, repeated+p.Repeated
			}
		})
		s.t.Logf("%d packets executed, %d lost, %d repeated, %d preemptions", executed, lost, repeated, s.suspends())
		if lost+repeated > 0 {
			s.fail("%d packets were lost, %d repeated", lost, repeated)
		}
	}
}

// suspends returns how often the daemon has suspended a program.
func (s *preemptSoak) suspends() uint64 {
	s.t.Helper()
	resp, err := s.admin.GetStatistics(s.t.Context(), &gpreemptv1.GetStatisticsRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.GetStatistics().GetSuspends()
}

// warned counts what the daemon warned of, by its words.
func (s *preemptSoak) warned() map[string]int {
	counts := map[string]int{}
	for _, text := range s.log.all() {
		var line struct{ Level, Msg string }
		if json.Unmarshal([]byte(text), &line) == nil && (line.Level == "warn" || line.Level == "error") {
			counts[line.Msg]++
		}
	}
	return counts
}
