package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxLabel is the longest label of a lease in bytes.
const maxLabel = 128

// announcement is a call's announcement made ready for the scheduler.
type announcement struct {
	req scheduler.LeaseRequested
	ids []uint32 // of the GPUs, as the API has them
}

// prepare turns a request into an announcement by a client: it fills in what the
// client left out, except what the policy has, and resolves the names of GPUs. The
// scheduler checks the ranges; prepare rejects what its types cannot hold.
func (s *Server) prepare(req *gpreemptv1.NotifyOnlineRequest, id scheduler.ClientID, caller *connection) (announcement, error) {
	a := announcement{req: scheduler.LeaseRequested{
		Client: id, User: caller.client.user.id, RequestID: req.GetRequestId(), Priority: gpreempt.PriorityHigh,
		TTL: scheduler.PolicyDefault, MaxWait: scheduler.PolicyDefault, OnIdle: req.GetCompleteOnIdle(),
	}}
	if a.req.OnIdle && ProcessOf(id).PID == 0 {
		return announcement{}, &gpreempt.Error{
			Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonIdleByHand,
			Message: "this lease cannot end by idleness: it belongs to no process of this host whose queues could be watched",
			Next:    "leave complete_on_idle out, and give a ttl",
		}
	}
	if req.Priority != nil {
		if req.GetPriority() > uint32(gpreempt.MaxPriority) {
			return announcement{}, priorityRange(req.GetPriority())
		}
		a.req.Priority = gpreempt.Priority(req.GetPriority())
	}
	if req.GetTtl() != nil {
		ttl, err := ttlOf(req.GetTtl())
		if err != nil {
			return announcement{}, err
		}
		a.req.TTL = ttl
	}
	for _, d := range [...]struct {
		name string
		from *durationpb.Duration
		to   *time.Duration
	}{
		{"max_wait", req.GetMaxWait(), &a.req.MaxWait},
		{"eta", req.GetEta(), &a.req.ETA},
		{"slo", req.GetSlo(), &a.req.SLO},
		{"expected", req.GetExpected(), &a.req.Expected},
	} {
		if d.from == nil {
			continue
		}
		v, err := durationOf(d.name, d.from)
		if err != nil {
			return announcement{}, err
		}
		*d.to = v
	}
	if n := len(req.GetLabel()); n > maxLabel {
		return announcement{}, &gpreempt.Error{
			Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonLabelTooLong,
			Message: fmt.Sprintf("label has %d bytes", n), Next: fmt.Sprintf("use at most %d", maxLabel),
		}
	}
	var set gpuSet
	if len(req.GetGpus()) == 0 {
		set = caller.client.defaultGPUs(s.cfg.Inventory, caller.peer.Process())
	} else {
		var err error
		if set, err = selectGPUs(s.cfg.Inventory.GPUs(), req.GetGpus()); err != nil {
			return announcement{}, err
		}
	}
	a.req.GPUs, a.ids = set.gpus, set.ids
	return a, nil
}

func priorityRange(p uint32) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonPriorityRange,
		Message: fmt.Sprintf("priority %d is out of range", p), Next: fmt.Sprintf("use 0 to %d", gpreempt.MaxPriority),
	}
}

// ttlOf reads a time to live; its range is the scheduler's affair.
func ttlOf(d *durationpb.Duration) (time.Duration, error) {
	if err := d.CheckValid(); err != nil {
		return 0, &gpreempt.Error{
			Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonTTLRange,
			Message: "ttl is no duration: " + err.Error(), Next: "use seconds and nanos of the same sign, as google.protobuf.Duration says",
		}
	}
	return saturated(d), nil
}

// saturated returns d, which must not turn into scheduler.PolicyDefault.
func saturated(d *durationpb.Duration) time.Duration {
	return max(d.AsDuration(), scheduler.PolicyDefault+1)
}

// durationOf reads any other time; its range is the caller's affair.
func durationOf(name string, d *durationpb.Duration) (time.Duration, error) {
	if err := d.CheckValid(); err != nil {
		return 0, &gpreempt.Error{
			Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonDurationRange,
			Message: name + " is no duration: " + err.Error(), Next: "use seconds and nanos of the same sign, as google.protobuf.Duration says",
		}
	}
	return saturated(d), nil
}

// waiter is what a unary announcement waits with. Waiters are used again: an
// announcement allocates neither channel nor closures.
type waiter struct {
	answers chan scheduler.Answer // capacity 1: the reply never blocks
	reply   scheduler.Reply
}

var waiters = sync.Pool{New: func() any {
	w := &waiter{answers: make(chan scheduler.Answer, 1)}
	w.reply = func(_ scheduler.LeaseID, a scheduler.Answer) { w.answers <- a }
	return w
}}

