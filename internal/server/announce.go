package server

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxLabel is the longest label of a lease in bytes.
const maxLabel = 128

// announcement is an announcement on its way through the server, from the request to the answer.
type announcement struct {
	// LeaseRequested is the request. Arrived and Trace are set by the call.
	scheduler.LeaseRequested
	client *client
	note   leaseNote
	// What the scheduler returns: the lease, its time to live, whether it was announced before, and
	// the answer.
	id     scheduler.LeaseID
	ttl    time.Duration
	known  bool
	sender atomic.Uint32 // of the answer, on a stream
	answer scheduler.Answer
	// decided is when the scheduler had admitted it.
	decided scheduler.Time
	tag     uint64 // of the frame, on a stream
}

// prepare returns the announcement of a request of a client, or of the admins: it sets the defaults,
// except those of the policy, and resolves the names of GPUs. The scheduler checks
// the ranges; prepare refuses values that do not fit its types.
func (s *Server) prepare(req *gpreemptv1.NotifyOnlineRequest, cl *client, caller *connection) (*announcement, error) {
	a := &announcement{client: cl, LeaseRequested: scheduler.LeaseRequested{
		Client: cl.id, User: caller.client.user.id, RequestID: req.GetRequestId(), Label: req.GetLabel(), Priority: gpreempt.PriorityHigh,
		TTL: scheduler.PolicyDefault, MaxWait: scheduler.PolicyDefault, OnIdle: req.GetCompleteOnIdle(),
	}}
	if cl != s.admins {
		a.Owner = cl.announces(s)
	}
	if a.OnIdle && cl.id.PID == 0 {
		return nil, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonIdleByHand,
			"complete_on_idle is not available: the lease owner is not a process of this host, so its queues cannot be observed",
			"leave complete_on_idle out, and set a ttl")
	}
	if req.Priority != nil {
		if req.GetPriority() > uint32(gpreempt.MaxPriority) {
			return nil, priorityRange(req.GetPriority())
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
			return nil, err
		}
	}
	if n := len(req.GetLabel()); n > maxLabel {
		return nil, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonLabelTooLong,
			fmt.Sprintf("label has %d bytes", n),
			fmt.Sprintf("use at most %d", maxLabel))
	}
	if len(req.GetGpus()) == 0 {
		var own bool
		a.GPUs, own = defaultGPUs(s.cfg.Inventory, caller.peer.Key())
		if pid := cl.id.PID; !own && pid != 0 && len(a.GPUs) > 1 {
			s.allTaken.Store(&allTaken{pid, len(a.GPUs), s.cfg.Scheduler.Now()})
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

// submit passes an announcement to the scheduler, which calls reply. alive is false if what the lease
// ends with has ended meanwhile: then the lease has ended, too. The reply, which may be called before
// submit returns, must not use id, ttl, known and decided.
func (s *Server) submit(a *announcement, reply scheduler.Reply) (alive bool, err error) {
	if s.closing.Err() != nil {
		return false, errShuttingDown
	}
	if a.id, a.ttl, err = s.cfg.Scheduler.Announce(a.LeaseRequested, reply); err != nil {
		return false, worded(err)
	}
	a.decided = s.cfg.Scheduler.Now()
	if a.known, alive = a.client.addLease(s, a.id, a.note); !alive {
		s.clients.releaseOrphan(a.client, a.id)
	}
	return alive, nil
}

// announce submits an announcement, calls accepted unless it is nil, and waits for the answer. When
// ctx or the server ends first, the lease ends too, unless a retry has taken it over.
func (s *Server) announce(ctx context.Context, a *announcement, accepted func()) (*gpreemptv1.NotifyOnlineResponse, error) {
	answers := make(chan scheduler.Answer, 1) // one answer: the scheduler never waits
	a.Trace, a.note.waiting = traceContext(ctx), 1
	alive, err := s.submit(a, func(_ scheduler.LeaseID, answer scheduler.Answer) { answers <- answer })
	if err != nil {
		return nil, err
	}
	if !alive {
		return nil, context.Canceled
	}
	if accepted != nil {
		accepted()
	}
	select {
	case a.answer = <-answers:
	case <-ctx.Done():
		return nil, s.abandon(a, context.Cause(ctx))
	case <-s.closing.Done():
		return nil, s.abandon(a, errShuttingDown)
	}
	a.client.stopWaiting(a.id, a.note.scope)
	return s.countedAnswer(a), nil
}

// abandon ends a lease that no call waits for any more, and returns why.
func (s *Server) abandon(a *announcement, why error) error {
	if !a.client.stopWaiting(a.id, a.note.scope) {
		return why
	}
	end := scheduler.EndDisconnected
	if a.note.scope == nil {
		end = scheduler.EndReleased
	}
	// The only error is that the lease ended long ago and is unknown now.
	_, _, _ = s.cfg.Scheduler.Complete(a.Client, a.id, end)
	a.client.drop(a.id)
	return why
}

// countedAnswer counts an announcement that has its answer, and returns the answer's message.
func (s *Server) countedAnswer(a *announcement) *gpreemptv1.NotifyOnlineResponse {
	now := s.cfg.Scheduler.Now()
	if !a.known {
		s.cfg.Events.Answered(a.answer, events.Stages{Decide: a.decided - a.Arrived, Reply: now - a.decided - a.answer.Waited})
	}
	timing := &gpreemptv1.Timing{Decide: durationpb.New(a.decided - a.Arrived), Total: durationpb.New(now - a.Arrived)}
	if a.answer.Quiesced && a.answer.Suspended > 0 && a.answer.Waited > 0 { // the answer waited for a suspend
		timing.Quiesce = durationpb.New(a.answer.Waited)
	}
	return &gpreemptv1.NotifyOnlineResponse{
		LeaseId: leaseID(s.leasePrefix, a.id), Quiesced: a.answer.Quiesced, OwnerOffline: a.answer.OwnerOffline, Reason: quiesceReason(a.answer.Reason),
		SuspendedTargets: uint32(a.answer.Suspended), CannotSuspendTargets: uint32(a.answer.CannotSuspend), GpuIds: gpuIDs(a.GPUs), Ttl: durationpb.New(a.ttl), Timing: timing,
	}
}
