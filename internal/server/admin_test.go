package server

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// verbs returns the actions of admins in the event log.
func (h *host) verbs(t *testing.T) []string {
	t.Helper()
	entries, err := h.events.Read(0, nil)
	if err != nil {
		t.Fatal(err)
	}
	var verbs []string
	for _, e := range entries {
		if e.Admin != "" {
			verbs = append(verbs, e.Admin)
		}
	}
	return verbs
}

// by returns the event of an admin action of this process.
func by(verb string) string {
	return fmt.Sprintf("uid %d pid %d: %s", os.Getuid(), os.Getpid(), verb)
}

func TestLeaseOfAnAdminOutlivesItsConnection(t *testing.T) {
	h := startHost(t)
	conn := h.dial(t)
	made, err := gpreemptv1.NewAdminServiceClient(conn).CreateLease(t.Context(), &gpreemptv1.CreateLeaseRequest{
		Announce: &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), Label: "maintenance", Priority: proto.Uint32(15)},
	})
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	h.server.clients.wait()
	admin := h.admin(t)
	listed, err := admin.ListLeases(t.Context(), &gpreemptv1.ListLeasesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&gpreemptv1.ListLeasesResponse{Leases: []*gpreemptv1.Lease{{
		LeaseId: made.GetAnnounced().GetLeaseId(), GpuIds: []uint32{100, 200}, Priority: 15, State: gpreemptv1.LeaseState_LEASE_STATE_HELD,
		ClientUid: uint32(os.Getuid()), Label: "maintenance",
	}}}, listed, protocmp.Transform(), protocmp.IgnoreFields(&gpreemptv1.Lease{}, "created_at", "expires_in")); diff != "" {
		t.Errorf("leases (-want +got):\n%s", diff)
	}
	if left := listed.GetLeases()[0].GetExpiresIn().AsDuration(); left <= 50*time.Second || left > time.Minute {
		t.Errorf("expires in %v, want almost 1m", left)
	}
	for range 2 { // idempotent
		released, err := admin.ReleaseLease(t.Context(), &gpreemptv1.ReleaseLeaseRequest{LeaseId: made.GetAnnounced().GetLeaseId()})
		if err != nil || released.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_RELEASED {
			t.Errorf("released: %v, %v", released, err)
		}
	}
	id := made.GetAnnounced().GetLeaseId()
	if diff := cmp.Diff([]string{
		by("lease create on GPUs [100 200] for 1m0s, priority 15"), by("lease release " + id), by("lease release " + id),
	}, h.verbs(t)); diff != "" {
		t.Errorf("admin events (-want +got):\n%s", diff)
	}
}

func TestAdminMayReleaseTheLeaseOfAClient(t *testing.T) {
	h := startHost(t)
	online := h.online(t)
	r, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), Label: "llm"})
	if err != nil {
		t.Fatal(err)
	}
	admin := h.admin(t)
	listed, err := admin.ListLeases(t.Context(), &gpreemptv1.ListLeasesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	l := listed.GetLeases()[0]
	if l.GetClientPid() != int32(os.Getpid()) || l.GetClientUid() != uint32(os.Getuid()) || l.GetLabel() != "llm" {
		t.Errorf("lease %v; want the pid, uid and label of its client", l)
	}
	if _, err := admin.ReleaseLease(t.Context(), &gpreemptv1.ReleaseLeaseRequest{LeaseId: r.GetLeaseId()}); err != nil {
		t.Fatal(err)
	}
	done, err := online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: r.GetLeaseId()})
	if err != nil || done.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_RELEASED {
		t.Errorf("Complete afterwards: %v, %v; want RELEASED", done, err)
	}
}

