package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// settleTime bounds how long ResumeTarget and SetDrain wait until targets run
	// again.
	settleTime = 10 * time.Second
	// maxHold bounds how long an admin may keep a target running.
	maxHold = time.Hour
)

// adminEvent records an action of an admin in the event log and for the audit log.
// r has its target or lease.
func (s *Server) adminEvent(ctx context.Context, r scheduler.Record, format string, args ...any) {
	r.At = s.cfg.Scheduler.Now()
	verb := fmt.Sprintf(format, args...)
	call := callOf(ctx)
	s.cfg.Events.AppendAdmin(s.cfg.Now(), fmt.Sprintf("%v: %s", call.peer, verb), r)
	call.audit = auditEntry{verb: verb, record: r}
}

// resolve returns the living process with a target ID, "PID" or "PID@START".
func (s *Server) resolve(id string) (discovery.Proc, error) {
	key, err := gpreempt.ParseProcessKey(id)
	if err != nil {
		return discovery.Proc{}, refusal(gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget,
			fmt.Sprintf("invalid target ID %.64q", id),
			"use PID or PID@START, as gpctl target list prints it")
	}
	proc, ok := s.cfg.Inventory.Process(key)
	if !ok {
		return discovery.Proc{}, refusal(gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget,
			fmt.Sprintf("process %s owns no GPU queues, or has exited", id),
			"see gpctl target list")
	}
	return proc, nil
}

// CreateLease creates a lease that does not end with a connection.
func (a adminService) CreateLease(ctx context.Context, req *gpreemptv1.CreateLeaseRequest) (*gpreemptv1.CreateLeaseResponse, error) {
	s := a.s
	arrived := s.cfg.Scheduler.Now()
	caller := callerOf(ctx)
	if req.GetAnnounce() == nil {
		return nil, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonMissingField,
			"announce is missing",
			"set it; an empty one means all GPUs and the defaults")
	}
	ann, err := s.prepare(req.GetAnnounce(), s.admins, caller)
	if err != nil {
		return nil, err
	}
	ann.Arrived, ann.note.admin = arrived, caller.peer
	m, err := s.announce(ctx, ann, func() {
		s.adminEvent(ctx, scheduler.Record{Lease: ann.id}, "lease create on GPUs %v for %v, priority %d", ann.GPUs, ann.ttl, ann.Priority)
	})
	if err != nil {
		return nil, err
	}
	return &gpreemptv1.CreateLeaseResponse{Announced: m}, nil
}

// ReleaseLease ends any lease.
func (a adminService) ReleaseLease(ctx context.Context, req *gpreemptv1.ReleaseLeaseRequest) (*gpreemptv1.ReleaseLeaseResponse, error) {
	s := a.s
	id, err := parseLeaseID(s.leasePrefix, req.GetLeaseId())
	if err != nil {
		return nil, err
	}
	end, _, err := s.cfg.Scheduler.Complete(scheduler.ClientID{}, id, scheduler.EndReleased)
	if err != nil {
		return nil, err
	}
	s.admins.drop(id)
	s.adminEvent(ctx, scheduler.Record{Lease: id}, "lease release %s", req.GetLeaseId())
	return &gpreemptv1.ReleaseLeaseResponse{End: gpreemptv1.LeaseEnd(end)}, nil
}

// SuspendTarget suspends one offline target for a bounded time.
func (a adminService) SuspendTarget(ctx context.Context, req *gpreemptv1.SuspendTargetRequest) (*gpreemptv1.SuspendTargetResponse, error) {
	s := a.s
	arrived := s.cfg.Scheduler.Now()
	proc, err := s.resolve(req.GetTargetId())
	if err != nil {
		return nil, err
	}
	order := &announcement{client: s.admins, note: leaseNote{admin: callerOf(ctx).peer}, LeaseRequested: scheduler.LeaseRequested{
		Arrived: arrived, Priority: gpreempt.PriorityAdmin, MaxWait: scheduler.PolicyDefault, Target: proc.Key,
	}}
	if err := setDuration(&order.TTL, req.GetTtl(), "ttl", gpreempt.ReasonTTLRange); err != nil {
		return nil, err
	}
	m, err := s.announce(ctx, order, func() {
		s.adminEvent(ctx, scheduler.Record{Target: proc.Key, Lease: order.id}, "target suspend %v for %v", proc.Key, order.ttl)
	})
	if err != nil {
		return nil, err
	}
	return &gpreemptv1.SuspendTargetResponse{LeaseId: m.GetLeaseId(), Quiesced: m.GetQuiesced(), Reason: m.GetReason(), Timing: m.GetTiming()}, nil
}

