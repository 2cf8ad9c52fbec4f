// Package clitest runs the scripts of gpctl and gplab against a fake machine.
package clitest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Noon is the wall clock of the fake machine and of gpctl in the tests.
var Noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// Ago returns the time d before Noon.
func Ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(Noon.Add(-d)) }

// Dur returns d as in messages.
func Dur(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

// Machine is a fake host behind the admin service: two GPUs and a few processes that can
// be suspended and classified, on a stopped clock.
type Machine struct {
	gpreemptv1.UnimplementedAdminServiceServer

	Mu       sync.Mutex // guards all below
	GPUs     []*gpreemptv1.Gpu
	Targets  []*gpreemptv1.Target
	Leases   []*gpreemptv1.Lease
	policy   *gpreemptv1.Policy
	Warnings []*gpreemptv1.Warning
	events   []*gpreemptv1.Event
	draining bool

	// The queues and the slots at each request, from 1; nil for constant ones.
	QueuesAt func(look int) ([]*gpreemptv1.Queue, error)
	SlotsAt  func(look int) (*gpreemptv1.ListHqdsResponse, error)
	looks    int
}

// NewMachine returns a machine with warnings, leases and events.
func NewMachine() *Machine {
	offline, online, unmanaged := gpreemptv1.Class_CLASS_OFFLINE, gpreemptv1.Class_CLASS_ONLINE, gpreemptv1.Class_CLASS_UNMANAGED
	running, suspended := gpreemptv1.TargetState_TARGET_STATE_RUNNING, gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
	quarantined, suspending := gpreemptv1.TargetState_TARGET_STATE_QUARANTINED, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING
	m := &Machine{
		GPUs: []*gpreemptv1.Gpu{
			{
				GpuId: 34535, Node: 2, Name: "mi300x", GfxTargetVersion: 90402, Bdf: "0000:c1:00.0", RenderMinor: 128, XccCount: 8,
				CuCount: 304, QueueSlots: 24, QueueCount: 30, LeaseCount: 1, SuspendedCount: 1, MappedQueueCount: 27, OfflineMappedQueueCount: 21, FreeSlotCount: new(uint32(0)),
			},
			{
				GpuId: 41235, Node: 3, Name: "mi300x", GfxTargetVersion: 90402, Bdf: "0000:c6:00.0", RenderMinor: 136, XccCount: 8,
				CuCount: 304, QueueSlots: 24, QueueCount: 4, MappedQueueCount: 3, OfflineMappedQueueCount: 1, FreeSlotCount: new(uint32(21)), BreakerOpen: true, BreakerClosesIn: Dur(42 * time.Second),
			},
		},
		Targets: []*gpreemptv1.Target{
			{
				TargetId: "4242@1001", Pid: 4242, Comm: "python3", Cmdline: "python3 train.py --epochs 90", Uid: 1000, Cgroup: "/slurm/job_7",
				Class: offline, Priority: 0, DecidedBy: "rule training", State: suspended, GpuIds: []uint32{34535, 41235}, QueueCount: 3,
				Mechanism: "sim", MechanismWhy: "simulated process: alive", InState: Dur(1234 * time.Microsecond), RunsWithin: Dur(1900 * time.Millisecond), Suspends: 17,
				SuspendedTotal: Dur(3400 * time.Millisecond), LearnedSuspend: Dur(850 * time.Microsecond), LearnedResume: Dur(420 * time.Microsecond),
				Job: &gpreemptv1.Job{
					Name: "slurm-2", Why: `rule slurm: cgroup "/slurm/job_7", uid 1000`, TargetCount: 8, RunningRatio: new(0.0061), MeasuredOver: Dur(57 * time.Second),
				},
			},
			{
				TargetId: "4300@1002", Pid: 4300, Comm: "evil\x1b[31m", Cmdline: "evil \x1b]0;title\x07" + strings.Repeat("x", 200), Uid: 1001,
				Cgroup: "/user.slice", Class: offline, Priority: 3, DecidedBy: "admin", State: running, GpuIds: []uint32{34535}, QueueCount: 1,
				InState: Dur(95 * time.Second), AttachError: "a debugger is attached to it",
			},
			{
				TargetId: "4400@1003", Pid: 4400, Comm: "preprocess", Uid: 1000, Class: offline, Priority: 0, DecidedBy: "rule training",
				State: quarantined, GpuIds: []uint32{41235}, QueueCount: 1, Mechanism: "sim", InState: Dur(12 * time.Second), Suspends: 1,
				SuspendedTotal: Dur(20 * time.Millisecond), Job: &gpreemptv1.Job{Name: "own-3", TargetCount: 1},
			},
			{
				TargetId: "5001@2000", Pid: 5001, Comm: "tritonserver", Cmdline: "tritonserver --model-repository /models", Uid: 990,
				Class: online, Priority: 11, DecidedBy: "rule inference", State: running, GpuIds: []uint32{34535}, QueueCount: 2,
				InState: Dur(26*time.Hour + 5*time.Minute),
			},
			{
				TargetId: "6000@3000", Pid: 6000, Comm: "monitor", Class: unmanaged, Priority: 7, DecidedBy: "default", State: running,
				GpuIds: []uint32{1, 2, 34535, 41235}, QueueCount: 1, InState: Dur(0),
			},
		},
		Leases: []*gpreemptv1.Lease{
			{
				LeaseId: "k3-1", GpuIds: []uint32{34535}, Priority: 11, State: gpreemptv1.LeaseState_LEASE_STATE_HELD, ClientPid: 5001,
				ClientUid: 990, CreatedAt: Ago(1500 * time.Microsecond), ExpiresIn: Dur(998500 * time.Microsecond), Label: "llama",
			},
			{
				LeaseId: "k3-2", GpuIds: []uint32{34535, 41235}, Priority: 12, State: gpreemptv1.LeaseState_LEASE_STATE_QUIESCING,
				CreatedAt: Ago(40 * time.Microsecond), ExpiresIn: Dur(2 * time.Second),
			},
		},
		policy: balanced(),
		Warnings: []*gpreemptv1.Warning{
			{
				Code: "BREAKER_OPEN", Severity: "error", Text: "GPU 41235 reported a hardware error; nothing is suspended on it",
				Remedy: "look for amdgpu in the kernel log; the breaker closes by itself in 42s",
			},
			{Code: "UNKNOWN_GROUP", Severity: "warning", Text: "this host has no group gpreempt-admin", Remedy: "groupadd gpreempt-admin"},
		},
		events: []*gpreemptv1.Event{
			{
				Revision: 1, At: Ago(3 * time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, LeaseId: "k3-1",
				ToLease: gpreemptv1.LeaseState_LEASE_STATE_QUIESCING, Cause: "announced",
			},
			{
				Revision: 2, At: Ago(3*time.Second - 40*time.Microsecond), Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: "4242@1001",
				FromTarget: running, ToTarget: suspending, LeaseId: "k3-1", Cause: "lease",
			},
			{
				Revision: 3, At: Ago(3*time.Second - 890*time.Microsecond), Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: "4242@1001",
				FromTarget: suspending, ToTarget: suspended, Cause: "done", Took: Dur(850 * time.Microsecond),
			},
			{
				Revision: 4, At: Ago(2 * time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, LeaseId: "k2-9",
				FromLease: gpreemptv1.LeaseState_LEASE_STATE_HELD, ToLease: gpreemptv1.LeaseState_LEASE_STATE_ENDED,
				End: gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED, Took: Dur(time.Second),
			},
			{
				Revision: 5, At: Ago(time.Second), Kind: gpreemptv1.EventKind_EVENT_KIND_BREAKER, GpuId: 41235, Cause: "hardware-error",
				Message: "the breaker is open",
			},
			{
				Revision: 6, At: Ago(0), Kind: gpreemptv1.EventKind_EVENT_KIND_ADMIN, Message: "uid 0 pid 99: classify 4300 offline",
			},
		},
	}
	for _, e := range m.events {
		e.Clock = Dur(uptime - Noon.Sub(e.GetAt().AsTime()))
	}
	m.describe()
	return m
}

// uptime is how long the daemon of a machine has been up.
const uptime = 3*time.Hour + 12*time.Minute

// Serve answers on a unix socket until the test ends.
func Serve(t testing.TB, socket string, m gpreemptv1.AdminServiceServer, opts ...grpc.ServerOption) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(opts...)
	gpreemptv1.RegisterAdminServiceServer(s, m)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		// A script may end before Serve begins.
		if err := <-done; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
}

// Refuse returns the error of a request as the daemon sends it.
func Refuse(code gpreempt.Code, reason gpreempt.Reason, message, next string) error {
	return api.ToStatus(&gpreempt.Error{Code: code, Reason: reason, Message: message, Next: next})
}

func (m *Machine) target(id string) (*gpreemptv1.Target, error) {
	for _, t := range m.Targets {
		if t.GetTargetId() == id || strconv.Itoa(int(t.GetPid())) == id {
			return t, nil
		}
	}
	return nil, Refuse(gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget, "unknown target "+id, "list them with `gpctl target list`")
}

func (m *Machine) GetStatus(context.Context, *gpreemptv1.GetStatusRequest) (*gpreemptv1.GetStatusResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	resp := &gpreemptv1.GetStatusResponse{
		Version: "v0.3.0", StartedAt: Ago(uptime), Clock: Dur(uptime), Backend: "simulated mi300x", GpuCount: uint32(len(m.GPUs)),
		TargetCount: uint32(len(m.Targets)), LeaseCount: uint32(len(m.Leases)), Draining: m.draining, Policy: m.policy.GetPreset(),
		Warnings: m.Warnings, InventoryRevision: 12, EventRevision: uint64(len(m.events)), BootId: "5a3e0f1c-9d0b-4a57-8a31-1f0c3e6a7b52",
		Sources: sources(),
	}
	for _, t := range m.Targets {
		resp.QueueCount += t.GetQueueCount()
		if t.GetClass() == gpreemptv1.Class_CLASS_OFFLINE {
			resp.OfflineCount++
		}
		if t.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
			resp.SuspendedCount++
		}
	}
	if m.policy.GetShareCap() < 1 {
		resp.ShareCappedCount = resp.GetSuspendedCount()
	}
	return resp, nil
}

func (m *Machine) ListGpus(context.Context, *gpreemptv1.ListGpusRequest) (*gpreemptv1.ListGpusResponse, error) {
	return &gpreemptv1.ListGpusResponse{Gpus: m.GPUs}, nil
}

func (m *Machine) ListLeases(context.Context, *gpreemptv1.ListLeasesRequest) (*gpreemptv1.ListLeasesResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	return &gpreemptv1.ListLeasesResponse{Leases: slices.Clone(m.Leases)}, nil
}

func (m *Machine) CreateLease(_ context.Context, req *gpreemptv1.CreateLeaseRequest) (*gpreemptv1.CreateLeaseResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	ask := req.GetAnnounce()
	if ask.GetPriority() > 15 {
		return nil, Refuse(gpreempt.CodeInvalidArgument, gpreempt.ReasonPriorityRange, fmt.Sprintf("priority %d is outside 0 to 15", ask.GetPriority()), "ask for less")
	}
	var ids []uint32
	for _, g := range m.GPUs {
		if len(ask.GetGpus()) == 0 || slices.ContainsFunc(ask.GetGpus(), func(s *gpreemptv1.GpuSelector) bool {
			return api.Selects(s, g.GetGpuId(), g.GetNode(), g.GetRenderMinor(), g.GetBdf())
		}) {
			ids = append(ids, g.GetGpuId())
		}
	}
	if len(ids) < len(ask.GetGpus()) {
		return nil, Refuse(gpreempt.CodeInvalidArgument, gpreempt.ReasonUnknownGPU, "GPU not found on this host", "gpctl gpu list")
	}
	ttl := ask.GetTtl()
	if ttl == nil {
		ttl = Dur(time.Second)
	}
	l := &gpreemptv1.Lease{
		LeaseId: fmt.Sprintf("k3-%d", len(m.Leases)+1), GpuIds: ids, Priority: ask.GetPriority(), State: gpreemptv1.LeaseState_LEASE_STATE_HELD,
		CreatedAt: Ago(0), ExpiresIn: ttl, Label: ask.GetLabel(),
	}
	m.Leases = append(m.Leases, l)
	resp := &gpreemptv1.NotifyOnlineResponse{
		LeaseId: l.GetLeaseId(), Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE, SuspendedTargets: 1, GpuIds: ids, Ttl: ttl,
		Timing: &gpreemptv1.Timing{Decide: Dur(9 * time.Microsecond), Quiesce: Dur(850 * time.Microsecond), Total: Dur(861 * time.Microsecond)},
	}
	if m.draining {
		resp.Quiesced, resp.Reason, resp.SuspendedTargets = false, gpreemptv1.QuiesceReason_QUIESCE_REASON_DRAINING, 0
	}
	return &gpreemptv1.CreateLeaseResponse{Announced: resp}, nil
}

func (m *Machine) ReleaseLease(_ context.Context, req *gpreemptv1.ReleaseLeaseRequest) (*gpreemptv1.ReleaseLeaseResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	i := slices.IndexFunc(m.Leases, func(l *gpreemptv1.Lease) bool { return l.GetLeaseId() == req.GetLeaseId() })
	if i < 0 {
		return nil, Refuse(gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease, "unknown lease "+req.GetLeaseId(), "list them with `gpctl lease list`")
	}
	m.Leases = slices.Delete(m.Leases, i, i+1)
	return &gpreemptv1.ReleaseLeaseResponse{End: gpreemptv1.LeaseEnd_LEASE_END_RELEASED}, nil
}

func (m *Machine) SuspendTarget(_ context.Context, req *gpreemptv1.SuspendTargetRequest) (*gpreemptv1.SuspendTargetResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	t, err := m.target(req.GetTargetId())
	switch {
	case err != nil:
		return nil, err
	case t.GetClass() != gpreemptv1.Class_CLASS_OFFLINE:
		return nil, Refuse(gpreempt.CodeFailedPrecondition, gpreempt.ReasonNotOffline, "target "+t.GetTargetId()+" is not offline",
			"gpctl target classify "+req.GetTargetId()+" offline")
	case req.GetTtl().AsDuration() <= 0 || req.GetTtl().AsDuration() > m.policy.GetMaxSuspend().AsDuration():
		return nil, Refuse(gpreempt.CodeInvalidArgument, gpreempt.ReasonTTLRange, "a suspension lasts more than 0 and at most 2s", "choose a shorter ttl")
	case m.policy.GetShadow():
		return &gpreemptv1.SuspendTargetResponse{Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_SHADOW}, nil
	}
	resp := &gpreemptv1.SuspendTargetResponse{Timing: &gpreemptv1.Timing{Total: Dur(861 * time.Microsecond)}}
	if t.GetState() == gpreemptv1.TargetState_TARGET_STATE_QUARANTINED {
		resp.Reason = gpreemptv1.QuiesceReason_QUIESCE_REASON_UNSAFE
		return resp, nil
	}
	t.State, t.RunsWithin = gpreemptv1.TargetState_TARGET_STATE_SUSPENDED, req.GetTtl()
	resp.Quiesced, resp.Reason = true, gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE
	return resp, nil
}

func (m *Machine) ResumeTarget(_ context.Context, req *gpreemptv1.ResumeTargetRequest) (*gpreemptv1.ResumeTargetResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	t, err := m.target(req.GetTargetId())
	if err != nil {
		return nil, err
	}
	t.State, t.RunsWithin = gpreemptv1.TargetState_TARGET_STATE_RUNNING, nil
	if t.GetPid() == 4400 && req.GetHold().AsDuration() == 0 { // a lease has it
		t.State = gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
	}
	return &gpreemptv1.ResumeTargetResponse{State: t.GetState()}, nil
}

func (m *Machine) ClassifyTarget(_ context.Context, req *gpreemptv1.ClassifyTargetRequest) (*gpreemptv1.ClassifyTargetResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	t, err := m.target(req.GetTargetId())
	if err != nil {
		return nil, err
	}
	if name := req.GetMechanism(); name != "" && name != "freezer" {
		return nil, Refuse(gpreempt.CodeInvalidArgument, gpreempt.ReasonUnknownMechanism, "this daemon has no mechanism "+name, "use freezer")
	}
	t.Class, t.Priority, t.DecidedBy = req.GetClass(), 0, "admin"
	if req.Priority != nil {
		t.Priority = req.GetPriority()
	}
	if req.GetClass() == gpreemptv1.Class_CLASS_UNSPECIFIED {
		t.Class, t.Priority, t.DecidedBy = gpreemptv1.Class_CLASS_UNMANAGED, 7, "default"
	}
	return &gpreemptv1.ClassifyTargetResponse{Target: t}, nil
}

func (m *Machine) ExplainTarget(_ context.Context, req *gpreemptv1.ExplainTargetRequest) (*gpreemptv1.ExplainTargetResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	t, err := m.target(req.GetTargetId())
	if err != nil {
		return nil, err
	}
	resp := &gpreemptv1.ExplainTargetResponse{Target: t, Classification: classification(t)}
	offline := t.GetClass() == gpreemptv1.Class_CLASS_OFFLINE
	pass, run, suspend := gpreemptv1.CheckResult_CHECK_RESULT_PASS, gpreemptv1.CheckResult_CHECK_RESULT_RUN, gpreemptv1.CheckResult_CHECK_RESULT_SUSPEND
	class := &gpreemptv1.ExplainCheck{Check: "class", Result: pass, Detail: fmt.Sprintf("class %s, priority %d", api.EnumName(t.GetClass()), t.GetPriority())}
	lease := &gpreemptv1.ExplainCheck{Check: "lease", Result: suspend, Decides: offline, Detail: "highest lease priority 11, target priority 0"}
	resp.Checks = []*gpreemptv1.ExplainCheck{class, lease, {Check: "otherwise", Result: run, Detail: "a target runs unless a check above decides"}}
	if !offline {
		class.Result, class.Decides = run, true
		resp.Verdict = "Running: it is not offline (class-changed)."
		return resp, nil
	}
	if m.policy.GetShareCap() < 1 {
		lease.Check, lease.Detail = "share cap", "the share cap of 30% is reached; ends in 9.4s"
		resp.Verdict = "Suspended: the share cap is used up (share-cap)."
		return resp, nil
	}
	resp.Leases = m.Leases[:1]
	resp.Verdict = "Suspended: a lease covers its GPUs (lease)."
	return resp, nil
}

func (m *Machine) WatchEvents(req *gpreemptv1.WatchEventsRequest, out grpc.ServerStreamingServer[gpreemptv1.WatchEventsResponse]) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for _, e := range m.events {
		if e.GetRevision() > req.GetAfterRevision() && (req.GetAfterRevision() > 0 || req.GetFromStart()) {
			if err := out.Send(&gpreemptv1.WatchEventsResponse{Event: e}); err != nil {
				return err
			}
		}
	}
	if req.GetNoFollow() {
		return nil
	}
	return Refuse(gpreempt.CodeResourceExhausted, gpreempt.ReasonSlowReader, "the reader fell too far behind", "begin again with --since 6")
}

