package trial

import (
	"context"
	"fmt"
	"slices"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// sampler reads the machine while a window is measured.
type sampler struct {
	*play
	began time.Time
	stop  context.CancelCauseFunc
	slots slotCounter
	// err is why the repeat is of no use, such as a job that ended.
	err error
}

// every is the pause between two samples.
func (p *Plan) every() time.Duration {
	return min(max(p.window()/10, 200*time.Millisecond), time.Second)
}

func (s *sampler) run(ctx context.Context) {
	var minors []uint32
	if list, err := s.daemon.admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{}); err == nil && s.trial.run.Origin == evidence.Hardware {
		for _, g := range list.GetGpus() {
			minors = append(minors, g.GetRenderMinor())
		}
	}
	before := map[string]usage{}
	last := time.Now()
	for {
		if err := s.sample(ctx, minors, before, &last); err != nil && ctx.Err() == nil {
			s.err = err
			s.stop(err)
			return
		}
		if sleep(ctx, s.plan.every()) != nil {
			return
		}
	}
}

func (s *sampler) sample(ctx context.Context, minors []uint32, before map[string]usage, last *time.Time) error {
	if err := s.jobsRun(); err != nil {
		return err
	}
	targets, err := s.offlineTargets(ctx)
	if err != nil {
		return err
	}
	if err := s.daemon.classify(ctx, targets, s.class(), s.arm.Mechanism); err != nil {
		return err
	}
	values := map[string]float64{}
	if len(targets) > 0 {
		queues, err := s.daemon.admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{Backlog: true})
		if err != nil {
			return err
		}
		for _, q := range queues.GetQueues() {
			if q.Backlog != nil && q.GetBacklogUnit() == "packets" && slices.ContainsFunc(targets, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == q.GetTargetId() }) {
				values[evidence.Backlog] += float64(q.GetBacklog())
			}
		}
		if s.counts() {
			s.slots.read(ctx, s.daemon.admin, targets)
		}
	}
	now := time.Now()
	var pids []int32
	for _, t := range targets {
		if s.trial.run.Origin != evidence.Simulated { // whose processes the host does not have
			pids = append(pids, t.GetPid())
		}
	}
	all := readStats()
	use := map[string]usage{evidence.CPU: usageOf(all, s.roots(), pids)}
	if s.server != nil && s.server.process != nil {
		use[evidence.OnlineCPU] = usageOf(all, []int32{s.server.pid()}, nil)
	}
	if s.served != 0 {
		use[evidence.DaemonCPU] = usageOf(all, []int32{s.served}, nil)
	}
	for name, u := range use {
		if was, ok := before[name]; ok && u.ticks >= was.ticks {
			values[name] = float64(u.ticks-was.ticks) / discovery.ClockTicks / now.Sub(*last).Seconds()
		}
		before[name] = u
		values[map[string]string{evidence.CPU: evidence.RSS, evidence.OnlineCPU: evidence.OnlineRSS, evidence.DaemonCPU: evidence.DaemonRSS}[name]] = u.mib
	}
	*last = now
	if percent, ok := gpuBusy(minors); ok {
		values[evidence.GPUBusy] = percent
	}
	s.result.Samples = append(s.result.Samples, evidence.Sample{At: ms(now.Sub(s.began)), Values: values})
	return nil
}

// counts reports whether the progress must be read from the hardware slots: the jobs print none.
func (s *sampler) counts() bool {
	for _, j := range s.jobs {
		if _, known := j.progress.rate(); !known && time.Since(s.began) > slotsAfter {
			return true
		}
	}
	return len(s.jobs) == 0
}

// slotsAfter is how long a job may print nothing until its progress is read from the slots.
const slotsAfter = 2 * time.Second

// slotCounter counts what the offline processes write to their rings, by the slots' write pointers.
// These count up for as long as the queue exists, and are ahead of the GPU by a ring at most.
type slotCounter struct {
	// readings are those with a slot of the processes.
	readings int
	unread   string // why the last one failed
	dwords   uint64
	last     map[string]uint64
}

func (c *slotCounter) read(ctx context.Context, admin gpreemptv1.AdminServiceClient, targets []*gpreemptv1.Target) {
	resp, err := admin.ListHqds(ctx, &gpreemptv1.ListHqdsRequest{})
	if err != nil {
		c.unread = client.FromStatus(err).Error() // the caller has no second reading then
		return
	}
	if c.last == nil {
		c.last = map[string]uint64{}
	}
	found := false
	for _, h := range resp.GetHqds() {
		// A queue has a slot in each XCC, and all of them have the same packets.
		if h.GetKind() != "cp" || h.GetXcc() != 0 || h.GetState() != gpreemptv1.HqdState_HQD_STATE_LIVE ||
			!slices.ContainsFunc(targets, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == h.GetTargetId() }) {
			continue
		}
		found = true
		key := fmt.Sprintf("%s/%d/%d", h.GetTargetId(), h.GetQueueId(), h.GetGpuId())
		if was, ok := c.last[key]; ok && h.GetWritePointer() > was {
			c.dwords += h.GetWritePointer() - was
		}
		c.last[key] = h.GetWritePointer()
	}
	if found {
		c.readings++
	}
}
