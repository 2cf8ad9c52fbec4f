package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// served returns every method of every service that is served.
func served() (methods []string) {
	for _, desc := range []grpc.ServiceDesc{gpreemptv1.OnlineService_ServiceDesc, gpreemptv1.AdminService_ServiceDesc, grpc_health_v1.Health_ServiceDesc} {
		for _, m := range desc.Methods {
			methods = append(methods, "/"+desc.ServiceName+"/"+m.MethodName)
		}
		for _, m := range desc.Streams {
			methods = append(methods, "/"+desc.ServiceName+"/"+m.StreamName)
		}
	}
	return methods
}

func TestEveryMethodHasACost(t *testing.T) {
	for _, method := range served() {
		if auth.Cost(method) <= 0 {
			t.Errorf("%s has no cost: measure it with BenchmarkCosts", method)
		}
	}
}

// busy adds 24 jobs of 8 queues and events that fill the log.
func (h *host) busy() {
	var procs []discovery.Proc
	for i := range int32(24) {
		p := discovery.Proc{Process: gpreempt.Process{Key: gpreempt.ProcessKey{PID: 4_000_001 + i, Start: 11}, Comm: "train", Cmdline: strings.Repeat("python train.py ", 10)}}
		for q := range uint32(8) {
			p.Queues = append(p.Queues, gpreempt.Queue{Process: p.Key, ID: q, GPU: gpuA, Type: gpreempt.QueueCompute, RingBytes: 4096})
		}
		procs = append(procs, p)
	}
	h.setProcs(procs...)
	for range 2000 {
		h.events.Append(time.Now(), scheduler.Record{Kind: scheduler.RecordTarget, Target: procs[0].Key, Took: time.Millisecond}, "")
	}
}

// BenchmarkCosts measures the processor time of a call of each method, the client's
// included, as a multiple of half an announcement with its Complete. The costs of package auth are from it.
func BenchmarkCosts(b *testing.B) {
	h := startHost(b, func(c *Config, _ *scheduler.Limits) {
		c.Observer = &readings{hqds: &inventory.HQDs{}}
	})
	h.busy()
	conn := h.dial(b)
	target := offline.String()
	requests := map[string]proto.Message{
		"NotifyOnline":   &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(gpuB)}, Ttl: durationpb.New(time.Millisecond), MaxWait: durationpb.New(0)},
		"CreateLease":    &gpreemptv1.CreateLeaseRequest{Announce: &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(gpuB)}, Ttl: durationpb.New(time.Millisecond), MaxWait: durationpb.New(0)}},
		"SuspendTarget":  &gpreemptv1.SuspendTargetRequest{TargetId: target, Ttl: durationpb.New(time.Millisecond)},
		"ResumeTarget":   &gpreemptv1.ResumeTargetRequest{TargetId: target},
		"ClassifyTarget": &gpreemptv1.ClassifyTargetRequest{TargetId: target, Class: gpreemptv1.Class_CLASS_OFFLINE},
		"ExplainTarget":  &gpreemptv1.ExplainTargetRequest{TargetId: target},
		"SetPolicy":      &gpreemptv1.SetPolicyRequest{Preset: "strict", DryRun: true},
		"WatchEvents":    &gpreemptv1.WatchEventsRequest{FromStart: true, NoFollow: true},
	}
	measure := func(b *testing.B, call func() error) float64 {
		const rounds = 200
		before := processorTime(b)
		for range rounds {
			_ = call() // the refused ones cost as much
		}
		return float64(processorTime(b)-before) / rounds
	}
	announce := func() error {
		r := &gpreemptv1.NotifyOnlineResponse{}
		if err := conn.Invoke(b.Context(), gpreemptv1.OnlineService_NotifyOnline_FullMethodName, requests["NotifyOnline"], r); err != nil {
			return err
		}
		return conn.Invoke(b.Context(), gpreemptv1.OnlineService_Complete_FullMethodName, &gpreemptv1.CompleteRequest{LeaseId: r.GetLeaseId()}, &gpreemptv1.CompleteResponse{})
	}
	measure(b, announce)
	unit := measure(b, announce) / 2
	for _, service := range []protoreflect.FullName{"gpreempt.v1.OnlineService", "gpreempt.v1.AdminService", "grpc.health.v1.Health"} {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(service)
		if err != nil {
			b.Fatal(err)
		}
		methods := d.(protoreflect.ServiceDescriptor).Methods()
		for i := range methods.Len() {
			m := methods.Get(i)
			full := fmt.Sprintf("/%s/%s", service, m.Name())
			req := requests[string(m.Name())]
			if req == nil {
				kind, _ := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
				req = kind.New().Interface()
			}
			answer, _ := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
			call := func() error { return conn.Invoke(b.Context(), full, req, answer.New().Interface()) }
			if m.IsStreamingServer() {
				call = func() error { return firstAnswers(b.Context(), conn, full, req, m.IsStreamingClient(), answer) }
			}
			b.Run(full[1:], func(b *testing.B) {
				for b.Loop() {
					b.ReportMetric(measure(b, call)/unit, "announcements")
				}
			})
		}
	}
}

