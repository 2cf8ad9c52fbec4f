package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// DefaultAddr is where gpreemptd listens unless it was told otherwise.
const DefaultAddr = "unix:///run/gpreempt/gpreemptd.sock"

// Limits of the connection.
const (
	// reconnectMin and reconnectMax bound the pause between two attempts to connect.
	reconnectMin = 50 * time.Millisecond
	reconnectMax = 2 * time.Second
	// connectTime bounds one attempt. A socket that systemd keeps takes a connection while
	// the daemon starts again, and who waits in its queue fails no sooner than its call's
	// own deadline.
	connectTime = 20 * time.Second
	// maxAnswer bounds an answer in bytes: thousands of targets with their command
	// lines.
	maxAnswer = 64 << 20
)

// ErrClosed is what calls give after Close.
var ErrClosed = errors.New("gpreempt client: used after Close")

// Option changes what a Client does.
type Option func(*Client)

// FailClosed makes Acquire give an error where it would have given an
// unprotected lease: for programs that would rather not run than run disturbed.
func FailClosed() Option { return func(c *Client) { c.failClosed = true } }

// OnUnprotected replaces the default of one log line through log/slog. report is
// called with the reason when work begins to run unprotected and with nil when
// protection is back, never twice in a row with the same. It must return soon and
// must not call the Client. With FailClosed it is never called.
func OnUnprotected(report func(err error)) Option {
	return func(c *Client) { c.guard.report = report }
}

// withDialer replaces the socket.
func withDialer(dial func(context.Context, string) (net.Conn, error)) Option {
	return func(c *Client) { c.grpc = append(c.grpc, grpc.WithContextDialer(dial)) }
}

// Client talks to one daemon.
type Client struct {
	cc     *grpc.ClientConn
	online gpreemptv1.OnlineServiceClient
	grpc   []grpc.DialOption
	// certificate is nil on a unix socket.
	certificate *certificate
	failClosed  bool
	guard       guard

	// background is the context of what no call waits for; Close ends it.
	background context.Context
	stop       context.CancelFunc
	mu         sync.Mutex // guards closed, and wg against growing after it
	closed     bool
	wg         sync.WaitGroup
}

// Dial returns a client of the daemon at addr: "unix:///PATH", an absolute path, or
// "" for DefaultAddr; or "tcp://HOST:PORT" with Certificate, for a daemon on another
// host. It does not connect yet, so it succeeds without a daemon; the error is
// about addr and the files of Certificate.
func Dial(addr string, opts ...Option) (*Client, error) {
	c := &Client{guard: guard{report: logProtection}}
	for _, opt := range opts {
		opt(c)
	}
	target, err := c.target(addr)
	if err != nil {
		return nil, err
	}
	//nolint:forbidigo // what runs in the background belongs to the client and to none of its calls
	c.background, c.stop = context.WithCancel(context.Background())
	cc, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(transport{c}),
		// A connection with no call in flight may still carry leases.
		grpc.WithIdleTimeout(0),
		grpc.WithDisableServiceConfig(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: reconnectMin, Multiplier: 1.6, Jitter: 0.2, MaxDelay: reconnectMax},
			MinConnectTimeout: connectTime,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
	}, c.grpc...)...)
	if err != nil {
		c.stop()
		return nil, fmt.Errorf("address %q of gpreemptd: %w: write it as %s", addr, err, DefaultAddr)
	}
	c.cc, c.online = cc, gpreemptv1.NewOnlineServiceClient(cc)
	return c, nil
}

func logProtection(err error) {
	if err != nil {
		slog.Warn("gpreempt: inference runs unprotected", "error", err)
		return
	}
	slog.Info("gpreempt: inference is protected again")
}

// Close ends the connection, and with it every lease and session of the client.
// It waits for what the client runs in the background.
func (c *Client) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	c.stop()
	var err error
	if !closed {
		err = c.cc.Close()
	}
	c.wg.Wait()
	return err
}

// over returns ErrClosed once the client is closed.
func (c *Client) over() error {
	if c.background.Err() != nil {
		return ErrClosed
	}
	return nil
}

// spawn runs fn in the background unless the client is closed.
func (c *Client) spawn(fn func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.wg.Go(fn)
	}
	return !c.closed
}

// Online returns the bare stub of the online service. Its errors are gRPC's, and
// it knows nothing of failing open.
func (c *Client) Online() gpreemptv1.OnlineServiceClient { return c.online }

// Admin returns the bare stub of the admin service. Its errors are gRPC's.
func (c *Client) Admin() gpreemptv1.AdminServiceClient { return gpreemptv1.NewAdminServiceClient(c.cc) }

// Conn returns the connection, for stubs of other services the daemon may have.
func (c *Client) Conn() grpc.ClientConnInterface { return c.cc }