func (m *Machine) GetStatistics(context.Context, *gpreemptv1.GetStatisticsRequest) (*gpreemptv1.GetStatisticsResponse, error) {
	us := func(n int) *durationpb.Duration { return Dur(time.Duration(n) * time.Microsecond) }
	m.Mu.Lock()
	defer m.Mu.Unlock()
	var shadow *gpreemptv1.ShadowReport
	if m.policy.GetShadow() {
		shadow = &gpreemptv1.ShadowReport{InForce: true, Lasted: Dur(10 * time.Minute), Rows: []*gpreemptv1.ShadowRow{
			{TargetId: "4242@1001", Comm: "python3", ClassifiedBy: "rule training", GpuCount: 8, Owner: `"llama" of process 5001`, Suspends: 412, Total: Dur(90 * time.Second), Longest: us(1250000)},
			{TargetId: "4300@1002", Comm: "bench", ClassifiedBy: "tag", GpuCount: 1, Owner: "an admin", Suspends: 1, Total: Dur(2 * time.Second), Longest: Dur(2 * time.Second)},
			{Suspends: 3, Total: us(300), Longest: us(200)},
		}}
	}
	return &gpreemptv1.GetStatisticsResponse{Statistics: &gpreemptv1.Statistics{
		Shadow:        shadow,
		Announcements: 1200, Quiesced: 1190, MaxWaitPassed: 10, Suspends: 640, Resumes: 639, Failures: 2, Coalesced: 560, ForcedResumes: 12,
		QuiesceLatency: &gpreemptv1.LatencySummary{Count: 1190, Mean: us(910), P50: us(850), P95: us(1900), P99: us(4200), Max: us(19800)},
		SuspendLatency: &gpreemptv1.LatencySummary{Count: 640, Mean: us(850), P50: us(820), P95: us(1200), P99: us(2000), Max: us(3000)},
		ResumeLatency:  &gpreemptv1.LatencySummary{Count: 639, Mean: us(420), P50: us(400), P95: us(600), P99: us(900), Max: us(1100)},
		LeaseDuration:  &gpreemptv1.LatencySummary{},
		Rules: []*gpreemptv1.RuleCount{
			{Rule: "training", Class: gpreemptv1.Class_CLASS_OFFLINE, Matched: 12, Decided: 11, MatchesNow: 2, DecidesNow: 2},
			{Rule: "inference", Class: gpreemptv1.Class_CLASS_ONLINE, Matched: 1, Decided: 1, MatchesNow: 1, DecidesNow: 1},
			{Rule: "tag", Matched: 3},
		},
		Refusals: []*gpreemptv1.RefusalCount{{Reason: "RATE_LIMITED", Count: 1400}, {Reason: "UNKNOWN_LEASE", Count: 3}},
	}}, nil
}