func TestBadAdminRequests(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	ctx := t.Context()
	call := func(_ any, err error) error { return err }
	for _, tc := range []struct {
		name string
		err  error
		code gpreempt.Code
		want gpreempt.Reason
	}{
		{"lease without announcement", call(admin.CreateLease(ctx, &gpreemptv1.CreateLeaseRequest{})), gpreempt.CodeInvalidArgument, gpreempt.ReasonMissingField},
		{"lease that ends by idleness", call(admin.CreateLease(ctx, &gpreemptv1.CreateLeaseRequest{Announce: &gpreemptv1.NotifyOnlineRequest{CompleteOnIdle: true}})), gpreempt.CodeInvalidArgument, gpreempt.ReasonIdleByHand},
		{"lease on an unknown GPU", call(admin.CreateLease(ctx, &gpreemptv1.CreateLeaseRequest{Announce: &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(1)}}})), gpreempt.CodeInvalidArgument, gpreempt.ReasonUnknownGPU},
		{"release of nothing", call(admin.ReleaseLease(ctx, &gpreemptv1.ReleaseLeaseRequest{})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease},
		{"suspend of nothing", call(admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{Ttl: durationpb.New(1)})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget},
		{"suspend of a process without queues", call(admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: "1", Ttl: durationpb.New(1)})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget},
		{"suspend of a pid used again", call(admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: "4000001@12", Ttl: durationpb.New(1)})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget},
		{"suspend of a target that is not offline", call(admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: other.String(), Ttl: durationpb.New(1)})), gpreempt.CodeFailedPrecondition, gpreempt.ReasonNotOffline},
		{"suspend without ttl", call(admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: offline.String()})), gpreempt.CodeInvalidArgument, gpreempt.ReasonTTLRange},
		{"suspend beyond max_suspend", call(admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: offline.String(), Ttl: durationpb.New(scheduler.DefaultPolicy().MaxSuspend + 1)})), gpreempt.CodeInvalidArgument, gpreempt.ReasonTTLRange},
		{"resume of nothing", call(admin.ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: "x"})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget},
		{"negative hold", call(admin.ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: offline.String(), Hold: durationpb.New(-1)})), gpreempt.CodeInvalidArgument, gpreempt.ReasonDurationRange},
		{"long hold", call(admin.ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: offline.String(), Hold: durationpb.New(time.Hour + 1)})), gpreempt.CodeInvalidArgument, gpreempt.ReasonDurationRange},
		{"class of a newer API", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Class: 9})), gpreempt.CodeInvalidArgument, gpreempt.ReasonBadClass},
		{"priority without class", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Priority: proto.Uint32(1)})), gpreempt.CodeInvalidArgument, gpreempt.ReasonBadClass},
		{"priority 16", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Class: gpreemptv1.Class_CLASS_OFFLINE, Priority: proto.Uint32(16)})), gpreempt.CodeInvalidArgument, gpreempt.ReasonPriorityRange},
		{"class for no time", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Class: gpreemptv1.Class_CLASS_OFFLINE, Ttl: durationpb.New(0)})), gpreempt.CodeInvalidArgument, gpreempt.ReasonTTLRange},
		{"mechanism without class", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Mechanism: "dbgtrap"})), gpreempt.CodeInvalidArgument, gpreempt.ReasonBadClass},
		{"mechanism of an online process", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Class: gpreemptv1.Class_CLASS_ONLINE, Mechanism: "dbgtrap"})), gpreempt.CodeInvalidArgument, gpreempt.ReasonBadClass},
		{"missing mechanism", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: offline.String(), Class: gpreemptv1.Class_CLASS_OFFLINE, Mechanism: "criu"})), gpreempt.CodeInvalidArgument, gpreempt.ReasonUnknownMechanism},
		{"class of nothing", call(admin.ClassifyTarget(ctx, &gpreemptv1.ClassifyTargetRequest{TargetId: "9", Class: gpreemptv1.Class_CLASS_OFFLINE})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget},
		{"explanation of nothing", call(admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: "9"})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget},
		{"queues of nothing", call(admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{TargetId: "9"})), gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget},
	} {
		t.Run(tc.name, func(t *testing.T) { want(t, tc.err, tc.code, tc.want) })
	}
	if got := h.verbs(t); len(got) > 0 {
		t.Errorf("refused actions left events: %q", got)
	}
}