// ResumeTarget ends an admin's suspension and a quarantine, and with hold keeps the
// target running.
func (a adminService) ResumeTarget(ctx context.Context, req *gpreemptv1.ResumeTargetRequest) (*gpreemptv1.ResumeTargetResponse, error) {
	s := a.s
	proc, err := s.resolve(req.GetTargetId())
	if err != nil {
		return nil, err
	}
	var hold time.Duration
	if err := setDuration(&hold, req.GetHold(), "hold", gpreempt.ReasonDurationRange); err != nil {
		return nil, err
	}
	if hold < 0 || hold > maxHold {
		return nil, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonDurationRange,
			fmt.Sprintf("hold %v is out of range", hold),
			fmt.Sprintf("use 0 to %v", maxHold))
	}
	state, known := s.targetState(proc.Key)
	if !known {
		return nil, scheduler.UnknownTarget(proc.Key)
	}
	s.adminEvent(ctx, scheduler.Record{Target: proc.Key}, "target resume %v, hold %v", proc.Key, hold)
	s.cfg.Scheduler.Post(scheduler.Hold{Target: proc.Key, For: hold})
	// By now a target that may run is being resumed; one that is suspended stays so,
	// for a lease.
	err = s.await(ctx, func() bool {
		state, known = s.targetState(proc.Key)
		return !known || state == scheduler.TargetRunning || state == scheduler.TargetQuarantined || state == scheduler.TargetSuspended
	})
	if err != nil {
		return nil, err
	}
	if !known {
		state = scheduler.TargetLeft
	}
	return &gpreemptv1.ResumeTargetResponse{State: gpreemptv1.TargetState(state)}, nil
}

func (s *Server) targetState(key gpreempt.ProcessKey) (state scheduler.TargetState, known bool) {
	s.cfg.Scheduler.View(func(c *scheduler.Core) {
		var info scheduler.TargetInfo
		info, known = c.Target(key)
		state = info.State
	})
	return state, known
}

// await returns when done returns true, or after settleTime; done is called again
// after each event. The error is the end of ctx or of the server.
func (s *Server) await(ctx context.Context, done func() bool) error {
	bounded, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	stop := context.AfterFunc(s.closing, cancel) //nolint:contextcheck // two contexts bound the wait: the call's and the server's
	defer stop()
	for {
		revision := s.cfg.Events.Revision()
		if done() {
			return nil
		}
		if err := s.cfg.Events.Wait(bounded, revision); err != nil {
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case s.closing.Err() != nil:
				return errShuttingDown
			}
			return nil // the caller reports the state that was reached
		}
	}
}

// ClassifyTarget overrides class and priority of one process.
func (a adminService) ClassifyTarget(ctx context.Context, req *gpreemptv1.ClassifyTargetRequest) (*gpreemptv1.ClassifyTargetResponse, error) {
	s := a.s
	decision, ttl, err := s.overrideOf(req)
	if err != nil {
		return nil, err
	}
	proc, err := s.resolve(req.GetTargetId())
	if err != nil {
		return nil, err
	}
	if !s.cfg.Directory.Override(proc.Key, decision, ttl) {
		return nil, scheduler.UnknownTarget(proc.Key)
	}
	r := scheduler.Record{Target: proc.Key}
	switch {
	case decision == nil:
		s.adminEvent(ctx, r, "target classify %v: override removed", proc.Key)
	default:
		what := fmt.Sprintf("target classify %v %v, priority %d", proc.Key, decision.Class, decision.Priority)
		if decision.Mechanism != "" {
			what += ", by " + decision.Mechanism
		}
		if ttl > 0 {
			what += fmt.Sprintf(", for %v", ttl)
		}
		s.adminEvent(ctx, r, "%s", what)
	}
	t := s.target(proc)
	return &gpreemptv1.ClassifyTargetResponse{Target: t.message(s.clocks(), true)}, nil
}

