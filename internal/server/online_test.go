package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
	goclient "github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func byID(id gpreempt.GPUID) *gpreemptv1.GpuSelector {
	return &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_GpuId{GpuId: uint32(id)}}
}

func TestAnnouncementSuspendsAndCompleteResumes(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	got, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(gpuA)}, Label: "llm"})
	if err != nil {
		t.Fatal(err)
	}
	timing := got.GetTiming()
	if timing.GetQuiesce().AsDuration() <= 0 || timing.GetDecide() == nil || timing.GetTotal().AsDuration() < timing.GetQuiesce().AsDuration() {
		t.Errorf("timing %v: want quiesce, and a total of at least that", timing)
	}
	got.Timing = nil
	if diff := cmp.Diff(&gpreemptv1.NotifyOnlineResponse{
		LeaseId: "000000000000feed-1", Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE, SuspendedTargets: 1,
		GpuIds: []uint32{uint32(gpuA)}, Ttl: durationpb.New(defaultTTL),
	}, got, protocmp.Transform()); diff != "" {
		t.Errorf("response (-want +got):\n%s", diff)
	}
	done, err := online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: got.GetLeaseId()})
	if err != nil {
		t.Fatal(err)
	}
	if done.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED || done.GetHeld().AsDuration() <= 0 || done.GetTiming().GetTotal() == nil {
		t.Errorf("completed: %v; want COMPLETED with the time held and a timing", done)
	}
	again, err := online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: got.GetLeaseId()})
	if err != nil || again.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED {
		t.Errorf("the second Complete: %v, %v; want the same end", again, err)
	}
	h.until(t, "the target to run", func() bool {
		state, _ := h.server.targetState(offline)
		return state == scheduler.TargetRunning
	})
	if got, want := h.events.Stats().Announcements, uint64(1); got != want {
		t.Errorf("%d announcements counted, want %d", got, want)
	}
}

func TestInvalidAnnouncementsAreRefusedWithAReason(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	for _, tc := range []struct {
		name string
		req  *gpreemptv1.NotifyOnlineRequest
		want gpreempt.Reason
	}{
		{"unknown gpu id", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(gpuA), byID(7)}}, gpreempt.ReasonUnknownGPU},
		{"gpu id 0", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(0)}}, gpreempt.ReasonUnknownGPU},
		{"empty selector", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{{}}}, gpreempt.ReasonUnknownGPU},
		{"not all", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_All{}}}}, gpreempt.ReasonUnknownGPU},
		{"unknown node", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_Node{Node: 0}}}}, gpreempt.ReasonUnknownGPU},
		{"invalid address", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_Bdf{Bdf: "a"}}}}, gpreempt.ReasonUnknownGPU},
		{"address in another domain", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_Bdf{Bdf: "80:00.0"}}}}, gpreempt.ReasonUnknownGPU},
		{"render minor 0", &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_RenderMinor{}}}}, gpreempt.ReasonUnknownGPU},
		{"priority of an admin", &gpreemptv1.NotifyOnlineRequest{Priority: proto.Uint32(16)}, gpreempt.ReasonPriorityRange},
		{"priority beyond a byte", &gpreemptv1.NotifyOnlineRequest{Priority: proto.Uint32(256 + 3)}, gpreempt.ReasonPriorityRange},
		{"ttl 0", &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(0)}, gpreempt.ReasonTTLRange},
		{"negative ttl", &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(-1)}, gpreempt.ReasonTTLRange},
		{"ttl above max_ttl", &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute + 1)}, gpreempt.ReasonTTLRange},
		{"huge ttl", &gpreemptv1.NotifyOnlineRequest{Ttl: &durationpb.Duration{Seconds: 315_576_000_000}}, gpreempt.ReasonTTLRange},
		{"ttl of two signs", &gpreemptv1.NotifyOnlineRequest{Ttl: &durationpb.Duration{Seconds: 1, Nanos: -1}}, gpreempt.ReasonTTLRange},
		{"negative max_wait", &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(-1)}, gpreempt.ReasonDurationRange},
		{"long max_wait", &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(10*time.Second + 1)}, gpreempt.ReasonDurationRange},
		{"long eta", &gpreemptv1.NotifyOnlineRequest{Eta: durationpb.New(time.Minute + 1)}, gpreempt.ReasonDurationRange},
		{"invalid eta", &gpreemptv1.NotifyOnlineRequest{Eta: &durationpb.Duration{Nanos: 2e9}}, gpreempt.ReasonDurationRange},
		{"long request id", &gpreemptv1.NotifyOnlineRequest{RequestId: strings.Repeat("x", 65)}, gpreempt.ReasonRequestIDTooLong},
		{"long label", &gpreemptv1.NotifyOnlineRequest{Label: strings.Repeat("x", 129)}, gpreempt.ReasonLabelTooLong},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := online.NotifyOnline(t.Context(), tc.req)
			want(t, err, gpreempt.CodeInvalidArgument, tc.want)
		})
	}
	if got := h.leases(); len(got) > 0 {
		t.Errorf("refused announcements left leases: %v", got)
	}
}