func TestSuspendTargetAndResumeTarget(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	pid := fmt.Sprint(offline.PID)
	first, err := admin.SuspendTarget(t.Context(), &gpreemptv1.SuspendTargetRequest{TargetId: pid, Ttl: durationpb.New(9 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	if !first.GetQuiesced() || first.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE || first.GetTiming().GetTotal() == nil {
		t.Errorf("suspended: %v; want quiet GPUs", first)
	}
	second, err := admin.SuspendTarget(t.Context(), &gpreemptv1.SuspendTargetRequest{TargetId: pid, Ttl: durationpb.New(10 * time.Second)})
	if err != nil || !second.GetQuiesced() {
		t.Errorf("the second call: %v, %v; want it suspended", second, err)
	}
	resumed, err := admin.ResumeTarget(t.Context(), &gpreemptv1.ResumeTargetRequest{TargetId: pid, Hold: durationpb.New(time.Minute)})
	if err != nil || resumed.GetState() != gpreemptv1.TargetState_TARGET_STATE_RUNNING {
		t.Errorf("resumed: %v, %v; want it running", resumed, err)
	}
	r, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{})
	if err != nil || r.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_HOLD {
		t.Errorf("an announcement during the hold: %v, %v; want HOLD", r, err)
	}
	if diff := cmp.Diff([]string{
		by("target suspend 4000001@11 for 9s"), by("target suspend 4000001@11 for 10s"), by("target resume 4000001@11, hold 1m0s"),
	}, h.verbs(t)); diff != "" {
		t.Errorf("admin events (-want +got):\n%s", diff)
	}
}

func TestResumeWaitsForTheTarget(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	if _, err := admin.SuspendTarget(t.Context(), &gpreemptv1.SuspendTargetRequest{TargetId: offline.String(), Ttl: durationpb.New(10 * time.Second)}); err != nil {
		t.Fatal(err)
	}
	h.machine.freeze()
	answered := make(chan gpreemptv1.TargetState, 1)
	go func() {
		r, err := admin.ResumeTarget(context.Background(), &gpreemptv1.ResumeTargetRequest{TargetId: offline.String()})
		if err != nil {
			t.Error(err)
		}
		answered <- r.GetState()
	}()
	h.until(t, "the resume", func() bool { s, _ := h.server.targetState(offline); return s == scheduler.TargetResuming })
	select {
	case s := <-answered:
		t.Errorf("answered %v while the resume was in flight", s)
	default:
	}
	h.machine.thaw()
	if s := testutil.Receive(t, answered, "the answer"); s != gpreemptv1.TargetState_TARGET_STATE_RUNNING {
		t.Errorf("state %v, want running", s)
	}
}

func TestDrainWaitsUntilNothingIsSuspended(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	if _, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	got, err := admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{Drain: true, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&gpreemptv1.SetDrainResponse{Draining: true}, got, protocmp.Transform()); diff != "" {
		t.Errorf("drained (-want +got):\n%s", diff)
	}
	if got, err = admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{}); err != nil || got.GetDraining() {
		t.Errorf("no longer draining: %v, %v", got, err)
	}
	if diff := cmp.Diff([]string{by("drain true"), by("drain false")}, h.verbs(t)); diff != "" {
		t.Errorf("admin events (-want +got):\n%s", diff)
	}
}

func TestClassifyTargetSetsAndRemovesAnOverride(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	id := other.String()
	got, err := admin.ClassifyTarget(t.Context(), &gpreemptv1.ClassifyTargetRequest{TargetId: id, Class: gpreemptv1.Class_CLASS_OFFLINE, Priority: proto.Uint32(3), Ttl: durationpb.New(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	if tgt := got.GetTarget(); tgt.GetClass() != gpreemptv1.Class_CLASS_OFFLINE || tgt.GetPriority() != 3 || tgt.GetDecidedBy() != "admin" {
		t.Errorf("classified: %v", tgt)
	}
	got, err = admin.ClassifyTarget(t.Context(), &gpreemptv1.ClassifyTargetRequest{TargetId: id, Class: gpreemptv1.Class_CLASS_ONLINE})
	if err != nil || got.GetTarget().GetPriority() != 11 {
		t.Errorf("classified without priority: %v, %v; want online's default", got, err)
	}
	if _, err := admin.ClassifyTarget(t.Context(), &gpreemptv1.ClassifyTargetRequest{TargetId: id, Class: gpreemptv1.Class_CLASS_OFFLINE, Mechanism: "freezer"}); err != nil {
		t.Error(err)
	}
	if facts, _ := h.directory.Facts(other); facts.Decision.Mechanism != "freezer" {
		t.Errorf("the mechanism was not passed on: %+v", facts.Decision)
	}
	got, err = admin.ClassifyTarget(t.Context(), &gpreemptv1.ClassifyTargetRequest{TargetId: id})
	if err != nil || got.GetTarget().GetDecidedBy() != "default" {
		t.Errorf("override removed: %v, %v", got, err)
	}
	if diff := cmp.Diff([]string{
		by("target classify 4000002@22 offline, priority 3, for 1h0m0s"), by("target classify 4000002@22 online, priority 11"),
		by("target classify 4000002@22 offline, priority 0, by freezer"),
		by("target classify 4000002@22: override removed"),
	}, h.verbs(t)); diff != "" {
		t.Errorf("admin events (-want +got):\n%s", diff)
	}
}

func TestExplainTargetReturnsChecksAndLeases(t *testing.T) {
	h := startHost(t)
	r, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	got, err := h.admin(t).ExplainTarget(t.Context(), &gpreemptv1.ExplainTargetRequest{TargetId: "4000001"})
	if err != nil {
		t.Fatal(err)
	}
	if got.GetVerdict() != "Suspended: a lease covers its GPUs (lease)." || got.GetTarget().GetTargetId() != offline.String() {
		t.Errorf("explanation %v", got)
	}
	var deciding []*gpreemptv1.ExplainCheck
	for _, c := range got.GetChecks() {
		if c.GetDecides() {
			deciding = append(deciding, c)
		}
	}
	want := []*gpreemptv1.ExplainCheck{{
		Check: "lease", Result: gpreemptv1.CheckResult_CHECK_RESULT_SUSPEND, Decides: true, Detail: "highest lease priority 11, target priority 0",
	}}
	if diff := cmp.Diff(want, deciding, protocmp.Transform()); diff != "" {
		t.Errorf("the checks that decide (-want +got):\n%s", diff)
	}
	if len(got.GetLeases()) != 1 || got.GetLeases()[0].GetLeaseId() != r.GetLeaseId() {
		t.Errorf("leases %v, want %s", got.GetLeases(), r.GetLeaseId())
	}
}

func TestListsShowTheHost(t *testing.T) {
	warning := gpreempt.Warning{Code: "W", Severity: "warning", Text: "text", Remedy: "remedy"}
	h := startHost(t, func(c *Config, _ *scheduler.Limits) {
		c.Warnings = func() []gpreempt.Warning { return []gpreempt.Warning{warning} }
	})
	r, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), Gpus: []*gpreemptv1.GpuSelector{byID(gpuA)}})
	if err != nil || !r.GetQuiesced() {
		t.Fatal(r, err)
	}
	admin := h.admin(t)

	status, err := admin.GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&gpreemptv1.GetStatusResponse{
		Version: "v1.2.3", StartedAt: timestamppb.New(h.server.started), Backend: "simulated mi300x", GpuCount: 2, TargetCount: 2,
		OfflineCount: 1, SuspendedCount: 1, QueueCount: 3, LeaseCount: 1, Policy: "custom", InventoryRevision: 3,
		EventRevision: h.events.Revision(), BootId: "b007", Mechanisms: []string{"dbgtrap", "freezer"},
		Warnings: []*gpreemptv1.Warning{{Code: "W", Severity: "warning", Text: "text", Remedy: "remedy"}},
	}, status, protocmp.Transform(), protocmp.IgnoreFields(status, "goroutine_count", "clock")); diff != "" || status.GetGoroutineCount() < 2 {
		t.Errorf("%d goroutines, status (-want +got):\n%s", status.GetGoroutineCount(), diff)
	}

	listed, err := admin.ListGpus(t.Context(), &gpreemptv1.ListGpusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*gpreemptv1.Gpu{
		{GpuId: 100, Node: 2, Name: "simulated", Bdf: "0000:0a:00.0", RenderMinor: 128, QueueSlots: 24, QueueCount: 1, LeaseCount: 1, SuspendedCount: 1, FreeSlotCount: new(uint32(24))},
		{GpuId: 200, Node: 3, Name: "simulated", Bdf: "0001:80:00.0", RenderMinor: 129, QueueSlots: 24, QueueCount: 2, SuspendedCount: 1, MappedQueueCount: 1, FreeSlotCount: new(uint32(23))},
	}, listed.GetGpus(), protocmp.Transform()); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}

	targets, err := admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*gpreemptv1.Target{
		{
			TargetId: "4000001@11", Pid: offline.PID, Comm: "train", Cmdline: "python train.py", Uid: 1001, Cgroup: "/batch",
			Class: gpreemptv1.Class_CLASS_OFFLINE, DecidedBy: "rule batch", State: gpreemptv1.TargetState_TARGET_STATE_SUSPENDED,
			GpuIds: []uint32{100, 200}, QueueCount: 2, Mechanism: "sim", Suspends: 1, LearnedSuspend: durationpb.New(time.Millisecond),
		},
		{
			TargetId: "4000002@22", Pid: other.PID, Comm: "serve", Uid: 1002, Class: gpreemptv1.Class_CLASS_UNMANAGED, Priority: 7,
			DecidedBy: "default", State: gpreemptv1.TargetState_TARGET_STATE_RUNNING, GpuIds: []uint32{200}, QueueCount: 1,
			SuspendedTotal: durationpb.New(0),
		},
	}, targets.GetTargets(), protocmp.Transform(), protocmp.IgnoreFields(&gpreemptv1.Target{}, "in_state", "runs_within"),
		protocmp.FilterField(&gpreemptv1.Target{}, "suspended_total", cmp.Ignore())); diff != "" {
		t.Errorf("targets (-want +got):\n%s", diff)
	}
	if tgt := targets.GetTargets()[0]; tgt.GetRunsWithin() == nil || tgt.GetSuspendedTotal().AsDuration() <= 0 {
		t.Errorf("the suspended target %v; want runs_within and suspended_total", tgt)
	}

	queues, err := admin.ListQueues(t.Context(), &gpreemptv1.ListQueuesRequest{GpuId: 200})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&gpreemptv1.ListQueuesResponse{Revision: 3, Queues: []*gpreemptv1.Queue{
		{
			TargetId: "4000001@11", Pid: offline.PID, QueueId: 1, GpuId: 200, Type: "sdma", RingBytes: 8192, Class: gpreemptv1.Class_CLASS_OFFLINE,
			State: gpreemptv1.TargetState_TARGET_STATE_SUSPENDED, Comm: "train", FirstSeen: timestamppb.New(seen),
		},
		{
			TargetId: "4000002@22", Pid: other.PID, GpuId: 200, Type: "compute", RingBytes: 4096, Class: gpreemptv1.Class_CLASS_UNMANAGED, Priority: 7,
			State: gpreemptv1.TargetState_TARGET_STATE_RUNNING, Comm: "serve", FirstSeen: timestamppb.New(seen),
		},
	}}, queues, protocmp.Transform()); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}

	stats, err := admin.GetStatistics(t.Context(), &gpreemptv1.GetStatisticsRequest{})
	if err != nil || stats.GetStatistics().GetAnnouncements() != 1 || stats.GetStatistics().GetSuspendLatency().GetCount() != 1 {
		t.Errorf("statistics %v, %v; want one announcement and one suspend", stats, err)
	}
}

