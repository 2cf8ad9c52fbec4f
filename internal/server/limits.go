package server

import (
	"context"
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

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

// callerOf returns who called. Every handler of ours runs behind the interceptors,
// so there always is one.
func callerOf(ctx context.Context) *connection {
	return ctx.Value(callerKey{}).(*connection)
}
