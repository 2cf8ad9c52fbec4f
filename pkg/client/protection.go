package client

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Bounds of what is known of protection.
const (
	// settle is how long no announcement may have been refused before protection
	// counts as back: under overload some are refused and some are not.
	settle = time.Second
	// maxFailing bounds the GPUs of which it is remembered that they were refused.
	maxFailing = 64
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

	mu sync.Mutex // guards all below
	// unavailable is why the daemon is unavailable, nil when it is available.
	unavailable error
	// failing is what runs unprotected: "" is all work, others are the GPUs that a request names.
	failing map[string]failure
}

// failure is the last refusal, and when it was.
type failure struct {
	reason gpreempt.Reason
	at     time.Time
}

// unreachable returns why the daemon is unavailable, or nil.
func (p *protection) unreachable() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unavailable
}

// lost is called when work on some GPUs runs unprotected. It reports whether the
// caller must start a probe for the daemon.
func (p *protection) lost(gpus []*gpreemptv1.GpuSelector, refusal *gpreempt.Error) (probe bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if refusal.Code == gpreempt.CodeUnavailable && p.unavailable == nil {
		p.unavailable, probe = refusal, true
	}
	of := ""
	if refusal.Code == gpreempt.CodeInvalidArgument {
		of = fmt.Sprint(gpus) // the others are not concerned
	}
	last, known := p.failing[of]
	if p.failing == nil || len(p.failing) >= maxFailing {
		p.failing = make(map[string]failure)
	}
	p.failing[of] = failure{refusal.Reason, time.Now()}
	// A refusal that will be repeated is reported when its reason is another, any other once
	// until protection is back.
	if !known || !temporary(refusal) && last.reason != refusal.Reason {
		p.report(refusal)
	}
	return probe
}

// granted is called when the daemon has granted a lease for some GPUs.
func (p *protection) granted(gpus []*gpreemptv1.GpuSelector) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// While the daemon is unavailable this is the answer to an earlier request, and the
	// probe decides.
	if len(p.failing) == 0 || p.unavailable != nil {
		return
	}
	for _, of := range []string{"", fmt.Sprint(gpus)} {
		if f, ok := p.failing[of]; ok && time.Since(f.at) >= settle {
			p.back(of)
		}
	}
}

// found is called when the daemon answers again.
func (p *protection) found() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unavailable = nil
	p.back("")
}

func (p *protection) back(of string) {
	delete(p.failing, of)
	if len(p.failing) == 0 {
		p.report(nil)
	}
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
