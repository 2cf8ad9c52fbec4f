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

// Times until protection is back.
const (
	// settle is how long no announcement may have been refused before protection
	// counts as back: under overload some are refused and some are not.
	settle = time.Second
	// probeMin and probeMax bound the pause between two probes of a daemon that does
	// not answer, and probeBound the wait for an answer.
	probeMin   = 100 * time.Millisecond
	probeMax   = 2 * time.Second
	probeBound = time.Second
)

// protection is whether work is protected. It reports each change.
type protection struct {
	// report is called with mu held, which keeps its calls in order.
	report func(error)

	// unavailable is why the daemon is unavailable, nil when it is available. It is
	// atomic because every announcement reads it.
	unavailable atomic.Pointer[error]
	// unprotected is whether the last call of report had an error.
	unprotected atomic.Bool

	mu      sync.Mutex // guards changes of the fields above, and refused
	refused time.Time  // when an announcement was last refused
}

// unreachable returns why the daemon is unavailable, or nil.
func (p *protection) unreachable() error {
	if err := p.unavailable.Load(); err != nil {
		return *err
	}
	return nil
}

// lost is called when work runs unprotected because of err. It reports whether the
// caller must start a probe for the daemon.
func (p *protection) lost(err error, unavailable bool) (probe bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = time.Now()
	if unavailable && p.unavailable.Load() == nil {
		p.unavailable.Store(&err)
		probe = true
	}
	if !p.unprotected.Swap(true) {
		p.report(err)
	}
	return probe
}

// granted is called when the daemon has granted a lease.
func (p *protection) granted() {
	if !p.unprotected.Load() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// While the daemon is unavailable this is the answer to an earlier request, and the
	// probe decides.
	if p.unprotected.Load() && p.unavailable.Load() == nil && time.Since(p.refused) >= settle {
		p.unprotected.Store(false)
		p.report(nil)
	}
}

// found is called when the daemon answers again.
func (p *protection) found() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unavailable.Store(nil)
	p.unprotected.Store(false)
	p.report(nil)
}

// probe checks the daemon until it answers or the client is closed.
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
			c.protection.found()
			return
		}
	}
}

// connected waits for a connection. It returns false when the client is closed.
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

// answers reports whether the daemon serves. A daemon that refuses the health check, or
// does not implement it, counts as serving.
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
