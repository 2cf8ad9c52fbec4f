package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

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
			"gpctl target list")
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
		return nil, worded(err)
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
	var ttl time.Duration
	if err := setDuration(&ttl, req.GetTtl(), "ttl", gpreempt.ReasonTTLRange); err != nil {
		return nil, err
	}
	var info scheduler.TargetInfo
	var policy scheduler.Policy
	var known bool
	s.cfg.Scheduler.View(func(c *scheduler.Core) {
		info, known = c.Target(proc.Key)
		policy = c.Policy()
	})
	switch {
	case !known:
		return nil, unknownTarget(proc.Key)
	case info.Class != gpreempt.Offline:
		return nil, refusal(gpreempt.CodeFailedPrecondition, gpreempt.ReasonNotOffline,
			fmt.Sprintf("target %v is %v, and only offline targets are suspended", proc.Key, info.Class),
			fmt.Sprintf("classify it first: gpctl target classify %v offline", proc.Key))
	case ttl <= 0 || ttl > policy.MaxSuspend:
		return nil, refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonTTLRange,
			fmt.Sprintf("ttl %s is out of range", durationText(ttl)),
			fmt.Sprintf("use more than 0 and at most %s, the policy's max_suspend", durationText(policy.MaxSuspend)))
	}
	s.adminEvent(ctx, scheduler.Record{Target: proc.Key}, "target suspend %v for %v", proc.Key, ttl)
	s.cfg.Scheduler.Post(scheduler.Pin{Target: proc.Key, Cause: scheduler.CauseByHand, For: ttl})
	resp := &gpreemptv1.SuspendTargetResponse{}
	var why scheduler.Cause
	err = s.await(ctx, policy.MaxWait, func() (final bool) {
		s.cfg.Scheduler.View(func(c *scheduler.Core) { resp.Quiesced, why, final = c.SuspendResult(proc.Key) })
		return final
	})
	if err != nil {
		return nil, err
	}
	resp.Reason = quiesceReason(cmp.Or(why, scheduler.CauseMaxWait))
	resp.Timing = &gpreemptv1.Timing{Total: durationpb.New(s.cfg.Scheduler.Now() - arrived)}
	return resp, nil
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
			fmt.Sprintf("hold %s is out of range", durationText(hold)),
			fmt.Sprintf("use 0 to %s", durationText(maxHold)))
	}
	state, known := s.targetState(proc.Key)
	if !known {
		return nil, unknownTarget(proc.Key)
	}
	s.adminEvent(ctx, scheduler.Record{Target: proc.Key}, "target resume %v, hold %v", proc.Key, hold)
	s.cfg.Scheduler.Post(scheduler.Pin{Target: proc.Key, Cause: scheduler.CauseHold, For: hold})
	// By now a target that may run is being resumed; one that is suspended stays so,
	// for a lease.
	err = s.await(ctx, settleTime, func() bool {
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

// await returns when done returns true, or after a time; done is called again
// after each event. The error is the end of ctx or of the server.
func (s *Server) await(ctx context.Context, atMost time.Duration, done func() bool) error {
	bounded, cancel := context.WithTimeout(ctx, atMost)
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
		return nil, unknownTarget(proc.Key)
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
	t := s.target(proc, func(*scheduler.Core) {})
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
			fmt.Sprintf("ttl %s is out of range", durationText(ttl)),
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
	if err := s.await(ctx, settleTime, look); err != nil {
		return nil, err
	}
	return m, nil
}
