package server

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
	sdk "github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// remote is the TCP address of a host.
type remote struct {
	t       *testing.T
	ca      *testutil.Authority
	address string
}

// openTCP serves TCP too: dns:web.example and cn:batch may announce, and
// uri:spiffe://example/ops is an admin.
func (h *host) openTCP(t *testing.T) *remote {
	t.Helper()
	r := &remote{t: t, ca: testutil.NewAuthority(t, "clients")}
	cert, key := r.ca.Issue(testutil.ForServer)
	certificates, err := auth.ReadCertificates(auth.CertificateFiles{Certificate: cert, Key: key, ClientCA: r.ca.File})
	if err != nil {
		t.Fatal(err)
	}
	l, err := auth.ListenTLS(t.Context(), "127.0.0.1:0", auth.NewCertificateStore(certificates), h.server.Refused)
	if err != nil {
		t.Fatal(err)
	}
	r.address = "tcp://" + l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- h.server.Serve(l) }()
	t.Cleanup(func() {
		_ = l.Close()
		testutil.Receive(t, served, "the end of the server") // nil, or an error about the closed listener
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.rights()
	before.OnlineNames, before.AdminNames = []string{"dns:web.example", "cn:batch"}, []string{"uri:spiffe://example/ops"}
	h.rights = func() auth.Policy { return before }
	return r
}

// dial returns a client with a new certificate.
func (r *remote) dial(change ...func(*x509.Certificate)) *sdk.Client {
	r.t.Helper()
	cert, key := r.ca.Issue(change...)
	c, err := sdk.Dial(r.address, sdk.Certificate(cert, key, r.ca.File))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = c.Close() })
	return c
}

var (
	web   = testutil.Named("web.example")
	ops   = testutil.WithURI("spiffe://example/ops")
	batch = func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: "batch"} }
)

func minute(gpus ...gpreempt.GPUID) *gpreemptv1.NotifyOnlineRequest {
	req := &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(0)}
	for _, id := range gpus {
		req.Gpus = append(req.Gpus, byID(id))
	}
	return req
}

func TestCertificateAnnouncesAndCompletes(t *testing.T) {
	h := startHost(t)
	c := h.openTCP(t).dial(web)
	lease, err := c.Online().NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{Gpus: []*gpreemptv1.GpuSelector{byID(gpuA)}, Label: "llm"})
	if err != nil {
		t.Fatal(err)
	}
	if !lease.GetQuiesced() || lease.GetSuspendedTargets() != 1 {
		t.Errorf("answer %v, want the offline process suspended", lease)
	}
	listed, err := h.admin(t).ListLeases(t.Context(), &gpreemptv1.ListLeasesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	type owner struct {
		Certificate, Label string
		PID                int32
		UID                uint32
	}
	l := listed.GetLeases()[0]
	if diff := cmp.Diff(owner{Certificate: "dns:web.example", Label: "llm"},
		owner{l.GetClientCertificate(), l.GetLabel(), l.GetClientPid(), l.GetClientUid()}); diff != "" {
		t.Errorf("lease owner (-want +got):\n%s", diff)
	}
	if _, err := c.Online().Renew(t.Context(), &gpreemptv1.RenewRequest{LeaseId: lease.GetLeaseId(), Ttl: durationpb.New(time.Minute)}); err != nil {
		t.Error(err)
	}
	done, err := c.Online().Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()})
	if err != nil || done.GetEnd() != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED {
		t.Errorf("completed: %v, %v", done, err)
	}
	// The same over a stream, by the SDK.
	held, err := c.Acquire(t.Context(), sdk.Request{GPUs: sdk.AllGPUs(), MaxWait: 10 * time.Second})
	if err != nil || !held.Protected() {
		t.Fatalf("acquired %+v, %v", held, err)
	}
	err = held.Release(t.Context())
	for gpreempt.ReasonOf(err) == gpreempt.ReasonDaemonUnavailable { // within a second, which a busy host exceeds
		err = held.Release(t.Context())
	}
	if err != nil {
		t.Error(err)
	}
}

func TestRefusalOfACertificateHasANextStep(t *testing.T) {
	h := startHost(t)
	r := h.openTCP(t)
	for name, tc := range map[string]struct {
		change func(*x509.Certificate)
		next   string
	}{
		"another name":         {testutil.Named("db.example"), `add "dns:db.example" to tcp.online on the daemon's host, and reload gpreemptd`},
		"a name of other kind": {func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: "web.example"} }, `add "cn:web.example" to tcp.online on the daemon's host, and reload gpreemptd`},
		"no name":              {func(*x509.Certificate) {}, "issue a certificate with a URI, a DNS name or a common name"},
	} {
		t.Run(name, func(t *testing.T) {
			c := r.dial(tc.change)
			_, err := c.Online().NotifyOnline(t.Context(), minute(gpuA))
			want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotOnline)
			if !strings.HasSuffix(status.Convert(err).Message(), ": "+tc.next) {
				t.Errorf("message %q, want the suffix %q", status.Convert(err).Message(), tc.next)
			}
			_, err = c.Admin().SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{Drain: true})
			want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin)
		})
	}
	// A name that is removed from the list has no right at the next call.
	c := r.dial(web)
	if _, err := c.Online().NotifyOnline(t.Context(), minute(gpuA)); err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	h.rights = func() auth.Policy { return auth.Policy{} }
	h.mu.Unlock()
	_, err := c.Online().NotifyOnline(t.Context(), minute(gpuA))
	want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotOnline)
}

