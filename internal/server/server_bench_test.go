package server

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/targets"
)

// BenchmarkHandlers measures an announcement and its Complete without gRPC: the cost and
// allocations of the server's own code. test/bench measures the whole call.
func BenchmarkHandlers(b *testing.B) {
	h := startHost(b)
	h.directory.mu.Lock()
	h.directory.set(offline, targets.Facts{})
	h.directory.mu.Unlock()
	req := &gpreemptv1.NotifyOnlineRequest{
		Gpus: []*gpreemptv1.GpuSelector{byID(gpuB)}, Ttl: durationpb.New(50 * time.Millisecond), Label: "llama",
	}
	if _, err := h.online(b).NotifyOnline(b.Context(), req); err != nil {
		b.Fatal(err)
	}
	ctx, online := withCaller(b.Context(), h.anyConnection()), onlineService{s: h.server}
	complete := &gpreemptv1.CompleteRequest{}
	b.ReportAllocs()
	for b.Loop() {
		r, err := online.NotifyOnline(ctx, req)
		if err != nil {
			b.Fatal(err)
		}
		complete.LeaseId = r.GetLeaseId()
		if _, err := online.Complete(ctx, complete); err != nil {
			b.Fatal(err)
		}
	}
}
