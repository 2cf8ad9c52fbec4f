package server

import (
	"context"
	"fmt"

	"golang.org/x/time/rate"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// allow takes one request off what the client may ask now.
func (c *client) allow(l Limits) error {
	c.mu.Lock()
	if c.limiter == nil || c.limiter.Limit() != rate.Limit(l.RequestsPerSecond) || c.limiter.Burst() != l.Burst {
		c.limiter = rate.NewLimiter(rate.Limit(l.RequestsPerSecond), l.Burst)
	}
	limiter := c.limiter
	c.mu.Unlock()
	if limiter.Allow() {
		return nil
	}
	return &gpreempt.Error{
		Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited,
		Message: fmt.Sprintf("%v asks more than %d times a second", c.peer, l.RequestsPerSecond),
		Next:    "ask less often, or raise limits.requests_per_second",
	}
}

// openStream counts a stream in; closeStream counts it out.
func (c *client) openStream(l Limits) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.streams >= l.StreamsPerClient {
		return &gpreempt.Error{
			Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonStreamsPerClient,
			Message: fmt.Sprintf("%v has %d streams open, the most it may", c.peer, c.streams),
			Next:    "use those it has, or raise limits.streams_per_client",
		}
	}
	c.streams++
	return nil
}

func (c *client) closeStream() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams--
}

// callerKey is where a call's context has its *connection.
type callerKey struct{}

func withCaller(ctx context.Context, c *connection) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// callerOf gives who called. Every handler of ours runs behind the interceptors,
// so there always is one.
func callerOf(ctx context.Context) *connection {
	return ctx.Value(callerKey{}).(*connection)
}
