package server

import (
	"context"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
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
	a, err := s.prepare(req, caller.client, caller)
	if err != nil {
		return nil, err
	}
	a.Arrived, a.note.scope = arrived, &caller.scope
	return s.announce(ctx, a, nil)
}

// Complete ends a lease.
func (o onlineService) Complete(ctx context.Context, req *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	return o.s.complete(callerOf(ctx).client, req)
}

// Renew sets a new time to live of a lease.
func (o onlineService) Renew(ctx context.Context, req *gpreemptv1.RenewRequest) (*gpreemptv1.RenewResponse, error) {
	return o.s.renew(callerOf(ctx).client, req)
}

func (s *Server) complete(c *client, req *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	arrived := s.cfg.Scheduler.Now()
	id, err := parseLeaseID(s.leasePrefix, req.GetLeaseId())
	if err != nil {
		return nil, err
	}
	end, held, err := s.cfg.Scheduler.Complete(c.id, id, scheduler.EndCompleted)
	if err != nil {
		return nil, worded(err)
	}
	c.drop(id)
	took := s.cfg.Scheduler.Now() - arrived
	return &gpreemptv1.CompleteResponse{
		End: gpreemptv1.LeaseEnd(end), Held: durationpb.New(held),
		Timing: &gpreemptv1.Timing{Decide: durationpb.New(took), Total: durationpb.New(took)},
	}, nil
}

func (s *Server) renew(c *client, req *gpreemptv1.RenewRequest) (*gpreemptv1.RenewResponse, error) {
	id, err := parseLeaseID(s.leasePrefix, req.GetLeaseId())
	if err != nil {
		return nil, err
	}
	ttl := scheduler.PolicyDefault
	if err := setDuration(&ttl, req.GetTtl(), "ttl", gpreempt.ReasonTTLRange); err != nil {
		return nil, err
	}
	if ttl, err = s.cfg.Scheduler.Renew(c.id, id, ttl); err != nil {
		return nil, worded(err)
	}
	return &gpreemptv1.RenewResponse{Ttl: durationpb.New(ttl)}, nil
}