// order is an announcement and what its lease ends with.
type order struct {
	announcement
	client *client
	by     *holder // nil for a lease by hand
	label  string
	admin  authz.Peer // who makes a lease by hand
	// accepted, when set, is called with the lease and its time to live before the wait.
	accepted func(scheduler.LeaseID, time.Duration)
}

// granted is the outcome of an order.
type granted struct {
	id     scheduler.LeaseID
	ttl    time.Duration
	answer scheduler.Answer
	timing times
}

// times are the moments behind a Timing.
type times struct {
	arrived, decided, answered scheduler.Time
}

// stages reports where the time of an answered announcement went.
func (t times) stages(a scheduler.Answer) events.Stages {
	return events.Stages{Decide: t.decided - t.arrived, Reply: t.answered - t.decided - a.Waited}
}

// announce hands an order to the scheduler and waits for the answer. When ctx or
// the server ends first, the lease ends too, unless it is an order on a target,
// which is bounded by its ttl, or a retry has taken it over.
func (s *Server) announce(ctx context.Context, w *waiter, arrived scheduler.Time, o order) (granted, error) {
	if s.closing.Err() != nil {
		return granted{}, errShuttingDown
	}
	id, ttl, err := s.cfg.Scheduler.Announce(o.req, w.reply)
	if err != nil {
		return granted{}, err
	}
	g := granted{id: id, ttl: ttl, timing: times{arrived: arrived, decided: s.cfg.Scheduler.Now()}}
	if s.cfg.Traced != nil {
		s.cfg.Traced(ctx, id, arrived, g.timing.decided)
	}
	known, alive := o.client.keep(s, id, held{by: o.by, label: o.label, admin: o.admin, waiting: 1})
	if !alive {
		s.clients.disown(o.client, id)
		w.drain()
		return granted{}, context.Canceled
	}
	if o.accepted != nil {
		o.accepted(id, ttl)
	}
	select {
	case g.answer = <-w.answers:
	case <-ctx.Done():
		return granted{}, s.abandon(w, o, id, context.Cause(ctx))
	case <-s.closing.Done():
		return granted{}, s.abandon(w, o, id, errShuttingDown)
	}
	g.timing.answered = s.cfg.Scheduler.Now()
	o.client.answered(id)
	if !known {
		s.cfg.Events.Answered(g.answer, g.timing.stages(g.answer))
	}
	return g, nil
}

// abandon ends a lease nobody waits for any more, and gives why.
func (s *Server) abandon(w *waiter, o order, id scheduler.LeaseID, why error) error {
	if !o.client.abandon(id, o.by) || !o.req.Target.IsZero() {
		w.spoil() // its answer is still to come
		return why
	}
	end := scheduler.EndDisconnected
	if o.by == nil {
		end = scheduler.EndReleased
	}
	// The only error is that the lease ended so long ago that it is forgotten.
	_, _, _ = s.cfg.Scheduler.Complete(o.req.Client, id, end)
	o.client.drop(id)
	w.drain()
	return why
}

// drain takes the answer of a lease that has ended. It has been given by then.
func (w *waiter) drain() {
	select {
	case <-w.answers:
	default:
		w.spoil()
	}
}

// spoil keeps a waiter that may yet be answered from being used again.
func (w *waiter) spoil() { w.reply = nil }

// free returns a waiter back.
func (w *waiter) free() {
	if w.reply != nil {
		waiters.Put(w)
	}
}

// answerMessage is a NotifyOnlineResponse with all its parts, in one allocation.
type answerMessage struct {
	response                    gpreemptv1.NotifyOnlineResponse
	timing                      gpreemptv1.Timing
	ttl, decide, quiesce, total durationpb.Duration
}

func (s *Server) answerMessage(g granted, a *announcement) *gpreemptv1.NotifyOnlineResponse {
	m := &answerMessage{}
	setDuration(&m.ttl, g.ttl)
	g.timing.fill(&m.timing, &m.decide, &m.quiesce, &m.total, g.answer)
	r := &m.response
	r.LeaseId = leaseID(s.leasePrefix, g.id)
	r.Quiesced = g.answer.Quiesced
	r.Reason = gpreemptv1.QuiesceReason(g.answer.Reason)
	r.SuspendedTargets = uint32(g.answer.Suspended)
	r.GpuIds = a.ids
	r.Ttl = &m.ttl
	r.Timing = &m.timing
	return r
}

// fill writes a Timing. quiesce is there only when the answer waited for a
// suspend.
func (t times) fill(m *gpreemptv1.Timing, decide, quiesce, total *durationpb.Duration, a scheduler.Answer) {
	setDuration(decide, t.decided-t.arrived)
	setDuration(total, t.answered-t.arrived)
	m.Decide, m.Total = decide, total
	if a.Quiesced && a.Suspended > 0 && a.Waited > 0 {
		setDuration(quiesce, a.Waited)
		m.Quiesce = quiesce
	}
}