func TestListFilters(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	type key struct {
		Target string
		Queue  uint32
	}
	for _, tc := range []struct {
		name string
		req  *gpreemptv1.ListQueuesRequest
		want []key
	}{
		{"all", &gpreemptv1.ListQueuesRequest{}, []key{{"4000001@11", 0}, {"4000001@11", 1}, {"4000002@22", 0}}},
		{"target", &gpreemptv1.ListQueuesRequest{TargetId: "4000002"}, []key{{"4000002@22", 0}}},
		{"gpu", &gpreemptv1.ListQueuesRequest{GpuId: 100}, []key{{"4000001@11", 0}}},
		{"class", &gpreemptv1.ListQueuesRequest{Class: gpreemptv1.Class_CLASS_UNMANAGED}, []key{{"4000002@22", 0}}},
		{"both", &gpreemptv1.ListQueuesRequest{GpuId: 200, Class: gpreemptv1.Class_CLASS_OFFLINE}, []key{{"4000001@11", 1}}},
		{"none", &gpreemptv1.ListQueuesRequest{Class: gpreemptv1.Class_CLASS_ONLINE}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, err := admin.ListQueues(t.Context(), tc.req)
			if err != nil {
				t.Fatal(err)
			}
			var got []key
			for _, q := range r.GetQueues() {
				got = append(got, key{q.GetTargetId(), q.GetQueueId()})
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("queues (-want +got):\n%s", diff)
			}
		})
	}
	r, err := admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{GpuId: 100, Class: gpreemptv1.Class_CLASS_OFFLINE})
	if err != nil || len(r.GetTargets()) != 1 || r.GetTargets()[0].GetPid() != offline.PID {
		t.Errorf("targets %v, %v", r, err)
	}
}