func TestOnlineCertificateMayReadNothing(t *testing.T) {
	h := startHost(t)
	r := h.openTCP(t)
	c, admin := r.dial(web), r.dial(ops)
	for _, method := range gpreemptv1.AdminService_ServiceDesc.Methods {
		full := "/" + gpreemptv1.AdminService_ServiceDesc.ServiceName + "/" + method.MethodName
		var reply gpreemptv1.GetStatusResponse
		err := c.Conn().Invoke(t.Context(), full, &gpreemptv1.GetStatusRequest{}, &reply)
		want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin)
	}
	st, err := c.Admin().WatchEvents(testutil.Context(t), &gpreemptv1.WatchEventsRequest{NoFollow: true})
	if err == nil {
		_, err = st.Recv()
	}
	want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin)

	if _, err := admin.Admin().ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{}); err != nil {
		t.Errorf("an admin by certificate: %v", err)
	}
	if _, err := admin.Admin().SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{}); err != nil {
		t.Errorf("an admin by certificate: %v", err)
	}
	if diff := cmp.Diff([]string{`certificate "uri:spiffe://example/ops": drain false`}, h.verbs(t)); diff != "" {
		t.Errorf("admin events (-want +got):\n%s", diff)
	}
}

func TestLeaseByTCPEndsWithItsConnection(t *testing.T) {
	h := startHost(t)
	r := h.openTCP(t)
	first, second := r.dial(web), r.dial(web)
	lease, err := first.Online().NotifyOnline(t.Context(), minute(gpuA))
	if err != nil {
		t.Fatal(err)
	}
	kept, err := second.Online().NotifyOnline(t.Context(), minute(gpuB))
	if err != nil {
		t.Fatal(err)
	}
	_ = first.Close()
	if end := h.ended(t, lease.GetLeaseId()); end != scheduler.EndDisconnected {
		t.Errorf("ended as %v, want disconnected", end)
	}
	// Both are one client: the other connection keeps its lease.
	if got := h.leases(); len(got) != 1 || leaseID(h.server.leasePrefix, got[0].ID) != kept.GetLeaseId() {
		t.Errorf("leases %v, want %s alone", got, kept.GetLeaseId())
	}
	_ = second.Close()
	if end := h.ended(t, kept.GetLeaseId()); end != scheduler.EndDisconnected {
		t.Errorf("ended as %v, want disconnected", end)
	}
}

func TestQuotasAreOfTheNamesInACertificate(t *testing.T) {
	h := startHost(t, func(_ *Config, l *scheduler.Limits) { l.LeasesPerClient = 2 })
	r := h.openTCP(t)
	first, renewed, other := r.dial(web), r.dial(web), r.dial(batch) // two certificates for one name
	announce := func(c *sdk.Client) error {
		_, err := c.Online().NotifyOnline(t.Context(), minute(gpuA))
		return err
	}
	for _, c := range []*sdk.Client{first, renewed} {
		if err := announce(c); err != nil {
			t.Fatal(err)
		}
	}
	want(t, announce(first), gpreempt.CodeResourceExhausted, gpreempt.ReasonLeasesPerClient)
	want(t, announce(renewed), gpreempt.CodeResourceExhausted, gpreempt.ReasonLeasesPerClient)
	if err := announce(other); err != nil {
		t.Errorf("another client: %v", err)
	}

	h.setLimits(func(l *Limits) { l.RequestsPerSecond, l.Burst = 1, 1 })
	var refused error
	for range 3 {
		_, refused = first.Online().Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "x"})
	}
	want(t, refused, gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited)
	_, refused = renewed.Online().Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "x"})
	want(t, refused, gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited)
	_, refused = other.Online().Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "x"})
	want(t, refused, gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease)

	h.setLimits(func(l *Limits) { l.ConnectionsPerUser, l.RequestsPerSecond, l.Burst = 2, 1000, 1000 })
	want(t, announce(r.dial(web)), gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsPerUser)
}

func TestClientsByCertificateAndByProcessDiffer(t *testing.T) {
	h := startHost(t)
	r := h.openTCP(t)
	c := r.dial(web)
	lease, err := c.Online().NotifyOnline(t.Context(), minute(gpuA))
	if err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]gpreemptv1.OnlineServiceClient{"another certificate": r.dial(batch).Online(), "a process": h.online(t)} {
		_, err := other.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: lease.GetLeaseId()})
		if reason(err) != gpreempt.ReasonForeignLease {
			t.Errorf("%s completes: %v", name, err)
		}
	}
	ids := h.clients()
	if len(ids) != 3 || ids[0].IsAdmin() || ids[0].PID != 0 || ids[1].PID != 0 || ids[2] != scheduler.ClientID(identity(t).Peer().Key()) {
		t.Errorf("clients %v, want two of pid 0 and this process", ids)
	}
	req := minute(gpuA)
	req.CompleteOnIdle = true
	_, err = c.Online().NotifyOnline(t.Context(), req)
	want(t, err, gpreempt.CodeInvalidArgument, gpreempt.ReasonIdleByHand)
	// Without selectors the lease covers all GPUs: the client has no process here.
	all, err := c.Online().NotifyOnline(t.Context(), minute())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]uint32{uint32(gpuA), uint32(gpuB)}, all.GetGpuIds()); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestPlainTCPIsRefused(t *testing.T) {
	h := startHost(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- h.server.Serve(l) }()
	t.Cleanup(func() {
		_ = l.Close()
		testutil.Receive(t, served, "the end of the server")
	})
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = gpreemptv1.NewOnlineServiceClient(conn).NotifyOnline(ctx, minute(gpuA))
	if status.Code(err) != codes.Unavailable {
		t.Errorf("plain TCP was answered: %v", err)
	}
}
