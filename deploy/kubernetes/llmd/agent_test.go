package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/deploy/kubernetes/llmd/gen/snapshotpb"
)

const maxSuspend = 10 * time.Second

// node is a daemon in place of gpreemptd, with the processes of a node.
type node struct {
	gpreemptv1.AdminServiceClient

	mu        sync.Mutex
	targets   []*gpreemptv1.Target
	suspended []string // now
	// refuse are errors of SuspendTarget, and late how often its answer is that the target runs still, by target.
	refuse map[string]error
	late   map[string]int
	calls  int
	// gone reports that the daemon does not answer.
	gone bool
}

func (n *node) add(id, job string) {
	n.targets = append(n.targets, &gpreemptv1.Target{
		TargetId: id, State: gpreemptv1.TargetState_TARGET_STATE_RUNNING,
		Container: &gpreemptv1.Container{Namespace: "team", PodLabels: map[string]string{jobLabel: job}},
	})
}

func (n *node) ListTargets(context.Context, *gpreemptv1.ListTargetsRequest, ...grpc.CallOption) (*gpreemptv1.ListTargetsResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &gpreemptv1.ListTargetsResponse{Targets: slices.Clone(n.targets)}, nil
}

func (n *node) GetPolicy(context.Context, *gpreemptv1.GetPolicyRequest, ...grpc.CallOption) (*gpreemptv1.GetPolicyResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone {
		return nil, status.Error(codes.Unavailable, "no daemon")
	}
	return &gpreemptv1.GetPolicyResponse{Policy: &gpreemptv1.Policy{MaxSuspend: durationpb.New(maxSuspend)}}, nil
}

func (n *node) SuspendTarget(_ context.Context, r *gpreemptv1.SuspendTargetRequest, _ ...grpc.CallOption) (*gpreemptv1.SuspendTargetResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.calls++
	id := r.GetTargetId()
	if r.GetTtl().AsDuration() != maxSuspend {
		return nil, status.Error(codes.InvalidArgument, "TTL_OUT_OF_RANGE")
	}
	if err := n.refuse[id]; err != nil {
		return nil, err
	}
	if n.late[id] > 0 {
		n.late[id]--
		return &gpreemptv1.SuspendTargetResponse{Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_MAX_WAIT}, nil
	}
	if !slices.Contains(n.suspended, id) {
		n.suspended = append(n.suspended, id)
		slices.Sort(n.suspended)
	}
	return &gpreemptv1.SuspendTargetResponse{Quiesced: true}, nil
}

func (n *node) ResumeTarget(_ context.Context, r *gpreemptv1.ResumeTargetRequest, _ ...grpc.CallOption) (*gpreemptv1.ResumeTargetResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.suspended = slices.DeleteFunc(n.suspended, func(id string) bool { return id == r.GetTargetId() })
	return &gpreemptv1.ResumeTargetResponse{}, nil
}

// off returns the suspended targets.
func (n *node) off() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.suspended)
}

// connect serves an agent and returns it, and a connection to it.
func connect(t *testing.T, n *node) (*agent, *grpc.ClientConn) {
	t.Helper()
	a := newAgent(n, "team")
	server, listener := newServer(a, insecure.NewCredentials()), bufconn.Listen(1<<16)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///agent", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		a.background.Wait()
	})
	return a, conn
}

// ended waits until the operations of an agent have ended, and returns the end of one.
func ended(t *testing.T, a *agent, c snapshotpb.SnapshotAgentServiceClient, id string) *snapshotpb.GetOperationResponse {
	t.Helper()
	a.background.Wait()
	r, err := c.GetOperation(t.Context(), &snapshotpb.GetOperationRequest{OperationId: id})
	if err != nil {
		t.Fatal(err)
	}
	r.ElapsedMs = 0 // differs
	return r
}

var complete = &snapshotpb.GetOperationResponse{
	Status: snapshotpb.OperationStatus_OPERATION_STATUS_COMPLETE, StorageBytes: new(int64), SnapshotDeviceBytes: new(int64),
}

