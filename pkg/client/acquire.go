package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Acquire announces work and returns a lease when the GPUs are quiet or r.MaxWait
// has passed; at once while an equal announcement holds one. Release it when the work is
// done. See the package comment for its behaviour without a daemon. Errors: MISSING_FIELD
// for a request without GPUs, with or without a daemon; with FailClosed the *gpreempt.Error
// of any refusal; the error of ctx when it ended first; ErrClosed.
func (c *Client) Acquire(ctx context.Context, r Request) (*Lease, error) {
	if err := cmp.Or(ctx.Err(), c.ended()); err != nil {
		return nil, err
	}
	if len(r.GPUs) == 0 {
		return nil, errNoGPUs
	}
	a := r.announcement()
	for begun, key := time.Now(), r.key(a); ; {
		if cause := c.protection.unreachable(); cause != nil {
			return unprotected(cause), nil
		}
		sh, err := c.share(ctx, key, func() (*grant, error) { return c.announceFor(ctx, &r, a) })
		if err == nil {
			leave := sync.OnceValue(func() bool { return c.shares.leave(sh) })
			return &Lease{grant: sh.grant, roundTrip: time.Since(begun), leave: leave}, nil
		}
		if err := cmp.Or(ctx.Err(), c.ended()); err != nil {
			return nil, err
		}
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			continue // the context of the first has ended
		}
		if _, ok := errors.AsType[*gpreempt.Error](err); !ok || c.failClosed {
			return nil, err
		}
		return unprotected(err), nil
	}
}

// announceFor announces, in the time that a request has.
func (c *Client) announceFor(ctx context.Context, r *Request, a *gpreemptv1.NotifyOnlineRequest) (*grant, error) {
	begun, limit := time.Now(), r.callTime()
	call, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answer, st, err := c.announce(call, a)
	if err == nil {
		c.protection.granted(a.GetGpus())
		return c.hold(r, begun, answer, st), nil
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		err = noAnswer("an announcement", limit)
	}
	if refusal, ok := errors.AsType[*gpreempt.Error](err); ok && !c.failClosed && c.protection.lost(a.GetGpus(), refusal) {
		c.spawn(c.probe)
	}
	return nil, err
}

var errNoGPUs error = &gpreempt.Error{
	Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonMissingField, Message: "the request names no GPUs",
	Next: "set GPUs, such as client.AllGPUs(), or client.OwnGPUs() for those on which this process has queues",
}

// Do runs fn with a lease. It releases the lease also when fn panics. It returns the
// error of Acquire, without running fn, or the error of fn. An error of Release is added
// with FailClosed; otherwise it is ignored, because the lease ends with its TTL.
func (c *Client) Do(ctx context.Context, r Request, fn func(ctx context.Context) error) (err error) {
	lease, err := c.Acquire(ctx, r)
	if err != nil {
		return err
	}
	defer func() {
		if failed := lease.Release(ctx); failed != nil && c.failClosed {
			err = errors.Join(err, failed)
		}
	}()
	return fn(ctx)
}

// noAnswer returns the error of a call that the daemon did not answer in time.
func noAnswer(call string, bound time.Duration) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonDaemonUnavailable,
		Message: fmt.Sprintf("gpreemptd did not answer %s within %v", call, bound),
		Next:    "check the daemon: systemctl status gpreemptd, gpctl status",
	}
}

// temporary reports whether the same request may succeed later.
func temporary(refusal *gpreempt.Error) bool {
	switch codes.Code(refusal.Code) {
	case codes.Unavailable, codes.Internal, codes.Unknown, codes.Aborted:
		return true
	case codes.ResourceExhausted:
		return refusal.Reason != gpreempt.ReasonMessageTooLarge
	default:
		return false
	}
}
