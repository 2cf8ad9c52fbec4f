package testutil

import (
	"context"
	"net"
	"sync"
	"testing"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
)

// Collector is an OpenTelemetry collector that keeps the spans it receives.
type Collector struct {
	coltracepb.UnimplementedTraceServiceServer

	mu     sync.Mutex // guards all below
	spans  []*tracepb.Span
	refuse error
	wake   chan struct{} // closed and replaced with each message
}

// StartCollector serves a Collector on a listener until the test ends.
func StartCollector(tb testing.TB, l net.Listener) *Collector {
	tb.Helper()
	c := &Collector{wake: make(chan struct{})}
	s := grpc.NewServer()
	coltracepb.RegisterTraceServiceServer(s, c)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	tb.Cleanup(func() {
		s.Stop()
		if err := <-ended; err != nil {
			tb.Errorf("the collector: %v", err)
		}
	})
	return c
}

// Export keeps the spans.
func (c *Collector) Export(_ context.Context, req *coltracepb.ExportTraceServiceRequest) (*coltracepb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.wake)
	c.wake = make(chan struct{})
	if c.refuse != nil {
		return nil, c.refuse
	}
	for _, r := range req.GetResourceSpans() {
		for _, s := range r.GetScopeSpans() {
			c.spans = append(c.spans, s.GetSpans()...)
		}
	}
	return &coltracepb.ExportTraceServiceResponse{}, nil
}

// Refuse makes the collector answer every message with an error, or if it is nil with
// success.
func (c *Collector) Refuse(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refuse = err
}

// Await waits until n spans have arrived for which keep returns true, and returns them by
// name, in the order of arrival.
func (c *Collector) Await(ctx context.Context, tb testing.TB, n int, keep func(*tracepb.Span) bool) map[string][]*tracepb.Span {
	tb.Helper()
	for {
		c.mu.Lock()
		got, seen := map[string][]*tracepb.Span{}, 0
		for _, s := range c.spans {
			if keep(s) {
				got[s.GetName()] = append(got[s.GetName()], s)
				seen++
			}
		}
		wake := c.wake
		c.mu.Unlock()
		if seen >= n {
			return got
		}
		select {
		case <-wake:
		case <-ctx.Done():
			tb.Fatalf("%d spans, want %d: %v", seen, n, got)
		}
	}
}