func TestGPUsAreSelectedByEachOfTheirNames(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	for _, tc := range []struct {
		name string
		gpus []*gpreemptv1.GpuSelector
		want []uint32
	}{
		{"none: all", nil, []uint32{100, 200}},
		{"gpu_id", []*gpreemptv1.GpuSelector{byID(gpuB)}, []uint32{200}},
		{"node", []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_Node{Node: 3}}}, []uint32{200}},
		{"short bdf", []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_Bdf{Bdf: "0A:00.0"}}}, []uint32{100}},
		{"long bdf", []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_Bdf{Bdf: "0001:80:00.0"}}}, []uint32{200}},
		{"render minor", []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_RenderMinor{RenderMinor: 128}}}, []uint32{100}},
		{"all", []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_All{All: true}}}, []uint32{100, 200}},
		{"one twice, out of order", []*gpreemptv1.GpuSelector{byID(gpuB), byID(gpuA), {By: &gpreemptv1.GpuSelector_Node{Node: 3}}}, []uint32{100, 200}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Gpus: tc.gpus})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, r.GetGpuIds()); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWithoutSelectorsALeaseCoversTheGPUsOfTheCallersQueues(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	announce := func() []uint32 {
		r, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(0)})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetGpuIds()
	}
	before := announce()
	self := gpreempt.ProcessKey(h.clients()[0])
	h.setProcs(discovery.Proc{
		Process: gpreempt.Process{Key: self}, Queues: []gpreempt.Queue{{Process: self, GPU: gpuB, Type: gpreempt.QueueCompute}},
	})
	after := announce()
	if diff := cmp.Diff([][]uint32{{100, 200}, {200}}, [][]uint32{before, after}); diff != "" {
		t.Errorf("GPUs before and after the caller has a queue (-want +got):\n%s", diff)
	}
}

func TestRetryWithARequestIDReturnsTheSameLease(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	req := &gpreemptv1.NotifyOnlineRequest{RequestId: "r1", Ttl: durationpb.New(time.Minute)}
	first, err := online.NotifyOnline(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	second, err := h.online(t).NotifyOnline(t.Context(), req) // over another connection
	if err != nil {
		t.Fatal(err)
	}
	if first.GetLeaseId() != second.GetLeaseId() || len(h.leases()) != 1 {
		t.Errorf("leases %s and %s, %d live: want one", first.GetLeaseId(), second.GetLeaseId(), len(h.leases()))
	}
	if got := h.events.Stats().Announcements; got != 1 {
		t.Errorf("%d announcements counted, want 1", got)
	}
	req.Label, req.Priority = "other", proto.Uint32(3)
	_, err = online.NotifyOnline(t.Context(), req)
	want(t, err, gpreempt.CodeAlreadyExists, gpreempt.ReasonRequestIDReused)
}

func TestUnknownLeases(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	for _, tc := range []struct{ name, id, says string }{
		{"never granted", "000000000000feed-99", "no such lease"},
		{"of an earlier run", "000000000000beef-1", "ended when the daemon restarted"},
		{"empty", "", "invalid lease ID"},
		{"no digits", "000000000000feed-", "invalid lease ID"},
		{"leading zero", "000000000000feed-01", "invalid lease ID"},
		{"sign", "000000000000feed-+1", "invalid lease ID"},
		{"too large", "000000000000feed-99999999999999999999999", "invalid lease ID"},
		{"upper case", "000000000000FEED-1", "invalid lease ID"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: tc.id})
			want(t, err, gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease)
			if !strings.Contains(fmt.Sprint(err), tc.says) {
				t.Errorf("%v; want it to say %q", err, tc.says)
			}
			_, err = online.Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: tc.id})
			want(t, err, gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease)
		})
	}
}

