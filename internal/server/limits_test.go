package server

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestFloodAboveTheRateIsRefused(t *testing.T) {
	h := startHost(t)
	h.setLimits(func(l *Limits) { l.RequestsPerSecond, l.Burst = 1, 5 })
	online := h.online(t)
	refused := 0
	for range 50 {
		_, err := online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "x"})
		if reason(err) == gpreempt.ReasonRateLimited {
			want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited)
			refused++
		}
	}
	if refused == 0 {
		t.Error("no call was refused")
	}
	// Another connection has the same quota; a reload changes it.
	again := h.online(t)
	var err error
	for range 5 { // a quota of its own would allow them all; this one, one a second
		if _, err = again.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "x"}); reason(err) == gpreempt.ReasonRateLimited {
			break
		}
	}
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited)
	h.setLimits(func(l *Limits) { l.RequestsPerSecond, l.Burst = 1000, 1000 })
	_, err = online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "x"})
	want(t, err, gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease)
}

func TestTooLargeMessageIsRefused(t *testing.T) {
	h := startHost(t)
	_, err := h.online(t).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Label: strings.Repeat("x", 5<<20)})
	if status.Code(err) != codes.ResourceExhausted || reason(err) != gpreempt.ReasonMessageTooLarge {
		t.Errorf("unary: %v, want RESOURCE_EXHAUSTED with MESSAGE_TOO_LARGE", err)
	}
	c := h.session(t)
	lease := c.do(announceFrame(1, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)})).GetAnnounced().GetLeaseId()
	_ = c.stream.Send(announceFrame(2, &gpreemptv1.NotifyOnlineRequest{Label: strings.Repeat("x", 5<<20)}))
	if _, err := c.stream.Recv(); status.Code(err) != codes.ResourceExhausted || reason(err) != gpreempt.ReasonMessageTooLarge {
		t.Errorf("stream: %v, want RESOURCE_EXHAUSTED with MESSAGE_TOO_LARGE", err)
	}
	if end := h.ended(t, lease); end != scheduler.EndDisconnected {
		t.Errorf("the lease of the broken stream ended as %v, want disconnected", end)
	}
}

func TestStreamsPerClientAreBounded(t *testing.T) {
	h := startHost(t)
	first := h.session(t)
	first.do(completeFrame(1, "x")) // it is open then
	for range streamsPerClient - 1 {
		h.session(t).do(completeFrame(1, "x"))
	}
	st, err := h.admin(t).WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{})
	if err == nil {
		_, err = st.Recv()
	}
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonStreamsPerClient)
	if err := first.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := first.stream.Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	h.session(t).do(completeFrame(1, "x"))
}

func TestConnectionsPerUserAreBounded(t *testing.T) {
	logged := make(chan string, 100)
	h := startHost(t, func(c *Config, _ *scheduler.Limits) {
		core, _ := observer.New(zap.WarnLevel)
		c.Log = zap.New(core, zap.Hooks(func(e zapcore.Entry) error {
			logged <- e.Message
			return nil
		}))
	})
	h.setLimits(func(l *Limits) { l.ConnectionsPerUser = 2 })
	var conns []*grpc.ClientConn
	for range 2 {
		conn := h.dial(t)
		conns = append(conns, conn)
		if _, err := gpreemptv1.NewAdminServiceClient(conn).GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := net.Dial("unix", h.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := io.Copy(io.Discard, raw); err != nil {
		t.Errorf("the connection above the limit reads %v, want its end", err)
	}
	if got := testutil.Receive(t, logged, "a line of the log"); got != "client connection refused" {
		t.Errorf("the log has %q, want the refusal", got)
	}
	// A client of gRPC gets the reason, as the outcome of its call or stream.
	admin := h.admin(t)
	_, err = admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsPerUser)
	stream, err := admin.WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsPerUser)
	// After the end of one, another is accepted: gRPC reconnects automatically when the refused one
	// has ended.
	_ = conns[0].Close()
	h.awaitConnections(t, 1)
	testutil.Until(t, "a connection is accepted", func() bool {
		_, err = admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
		return err == nil
	})
}

// awaitConnections waits until at most so many connections are open.
func (h *host) awaitConnections(t *testing.T, most int) {
	t.Helper()
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for len(cs.conns) > most {
		cs.left.Wait()
	}
}

