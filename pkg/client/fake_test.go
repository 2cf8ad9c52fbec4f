package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// testRequest is a request with a max_wait that a busy machine does not exceed.
var testRequest = Request{GPUs: OwnGPUs(), MaxWait: 10 * time.Second}

// daemon is a fake of gpreemptd's online service: it grants leases, keeps the live ones,
// and can misbehave. Leases do not expire.
type daemon struct {
	gpreemptv1.UnimplementedOnlineServiceServer
	// ttl is granted to requests without one.
	ttl time.Duration
	// on, when set, is called first with each request, unary or frame; an error refuses
	// the request. It may block.
	on func(ctx context.Context, request any) error
	// happened receives a line for each action.
	happened chan string

	// health is grpc.health.v1; it reports SERVING until SetServing(false).
	health healthSwitch

	mu   sync.Mutex
	last int
	live map[string]time.Duration
}

func newDaemon() *daemon {
	return &daemon{
		ttl: time.Minute, happened: make(chan string, 1000), live: map[string]time.Duration{},
		health: healthSwitch{health.NewServer()},
	}
}

type healthSwitch struct{ *health.Server }

func (h healthSwitch) SetServing(serving bool) {
	status := healthpb.HealthCheckResponse_NOT_SERVING
	if serving {
		status = healthpb.HealthCheckResponse_SERVING
	}
	h.SetServingStatus("", status)
}

func (d *daemon) seen(ctx context.Context, request any) error {
	if d.on == nil {
		return nil
	}
	return d.on(ctx, request)
}

func (d *daemon) announce(ctx context.Context, r *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, error) {
	if err := d.seen(ctx, r); err != nil {
		return nil, err
	}
	ttl := d.ttl
	if r.GetTtl() != nil {
		ttl = r.GetTtl().AsDuration()
	}
	d.mu.Lock()
	d.last++
	id := fmt.Sprint("lease-", d.last)
	d.live[id] = ttl
	d.mu.Unlock()
	d.happened <- "announced " + id
	return &gpreemptv1.NotifyOnlineResponse{
		LeaseId: id, Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE,
		SuspendedTargets: 2, GpuIds: []uint32{51234, 7}, Ttl: durationpb.New(ttl),
		Timing: &gpreemptv1.Timing{
			Decide: durationpb.New(time.Microsecond), Quiesce: durationpb.New(2 * time.Microsecond), Total: durationpb.New(3 * time.Microsecond),
		},
	}, nil
}

func (d *daemon) complete(ctx context.Context, r *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	if err := d.seen(ctx, r); err != nil {
		return nil, err
	}
	d.mu.Lock()
	_, ok := d.live[r.GetLeaseId()]
	delete(d.live, r.GetLeaseId())
	d.mu.Unlock()
	d.happened <- "completed " + r.GetLeaseId()
	if !ok {
		return nil, unknownLease(r.GetLeaseId())
	}
	return &gpreemptv1.CompleteResponse{End: gpreemptv1.LeaseEnd_LEASE_END_COMPLETED}, nil
}

func (d *daemon) renew(ctx context.Context, r *gpreemptv1.RenewRequest) (*gpreemptv1.RenewResponse, error) {
	if err := d.seen(ctx, r); err != nil {
		return nil, err
	}
	d.mu.Lock()
	_, ok := d.live[r.GetLeaseId()]
	d.mu.Unlock()
	if !ok {
		return nil, unknownLease(r.GetLeaseId())
	}
	d.happened <- "renewed " + r.GetLeaseId()
	return &gpreemptv1.RenewResponse{Ttl: r.GetTtl()}, nil
}

// forget ends every lease.
func (d *daemon) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.live)
}

func (d *daemon) leases() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.live)
}

func unknownLease(id string) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeNotFound, Reason: gpreempt.ReasonUnknownLease, Message: "unknown lease " + id, Next: "announce again",
	}
}

func (d *daemon) NotifyOnline(ctx context.Context, r *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, error) {
	answer, err := d.announce(ctx, r)
	return answer, api.ToStatus(err)
}

func (d *daemon) Complete(ctx context.Context, r *gpreemptv1.CompleteRequest) (*gpreemptv1.CompleteResponse, error) {
	answer, err := d.complete(ctx, r)
	return answer, api.ToStatus(err)
}

func (d *daemon) Renew(ctx context.Context, r *gpreemptv1.RenewRequest) (*gpreemptv1.RenewResponse, error) {
	answer, err := d.renew(ctx, r)
	return answer, api.ToStatus(err)
}

// errHangUp as the error of a frame ends the stream.
var errHangUp = errors.New("hang up")

