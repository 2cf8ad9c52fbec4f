package server

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/metadata"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestOnlyValidTraceContextIsKept(t *testing.T) {
	for i, tc := range []struct {
		headers []string
		want    *scheduler.TraceContext
	}{
		{nil, nil},
		{[]string{"tracestate", "vendor=1"}, nil},
		{[]string{"traceparent", parent}, &scheduler.TraceContext{Parent: parent}},
		{[]string{"traceparent", parent, "tracestate", "vendor=1"}, &scheduler.TraceContext{Parent: parent, State: "vendor=1"}},
		{[]string{"traceparent", parent, "tracestate", strings.Repeat("a", 513)}, &scheduler.TraceContext{Parent: parent}},
		{[]string{"traceparent", parent, "tracestate", "vendor=\xff"}, &scheduler.TraceContext{Parent: parent}},
		{[]string{"traceparent", parent, "tracestate", "vendor=\x1b"}, &scheduler.TraceContext{Parent: parent}},
		{[]string{"traceparent", parent + "0"}, nil},
		{[]string{"traceparent", strings.ToUpper(parent)}, nil},
		{[]string{"traceparent", strings.Repeat("\xff", len(parent))}, nil},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(tc.headers...))
			if diff := cmp.Diff(tc.want, traceContext(ctx)); diff != "" {
				t.Errorf("%q (-want +got):\n%s", tc.headers, diff)
			}
		})
	}
}

func TestTheEventOfAnAnnouncementHasTheClientsTraceContext(t *testing.T) {
	h := startHost(t)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", parent, "tracestate", "vendor=1")
	called, err := h.online(t).NotifyOnline(ctx, minute(gpuA))
	if err != nil {
		t.Fatal(err)
	}
	session, err := h.online(t).Session(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := session.Send(&gpreemptv1.SessionRequest{Tag: 1, Frame: &gpreemptv1.SessionRequest_Announce{Announce: minute(gpuA)}}); err != nil {
		t.Fatal(err)
	}
	streamed, err := session.Recv()
	if err != nil {
		t.Fatal(err)
	}
	events, err := h.admin(t).WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{FromStart: true, NoFollow: true})
	if err != nil {
		t.Fatal(err)
	}
	contexts := map[string]string{}
	for resp, err := events.Recv(); err == nil; resp, err = events.Recv() {
		if e := resp.GetEvent(); e.GetTrace() != nil {
			contexts[e.GetLeaseId()] += fmt.Sprint(e.GetToLease(), " ", e.GetTrace().GetTraceparent(), " ", e.GetTrace().GetTracestate(), " ", e.GetTook().AsDuration() > 0)
		}
	}
	want := "LEASE_STATE_REQUESTED " + parent + " vendor=1 true"
	if diff := cmp.Diff(map[string]string{called.GetLeaseId(): want, streamed.GetAnnounced().GetLeaseId(): want}, contexts); diff != "" {
		t.Errorf("contexts by lease (-want +got):\n%s", diff)
	}
}

func TestTheEventOfAnAnnouncementHasItsGPUs(t *testing.T) {
	h := startHost(t)
	called, err := h.online(t).NotifyOnline(t.Context(), minute(gpuA))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.online(t).Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: called.GetLeaseId()}); err != nil {
		t.Fatal(err)
	}
	events, err := h.admin(t).WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{FromStart: true, NoFollow: true})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]uint32{}
	for resp, err := events.Recv(); err == nil; resp, err = events.Recv() {
		if e := resp.GetEvent(); e.GetLeaseId() == called.GetLeaseId() && e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_LEASE {
			got[e.GetFromLease().String()] = e.GetGpuIds()
		}
	}
	want := map[string][]uint32{"LEASE_STATE_UNSPECIFIED": {uint32(gpuA)}, "LEASE_STATE_REQUESTED": nil, "LEASE_STATE_QUIESCING": nil, "LEASE_STATE_HELD": nil}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("GPUs by the state before (-want +got):\n%s", diff)
	}
}
