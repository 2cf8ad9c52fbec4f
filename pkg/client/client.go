package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// DefaultAddr is the default address of gpreemptd.
const DefaultAddr = "unix:///run/gpreempt/gpreemptd.sock"

// Limits of the connection.
const (
	// reconnectMin and reconnectMax bound the pause between two attempts to connect.
	reconnectMin = 50 * time.Millisecond
	reconnectMax = 2 * time.Second
	// connectTime bounds one attempt. A socket of systemd accepts a connection while the
	// daemon starts again; a call that waits for it fails at its own deadline.
	connectTime = 20 * time.Second
	// maxAnswer bounds an answer in bytes. It has room for thousands of targets with
	// their command lines.
	maxAnswer = 64 << 20
)

// ErrClosed is returned by calls after Close.
var ErrClosed = errors.New("gpreempt client: used after Close")

// Option configures a Client.
type Option func(*Client)

// FailClosed makes Acquire return an error instead of an unprotected lease. It is for
// programs that must not run beside offline work.
func FailClosed() Option { return func(c *Client) { c.failClosed = true } }

// OnUnprotected sets a hook instead of the default, a line through log/slog. report
// is called with the reason when work begins to run unprotected, once for all work, and once
// for GPUs that the daemon refuses; and with nil when all is protected again. It must return
// soon and must not call the Client. With FailClosed it is never called.
func OnUnprotected(report func(err error)) Option {
	return func(c *Client) { c.protection.report = report }
}

// Client is a client of one daemon.
type Client struct {
	cc     *grpc.ClientConn
	online gpreemptv1.OnlineServiceClient
	grpc   []grpc.DialOption
	// certificate is nil on a unix socket.
	certificate *certificate
	failClosed  bool
	protection  protection
	shares      shares

	opening     chan struct{} // has an element while its holder uses current
	current     *stream
	outstanding chan struct{} // has an element for each announcement without an answer

	// background is the context of the client's goroutines and streams; Close ends it.
	background context.Context
	stop       context.CancelFunc
	mu         sync.Mutex // guards closed, and wg against growing after it
	closed     bool
	wg         sync.WaitGroup
}

// Dial returns a client of the daemon at addr: "unix:///PATH", an absolute path, or
// "" for DefaultAddr; or "tcp://HOST:PORT" with Certificate, for a daemon on another
// host. It does not connect yet, so it succeeds without a daemon; it returns an error
// for an invalid addr and for invalid files of Certificate.
func Dial(addr string, opts ...Option) (*Client, error) {
	c := &Client{
		protection: protection{report: logProtection}, shares: shares{all: make(map[string]*share)},
		opening: make(chan struct{}, 1), outstanding: make(chan struct{}, maxOutstanding),
	}
	for _, opt := range opts {
		opt(c)
	}
	target, err := c.target(addr)
	if err != nil {
		return nil, err
	}
	transport := insecure.NewCredentials() // the daemon's kernel identifies this process
	if c.certificate != nil {
		transport = c.certificate
	}
	//nolint:forbidigo // the goroutines of the client outlive its calls
	c.background, c.stop = context.WithCancel(context.Background())
	cc, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		// A connection without a call in flight may have leases.
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
		return nil, fmt.Errorf("invalid address %q of gpreemptd: %w: use the form %s", addr, err, DefaultAddr)
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

// Close ends the connection, and with it every lease of the client.
// It waits for the client's goroutines.
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

// ended returns ErrClosed once the client is closed.
func (c *Client) ended() error {
	if c.background.Err() != nil {
		return ErrClosed
	}
	return nil
}

// spawn runs fn in a goroutine, and returns false when the client is closed.
func (c *Client) spawn(fn func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.wg.Go(fn)
	}
	return !c.closed
}

// Online returns the generated client of the online service. Its errors are gRPC's,
// and it does not fail open.
func (c *Client) Online() gpreemptv1.OnlineServiceClient { return c.online }

// Admin returns the generated client of the admin service. Its errors are gRPC's.
func (c *Client) Admin() gpreemptv1.AdminServiceClient { return gpreemptv1.NewAdminServiceClient(c.cc) }

// Conn returns the connection, for generated clients of other services.
func (c *Client) Conn() grpc.ClientConnInterface { return c.cc }
