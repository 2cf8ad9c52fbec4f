package server

import (
	"context"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// onlineService implements gpreempt.v1.OnlineService.
type onlineService struct {
	gpreemptv1.UnimplementedOnlineServiceServer
	s *Server
}

// NotifyOnline announces work and answers when the GPUs are quiet, or max_wait
// has passed.
func (o onlineService) NotifyOnline(ctx context.Context, req *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, error) {
	s := o.s
	arrived := s.cfg.Scheduler.Now()
	caller := callerOf(ctx)
	w := waiters.Get().(*waiter)
	defer w.free()
	a, err := s.prepare(req, caller.client.id, caller)
	if err != nil {
		return nil, err
	}
	g, err := s.announce(ctx, w, arrived, order{announcement: a, client: caller.client, by: &caller.holder, label: req.GetLabel()})
	if err != nil {
		return nil, err
	}
	return s.answerMessage(g, &a), nil
}

// Complete ends a lease.
func (o onlineService) Complete(ctx context.Context, req *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	return o.s.complete(callerOf(ctx).client, req)
}

// Renew sets the time to live of a lease.
func (o onlineService) Renew(ctx context.Context, req *gpreemptv1.RenewRequest) (*gpreemptv1.RenewResponse, error) {
	return o.s.renew(callerOf(ctx).client, req)
}

// completeMessage is a CompleteResponse with all its parts, in one allocation.
type completeMessage struct {
	response            gpreemptv1.CompleteResponse
	timing              gpreemptv1.Timing
	held, decide, total durationpb.Duration
}

func (s *Server) complete(c *client, req *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	arrived := s.cfg.Scheduler.Now()
	id, err := parseLeaseID(s.leasePrefix, req.GetLeaseId())
	if err != nil {
		return nil, err
	}
	end, held, err := s.cfg.Scheduler.Complete(c.id, id, scheduler.EndCompleted)
	if err != nil {
		return nil, err
	}
	c.drop(id)
	m := &completeMessage{}
	took := s.cfg.Scheduler.Now() - arrived
	setDuration(&m.held, held)
	setDuration(&m.decide, took)
	setDuration(&m.total, took)
	m.timing.Decide, m.timing.Total = &m.decide, &m.total
	r := &m.response
	r.End, r.Held, r.Timing = gpreemptv1.LeaseEnd(end), &m.held, &m.timing
	return r, nil
}

func (s *Server) renew(c *client, req *gpreemptv1.RenewRequest) (*gpreemptv1.RenewResponse, error) {
	id, err := parseLeaseID(s.leasePrefix, req.GetLeaseId())
	if err != nil {
		return nil, err
	}
	ttl := scheduler.PolicyDefault
	if req.GetTtl() != nil {
		if ttl, err = ttlOf(req.GetTtl()); err != nil {
			return nil, err
		}
	}
	if ttl, err = s.cfg.Scheduler.Renew(c.id, id, ttl); err != nil {
		return nil, err
	}
	return &gpreemptv1.RenewResponse{Ttl: durationpb.New(ttl)}, nil
}
