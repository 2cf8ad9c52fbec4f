package server

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// The benchmarks compare a pair of calls, NotifyOnline and Complete, with what
// gRPC itself costs for two calls with the same messages: their ratio is what
// the daemon adds. Compare them within one run only.

// trivial is a scheduler that says yes.
type trivial struct {
	core  *scheduler.Core
	clock monotonic
	next  scheduler.LeaseID
}

func (s *trivial) Announce(_ scheduler.LeaseRequested, reply scheduler.Reply) (scheduler.LeaseID, error) {
	s.next++ // one caller at a time
	reply(s.next, scheduler.Answer{Quiesced: true, Reason: scheduler.QuiesceNothingToDo})
	return s.next, nil
}

func (s *trivial) Complete(scheduler.ClientID, scheduler.LeaseID, scheduler.LeaseEnd) (scheduler.LeaseEnd, time.Duration, error) {
	return scheduler.EndCompleted, time.Microsecond, nil
}
func (s *trivial) Renew(scheduler.ClientID, scheduler.LeaseID, time.Duration) error { return nil }
func (s *trivial) Post(scheduler.Event)                                             {}
func (s *trivial) View(fn func(*scheduler.Core))                                    { fn(s.core) }
func (s *trivial) Now() scheduler.Time                                              { return s.clock.Now() }

// request is a typical announcement.
func request() *gpreemptv1.NotifyOnlineRequest {
	return &gpreemptv1.NotifyOnlineRequest{
		Gpus: []*gpreemptv1.GpuSelector{byID(gpuB)}, Ttl: durationpb.New(50 * time.Millisecond), Label: "llama",
	}
}

// pair announces and completes b.N times.
func pair(b *testing.B, online gpreemptv1.OnlineServiceClient) {
	b.Helper()
	ctx := b.Context()
	req := request()
	b.ReportAllocs()
	for b.Loop() {
		r, err := online.NotifyOnline(ctx, req)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: r.GetLeaseId()}); err != nil {
			b.Fatal(err)
		}
	}
}

// echo answers with the same bytes as the server does, and does nothing else.
type echo struct {
	gpreemptv1.UnimplementedOnlineServiceServer
}

func (echo) NotifyOnline(context.Context, *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, error) {
	return &gpreemptv1.NotifyOnlineResponse{
		LeaseId: "000000000000feed-1000", Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_NOTHING_TO_DO,
		GpuIds: []uint32{uint32(gpuB)}, Ttl: durationpb.New(50 * time.Millisecond),
		Timing: &gpreemptv1.Timing{Decide: durationpb.New(9999), Total: durationpb.New(9999)},
	}, nil
}

func (echo) Complete(context.Context, *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	return &gpreemptv1.CompleteResponse{
		End: gpreemptv1.LeaseEnd_LEASE_END_COMPLETED, Held: durationpb.New(99999),
		Timing: &gpreemptv1.Timing{Decide: durationpb.New(9999), Total: durationpb.New(9999)},
	}, nil
}

func BenchmarkPairBareGRPC(b *testing.B) {
	socket := filepath.Join(testutil.TempSocketDir(b), "echo.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer()
	gpreemptv1.RegisterOnlineServiceServer(server, echo{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	defer func() {
		server.Stop()
		if err := <-served; err != nil {
			b.Error(err)
		}
	}()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	pair(b, gpreemptv1.NewOnlineServiceClient(conn))
}

func BenchmarkPairTrivialScheduler(b *testing.B) {
	core := scheduler.New(scheduler.DefaultPolicy(), scheduler.Limits{LeasesPerClient: 64, LeasesPerUser: 64, LeasesTotal: 64})
	core.Step(0, scheduler.GPUAdded{GPU: gpuB})
	h := startHost(b, func(c *Config, _ *scheduler.Limits) { c.Scheduler = &trivial{core: core, clock: monotonic{time.Now()}} })
	pair(b, h.online(b))
}

func BenchmarkPairRealScheduler(b *testing.B) {
	h := startHost(b)
	h.directory.mu.Lock()
	h.directory.tell(offline, Facts{}) // nothing to suspend
	h.directory.mu.Unlock()
	pair(b, h.online(b))
}

func BenchmarkPairSession(b *testing.B) {
	h := startHost(b)
	h.directory.mu.Lock()
	h.directory.tell(offline, Facts{})
	h.directory.mu.Unlock()
	st, err := h.online(b).Session(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	req := request()
	do := func(f *gpreemptv1.SessionRequest) *gpreemptv1.SessionResponse {
		if err := st.Send(f); err != nil {
			b.Fatal(err)
		}
		r, err := st.Recv()
		if err != nil {
			b.Fatal(err)
		}
		return r
	}
	b.ReportAllocs()
	for b.Loop() {
		lease := do(announceFrame(1, req)).GetAnnounced().GetLeaseId()
		if do(completeFrame(2, lease)).GetCompleted() == nil {
			b.Fatal("not completed")
		}
	}
}

// BenchmarkHandlers is the pair without gRPC: what our own code costs and
// allocates.
func BenchmarkHandlers(b *testing.B) {
	h := startHost(b)
	h.directory.mu.Lock()
	h.directory.tell(offline, Facts{})
	h.directory.mu.Unlock()
	if _, err := h.online(b).NotifyOnline(b.Context(), request()); err != nil {
		b.Fatal(err)
	}
	ctx, req, online := withCaller(b.Context(), h.anyConnection()), request(), onlineService{s: h.server}
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
