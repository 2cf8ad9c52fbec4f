package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Acquire announces work and returns a lease when the GPUs are quiet or r.MaxWait
// has passed. Release it when the work is done. See the package comment for its
// behaviour without a daemon. Errors: a *gpreempt.Error for a request that is
// invalid or not permitted, and with FailClosed for any other refusal; the error of
// ctx when it ended first; ErrClosed.
func (c *Client) Acquire(ctx context.Context, r Request) (*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := c.ended(); err != nil {
		return nil, err
	}
	if cause := c.protection.unreachable(); cause != nil {
		return unprotected(cause), nil
	}
	begun := time.Now()
	limit := r.callTime()
	call, cancel := context.WithTimeout(ctx, limit)
	answer, st, err := c.announce(call, r.announcement())
	cancel()
	if err == nil {
		c.protection.granted()
		return c.hold(&r, begun, answer, st), nil
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err := c.ended(); err != nil {
			return nil, err
		}
		err = noAnswer("an announcement", limit)
	}
	temporary, unavailable := classify(err)
	if !temporary || c.failClosed {
		return nil, err
	}
	if c.protection.lost(err, unavailable) {
		c.spawn(c.probe)
	}
	return unprotected(err), nil
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

// classify reports whether the same request may succeed later, and whether the daemon
// is unavailable.
func classify(err error) (temporary, unavailable bool) {
	refusal, ok := errors.AsType[*gpreempt.Error](err)
	if !ok {
		return false, false
	}
	switch codes.Code(refusal.Code) {
	case codes.Unavailable:
		return true, true
	case codes.ResourceExhausted:
		return refusal.Reason != gpreempt.ReasonMessageTooLarge, false
	case codes.Internal, codes.Unknown, codes.Aborted:
		return true, false
	default:
		return false, false
	}
}