func TestEventMessages(t *testing.T) {
	h := startHost(t)
	at := timestamppb.New(seen)
	for _, tc := range []struct {
		entry events.Entry
		want  *gpreemptv1.Event
	}{
		{
			events.Entry{Revision: 1, At: seen, Record: scheduler.Record{
				At:   1 * time.Second,
				Kind: scheduler.RecordTarget, Target: offline, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetSuspended,
				Lease: 7, Cause: scheduler.CauseDone, Took: time.Millisecond,
			}},
			&gpreemptv1.Event{
				Revision: 1, At: at, Clock: durationpb.New(1 * time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: "4000001@11",
				FromTarget: gpreemptv1.TargetState_TARGET_STATE_SUSPENDING, ToTarget: gpreemptv1.TargetState_TARGET_STATE_SUSPENDED,
				LeaseId: "000000000000feed-7", Cause: "done", Took: durationpb.New(time.Millisecond),
			},
		},
		{
			events.Entry{Revision: 2, At: seen, Record: scheduler.Record{
				At:   2 * time.Second,
				Kind: scheduler.RecordLease, Lease: 7, FromLease: scheduler.LeaseHeld, ToLease: scheduler.LeaseEnded, End: scheduler.EndExpired,
			}},
			&gpreemptv1.Event{
				Revision: 2, At: at, Clock: durationpb.New(2 * time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, LeaseId: "000000000000feed-7",
				FromLease: gpreemptv1.LeaseState_LEASE_STATE_HELD, ToLease: gpreemptv1.LeaseState_LEASE_STATE_ENDED, End: gpreemptv1.LeaseEnd_LEASE_END_EXPIRED,
			},
		},
		{
			events.Entry{Revision: 3, At: seen, Record: scheduler.Record{At: 3 * time.Second, Kind: scheduler.RecordBreaker, GPU: gpuA, On: true, Cause: scheduler.CauseAlarm}},
			&gpreemptv1.Event{Revision: 3, At: at, Clock: durationpb.New(3 * time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_BREAKER, GpuId: 100, Cause: "alarm", Message: "open"},
		},
		{
			events.Entry{Revision: 4, At: seen, Record: scheduler.Record{At: 4 * time.Second, Kind: scheduler.RecordDrain}},
			&gpreemptv1.Event{Revision: 4, At: at, Clock: durationpb.New(4 * time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_DRAIN, Message: "no longer draining"},
		},
		{
			events.Entry{Revision: 5, At: seen, Record: scheduler.Record{At: 5 * time.Second}, Admin: "uid 0 pid 1: drain true"},
			&gpreemptv1.Event{Revision: 5, At: at, Clock: durationpb.New(5 * time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_ADMIN, Message: "uid 0 pid 1: drain true"},
		},
	} {
		if diff := cmp.Diff(tc.want, h.server.eventMessage(tc.entry), protocmp.Transform()); diff != "" {
			t.Errorf("event %d (-want +got):\n%s", tc.entry.Revision, diff)
		}
	}
}

func TestDiagnoseReturnsTheReport(t *testing.T) {
	h := startHost(t)
	got, err := h.admin(t).Diagnose(t.Context(), &gpreemptv1.DiagnoseRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &gpreemptv1.DiagnoseResponse{
		Verdict: gpreemptv1.Verdict_VERDICT_LIMITED, Summary: "it can work", ByDaemon: true, Backend: "simulated mi300x", Version: "v1.2.3",
		Checks: []*gpreemptv1.Check{{
			Id: "yama", Title: "Yama", Status: gpreemptv1.CheckStatus_CHECK_STATUS_WARN, Found: "3", Remedy: "lower it",
		}},
	}
	if !proto.Equal(want, got) {
		t.Errorf("diagnosis %v, want %v", got, want)
	}
}

func TestDiagnoseEndsWithItsCall(t *testing.T) {
	looking := make(chan struct{})
	h := startHost(t, func(cfg *Config, _ *scheduler.Limits) {
		cfg.Diagnose = func(ctx context.Context) *gpreemptv1.DiagnoseResponse {
			close(looking)
			<-ctx.Done()
			return &gpreemptv1.DiagnoseResponse{}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-looking
		cancel()
	}()
	if _, err := h.admin(t).Diagnose(ctx, &gpreemptv1.DiagnoseRequest{}); status.Code(err) != codes.Canceled {
		t.Errorf("error %v, want CANCELED", err)
	}
}