func (m *Machine) SetDrain(_ context.Context, req *gpreemptv1.SetDrainRequest) (*gpreemptv1.SetDrainResponse, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.draining = req.GetDrain()
	resp := &gpreemptv1.SetDrainResponse{Draining: m.draining}
	for _, t := range m.Targets {
		if t.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
			if m.draining && req.GetWait() {
				t.State, t.RunsWithin = gpreemptv1.TargetState_TARGET_STATE_RUNNING, nil
			} else {
				resp.SuspendedCount++
			}
		}
	}
	return resp, nil
}

// Diagnose reports that the fake machine is usable, with limits.
func (m *Machine) Diagnose(context.Context, *gpreemptv1.DiagnoseRequest) (*gpreemptv1.DiagnoseResponse, error) {
	const ok, warn, skip = gpreemptv1.CheckStatus_CHECK_STATUS_OK, gpreemptv1.CheckStatus_CHECK_STATUS_WARN, gpreemptv1.CheckStatus_CHECK_STATUS_SKIP
	return &gpreemptv1.DiagnoseResponse{
		Verdict: gpreemptv1.Verdict_VERDICT_LIMITED, Summary: "gpreempt can suspend offline work here; warnings: queue slots.",
		Remedy: "read the warnings", ByDaemon: true, Backend: "kfd", Version: "v0.3.0",
		Checks: []*gpreemptv1.Check{
			{Id: "gpu", Title: "AMD GPU", Status: ok, Found: "2 × mi300x"},
			{Id: "permission-rule", Title: "permission rule", Status: ok, Found: "process: " + strings.Repeat("a long explanation ", 10)},
			{Id: "queue-slots", Title: "queue slots", Status: warn, Found: "GPU 34535: 30 compute queues for 24 slots", Remedy: "have fewer"},
			{Id: "kernel-log", Title: "kernel log", Status: skip, Found: "uid 1000 may not read /dev/kmsg"},
		},
		Gpus: []*gpreemptv1.DiagnosedGpu{
			{
				GpuId: 34535, Node: 2, Name: "mi300x", GfxTargetVersion: 90402, Bdf: "0000:c1:00.0", XccCount: 8, DebugFirmware: true,
				DebugSharing: gpreemptv1.DebugSharing_DEBUG_SHARING_SEVERAL, QueueSlots: 24, ComputeQueues: 30, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_ALLOW,
			},
			{
				GpuId: 41235, Node: 3, Name: "gfx1100", GfxTargetVersion: 110000, Bdf: "0000:c6:00.0", XccCount: 1, Mes: true,
				ComputeQueues: 4, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_DENY, HazardReason: "resets (ROCm/rocm#1)",
			},
			{
				GpuId: 41236, Node: 4, Name: "mi50", GfxTargetVersion: 90006, XccCount: 1, DebugFirmware: true, QueueSlots: 24,
				DebugSharing: gpreemptv1.DebugSharing_DEBUG_SHARING_ONE, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_LIMIT, HazardReason: "one (ROCm/rocm#2)",
			},
		},
		Processes: []*gpreemptv1.DiagnosedProcess{
			{TargetId: "4242@1001", Pid: 4242, Comm: "python3", Offline: true, Mechanism: "freezer", Why: "cgroup: version 2", Rejected: []*gpreemptv1.Rejection{
				{Mechanism: "dbgtrap", Why: "debugger: rocgdb is attached", Remedy: "end it"}, {Mechanism: "criu", Why: "not enabled"},
			}},
			{TargetId: "4300@1002", Pid: 4300, Comm: "evil\x1b[31m", Offline: true},
			{TargetId: "5001@2000", Pid: 5001, Comm: "tritonserver", Why: "it is online"},
		},
	}, nil
}