func TestRenewSetsANewTimeToLive(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	r, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(30 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	renewed, err := online.Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: r.GetLeaseId(), Ttl: durationpb.New(time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	left := h.leases()[0].Expires - h.runner.Now()
	if renewed.GetTtl().AsDuration() != time.Minute || left < 50*time.Second {
		t.Errorf("renewed for %v with %v left, want 1m", renewed.GetTtl().AsDuration(), left)
	}
	renewed, err = online.Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: r.GetLeaseId()})
	if err != nil || renewed.GetTtl().AsDuration() != defaultTTL {
		t.Errorf("renewed without ttl: %v, %v; want default_ttl", renewed, err)
	}
	for _, ttl := range []*durationpb.Duration{durationpb.New(0), durationpb.New(-1), durationpb.New(time.Hour), {Seconds: 1, Nanos: -1}} {
		_, err = online.Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: r.GetLeaseId(), Ttl: ttl})
		want(t, err, gpreempt.CodeInvalidArgument, gpreempt.ReasonTTLRange)
	}
	if _, err := online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: r.GetLeaseId()}); err != nil {
		t.Fatal(err)
	}
	_, err = online.Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: r.GetLeaseId()})
	want(t, err, gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease)
}

func TestLeaseMayBeCompletedOverAnotherConnectionOfTheProcess(t *testing.T) {
	h := startHost(t)
	r, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{})
	if err != nil {
		t.Fatal(err)
	}
	done, err := h.online(t).Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: r.GetLeaseId()})
	if err != nil || done.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED {
		t.Errorf("Complete over another connection: %v, %v", done, err)
	}
}

func TestAnotherProcessCannotEndALease(t *testing.T) {
	h := startHost(t)
	r, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	c := h.startChild(t)
	got := []string{c.do(t, "complete "+r.GetLeaseId()), c.do(t, "renew "+r.GetLeaseId())}
	if diff := cmp.Diff([]string{"FOREIGN_LEASE", "FOREIGN_LEASE"}, got); diff != "" {
		t.Errorf("another process (-want +got):\n%s", diff)
	}
	if len(h.leases()) != 1 {
		t.Error("the lease has ended")
	}
}

func TestLeasesEndWithTheirConnection(t *testing.T) {
	h := startHost(t)
	staying, leaving := h.dial(t), h.dial(t)
	var leases []string
	for _, c := range []gpreemptv1.OnlineServiceClient{gpreemptv1.NewOnlineServiceClient(staying), gpreemptv1.NewOnlineServiceClient(leaving)} {
		r, err := c.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})
		if err != nil {
			t.Fatal(err)
		}
		leases = append(leases, r.GetLeaseId())
	}
	_ = leaving.Close()
	if end := h.ended(t, leases[1]); end != scheduler.EndDisconnected {
		t.Errorf("its lease ended as %v, want disconnected", end)
	}
	if got := h.leases(); len(got) != 1 || leaseID(h.server.leasePrefix, got[0].ID) != leases[0] {
		t.Errorf("live leases %v, want only that of the other connection", got)
	}
	// The process is the same client, so Complete returns how its lease ended.
	done, err := gpreemptv1.NewOnlineServiceClient(staying).Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: leases[1]})
	if err != nil || done.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_DISCONNECTED {
		t.Errorf("Complete of the ended lease: %v, %v", done, err)
	}
	_ = staying.Close()
	if end := h.ended(t, leases[0]); end != scheduler.EndDisconnected {
		t.Errorf("the last lease ended as %v, want disconnected", end)
	}
	done, err = h.online(t).Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: leases[0]})
	if err != nil || done.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_DISCONNECTED {
		t.Errorf("Complete after reconnecting: %v, %v", done, err)
	}
}

// TestAnnouncementThatOutlivesItsConnectionLeavesNoLease makes a call reach the
// scheduler after its connection and that connection's leases have ended.
func TestAnnouncementThatOutlivesItsConnectionLeavesNoLease(t *testing.T) {
	h := startHost(t)
	conn := h.dial(t)
	if _, err := gpreemptv1.NewOnlineServiceClient(conn).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{}); err != nil {
		t.Fatal(err)
	}
	caller := h.anyConnection()
	_ = conn.Close()
	h.server.clients.wait()
	_, err := onlineService{s: h.server}.NotifyOnline(withCaller(t.Context(), caller), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})
	if !errors.Is(err, context.Canceled) || len(h.leases()) > 0 {
		t.Errorf("error %v, live leases %v; want canceled and none", err, h.leases())
	}
}

