package server

import (
	"context"
	"strings"

	"google.golang.org/grpc/metadata"

	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Lengths of W3C Trace Context: of a traceparent of version 00, and the longest
// tracestate that must be propagated.
const (
	traceparentBytes = 55
	tracestateBytes  = 512
)

// traceContext returns the trace context in the metadata of a call; nil when there is no
// valid one. It is copied into the event log, so its size and its bytes are checked.
func traceContext(ctx context.Context) *scheduler.TraceContext {
	parent := metadata.ValueFromIncomingContext(ctx, "traceparent")
	if len(parent) == 0 || len(parent[0]) != traceparentBytes || strings.Trim(parent[0], "0123456789abcdef-") != "" {
		return nil
	}
	t := &scheduler.TraceContext{Parent: parent[0]}
	state := metadata.ValueFromIncomingContext(ctx, "tracestate")
	if len(state) > 0 && len(state[0]) <= tracestateBytes && !strings.ContainsFunc(state[0], func(r rune) bool { return r < ' ' || r > '~' }) {
		t.State = state[0]
	}
	return t
}
