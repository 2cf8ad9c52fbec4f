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

// Admit checks an announcement before it becomes an event, and sets its TTL and MaxWait
// where they are PolicyDefault. It returns the existing lease for an announcement that
// repeats one of the same client and request id, and for an order by hand on a target
// that has one; 0 otherwise. Errors are *gpreempt.Error.
func (c *Core) Admit(req *LeaseRequested) (repeated LeaseID, err error) {
	req.TTL, req.MaxWait = orDefault(req.TTL, c.policy.DefaultTTL), orDefault(req.MaxWait, c.policy.MaxWait)
	if len(req.RequestID) > MaxRequestID {
		return 0, invalid(gpreempt.ReasonRequestIDTooLong, fmt.Sprintf("request_id has %d bytes", len(req.RequestID)),
			fmt.Sprintf("use at most %d", MaxRequestID))
	}
	if req.RequestID != "" {
		if id, ok := c.requests[requestKey{req.Client, req.RequestID}]; ok && !c.lost(id) {
			return id, c.sameRequest(id, *req)
		}
	}
	byHand := !req.Target.IsZero()
	if req.Priority > gpreempt.MaxPriority && !byHand {
		return 0, invalid(gpreempt.ReasonPriorityRange, fmt.Sprintf("priority %d is out of range", req.Priority), "use 0 to 15")
	}
	check := c.checkTTL
	if byHand {
		check = c.checkOrderTTL
	}
	if err := check(req.TTL); err != nil {
		return 0, err
	}
	for _, d := range []struct {
		name  string
		value time.Duration
		limit time.Duration
	}{{"max_wait", req.MaxWait, MaxWaitLimit}, {"eta", req.ETA, MaxETA}} {
		if d.value < 0 || d.value > d.limit {
			return 0, invalid(gpreempt.ReasonDurationRange, fmt.Sprintf("%s %v is out of range", d.name, d.value),
				fmt.Sprintf("use 0 to %v", d.limit))
		}
	}
	if byHand {
		t := c.targets[req.Target]
		if t == nil {
			return 0, UnknownTarget(req.Target)
		}
		if t.class != gpreempt.Offline {
			return 0, &gpreempt.Error{
				Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonNotOffline,
				Message: fmt.Sprintf("target %v is %v, and only offline targets are suspended", req.Target, t.class),
				Next:    fmt.Sprintf("classify it first: gpctl target classify %v offline", req.Target),
			}
		}
		if len(t.orders) > 0 {
			return t.orders[0].id, nil
		}
	}
	for _, id := range req.GPUs {
		if c.gpus[id] == nil {
			return 0, UnknownGPU(id.String())
		}
	}
	return 0, c.room(req.Client, req.User)
}

func (c *Core) checkTTL(ttl time.Duration) error {
	return checkTTL(ttl, c.policy.MaxTTL, "")
}

func (c *Core) checkOrderTTL(ttl time.Duration) error {
	return checkTTL(ttl, c.policy.MaxSuspend, ", the policy's max_suspend")
}

func checkTTL(ttl, limit time.Duration, why string) error {
	if ttl > 0 && ttl <= limit {
		return nil
	}
	return invalid(gpreempt.ReasonTTLRange, fmt.Sprintf("ttl %v is out of range", ttl),
		fmt.Sprintf("use more than 0 and at most %v%s", limit, why))
}

// UnknownLease returns the error for a lease ID that this daemon does not know.
func UnknownLease() error {
	return &gpreempt.Error{
		Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease,
		Message: "no such lease",
		Next:    "it ended long ago or belongs to an earlier run of the daemon: announce again",
	}
}

// UnknownGPU returns the error for a GPU that is not on this host.
func UnknownGPU(name string) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonUnknownGPU,
		Message: fmt.Sprintf("GPU %s is not on this host", name),
		Next:    "gpctl gpu list shows those that are",
	}
}

// UnknownTarget returns the error for a process that owns no queues.
func UnknownTarget(key gpreempt.ProcessKey) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownTarget,
		Message: fmt.Sprintf("process %v owns no GPU queues, or has exited", key),
		Next:    "gpctl target list shows those that do",
	}
}

func invalid(reason gpreempt.Reason, message, next string) error {
	return &gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Reason: reason, Message: message, Next: next}
}