// firstAnswers opens a stream, sends a request, and reads what the daemon has at once.
func firstAnswers(ctx context.Context, conn *grpc.ClientConn, method string, req proto.Message, both bool, answer protoreflect.MessageType) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if both {
		req = completeFrame(1, "x") // of a Session
	}
	st, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: both}, method)
	if err != nil {
		return err
	}
	if err := st.SendMsg(req); err != nil {
		return err
	}
	if !both {
		if err := st.CloseSend(); err != nil {
			return err
		}
	}
	for n := 0; ; n++ {
		if _, follows := req.(*gpreemptv1.WatchEventsRequest); !follows && n > 0 && (both || n == 192 || method == grpc_health_v1.Health_Watch_FullMethodName) {
			return nil
		}
		if err := st.RecvMsg(answer.New().Interface()); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// processorTime returns the processor time of this process.
func processorTime(tb testing.TB) time.Duration {
	tb.Helper()
	var use syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// Expensive calls take more of the rate than cheap ones.
func TestExpensiveCallsTakeMoreOfTheRate(t *testing.T) {
	h := startHost(t)
	h.setLimits(func(l *Limits) { l.RequestsPerSecond, l.Burst = 1, 24 })
	admin := h.admin(t)
	answered := 0
	var err error
	for range 24 {
		if _, err = admin.ListQueues(t.Context(), &gpreemptv1.ListQueuesRequest{}); err != nil {
			break
		}
		answered++
	}
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited)
	if want := 24 / auth.Cost(gpreemptv1.AdminService_ListQueues_FullMethodName); answered != want {
		t.Errorf("%d calls are answered, want %d", answered, want)
	}
}

// A shared answer is computed once for all who accept its age, and again for one who does not.
func TestSharedAnswersAreComputedOnceForAllWhoAcceptTheirAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShared[int]()
		computed := 0
		compute := func() int { computed++; return computed }
		var got []int
		get := func(age time.Duration) {
			n, err := s.get(t.Context(), time.Now().Add(-age), compute)
			if err != nil {
				t.Error(err)
			}
			got = append(got, n)
		}
		get(time.Second)
		time.Sleep(sharedTime)
		get(time.Second)
		time.Sleep(time.Nanosecond)
		get(time.Second)
		get(0)
		time.Sleep(time.Nanosecond)
		get(0)
		if diff := cmp.Diff([]int{1, 1, 2, 2, 3}, got); diff != "" {
			t.Errorf("values (-want +got):\n%s", diff)
		}
	})
}

// A connection ends when a reload takes a right from its peer, with its streams and leases;
// others stay.
func TestConnectionEndsWhenItsPeerLosesARight(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to connect as another user")
	}
	h := startHost(t)
	h.setRights(auth.Policy{OnlineGIDs: []uint32{uint32(os.Getgid())}})
	conn := h.dialAsNobody(t)
	session, err := gpreemptv1.NewOnlineServiceClient(conn).Session(testutil.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	c := conversation{t, session}
	lease := c.do(announceFrame(1, minute(gpuA))).GetAnnounced().GetLeaseId()
	watch, err := gpreemptv1.NewAdminServiceClient(conn).WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	root := h.session(t)
	root.do(completeFrame(1, "x"))
	h.server.RightsChanged() // nothing has changed
	c.do(completeFrame(2, "x"))
	h.setRights(auth.Policy{})
	h.server.RightsChanged()
	if end := h.ended(t, lease); end != scheduler.EndDisconnected {
		t.Errorf("the lease ended as %v, want disconnected", end)
	}
	for {
		if _, err := watch.Recv(); err != nil {
			break
		}
	}
	if _, err := gpreemptv1.NewOnlineServiceClient(conn).NotifyOnline(t.Context(), minute(gpuA)); reason(err) != gpreempt.ReasonNotOnline {
		t.Errorf("afterwards: %v, want ONLINE_RIGHT_MISSING", err)
	}
	root.do(completeFrame(2, "x"))
}

// The remedy names the least right that suffices.
func TestRefusalAdvisesTheLeastRight(t *testing.T) {
	got := map[string]string{}
	for name, c := range map[string]struct {
		peer   auth.Peer
		method string
	}{
		"read":             {auth.Process{UID: 5}, gpreemptv1.AdminService_GetStatus_FullMethodName},
		"change":           {auth.Process{UID: 5}, gpreemptv1.AdminService_SetDrain_FullMethodName},
		"announce":         {auth.Process{UID: 5}, gpreemptv1.OnlineService_NotifyOnline_FullMethodName},
		"read, remote":     {auth.Certificate{Names: []string{"cn:a"}}, gpreemptv1.AdminService_GetStatus_FullMethodName},
		"announce, remote": {auth.Certificate{Names: []string{"cn:a"}}, gpreemptv1.OnlineService_Renew_FullMethodName},
	} {
		need, _ := auth.Need(c.method)
		refusal, ok := errors.AsType[*gpreempt.Error](forbidden(c.peer, c.method, need))
		if !ok {
			t.Fatalf("%s: the refusal is not a *gpreempt.Error", name)
		}
		got[name] = refusal.Next
	}
	want := map[string]string{
		"read":             "join a group of access.online_groups (gpreempt by default) and log in again, or run as root",
		"change":           "join a group of access.admin_groups (gpreempt-admin by default) and log in again, or run as root",
		"announce":         "join a group of access.online_groups (gpreempt by default) and log in again, or run as root",
		"read, remote":     `add "cn:a" to tcp.admin on the daemon's host, and reload gpreemptd`,
		"announce, remote": `add "cn:a" to tcp.online on the daemon's host, and reload gpreemptd`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("remedies (-want +got):\n%s", diff)
	}
}
