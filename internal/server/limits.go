package server

import (
	"context"
	"fmt"
	"net"

	"go.uber.org/zap"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// doorkeeper lets a connection in when its peer is known and its user has not
// too many already. Refusing here costs no goroutine, no memory and no
// descriptor for longer than the refusal takes; the client sees its connection
// closed.
type doorkeeper struct {
	credentials.TransportCredentials
	clients *clients
}

func (d *doorkeeper) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := d.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	ctx := peer.NewContext(d.clients.s.closing, &peer.Peer{AuthInfo: info})
	if pc, ok := peercred.FromContext(ctx); ok {
		if err := d.clients.join(pc); err != nil {
			d.clients.s.cfg.Log.Warn("a connection is refused", zap.Int32("pid", pc.Peer().PID), zap.Error(err))
			return nil, nil, err
		}
	}
	return conn, info, nil
}

func (d *doorkeeper) Clone() credentials.TransportCredentials {
	return &doorkeeper{TransportCredentials: d.TransportCredentials.Clone(), clients: d.clients}
}

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
		Message: fmt.Sprintf("process %d asks more than %d times a second", c.peer.PID, l.RequestsPerSecond),
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
			Message: fmt.Sprintf("process %d has %d streams open, the most it may", c.peer.PID, c.streams),
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
