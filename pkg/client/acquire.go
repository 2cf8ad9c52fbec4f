package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// announcer is a way to announce: a bare call, or a frame of a session.
type announcer interface {
	announce(ctx context.Context, a *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, link, error)
	// over reports why it can announce no more, or nil.
	over() error
}

// Acquire announces work and returns a lease when the GPUs are quiet or r.MaxWait
// has passed. Release it when the work is done. What it does without a daemon is
// told in the package comment. Errors: a *gpreempt.Error for a request that is
// wrong or not permitted, and with FailClosed for any other refusal; ctx's own
// when it ended first; ErrClosed.
func (c *Client) Acquire(ctx context.Context, r Request) (*Lease, error) {
	return c.acquire(ctx, c, &r)
}

// Do runs fn with a lease: it acquires, runs fn, and releases whatever fn does,
// panics included. It returns the error of Acquire, and then fn is not run, or that
// of fn. A failure to release is added with FailClosed; otherwise it is dropped,
// since the lease ends with its TTL.
func (c *Client) Do(ctx context.Context, r Request, fn func(ctx context.Context) error) error {
	return c.do(ctx, c, &r, fn)
}

func (c *Client) do(ctx context.Context, via announcer, r *Request, fn func(ctx context.Context) error) (err error) {
	lease, err := c.acquire(ctx, via, r)
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

func (c *Client) acquire(ctx context.Context, via announcer, r *Request) (*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := via.over(); err != nil {
		return nil, err
	}
	if cause := c.guard.unreachable(); cause != nil {
		return unprotected(cause), nil
	}
	begun := time.Now()
	patience := r.patience()
	call, cancel := context.WithTimeout(ctx, patience)
	answer, link, err := via.announce(call, r.announcement())
	cancel()
	if err == nil {
		c.guard.granted()
		return c.hold(r, begun, answer, link), nil
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err := via.over(); err != nil {
			return nil, err
		}
		err = noAnswer("NotifyOnline", patience)
	}
	pass, away := mayPass(err)
	if !pass || c.failClosed {
		return nil, err
	}
	if c.guard.exposedBy(err, away) {
		c.spawn(c.probe)
	}
	return unprotected(err), nil
}

// noAnswer is the error when the daemon let the time pass.
func noAnswer(call string, bound time.Duration) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonDaemonUnavailable,
		Message: fmt.Sprintf("gpreemptd did not answer %s within %v", call, bound),
		Next:    "look at what it is doing: systemctl status gpreemptd, gpctl status",
	}
}

// mayPass tells of a refusal whether the same request may succeed later, and
// whether the daemon is away altogether.
func mayPass(err error) (pass, away bool) {
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