func (d *daemon) Session(rpc gpreemptv1.OnlineService_SessionServer) error {
	if err := d.seen(rpc.Context(), "session"); err != nil {
		return api.ToStatus(err)
	}
	d.happened <- "session begun"
	answers := make(chan *gpreemptv1.SessionResponse, 100)
	var sent, working sync.WaitGroup
	sent.Go(func() {
		for a := range answers {
			_ = rpc.Send(a)
		}
	})
	hangUp := make(chan struct{}, 100)
	frames := make(chan *gpreemptv1.SessionRequest)
	go func() {
		defer close(frames)
		for {
			frame, err := rpc.Recv()
			if err != nil {
				return
			}
			select {
			case frames <- frame:
			case <-rpc.Context().Done():
				return
			}
		}
	}()
	mine := func() (err error) {
		for {
			select {
			case frame, ok := <-frames:
				if !ok {
					return nil
				}
				working.Go(func() {
					a := &gpreemptv1.SessionResponse{Tag: frame.GetTag()}
					var err error
					switch {
					case frame.GetAnnounce() != nil:
						var x *gpreemptv1.NotifyOnlineResponse
						x, err = d.announce(rpc.Context(), frame.GetAnnounce())
						a.Frame = &gpreemptv1.SessionResponse_Announced{Announced: x}
					case frame.GetComplete() != nil:
						var x *gpreemptv1.CompleteResponse
						x, err = d.complete(rpc.Context(), frame.GetComplete())
						a.Frame = &gpreemptv1.SessionResponse_Completed{Completed: x}
					case frame.GetRenew() != nil:
						var x *gpreemptv1.RenewResponse
						x, err = d.renew(rpc.Context(), frame.GetRenew())
						a.Frame = &gpreemptv1.SessionResponse_Renewed{Renewed: x}
					}
					if errors.Is(err, errHangUp) {
						hangUp <- struct{}{}
						return
					}
					if err != nil {
						a.Frame = &gpreemptv1.SessionResponse_Error{Error: api.ToFrame(err)}
					}
					answers <- a
				})
			case <-hangUp:
				return nil
			}
		}
	}()
	working.Wait()
	close(answers)
	sent.Wait()
	d.happened <- "session over"
	return mine
}

// serve serves d on l. stop ends it at once, as a crash would, and may be called again.
// The end of the test stops it too.
func (d *daemon) serve(t *testing.T, l net.Listener) (stop func()) {
	t.Helper()
	return serve(t, l, d, d.health.Server)
}

func serve(t *testing.T, l net.Listener, online gpreemptv1.OnlineServiceServer, checks healthpb.HealthServer) (stop func()) {
	t.Helper()
	server := grpc.NewServer()
	gpreemptv1.RegisterOnlineServiceServer(server, online)
	healthpb.RegisterHealthServer(server, checks)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	stop = sync.OnceFunc(func() {
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// listen serves d on a real socket.
func (d *daemon) listen(t *testing.T, path string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return d.serve(t, l)
}

func (d *daemon) expect(t *testing.T, lines ...string) {
	t.Helper()
	for _, want := range lines {
		if got := <-d.happened; got != want {
			t.Fatalf("the daemon saw %q, want %q", got, want)
		}
	}
}

func socketPath(t *testing.T) string {
	t.Helper()
	return filepath.Join(testutil.TempSocketDir(t), "s")
}

func newClient(t *testing.T, addr string, opts ...Option) *Client {
	t.Helper()
	c, err := Dial(addr, append([]Option{OnUnprotected(func(err error) {
		if err != nil {
			t.Errorf("unprotected: %v", err)
		}
	})}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// newPair returns a client and its daemon on a real socket.
func newPair(t *testing.T, opts ...Option) (*Client, *daemon) {
	t.Helper()
	d, path := newDaemon(), socketPath(t)
	d.listen(t, path)
	return newClient(t, path, opts...), d
}

// newBubble returns a client that is connected to d in memory, for synctest bubbles.
// end stops both; it must be called before the bubble ends.
func newBubble(t *testing.T, d *daemon, opts ...Option) (c *Client, end func()) {
	t.Helper()
	return newBubbleOf(t, d, opts...)
}

func newBubbleOf(t *testing.T, online gpreemptv1.OnlineServiceServer, opts ...Option) (c *Client, end func()) {
	t.Helper()
	checks := health.NewServer()
	if d, ok := online.(*daemon); ok {
		checks = d.health.Server
	}
	l := bufconn.Listen(1 << 10)
	stop := serve(t, l, online, checks)
	c = newClient(t, "", append(opts, withDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))...)
	return c, func() { c.Close(); stop() }
}

// reports returns a hook for OnUnprotected and a channel of its calls.
func reports() (chan error, Option) {
	got := make(chan error, 100)
	return got, OnUnprotected(func(err error) { got <- err })
}

func acquire(t *testing.T, c *Client, r Request) *Lease {
	t.Helper()
	l, err := c.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func release(t *testing.T, l *Lease) {
	t.Helper()
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func isLost(l *Lease) bool {
	select {
	case <-l.Lost():
		return true
	default:
		return false
	}
}

// withDialer sets how the client connects.
func withDialer(dial func(context.Context, string) (net.Conn, error)) Option {
	return func(c *Client) { c.grpc = append(c.grpc, grpc.WithContextDialer(dial)) }
}
