package server

import (
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func announceFrame(tag uint64, req *gpreemptv1.NotifyOnlineRequest) *gpreemptv1.SessionRequest {
	return &gpreemptv1.SessionRequest{Tag: tag, Frame: &gpreemptv1.SessionRequest_Announce{Announce: req}}
}

func completeFrame(tag uint64, lease string) *gpreemptv1.SessionRequest {
	return &gpreemptv1.SessionRequest{Tag: tag, Frame: &gpreemptv1.SessionRequest_Complete{Complete: &gpreemptv1.CompleteRequest{LeaseId: lease}}}
}

// conversation is a Session stream from the client's side.
type conversation struct {
	t      *testing.T
	stream gpreemptv1.OnlineService_SessionClient
}

func (h *host) session(t *testing.T) conversation {
	t.Helper()
	st, err := h.online(t).Session(testutil.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return conversation{t, st}
}

func (c conversation) send(req *gpreemptv1.SessionRequest) {
	c.t.Helper()
	if err := c.stream.Send(req); err != nil {
		c.t.Fatal(err)
	}
}

func (c conversation) recv() *gpreemptv1.SessionResponse {
	c.t.Helper()
	r, err := c.stream.Recv()
	if err != nil {
		c.t.Fatal(err)
	}
	return r
}

func (c conversation) do(req *gpreemptv1.SessionRequest) *gpreemptv1.SessionResponse {
	c.t.Helper()
	c.send(req)
	r := c.recv()
	if r.GetTag() != req.GetTag() {
		c.t.Errorf("tag %d in the answer to %d", r.GetTag(), req.GetTag())
	}
	return r
}

func TestSessionAnnouncesRenewsAndCompletes(t *testing.T) {
	h := startHost(t)
	c := h.session(t)
	a := c.do(announceFrame(7, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})).GetAnnounced()
	if !a.GetQuiesced() || a.GetSuspendedTargets() != 1 || a.GetTiming().GetQuiesce() == nil {
		t.Errorf("announced: %v; want the offline target suspended, with its timing", a)
	}
	r := c.do(&gpreemptv1.SessionRequest{Tag: 8, Frame: &gpreemptv1.SessionRequest_Renew{Renew: &gpreemptv1.RenewRequest{LeaseId: a.GetLeaseId()}}})
	if got := r.GetRenewed().GetTtl().AsDuration(); got != defaultTTL {
		t.Errorf("renewed for %v, want default_ttl", got)
	}
	done := c.do(completeFrame(9, a.GetLeaseId())).GetCompleted()
	if done.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED {
		t.Errorf("completed: %v", done)
	}
	if err := c.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after CloseSend: %v, want the end", err)
	}
}

func TestSessionContinuesAfterARefusedFrame(t *testing.T) {
	h := startHost(t)
	c := h.session(t)
	frames := []*gpreemptv1.SessionRequest{
		{Tag: 1},
		announceFrame(2, &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(9)}}),
		announceFrame(3, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Hour)}),
		completeFrame(4, "000000000000feed-5"),
		{Tag: 5, Frame: &gpreemptv1.SessionRequest_Renew{Renew: &gpreemptv1.RenewRequest{}}},
	}
	type refusal struct {
		Code   codes.Code
		Reason gpreempt.Reason
	}
	var got []refusal
	for _, f := range frames {
		e := c.do(f).GetError()
		if e.GetMessage() == "" || e.GetNext() == "" {
			t.Errorf("frame %d: %v; want message and next", f.GetTag(), e)
		}
		got = append(got, refusal{codes.Code(e.GetCode()), gpreempt.Reason(e.GetReason())})
	}
	want := []refusal{
		{codes.InvalidArgument, gpreempt.ReasonBadFrame},
		{codes.InvalidArgument, gpreempt.ReasonUnknownGPU},
		{codes.InvalidArgument, gpreempt.ReasonTTLRange},
		{codes.NotFound, gpreempt.ReasonUnknownLease},
		{codes.NotFound, gpreempt.ReasonUnknownLease},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("refusals (-want +got):\n%s", diff)
	}
	if c.do(announceFrame(6, &gpreemptv1.NotifyOnlineRequest{})).GetAnnounced() == nil {
		t.Error("no announcement after the refusals")
	}
}