// overrideOf returns the override of a request; nil removes one. ttl 0 means until
// the process exits.
func (s *Server) overrideOf(req *gpreemptv1.ClassifyTargetRequest) (decision *classify.Decision, ttl time.Duration, err error) {
	class, ok := classOf(req.GetClass())
	if !ok && req.GetClass() != gpreemptv1.Class_CLASS_UNSPECIFIED {
		return nil, 0, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonBadClass,
			fmt.Sprintf("unknown class %d", req.GetClass()),
			"use online, offline or unmanaged")
	}
	if !ok && (req.Priority != nil || req.GetTtl() != nil) {
		return nil, 0, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonBadClass,
			"priority and ttl are set without a class",
			"set the class too, or leave out all three to remove an override")
	}
	if err := s.checkMechanism(req, class); err != nil {
		return nil, 0, err
	}
	if !ok {
		return nil, 0, nil
	}
	priority := classify.DefaultPriority(class)
	if req.Priority != nil {
		if req.GetPriority() > uint32(gpreempt.MaxPriority) {
			return nil, 0, priorityRange(req.GetPriority())
		}
		priority = gpreempt.Priority(req.GetPriority())
	}
	if err := setDuration(&ttl, req.GetTtl(), "ttl", gpreempt.ReasonTTLRange); err != nil {
		return nil, 0, err
	}
	if req.GetTtl() != nil && ttl <= 0 {
		return nil, 0, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonTTLRange,
			fmt.Sprintf("ttl %v is out of range", ttl),
			"use more than 0, or leave it out to keep the override until the process exits")
	}
	return &classify.Decision{Class: class, Priority: priority, By: classify.ByAdmin, Mechanism: req.GetMechanism()}, ttl, nil
}

// checkMechanism returns an error for a mechanism that cannot be chosen.
func (s *Server) checkMechanism(req *gpreemptv1.ClassifyTargetRequest, class gpreempt.Class) error {
	name := req.GetMechanism()
	switch {
	case name == "":
		return nil
	case req.GetClass() == gpreemptv1.Class_CLASS_UNSPECIFIED || class != gpreempt.Offline:
		return refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonBadClass,
			fmt.Sprintf("the mechanism %q is set without the class offline", name),
			"set the class offline, or leave the mechanism out")
	case !slices.Contains(s.cfg.Mechanisms, name):
		return refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonUnknownMechanism,
			fmt.Sprintf("this daemon has no mechanism %q", name),
			"use one of "+strings.Join(s.cfg.Mechanisms, ", ")+", or enable it in the config key mechanisms and restart the daemon")
	}
	return nil
}

// SetDrain starts or ends draining.
func (a adminService) SetDrain(ctx context.Context, req *gpreemptv1.SetDrainRequest) (*gpreemptv1.SetDrainResponse, error) {
	s := a.s
	s.adminEvent(ctx, scheduler.Record{}, "drain %v", req.GetDrain())
	s.cfg.Scheduler.Post(scheduler.Drain{On: req.GetDrain()})
	m := &gpreemptv1.SetDrainResponse{}
	look := func() bool {
		s.cfg.Scheduler.View(func(c *scheduler.Core) { m.Draining, m.SuspendedCount = c.Draining(), uint32(c.Away()) })
		return m.GetSuspendedCount() == 0
	}
	if !req.GetWait() || !req.GetDrain() {
		look()
		return m, nil
	}
	if err := s.await(ctx, look); err != nil {
		return nil, err
	}
	return m, nil
}