func states(t *testing.T, c snapshotpb.SnapshotAgentServiceClient) map[string]string {
	t.Helper()
	r, err := c.Status(t.Context(), &snapshotpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, s := range r.GetJobStatuses() {
		all[s.GetJobId()] = s.GetState().String()
	}
	return all
}

func TestSnapshotSuspendsTheProcessesOfTheJobAndRestoreResumesThem(t *testing.T) {
	n := &node{late: map[string]int{"2@1": 3}} // it takes a while
	n.add("1@1", "a")
	n.add("2@1", "a")
	n.add("3@1", "b")
	n.add("4@1", "")
	a, conn := connect(t, n)
	c := snapshotpb.NewSnapshotAgentServiceClient(conn)

	r, err := c.Snapshot(t.Context(), &snapshotpb.SnapshotRequest{JobId: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(complete, ended(t, a, c, r.GetOperationId()), protocmp.Transform()); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"1@1", "2@1"}, n.off()); diff != "" {
		t.Errorf("suspended (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"a": "JOB_STATE_SAVED", "b": "JOB_STATE_RUNNING"}, states(t, c)); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}

	back, err := c.Restore(t.Context(), &snapshotpb.RestoreRequest{JobId: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(complete, ended(t, a, c, back.GetOperationId()), protocmp.Transform()); diff != "" {
		t.Errorf("restore (-want +got):\n%s", diff)
	}
	if off := n.off(); len(off) > 0 {
		t.Errorf("%v are suspended after the restore", off)
	}
	if diff := cmp.Diff(map[string]string{"a": "JOB_STATE_RUNNING", "b": "JOB_STATE_RUNNING"}, states(t, c)); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
}

func TestASnapshotThatFailsLeavesTheJobRunning(t *testing.T) {
	n := &node{refuse: map[string]error{"2@1": status.Error(codes.FailedPrecondition, "TARGET_NOT_OFFLINE")}}
	n.add("1@1", "a")
	n.add("2@1", "a")
	a, conn := connect(t, n)
	c := snapshotpb.NewSnapshotAgentServiceClient(conn)
	r, err := c.Snapshot(t.Context(), &snapshotpb.SnapshotRequest{JobId: "a"})
	if err != nil {
		t.Fatal(err)
	}
	text := "suspend process 0: rpc error: code = FailedPrecondition desc = TARGET_NOT_OFFLINE"
	want := &snapshotpb.GetOperationResponse{Status: snapshotpb.OperationStatus_OPERATION_STATUS_FAILED, Error: &text}
	if diff := cmp.Diff(want, ended(t, a, c, r.GetOperationId()), protocmp.Transform()); diff != "" {
		t.Errorf("snapshot (-want +got):\n%s", diff)
	}
	if off := n.off(); len(off) > 0 {
		t.Errorf("%v remain suspended", off)
	}
	if diff := cmp.Diff(map[string]string{"a": "JOB_STATE_FAULTED"}, states(t, c)); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
}

func TestASavedJobIsSuspendedAgainUntilItIsRestored(t *testing.T) {
	n := &node{}
	n.add("1@1", "a")
	n.add("2@1", "b")
	a, conn := connect(t, n)
	c := snapshotpb.NewSnapshotAgentServiceClient(conn)
	if _, err := c.Snapshot(t.Context(), &snapshotpb.SnapshotRequest{JobId: "a"}); err != nil {
		t.Fatal(err)
	}
	a.background.Wait()
	ctx, stop := context.WithCancel(t.Context())
	ticks, stopped := make(chan time.Time), make(chan struct{})
	go func() {
		defer close(stopped)
		a.keep(ctx, ticks, func(job string, err error) { t.Errorf("%s: %v", job, err) })
	}()
	tick := func() {
		ticks <- time.Time{} // the second one is taken when the first was handled
		ticks <- time.Time{}
	}
	n.mu.Lock()
	n.suspended = nil // max_suspend has passed
	n.mu.Unlock()
	n.add("3@1", "a") // a new process of the job
	tick()
	if diff := cmp.Diff([]string{"1@1", "3@1"}, n.off()); diff != "" {
		t.Errorf("suspended (-want +got):\n%s", diff)
	}
	if _, err := c.Restore(t.Context(), &snapshotpb.RestoreRequest{JobId: "a"}); err != nil {
		t.Fatal(err)
	}
	a.background.Wait()
	tick()
	if off := n.off(); len(off) > 0 {
		t.Errorf("%v are suspended after the restore", off)
	}
	stop()
	<-stopped
}

func TestCallsThatTheStateOfTheJobForbidsAreRefused(t *testing.T) {
	n := &node{}
	n.add("1@1", "a")
	a, conn := connect(t, n)
	c := snapshotpb.NewSnapshotAgentServiceClient(conn)
	snapshot := func(job string) codes.Code {
		_, err := c.Snapshot(t.Context(), &snapshotpb.SnapshotRequest{JobId: job})
		a.background.Wait()
		return status.Code(err)
	}
	restored := func(job string) string {
		r, err := c.Restore(t.Context(), &snapshotpb.RestoreRequest{JobId: job})
		if err != nil {
			return status.Code(err).String()
		}
		return r.GetOperationId()
	}
	_, withBackend := c.Snapshot(t.Context(), &snapshotpb.SnapshotRequest{JobId: "a", BackendConfig: &snapshotpb.BackendConfig{}})
	_, unknownOperation := c.GetOperation(t.Context(), &snapshotpb.GetOperationRequest{OperationId: "none"})
	type answers struct {
		Unknown, First, Second, WithBackend, UnknownOperation codes.Code
		RestoreUnknown, RestoreRunning                        string
	}
	want := answers{
		Unknown: codes.FailedPrecondition, Second: codes.FailedPrecondition, WithBackend: codes.InvalidArgument, UnknownOperation: codes.NotFound,
		RestoreUnknown: "FailedPrecondition", RestoreRunning: "already-running",
	}
	got := answers{
		RestoreUnknown: restored("none"), RestoreRunning: restored("a"), Unknown: snapshot("none"), First: snapshot("a"), Second: snapshot("a"),
		WithBackend: status.Code(withBackend), UnknownOperation: status.Code(unknownOperation),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("answers (-want +got):\n%s", diff)
	}
}

func TestAJobWhoseProcessesEndedIsForgotten(t *testing.T) {
	n := &node{}
	n.add("1@1", "a")
	a, conn := connect(t, n)
	c := snapshotpb.NewSnapshotAgentServiceClient(conn)
	if _, err := c.Snapshot(t.Context(), &snapshotpb.SnapshotRequest{JobId: "a"}); err != nil {
		t.Fatal(err)
	}
	a.background.Wait()
	n.mu.Lock()
	n.targets = nil
	n.mu.Unlock()
	if diff := cmp.Diff(map[string]string{}, states(t, c)); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
}

func TestHealthIsThatOfTheDaemon(t *testing.T) {
	n := &node{}
	_, conn := connect(t, n)
	var got []grpc_health_v1.HealthCheckResponse_ServingStatus
	for _, gone := range []bool{false, true} {
		n.mu.Lock()
		n.gone = gone
		n.mu.Unlock()
		r, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, r.GetStatus())
	}
	want := []grpc_health_v1.HealthCheckResponse_ServingStatus{grpc_health_v1.HealthCheckResponse_SERVING, grpc_health_v1.HealthCheckResponse_NOT_SERVING}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
}

// raw is a message that is not decoded.
type raw struct{ data []byte }

// asIs is a codec that leaves messages as they are.
type asIs struct{}

func (asIs) Marshal(v any) ([]byte, error)      { return v.(*raw).data, nil }
func (asIs) Unmarshal(data []byte, v any) error { v.(*raw).data = slices.Clone(data); return nil }
func (asIs) Name() string                       { return "proto" }

// TestTheOrchestratorsOwnMessagesAreUnderstood sends the messages of testdata/orchestrator.json,
// which llm-d's orchestrator sent (its snapshot_agent_store.go at 6cf8e9b), and compares the
// answers with those that llm-d's types encoded. Ids of operations and times differ.
func TestTheOrchestratorsOwnMessagesAreUnderstood(t *testing.T) {
	text, err := os.ReadFile("testdata/orchestrator.json")
	if err != nil {
		t.Fatal(err)
	}
	var recorded []struct{ Method, Request, Response, Meaning string }
	if err := json.Unmarshal(text, &recorded); err != nil {
		t.Fatal(err)
	}
	n := &node{}
	n.add("1@1", "job-a")
	a, conn := connect(t, n)
	var operation string
	for _, r := range recorded {
		answers := map[string]proto.Message{
			"/snapshot_agent.v1alpha1.SnapshotAgentService/Status":       &snapshotpb.StatusResponse{},
			"/snapshot_agent.v1alpha1.SnapshotAgentService/Snapshot":     &snapshotpb.SnapshotResponse{},
			"/snapshot_agent.v1alpha1.SnapshotAgentService/Restore":      &snapshotpb.RestoreResponse{},
			"/snapshot_agent.v1alpha1.SnapshotAgentService/GetOperation": &snapshotpb.GetOperationResponse{},
		}
		want, got := answers[r.Method], proto.Clone(answers[r.Method])
		decode(t, unhex(t, r.Response), want)
		request := unhex(t, r.Request)
		if _, polls := want.(*snapshotpb.GetOperationResponse); polls {
			a.background.Wait()
			m := &snapshotpb.GetOperationRequest{}
			decode(t, request, m)
			if m.OperationId = operation; r.Meaning == "failed" { // of an operation that the recording does not have
				continue
			}
			if request, err = proto.Marshal(m); err != nil {
				t.Fatal(err)
			}
		}
		var answer raw
		if err := conn.Invoke(t.Context(), r.Method, &raw{request}, &answer, grpc.ForceCodec(asIs{})); err != nil {
			t.Fatalf("%s: %v", r.Method, err)
		}
		decode(t, answer.data, got)
		switch m := got.(type) {
		case *snapshotpb.SnapshotResponse:
			operation, m.OperationId = m.OperationId, want.(*snapshotpb.SnapshotResponse).GetOperationId()
		case *snapshotpb.RestoreResponse:
			operation, m.OperationId = m.OperationId, want.(*snapshotpb.RestoreResponse).GetOperationId()
		case *snapshotpb.GetOperationResponse:
			m.ElapsedMs = want.(*snapshotpb.GetOperationResponse).GetElapsedMs()
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s, %s (-want +got):\n%s", r.Method, r.Meaning, diff)
		}
	}
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	data, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// decode decodes a message, of which every field must be known.
func decode(t *testing.T, data []byte, m proto.Message) {
	t.Helper()
	if err := proto.Unmarshal(data, m); err != nil {
		t.Fatal(err)
	}
	if unknown := m.ProtoReflect().GetUnknown(); len(unknown) > 0 {
		t.Errorf("%T has unknown fields: %x", m, unknown)
	}
}
