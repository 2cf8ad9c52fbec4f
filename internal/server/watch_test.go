package server

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// step has the main fields of a WatchQueues response.
type step struct {
	Revision uint64
	Change   string
	Pid      int32
	Queue    uint32
	State    string
}

func queueStep(r *gpreemptv1.WatchQueuesResponse) step {
	return step{
		r.GetRevision(), r.GetChange().String()[len("QUEUE_CHANGE_"):], r.GetQueue().GetPid(), r.GetQueue().GetQueueId(),
		r.GetQueue().GetState().String()[len("TARGET_STATE_"):],
	}
}

func recvSteps(t *testing.T, st grpc.ServerStreamingClient[gpreemptv1.WatchQueuesResponse], n int) []step {
	t.Helper()
	var steps []step
	for range n {
		r, err := st.Recv()
		if err != nil {
			t.Fatalf("after %v: %v", steps, err)
		}
		steps = append(steps, queueStep(r))
	}
	return steps
}

func TestWatchQueuesSendsEachKindOfChange(t *testing.T) {
	h := startHost(t)
	st, err := h.admin(t).WatchQueues(testutil.Context(t), &gpreemptv1.WatchQueuesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	got := recvSteps(t, st, 3)
	h.setProcs(h.procs[0], discovery.Proc{Process: h.procs[1].Process, Queues: []gpreempt.Queue{
		h.procs[1].Queues[0], {Process: other, ID: 5, GPU: gpuA, Type: gpreempt.QueueCompute},
	}})
	got = append(got, recvSteps(t, st, 1)...)
	h.setProcs(h.procs[0])
	got = append(got, recvSteps(t, st, 2)...)
	if diff := cmp.Diff([]step{
		{3, "ADDED", offline.PID, 0, "RUNNING"},
		{3, "ADDED", offline.PID, 1, "RUNNING"},
		{3, "ADDED", other.PID, 0, "RUNNING"},
		{4, "ADDED", other.PID, 5, "RUNNING"},
		{5, "REMOVED", other.PID, 0, "GONE"},
		{6, "REMOVED", other.PID, 5, "GONE"},
	}, got); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

func TestWatchQueuesContinuesFromARevision(t *testing.T) {
	h := startHost(t)
	st, err := h.admin(t).WatchQueues(testutil.Context(t), &gpreemptv1.WatchQueuesRequest{AfterRevision: 2})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]step{{3, "ADDED", other.PID, 0, "RUNNING"}}, recvSteps(t, st, 1)); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	st, err = h.admin(t).WatchQueues(testutil.Context(t), &gpreemptv1.WatchQueuesRequest{AfterRevision: 99})
	if err == nil {
		_, err = st.Recv()
	}
	want(t, err, gpreempt.CodeOutOfRange, gpreempt.ReasonRevisionCompacted)
}

func TestWatchEvents(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	h.runner.Post(scheduler.Drain{On: true})
	h.runner.Post(scheduler.Drain{On: false})
	last := h.events.Revision()
	// read returns the revisions of a stream with no_follow.
	read := func(req *gpreemptv1.WatchEventsRequest) (revisions []uint64) {
		t.Helper()
		req.NoFollow = true
		st, err := admin.WatchEvents(testutil.Context(t), req)
		if err != nil {
			t.Fatal(err)
		}
		for {
			r, err := st.Recv()
			if errors.Is(err, io.EOF) {
				return revisions
			}
			if err != nil {
				t.Fatal(err)
			}
			revisions = append(revisions, r.GetEvent().GetRevision())
		}
	}
	got := [][]uint64{
		read(&gpreemptv1.WatchEventsRequest{}), read(&gpreemptv1.WatchEventsRequest{FromStart: true}),
		read(&gpreemptv1.WatchEventsRequest{AfterRevision: last - 1}),
	}
	if diff := cmp.Diff([][]uint64{nil, {1, 2, 3, 4}, {4}}, got); diff != "" {
		t.Errorf("revisions from now, from the start, from the last (-want +got):\n%s", diff)
	}
	st, err := admin.WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{AfterRevision: last})
	if err != nil {
		t.Fatal(err)
	}
	h.runner.Post(scheduler.Drain{On: true})
	r, err := st.Recv()
	if err != nil || r.GetEvent().GetRevision() != last+1 || r.GetEvent().GetKind() != gpreemptv1.EventKind_EVENT_KIND_DRAIN {
		t.Errorf("followed: %v, %v; want the drain", r, err)
	}
	st, err = admin.WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{AfterRevision: 1 << 40})
	if err == nil {
		_, err = st.Recv()
	}
	want(t, err, gpreempt.CodeOutOfRange, gpreempt.ReasonRevisionCompacted)
}

// slow is a stream that is not read while more changes than are kept.
type slow[M any] struct {
	grpc.ServerStreamingServer[M]
	t      *testing.T
	behind func()
}

func (s *slow[M]) Context() context.Context {
	return withCaller(s.t.Context(), &connection{rights: auth.Read})
}

func (s *slow[M]) SetHeader(metadata.MD) error { return nil }

func (s *slow[M]) Send(*M) error {
	if s.behind != nil {
		s.behind()
		s.behind = nil
	}
	return nil
}

func TestSlowReaderGetsAnError(t *testing.T) {
	h := startHost(t)
	admin := adminService{s: h.server}
	err := admin.WatchEvents(&gpreemptv1.WatchEventsRequest{FromStart: true}, &slow[gpreemptv1.WatchEventsResponse]{t: t, behind: func() {
		for i := range 2000 {
			h.runner.Post(scheduler.Drain{On: i%2 == 0})
		}
	}})
	if got := gpreempt.ReasonOf(err); got != gpreempt.ReasonSlowReader {
		t.Errorf("events: %v, want SLOW_READER", err)
	}
	err = admin.WatchQueues(&gpreemptv1.WatchQueuesRequest{}, &slow[gpreemptv1.WatchQueuesResponse]{t: t, behind: func() {
		procs := h.procs
		for range inventory.ReadChunk * 5 {
			h.setProcs(procs[0])
			h.setProcs(procs...)
		}
	}})
	if got := gpreempt.ReasonOf(err); got != gpreempt.ReasonSlowReader {
		t.Errorf("queues: %v, want SLOW_READER", err)
	}
}