func TestLeasesEndAtOnceWhenTheProcessDies(t *testing.T) {
	h := startHost(t)
	c := h.startChild(t)
	lease := c.do(t, "announce")
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if end := h.ended(t, lease); end != scheduler.EndClientDied {
		t.Errorf("the lease ended as %v, want client-died", end)
	}
}

func TestCanceledAnnouncementLeavesNoLease(t *testing.T) {
	h := startHost(t)
	h.machine.freeze()
	defer h.machine.thaw()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	online := h.online(t)
	go func() {
		_, err := online.NotifyOnline(ctx, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})
		failed <- err
	}()
	h.until(t, "the lease", func() bool { return len(h.leases()) == 1 })
	cancel()
	if err := testutil.Receive(t, failed, "the end of the call"); !errors.Is(goclient.FromStatus(err), context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	h.until(t, "the end of the lease", func() bool { return len(h.leases()) == 0 })
}

func TestRetryKeepsTheLeaseOfACanceledCall(t *testing.T) {
	h := startHost(t)
	h.machine.freeze()
	c := newClient(scheduler.ClientID{PID: 77}, auth.Process{}, nil)
	req := scheduler.LeaseRequested{
		Client: c.id, RequestID: "r1", GPUs: []gpreempt.GPUID{gpuA}, Priority: 11, TTL: time.Minute, MaxWait: 10 * time.Second,
	}
	type outcome struct {
		*gpreemptv1.NotifyOnlineResponse
		err error
	}
	// call announces like a unary call of a new connection, and returns when the lease is
	// granted and the call waits.
	call := func(ctx context.Context) <-chan outcome {
		waits, over := make(chan struct{}), make(chan outcome, 1)
		go func() {
			a := &announcement{LeaseRequested: req, client: c, note: leaseNote{scope: &scope{}}}
			answer, err := h.server.announce(ctx, a, func() { close(waits) })
			over <- outcome{answer, err}
		}()
		testutil.Receive(t, waits, "the call waits")
		return over
	}
	ctx, cancel := context.WithCancel(t.Context())
	first := call(ctx)
	retry := call(t.Context())
	cancel()
	if got := testutil.Receive(t, first, "the end of the first"); !errors.Is(got.err, context.Canceled) {
		t.Errorf("the canceled call: %v", got.err)
	}
	h.machine.thaw()
	if got := testutil.Receive(t, retry, "the end of the second"); got.err != nil || !got.GetQuiesced() || len(h.leases()) != 1 {
		t.Errorf("the retry returned %+v with %d live leases, want quiet GPUs and the one lease", got, len(h.leases()))
	}
}

func TestNotesOfExpiredLeasesAreDeleted(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	for range 500 {
		if _, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Nanosecond)}); err != nil {
			t.Fatal(err)
		}
	}
	c := h.server.clients.byClient(h.clients()[0])
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.leases) > minPrune {
		t.Errorf("%d notes of leases after 500 expired, want at most %d", len(c.leases), minPrune)
	}
}

func TestAnnouncementsAboveTheLimitAreRefused(t *testing.T) {
	const limit = 10_000
	h := startHost(t, func(_ *Config, l *scheduler.Limits) {
		l.LeasesPerClient, l.LeasesPerUser, l.LeasesTotal = limit, limit+2, 11_112
	})
	req := &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(0), Gpus: []*gpreemptv1.GpuSelector{byID(gpuA)}}
	c := h.session(t)
	go func() {
		for tag := range uint64(limit) {
			_ = c.stream.Send(announceFrame(tag, req)) // an error shows below
		}
	}()
	for range limit {
		if r := c.recv(); r.GetAnnounced() == nil {
			t.Fatalf("refused below the limit: %v", r)
		}
	}
	_, err := h.online(t).NotifyOnline(t.Context(), req)
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonLeasesPerClient)
	if got := h.startChild(t).do(t, "announce"); !strings.HasPrefix(got, h.server.leasePrefix) {
		t.Errorf("another client gets %q, want a lease", got)
	}
	if got := h.startChild(t).do(t, "announce"); !strings.Contains(got, string(gpreempt.ReasonLeasesTotal)) {
		t.Errorf("a client above the total gets %q, want LEASES_TOTAL", got)
	}
	if _, err = h.admin(t).CreateLease(t.Context(), &gpreemptv1.CreateLeaseRequest{Announce: req}); err != nil {
		t.Errorf("an admin, when the clients have all leases: %v", err)
	}
	if err := c.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.stream.Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if got := len(h.leases()); got != 2 {
		t.Errorf("%d leases after the stream ended, want the other client's and the admin's", got)
	}
}
