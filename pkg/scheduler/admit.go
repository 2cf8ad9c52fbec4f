package scheduler

import (
	"fmt"
	"math"
	"slices"
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
	return checkTTL(ttl, c.policy.MaxTTL, "max_ttl")
}

func (c *Core) checkOrderTTL(ttl time.Duration) error {
	return checkTTL(ttl, c.policy.MaxSuspend, "max_suspend")
}

func checkTTL(ttl, limit time.Duration, knob string) error {
	if ttl > 0 && ttl <= limit {
		return nil
	}
	return invalid(gpreempt.ReasonTTLRange, fmt.Sprintf("ttl %v is out of range", ttl),
		fmt.Sprintf("use more than 0 and at most %v, the policy's %s", limit, knob))
}

func (c *Core) room(id ClientID, user UserID) error {
	if cl := c.clients[id]; id != 0 && cl != nil && len(cl.leases) >= c.limits.LeasesPerClient {
		return &gpreempt.Error{
			Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonLeasesPerClient,
			Message: fmt.Sprintf("this client holds %d leases, which is its limit", len(cl.leases)),
			Next:    "complete some, or raise limits.leases_per_client",
		}
	}
	if n := c.perUser[user]; id != 0 && n >= max(c.limits.LeasesPerUser, c.limits.LeasesPerClient) {
		return &gpreempt.Error{
			Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonLeasesPerUser,
			Message: fmt.Sprintf("the processes of this user hold %d leases together, which is their limit", n),
			Next:    "complete some, or raise limits.leases_per_user",
		}
	}
	live := 0 // of the admins
	if admins := c.clients[0]; admins != nil {
		live = len(admins.leases)
	}
	of, most := "the admins", c.limits.LeasesTotal
	if id != 0 {
		live, of = len(c.leases)-live, "clients"
		// The last tenth is for users with few leases.
		if c.perUser[user] > (c.limits.LeasesTotal-live)/16 {
			most -= c.limits.LeasesTotal / 10
		}
	}
	if live >= most {
		return &gpreempt.Error{
			Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonLeasesTotal,
			Message: fmt.Sprintf("%d leases of %s are live on this host, which is the limit", live, of),
			Next:    "see their owners with gpctl lease list, or raise limits.leases_total",
		}
	}
	return nil
}

// lost reports whether a lease ended because its client disconnected or died: a retry of
// that announcement after reconnecting is a new one.
func (c *Core) lost(id LeaseID) bool {
	end, _, ended := c.Ended(id)
	return ended && (end == EndDisconnected || end == EndClientDied)
}

func (c *Core) sameRequest(id LeaseID, req LeaseRequested) error {
	var first LeaseRequested
	if l := c.leases[id]; l != nil {
		first = l.req
	} else {
		first = c.ended[c.endedByID[id]].req
	}
	same := slices.Equal(first.GPUs, req.GPUs)
	first.Lease, first.GPUs, req.Lease, req.GPUs = 0, nil, 0, nil
	if same && equalRequests(first, req) {
		return nil
	}
	return &gpreempt.Error{
		Code: gpreempt.CodeAlreadyExists, Reason: gpreempt.ReasonRequestIDReused,
		Message: fmt.Sprintf("request_id %q was used by another announcement of this client", req.RequestID),
		Next:    "use a new id for each announcement and the same one only to retry it unchanged",
	}
}

func equalRequests(a, b LeaseRequested) bool {
	return a.Client == b.Client && a.User == b.User && a.Priority == b.Priority && a.TTL == b.TTL && a.MaxWait == b.MaxWait && a.ETA == b.ETA &&
		a.OnIdle == b.OnIdle && a.Target == b.Target
}

// Answered returns the answer to a lease, also after it ended; ok is false while there is
// none.
func (c *Core) Answered(id LeaseID) (answer Answer, ok bool) {
	if l := c.leases[id]; l != nil {
		return l.answer, l.answered
	}
	if at, known := c.endedByID[id]; known {
		a := c.ended[at].answer
		return Answer{Reason: QuiesceEnded, Waited: a.Waited}, true
	}
	return Answer{}, false
}

// Ended returns how a lease ended and how long it lived; false for one that is not kept.
func (c *Core) Ended(id LeaseID) (end LeaseEnd, held time.Duration, ok bool) {
	at, ok := c.endedByID[id]
	if !ok {
		return EndNone, 0, false
	}
	return c.ended[at].end, c.ended[at].held, true
}

// Owned checks that a lease is known and that the client may act on it; client 0
// (an admin) may act on any. Errors are *gpreempt.Error.
func (c *Core) Owned(client ClientID, id LeaseID) error {
	var owner ClientID
	if l := c.leases[id]; l != nil {
		owner = l.req.Client
	} else if at, ok := c.endedByID[id]; ok {
		owner = c.ended[at].req.Client
	} else {
		return UnknownLease()
	}
	if client != 0 && client != owner {
		return &gpreempt.Error{
			Code: gpreempt.CodePermissionDenied, Reason: gpreempt.ReasonForeignLease,
			Message: "the lease belongs to another process",
			Next:    "only the process that announced it may complete or renew it; an admin may use gpctl lease release",
		}
	}
	return nil
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
