package client

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// Times of the way back to protection.
const (
	// settle is how long no announcement may have been refused before protection
	// counts as back: under overload some are refused and some are not.
	settle = time.Second
	// probeMin and probeMax bound the pause between two questions to a daemon that
	// does not answer, probeBound the wait for an answer.
	probeMin   = 100 * time.Millisecond
	probeMax   = 2 * time.Second
	probeBound = time.Second
)

// guard knows whether work is protected, and says so when that changes.
type guard struct {
	// report is called with mu held: that keeps its calls in order.
	report func(error)

	// away is why the daemon is not to be asked, nil when it is. It has an atomic
	// of its own because every announcement looks at it.
	away atomic.Pointer[error]
	// exposed tells that report was called with an error last.
	exposed atomic.Bool

	mu      sync.Mutex // guards the changes of the above, and refused
	refused time.Time  // when an announcement was refused last
}

// unreachable returns why the daemon is not to be asked, or nil.
func (g *guard) unreachable() error {
	if err := g.away.Load(); err != nil {
		return *err
	}
	return nil
}

// exposedBy notes that work runs unprotected because of err. It reports whether
// the caller is the one to start looking for the daemon.
func (g *guard) exposedBy(err error, away bool) (probe bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refused = time.Now()
	if away && g.away.Load() == nil {
		g.away.Store(&err)
		probe = true
	}
	if !g.exposed.Swap(true) {
		g.report(err)
	}
	return probe
}

// granted notes that the daemon gave a lease.
func (g *guard) granted() {
	if !g.exposed.Load() {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	// While the daemon is away this is the answer to an old question: the probe
	// knows better.
	if g.exposed.Load() && g.away.Load() == nil && time.Since(g.refused) >= settle {
		g.exposed.Store(false)
		g.report(nil)
	}
}

// found notes that the daemon answers again.
func (g *guard) found() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.away.Store(nil)
	g.exposed.Store(false)
	g.report(nil)
}

// probe asks for the daemon until it answers or the client is closed.
func (c *Client) probe() {
	health := healthpb.NewHealthClient(c.cc)
	pause := time.NewTimer(probeMin)
	defer pause.Stop()
	for delay := probeMin; ; delay = min(2*delay, probeMax) {
		pause.Reset(delay)
		select {
		case <-pause.C:
		case <-c.background.Done():
			return
		}
		if !c.connected() {
			return
		}
		if c.answers(health) {
			c.guard.found()
			return
		}
	}
}

// connected waits for a connection; false when the client was closed.
func (c *Client) connected() bool {
	for {
		state := c.cc.GetState()
		switch state {
		case connectivity.Ready:
			return true
		case connectivity.Idle:
			c.cc.Connect()
		default:
		}
		if !c.cc.WaitForStateChange(c.background, state) {
			return false
		}
	}
}

// answers reports whether a daemon that means to serve is at the other end. One
// that does not know the question, or refuses to answer it, is.
func (c *Client) answers(health healthpb.HealthClient) bool {
	ctx, cancel := context.WithTimeout(c.background, probeBound)
	defer cancel()
	answer, err := health.Check(ctx, &healthpb.HealthCheckRequest{})
	switch status.Code(err) {
	case codes.OK:
		return answer.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return false
	default:
		return true
	}
}
