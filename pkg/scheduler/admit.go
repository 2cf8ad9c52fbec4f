package scheduler

import (
	"fmt"
	"math"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Bounds of an announcement that no policy sets.
const (
	MaxRequestID = 64
	MaxWaitLimit = 10 * time.Second
	MaxETA       = time.Minute
)

// PolicyDefault is the TTL or MaxWait of an announcement that has none: it gets that of
// the policy.
const PolicyDefault = time.Duration(math.MinInt64)

// orDefault returns d, or what the policy has for PolicyDefault.
func orDefault(d, byPolicy time.Duration) time.Duration {
	if d == PolicyDefault {
		return byPolicy
	}
	return d
}

// Refusal is why an announcement, or a call about a lease, is refused.
type Refusal struct {
	Reason gpreempt.Reason
	// What is the name of what is out of its range, the GPU that is not known, the request id that
	// was used, or "clients" or "admins" where all of these hold too many leases.
	What string
	// Value is a length, a number or a duration in nanoseconds, and Limit the most that is permitted.
	Value, Limit int64
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("scheduler: %s, %q %d of %d", r.Reason, r.What, r.Value, r.Limit)
}

// Unwrap returns an error with the reason only.
func (r *Refusal) Unwrap() error { return &gpreempt.Error{Reason: r.Reason} }

// Admit checks an announcement before it becomes an event, and sets its TTL and MaxWait
// where they are PolicyDefault. It returns the existing lease for an announcement that
// repeats one of the same client and request id; 0 otherwise. Errors are *Refusal.
func (c *Core) Admit(req *LeaseRequested) (repeated LeaseID, err error) {
	req.TTL, req.MaxWait = orDefault(req.TTL, c.policy.DefaultTTL), orDefault(req.MaxWait, c.policy.MaxWait)
	if len(req.RequestID) > MaxRequestID {
		return 0, &Refusal{Reason: gpreempt.ReasonRequestIDTooLong, What: "request_id", Value: int64(len(req.RequestID)), Limit: MaxRequestID}
	}
	if req.RequestID != "" {
		if id, ok := c.requests[requestKey{req.Client, req.RequestID}]; ok && !c.lost(id) {
			return id, c.sameRequest(id, *req)
		}
	}
	if req.Priority > gpreempt.MaxPriority {
		return 0, &Refusal{Reason: gpreempt.ReasonPriorityRange, What: "priority", Value: int64(req.Priority), Limit: int64(gpreempt.MaxPriority)}
	}
	if err := c.checkTTL(req.TTL); err != nil {
		return 0, err
	}
	if req.MaxWait < 0 || req.MaxWait > MaxWaitLimit {
		return 0, &Refusal{Reason: gpreempt.ReasonDurationRange, What: "max_wait", Value: int64(req.MaxWait), Limit: int64(MaxWaitLimit)}
	}
	if req.ETA < 0 || req.ETA > MaxETA {
		return 0, &Refusal{Reason: gpreempt.ReasonDurationRange, What: "eta", Value: int64(req.ETA), Limit: int64(MaxETA)}
	}
	for _, id := range req.GPUs {
		if c.gpus[id] == nil {
			return 0, &Refusal{Reason: gpreempt.ReasonUnknownGPU, What: id.String()}
		}
	}
	return 0, c.room(req.Client, req.User)
}

func (c *Core) checkTTL(ttl time.Duration) error {
	if ttl > 0 && ttl <= c.policy.MaxTTL {
		return nil
	}
	return &Refusal{Reason: gpreempt.ReasonTTLRange, What: "ttl", Value: int64(ttl), Limit: int64(c.policy.MaxTTL)}
}
