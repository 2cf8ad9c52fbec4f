package server

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxLabel is the longest label of a lease in bytes.
const maxLabel = 128

// prepare returns a request of a client in the scheduler's types: it sets the defaults,
// except those of the policy, and resolves the names of GPUs. The scheduler checks
// the ranges; prepare refuses values that do not fit its types.
func (s *Server) prepare(req *gpreemptv1.NotifyOnlineRequest, id scheduler.ClientID, caller *connection) (scheduler.LeaseRequested, error) {
	a := scheduler.LeaseRequested{
		Client: id, User: caller.client.user.id, RequestID: req.GetRequestId(), Priority: gpreempt.PriorityHigh,
		TTL: scheduler.PolicyDefault, MaxWait: scheduler.PolicyDefault, OnIdle: req.GetCompleteOnIdle(),
	}
	if id != 0 {
		a.Owner = caller.client.announces(s)
	}
	if a.OnIdle && ProcessOf(id).PID == 0 {
		return a, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonIdleByHand,
			"complete_on_idle is not available: the lease owner is not a process of this host, so its queues cannot be observed",
			"leave complete_on_idle out, and set a ttl")
	}
	if req.Priority != nil {
		if req.GetPriority() > uint32(gpreempt.MaxPriority) {
			return a, priorityRange(req.GetPriority())
		}
		a.Priority = gpreempt.Priority(req.GetPriority())
	}
	for _, d := range [...]struct {
		name   string
		to     *time.Duration
		from   *durationpb.Duration
		reason gpreempt.Reason
	}{
		{"ttl", &a.TTL, req.GetTtl(), gpreempt.ReasonTTLRange},
		{"max_wait", &a.MaxWait, req.GetMaxWait(), gpreempt.ReasonDurationRange},
		{"eta", &a.ETA, req.GetEta(), gpreempt.ReasonDurationRange},
	} {
		if err := setDuration(d.to, d.from, d.name, d.reason); err != nil {
			return a, err
		}
	}
	if n := len(req.GetLabel()); n > maxLabel {
		return a, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonLabelTooLong,
			fmt.Sprintf("label has %d bytes", n),
			fmt.Sprintf("use at most %d", maxLabel))
	}
	if len(req.GetGpus()) == 0 {
		var own bool
		a.GPUs, own = defaultGPUs(s.cfg.Inventory, caller.peer.Key())
		if pid := ProcessOf(id).PID; !own && pid != 0 && len(a.GPUs) > 1 {
			s.allTaken.note(pid, len(a.GPUs), s.cfg.Scheduler.Now())
		}
		return a, nil
	}
	var err error
	a.GPUs, err = selectGPUs(s.cfg.Inventory.GPUs(), req.GetGpus())
	return a, err
}

func priorityRange(p uint32) error {
	return refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonPriorityRange,
		fmt.Sprintf("priority %d is out of range", p),
		fmt.Sprintf("use 0 to %d", gpreempt.MaxPriority))
}

// setDuration sets a duration unless it is absent; the scheduler or the caller checks
// the range.
func setDuration(to *time.Duration, d *durationpb.Duration, name string, reason gpreempt.Reason) error {
	if d == nil {
		return nil
	}
	if err := d.CheckValid(); err != nil {
		return refusal(gpreempt.CodeInvalidArgument, reason,
			fmt.Sprintf("invalid duration %s: %v", name, err),
			"use seconds and nanos of the same sign, as google.protobuf.Duration requires")
	}
	*to = max(d.AsDuration(), scheduler.PolicyDefault+1) // a duration is never taken for PolicyDefault
	return nil
}

// pendingAnnounce is an announcement and what its lease ends with.
type pendingAnnounce struct {
	req    scheduler.LeaseRequested
	client *client
	scope  *scope // nil for a lease of an admin
	label  string
	admin  auth.Peer // who creates a lease of an admin
	// accepted, when set, is called with the lease and its time to live before the wait.
	accepted func(scheduler.LeaseID, time.Duration)
}