func TestHalfClosedSessionEndsItsLeasesAndAnswersThem(t *testing.T) {
	const open = 20 // they must be there before a call that hangs counts as failed, also on a busy host
	h := startHost(t, func(_ *Config, l *scheduler.Limits) { l.LeasesPerClient = open })
	h.machine.freeze()
	defer h.machine.thaw()
	c := h.session(t)
	for tag := range uint64(open) {
		c.send(announceFrame(tag, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)}))
	}
	h.until(t, "the leases", func() bool { return len(h.leases()) == open })
	if err := c.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var last string
	for range open {
		r := c.recv()
		if r.GetAnnounced().GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_ENDED {
			t.Fatalf("%v; want it answered with ENDED", r)
		}
		last = r.GetAnnounced().GetLeaseId()
	}
	if _, err := c.stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last answer: %v, want the end", err)
	}
	if end := h.ended(t, last); end != scheduler.EndDisconnected || len(h.leases()) > 0 {
		t.Errorf("the last lease ended as %v and %d are live, want disconnected and none", end, len(h.leases()))
	}
}

func TestLeasesEndWithTheirStreamBeforeTheConnection(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	unary, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	st, err := online.Session(testutil.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	c := conversation{t, st}
	lease := c.do(announceFrame(1, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})).GetAnnounced().GetLeaseId()
	if err := st.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if end := h.ended(t, lease); end != scheduler.EndDisconnected {
		t.Errorf("the lease of the stream ended as %v, want disconnected", end)
	}
	if got := h.leases(); len(got) != 1 || leaseID(h.server.leasePrefix, got[0].ID) != unary.GetLeaseId() {
		t.Errorf("live leases %v, want that of the unary call", got)
	}
}

func TestBrokenSessionEndsItsLeases(t *testing.T) {
	h := startHost(t)
	conn := h.dial(t)
	st, err := gpreemptv1.NewOnlineServiceClient(conn).Session(testutil.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	c := conversation{t, st}
	lease := c.do(announceFrame(1, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})).GetAnnounced().GetLeaseId()
	_ = conn.Close()
	if end := h.ended(t, lease); end != scheduler.EndDisconnected {
		t.Errorf("the lease ended as %v, want disconnected", end)
	}
}

func TestOutstandingAnnouncementsOfAStreamAreBounded(t *testing.T) {
	h := startHost(t, func(_ *Config, l *scheduler.Limits) { l.LeasesPerClient, l.LeasesTotal = 4096, 4096 })
	h.machine.freeze()
	c := h.session(t)
	for tag := range uint64(maxOutstanding + 1) {
		c.send(announceFrame(tag, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)}))
	}
	r := c.recv()
	if r.GetTag() != maxOutstanding || r.GetError().GetReason() != string(gpreempt.ReasonRateLimited) || codes.Code(r.GetError().GetCode()) != codes.ResourceExhausted {
		t.Errorf("%v; want the announcement beyond %d refused", r, maxOutstanding)
	}
	h.machine.thaw()
	var tags []uint64
	for range maxOutstanding {
		r := c.recv()
		if !r.GetAnnounced().GetQuiesced() {
			t.Fatalf("%v; want quiet GPUs", r)
		}
		tags = append(tags, r.GetTag())
	}
	slices.Sort(tags)
	for i, tag := range tags {
		if uint64(i) != tag {
			t.Fatalf("the answers have the tags %v", tags)
		}
	}
	if c.do(announceFrame(9999, &gpreemptv1.NotifyOnlineRequest{})).GetAnnounced() == nil {
		t.Error("refused after the answers were read")
	}
}

func TestSessionFramesCountAsRequests(t *testing.T) {
	h := startHost(t)
	h.setLimits(func(l *Limits) { l.RequestsPerSecond, l.Burst = 1, 3 })
	c := h.session(t)
	var got []string
	for tag := range uint64(20) {
		got = append(got, c.do(completeFrame(tag, "x")).GetError().GetReason())
	}
	if !slices.Contains(got, string(gpreempt.ReasonRateLimited)) {
		t.Errorf("reasons %v; want some RATE_LIMITED", got)
	}
}

func TestShutdownEndsSessions(t *testing.T) {
	h := startHost(t)
	c := h.session(t)
	lease := c.do(announceFrame(1, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})).GetAnnounced().GetLeaseId()
	h.server.Shutdown(t.Context())
	_, err := c.stream.Recv()
	if status.Code(err) != codes.Unavailable || reason(err) != gpreempt.ReasonShuttingDown {
		t.Errorf("the stream ended with %v, want SHUTTING_DOWN", err)
	}
	if end := h.ended(t, lease); end != scheduler.EndDisconnected {
		t.Errorf("the lease ended as %v, want disconnected", end)
	}
}