func TestRightsAreCheckedOnEveryCall(t *testing.T) {
	h := startHost(t)
	conn := h.dialAsNobody(t)
	uid := uint32(os.Getuid())
	if uid == 0 {
		uid = nobody
	}
	type outcome struct{ announce, read, change gpreempt.Reason }
	try := func(conn *grpc.ClientConn, p auth.Policy) outcome {
		online, admin := gpreemptv1.NewOnlineServiceClient(conn), gpreemptv1.NewAdminServiceClient(conn)
		h.mu.Lock()
		h.rights = func() auth.Policy { return p }
		h.mu.Unlock()
		_, announce := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{})
		_, read := admin.GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
		_, change := admin.SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{})
		return outcome{reason(announce), reason(read), reason(change)}
	}
	const owner = 1 << 30
	got := []outcome{
		try(h.dialAsNobody(t), auth.Policy{OwnerUID: owner}), // a connection without a right stays refused
		try(conn, auth.Policy{OwnerUID: owner, OnlineGIDs: []uint32{uint32(os.Getgid())}}),
		try(conn, auth.Policy{OwnerUID: owner, AdminUIDs: []uint32{uid}}),
	}
	if diff := cmp.Diff([]outcome{
		{gpreempt.ReasonNotOnline, gpreempt.ReasonNotAdmin, gpreempt.ReasonNotAdmin},
		{"", "", gpreempt.ReasonNotAdmin},
		{"", "", ""},
	}, got, cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("nobody, an online user, an admin (-want +got):\n%s", diff)
	}
	if err := conn.Invoke(t.Context(), "/gpreempt.v1.AdminService/Nothing", &gpreemptv1.GetStatusRequest{}, &gpreemptv1.GetStatusResponse{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("an unknown method: %v, want UNIMPLEMENTED", err)
	}
	if _, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Errorf("health needs no right: %v", err)
	}
}

// nobody is the uid of clients when the test runs as root, which has all rights.
const nobody = 65534

// dialAsNobody is dialAs with the uid nobody.
func (h *host) dialAsNobody(t *testing.T) *grpc.ClientConn {
	t.Helper()
	return h.dialAs(t, nobody)
}

// dialAs returns a connection of this process with a uid when the tests run as root, and with
// its own uid otherwise.
func (h *host) dialAs(t *testing.T, uid uint32) *grpc.ClientConn {
	t.Helper()
	if os.Getuid() != 0 {
		return h.dial(t)
	}
	for path, mode := range map[string]os.FileMode{filepath.Dir(h.socket): 0o755, h.socket: 0o777} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	dial := func(context.Context, string) (conn net.Conn, err error) {
		dialed := make(chan struct{})
		go func() {
			defer close(dialed)
			// The uid is of this thread only, which ends with the goroutine.
			runtime.LockOSThread()
			if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 { //nolint:forbidigo // syscall.Setresuid would change every thread
				err = errno
				return
			}
			conn, err = net.Dial("unix", h.socket)
		}()
		<-dialed
		return conn, err
	}
	conn, err := grpc.NewClient("passthrough:socket", grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// panicking is a scheduler with a defect.
type panicking struct {
	Scheduler
	on atomic.Bool
}

func (p *panicking) Complete(c scheduler.ClientID, id scheduler.LeaseID, end scheduler.LeaseEnd) (scheduler.LeaseEnd, time.Duration, error) {
	if p.on.Load() {
		panic("a defect")
	}
	return p.Scheduler.Complete(c, id, end)
}

func TestPanicIsAnErrorOfOneCall(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	p := &panicking{}
	h := startHost(t, func(c *Config, _ *scheduler.Limits) { c.Scheduler, c.Log = p, zap.New(core) })
	p.Scheduler = h.runner
	p.on.Store(true)
	online := h.online(t)
	_, err := online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "000000000000feed-1"})
	want(t, err, gpreempt.CodeInternal, gpreempt.ReasonInternal)
	c := h.session(t)
	c.send(completeFrame(1, "000000000000feed-1"))
	_, err = c.stream.Recv()
	want(t, err, gpreempt.CodeInternal, gpreempt.ReasonInternal)
	p.on.Store(false)
	if _, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{}); err != nil {
		t.Errorf("after the panics: %v", err)
	}
	if logs.Len() != 2 || !strings.Contains(logs.All()[0].ContextMap()["stack"].(string), "panicking") {
		t.Errorf("logged %v; want both panics with their stacks", logs.All())
	}
}

func TestConnectionsLeaveNoState(t *testing.T) {
	h := startHost(t)
	for range 1000 {
		conn, err := grpc.NewClient("unix:"+h.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		online := gpreemptv1.NewOnlineServiceClient(conn)
		if _, err := online.NotifyOnline(context.Background(), &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(0)}); err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
	}
	h.server.clients.wait()
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.conns)+len(cs.byID) > 0 || len(cs.users) != 1 {
		t.Errorf("%d connections, %d clients, %d users remain; want one user", len(cs.conns), len(cs.byID), len(cs.users))
	}
	if got := h.leases(); len(got) > 0 {
		t.Errorf("leases %v remain", got)
	}
}

func TestCallerWithoutIdentityIsRefused(t *testing.T) {
	h := startHost(t)
	handler := h.server.unary(gpreemptv1.OnlineService_Complete_FullMethodName,
		func(any, context.Context, func(any) error, grpc.UnaryServerInterceptor) (any, error) {
			t.Error("the handler was called")
			return nil, nil
		})
	err := handler(nil, &stream{ctx: t.Context()})
	want(t, err, gpreempt.CodeUnauthenticated, gpreempt.ReasonNoIdentity)
}