// granted is the outcome of an announcement.
type granted struct {
	id     scheduler.LeaseID
	ttl    time.Duration
	answer scheduler.Answer
	timing times
}

// times are the times behind a Timing.
type times struct {
	arrived, decided, answered scheduler.Time
}

// stages returns how long each stage of an answered announcement took.
func (t times) stages(a scheduler.Answer) events.Stages {
	return events.Stages{Decide: t.decided - t.arrived, Reply: t.answered - t.decided - a.Waited}
}

// announce passes an announcement to the scheduler and waits for the answer. When
// ctx or the server ends first, the lease ends too, unless a retry has taken it over.
func (s *Server) announce(ctx context.Context, arrived scheduler.Time, p pendingAnnounce) (granted, error) {
	if s.closing.Err() != nil {
		return granted{}, errShuttingDown
	}
	answers := make(chan scheduler.Answer, 1) // one answer: the scheduler never waits
	p.req.Arrived, p.req.Trace = arrived, traceContext(ctx)
	id, ttl, err := s.cfg.Scheduler.Announce(p.req, func(_ scheduler.LeaseID, a scheduler.Answer) { answers <- a })
	if err != nil {
		return granted{}, worded(err)
	}
	g := granted{id: id, ttl: ttl, timing: times{arrived: arrived, decided: s.cfg.Scheduler.Now()}}
	known, alive := p.client.addLease(s, id, leaseNote{scope: p.scope, label: p.label, admin: p.admin, waiting: 1})
	if !alive {
		s.clients.releaseOrphan(p.client, id)
		return granted{}, context.Canceled
	}
	if p.accepted != nil {
		p.accepted(id, ttl)
	}
	select {
	case g.answer = <-answers:
	case <-ctx.Done():
		return granted{}, s.abandon(p, id, context.Cause(ctx))
	case <-s.closing.Done():
		return granted{}, s.abandon(p, id, errShuttingDown)
	}
	g.timing.answered = s.cfg.Scheduler.Now()
	p.client.stopWaiting(id, p.scope)
	if !known {
		s.cfg.Events.Answered(g.answer, g.timing.stages(g.answer))
	}
	return g, nil
}

// abandon ends a lease that no call waits for any more, and returns why.
func (s *Server) abandon(p pendingAnnounce, id scheduler.LeaseID, why error) error {
	if !p.client.stopWaiting(id, p.scope) {
		return why
	}
	end := scheduler.EndDisconnected
	if p.scope == nil {
		end = scheduler.EndReleased
	}
	// The only error is that the lease ended long ago and is unknown now.
	_, _, _ = s.cfg.Scheduler.Complete(p.req.Client, id, end)
	p.client.drop(id)
	return why
}

func (s *Server) answerMessage(g granted, gpus []gpreempt.GPUID) *gpreemptv1.NotifyOnlineResponse {
	t := g.timing
	timing := &gpreemptv1.Timing{Decide: durationpb.New(t.decided - t.arrived), Total: durationpb.New(t.answered - t.arrived)}
	if g.answer.Quiesced && g.answer.Suspended > 0 && g.answer.Waited > 0 { // the answer waited for a suspend
		timing.Quiesce = durationpb.New(g.answer.Waited)
	}
	return &gpreemptv1.NotifyOnlineResponse{
		LeaseId: leaseID(s.leasePrefix, g.id), Quiesced: g.answer.Quiesced, OwnerOffline: g.answer.OwnerOffline, Reason: gpreemptv1.QuiesceReason(g.answer.Reason),
		SuspendedTargets: uint32(g.answer.Suspended), CannotSuspendTargets: uint32(g.answer.CannotSuspend), GpuIds: gpuIDs(gpus), Ttl: durationpb.New(g.ttl), Timing: timing,
	}
}
