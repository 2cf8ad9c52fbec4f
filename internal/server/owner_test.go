package server

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// TestLeaseSuspendsNeitherItsOwnerNorItsDescendants announces from this process, which is offline
// like a process that it has started, by a unary call and by a stream.
func TestLeaseSuspendsNeitherItsOwnerNorItsDescendants(t *testing.T) {
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		t.Fatal(err)
	}
	self, worker := gpreempt.ProcessKey{PID: stat.PID, Start: stat.Start}, gpreempt.ProcessKey{PID: 4_000_003, Start: 33}
	h := startHost(t)
	for key, kin := range map[gpreempt.ProcessKey][]gpreempt.ProcessKey{self: nil, worker: {self}} {
		h.runner.Post(scheduler.TargetSeen{Target: key, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{gpuA}, Kin: kin, Queues: 1})
		h.runner.Post(scheduler.Attached{Target: key})
	}
	request := &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(gpuA)}}
	want := &gpreemptv1.NotifyOnlineResponse{Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE, SuspendedTargets: 1, OwnerOffline: true}
	check := func(got *gpreemptv1.NotifyOnlineResponse) {
		t.Helper()
		if diff := cmp.Diff(want, got, protocmp.Transform(), protocmp.IgnoreFields(got, "lease_id", "ttl", "gpu_ids", "timing")); diff != "" {
			t.Errorf("the answer (-want +got):\n%s", diff)
		}
		states := map[gpreempt.ProcessKey]scheduler.TargetState{}
		for _, key := range []gpreempt.ProcessKey{self, worker, offline} {
			states[key], _ = h.server.targetState(key)
		}
		all := map[gpreempt.ProcessKey]scheduler.TargetState{self: scheduler.TargetRunning, worker: scheduler.TargetRunning, offline: scheduler.TargetSuspended}
		if diff := cmp.Diff(all, states); diff != "" {
			t.Errorf("states during the lease (-want +got):\n%s", diff)
		}
	}
	online := h.online(t)
	answer, err := online.NotifyOnline(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	check(answer)
	stream, err := online.Session(testutil.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&gpreemptv1.SessionRequest{Frame: &gpreemptv1.SessionRequest_Announce{Announce: request}}); err != nil {
		t.Fatal(err)
	}
	frame, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	check(frame.GetAnnounced())

	// The lease of an admin is nobody's.
	created, err := h.admin(t).CreateLease(t.Context(), &gpreemptv1.CreateLeaseRequest{Announce: request})
	if err != nil {
		t.Fatal(err)
	}
	if got := created.GetAnnounced(); !got.GetQuiesced() || got.GetSuspendedTargets() != 3 || got.GetOwnerOffline() {
		t.Errorf("the answer to an admin: %v; want all 3 targets suspended", got)
	}
}
