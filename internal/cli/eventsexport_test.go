package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

// exportedHost is a daemon whose target 2@1 appears while it is followed. Each list of targets has
// one more.
type exportedHost struct {
	gpreemptv1.AdminServiceClient
	lists  int
	events []*gpreemptv1.Event
	end    context.CancelFunc // called after the last event
}

func (h *exportedHost) GetStatus(context.Context, *gpreemptv1.GetStatusRequest, ...grpc.CallOption) (*gpreemptv1.GetStatusResponse, error) {
	return &gpreemptv1.GetStatusResponse{EventRevision: 1}, nil
}

func (h *exportedHost) GetPolicy(context.Context, *gpreemptv1.GetPolicyRequest, ...grpc.CallOption) (*gpreemptv1.GetPolicyResponse, error) {
	return &gpreemptv1.GetPolicyResponse{Policy: &gpreemptv1.Policy{Preset: "shadow"}}, nil
}

func (h *exportedHost) ListGpus(context.Context, *gpreemptv1.ListGpusRequest, ...grpc.CallOption) (*gpreemptv1.ListGpusResponse, error) {
	return &gpreemptv1.ListGpusResponse{Gpus: []*gpreemptv1.Gpu{{GpuId: 7}}}, nil
}

func (h *exportedHost) ListLeases(context.Context, *gpreemptv1.ListLeasesRequest, ...grpc.CallOption) (*gpreemptv1.ListLeasesResponse, error) {
	return &gpreemptv1.ListLeasesResponse{Leases: []*gpreemptv1.Lease{{LeaseId: "a-1", GpuIds: []uint32{7}, Priority: 9, Label: "secret", ClientUid: 1000}}}, nil
}

func (h *exportedHost) ListTargets(context.Context, *gpreemptv1.ListTargetsRequest, ...grpc.CallOption) (*gpreemptv1.ListTargetsResponse, error) {
	h.lists++
	all := []*gpreemptv1.Target{
		{TargetId: "1@1", Comm: "train", Class: gpreemptv1.Class_CLASS_OFFLINE, GpuIds: []uint32{7}, Cmdline: "secret", Environment: map[string]string{"KEY": "secret"}},
		{TargetId: "2@1", Comm: "score", Class: gpreemptv1.Class_CLASS_OFFLINE, Priority: 3, GpuIds: []uint32{7}, Job: &gpreemptv1.Job{Name: "slurm-1", Why: "secret"}},
	}
	return &gpreemptv1.ListTargetsResponse{Targets: all[:min(h.lists, 2)]}, nil
}

func (h *exportedHost) WatchEvents(ctx context.Context, _ *gpreemptv1.WatchEventsRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[gpreemptv1.WatchEventsResponse], error) {
	return &exportedStream{ctx: ctx, host: h}, nil
}

type exportedStream struct {
	grpc.ClientStream
	ctx  context.Context //nolint:containedctx // as a client's stream has it
	host *exportedHost
}

func (s *exportedStream) Recv() (*gpreemptv1.WatchEventsResponse, error) {
	if len(s.host.events) == 0 {
		s.host.end()
		return nil, context.Cause(s.ctx)
	}
	e := s.host.events[0]
	s.host.events = s.host.events[1:]
	return &gpreemptv1.WatchEventsResponse{Event: e}, nil
}

func TestRecordingHasALineForEachTargetBeforeItsEvents(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	defer end()
	const none, running = gpreemptv1.TargetState_TARGET_STATE_UNSPECIFIED, gpreemptv1.TargetState_TARGET_STATE_RUNNING
	event := func(revision uint64, target string, from, to gpreemptv1.TargetState) *gpreemptv1.Event {
		return &gpreemptv1.Event{
			Revision: revision, Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: target, FromTarget: from, ToTarget: to,
			Clock: durationpb.New(1),
		}
	}
	host := &exportedHost{end: end, events: []*gpreemptv1.Event{
		event(1, "1@1", none, running),
		event(2, "2@1", none, running),
		event(3, "2@1", running, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING),
		event(4, "1@1", running, running), // a new class
		event(5, "3@1", running, gpreemptv1.TargetState_TARGET_STATE_GONE),
	}}
	var out bytes.Buffer
	if err := (&exporting{admin: host, w: &out, follow: true}).run(ctx, clitest.Noon); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "secret") {
		t.Errorf("the export has what is private:\n%s", out.String())
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, `{"event"`) {
			line = line[:strings.Index(line, `",`)+2] + "..."
		} else if strings.HasPrefix(line, `{"format"`) || strings.HasPrefix(line, `{"gpu"`) || strings.HasPrefix(line, `{"policy"`) {
			line, _, _ = strings.Cut(line, ":")
		}
		got = append(got, strings.TrimSpace(line))
	}
	score := `{"target":{"target_id":"2@1","comm":"score","class":"CLASS_OFFLINE","priority":3,"gpu_ids":[7],"job":{"name":"slurm-1"}}}`
	train := `{"target":{"target_id":"1@1","comm":"train","class":"CLASS_OFFLINE","gpu_ids":[7]}}`
	want := []string{
		`{"format"`, `{"policy"`, `{"gpu"`, `{"lease":{"lease_id":"a-1","gpu_ids":[7],"priority":9}}`, train,
		`{"event":{"revision":"1",...`, score, `{"event":{"revision":"2",...`, `{"event":{"revision":"3",...`, train, `{"event":{"revision":"4",...`,
		`{"event":{"revision":"5",...`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
