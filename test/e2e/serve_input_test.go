package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// tryLock takes a lock as the daemon does; it goes with the file.
func tryLock(file *os.File) bool {
	return syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil
}

// refusal is what an error must be: its class, its reason, and a part of what it
// says to do.
type refusal struct {
	Code   codes.Code
	Reason gpreempt.Reason
	Next   string
}

var wantLeasesPerClient = refusal{codes.ResourceExhausted, "LEASES_PER_CLIENT", "complete some"}

func checkError(t *testing.T, what string, err error, want refusal) {
	t.Helper()
	var got refusal
	if e, ok := errors.AsType[*gpreempt.Error](client.FromStatus(err)); ok {
		got = refusal{status.Code(err), e.Reason, e.Next}
		if strings.Contains(e.Next, want.Next) {
			got.Next = want.Next
		}
	}
	if diff := cmp.Diff(want, got); diff != "" || want.Next == "" {
		t.Errorf("%s: %v; as an error (-want +got):\n%s", what, err, diff)
	}
}

// statusWithoutRevisions compares what the daemon holds, not how often it changed.
var statusWithoutRevisions = protocmp.IgnoreFields(&gpreemptv1.GetStatusResponse{}, "event_revision", "inventory_revision", "sources", "goroutine_count", "clock")

func TestBadInputIsRejectedWithoutEffect(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	p := d.startProcess()
	foreign := p.do("announce")
	before, fds := d.status(), d.fds()

	// A connection of its own, so that its end can be seen.
	conn := dial(t, d.socket)
	online, admin := gpreemptv1.NewOnlineServiceClient(conn), gpreemptv1.NewAdminServiceClient(conn)
	ctx := t.Context()
	change := func(f func(*gpreemptv1.NotifyOnlineRequest)) func() error {
		req := announcement()
		f(req)
		return func() error {
			_, err := online.NotifyOnline(ctx, req)
			return err
		}
	}
	for _, tc := range []struct {
		what string
		call func() error
		want refusal
	}{
		{"an unknown GPU", change(func(r *gpreemptv1.NotifyOnlineRequest) {
			r.Gpus = []*gpreemptv1.GpuSelector{{By: &gpreemptv1.GpuSelector_GpuId{GpuId: 4711}}}
		}), refusal{codes.InvalidArgument, "UNKNOWN_GPU", "gpctl gpu list"}},
		{"no GPU in a selector", change(func(r *gpreemptv1.NotifyOnlineRequest) {
			r.Gpus = []*gpreemptv1.GpuSelector{{}}
		}), refusal{codes.InvalidArgument, "UNKNOWN_GPU", "gpctl gpu list"}},
		{
			"priority 16", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Priority = proto.Uint32(16) }),
			refusal{codes.InvalidArgument, "PRIORITY_OUT_OF_RANGE", "0 to 15"},
		},
		{
			"priority 272", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Priority = proto.Uint32(272) }),
			refusal{codes.InvalidArgument, "PRIORITY_OUT_OF_RANGE", "0 to 15"},
		},
		{
			"a negative ttl", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Ttl = durationpb.New(-time.Second) }),
			refusal{codes.InvalidArgument, "TTL_OUT_OF_RANGE", "at most 1m"},
		},
		{
			"no ttl at all", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Ttl = &durationpb.Duration{} }),
			refusal{codes.InvalidArgument, "TTL_OUT_OF_RANGE", "at most 1m"},
		},
		{
			"a ttl of centuries", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Ttl = &durationpb.Duration{Seconds: 315_576_000_000} }),
			refusal{codes.InvalidArgument, "TTL_OUT_OF_RANGE", "at most 1m"},
		},
		{
			"an invalid ttl", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Ttl = &durationpb.Duration{Seconds: 1, Nanos: -1} }),
			refusal{codes.InvalidArgument, "TTL_OUT_OF_RANGE", "same sign"},
		},
		{
			"a negative max_wait", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.MaxWait = durationpb.New(-1) }),
			refusal{codes.InvalidArgument, "DURATION_OUT_OF_RANGE", "use 0 to 1m"}, // of busyHost
		},
		{
			"a long eta", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Eta = durationpb.New(time.Hour) }),
			refusal{codes.InvalidArgument, "DURATION_OUT_OF_RANGE", "0 to 1m"},
		},
		{
			"a long request id", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.RequestId = strings.Repeat("x", 65) }),
			refusal{codes.InvalidArgument, "REQUEST_ID_TOO_LONG", "64"},
		},
		{
			"a long label", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Label = strings.Repeat("x", 129) }),
			refusal{codes.InvalidArgument, "LABEL_TOO_LONG", "128"},
		},
		{
			"a message of 5 MB", change(func(r *gpreemptv1.NotifyOnlineRequest) { r.Label = strings.Repeat("x", 5<<20) }),
			refusal{codes.ResourceExhausted, "MESSAGE_TOO_LARGE", "send less"},
		},
		{"completing another process's lease", func() error {
			_, err := online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: foreign})
			return err
		}, refusal{codes.PermissionDenied, "FOREIGN_LEASE", "gpctl lease release"}},
		{"renewing another process's lease", func() error {
			_, err := online.Renew(ctx, &gpreemptv1.RenewRequest{LeaseId: foreign})
			return err
		}, refusal{codes.PermissionDenied, "FOREIGN_LEASE", "gpctl lease release"}},
		{"a lease of an earlier run", func() error {
			_, err := online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: "0123456789abcdef-1"})
			return err
		}, refusal{codes.NotFound, "UNKNOWN_LEASE", "announce again"}},
		{"no lease id", func() error {
			_, err := online.Complete(ctx, &gpreemptv1.CompleteRequest{})
			return err
		}, refusal{codes.NotFound, "UNKNOWN_LEASE", "lease_id"}},
		{"suspending for more than max_suspend", func() error {
			_, err := admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: fmt.Sprint(pid), Ttl: durationpb.New(time.Hour)})
			return err
		}, refusal{codes.InvalidArgument, "TTL_OUT_OF_RANGE", "max_suspend"}},
		{"explaining an unknown target", func() error {
			_, err := admin.ExplainTarget(ctx, &gpreemptv1.ExplainTargetRequest{TargetId: "../../etc"})
			return err
		}, refusal{codes.NotFound, "UNKNOWN_TARGET", "gpctl target list"}},
		{"a revision of the future", func() error {
			stream, err := admin.WatchEvents(ctx, &gpreemptv1.WatchEventsRequest{AfterRevision: 1 << 60})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}, refusal{codes.OutOfRange, "REVISION_COMPACTED", "read the present state"}},
	} {
		checkError(t, tc.what, tc.call(), tc.want)
	}

	// The same id for the same announcement is one lease, for another an error.
	same := announcement()
	same.RequestId = "one"
	first, err := online.NotifyOnline(ctx, same)
	if err != nil {
		t.Fatal(err)
	}
	again, err := online.NotifyOnline(ctx, same)
	if err != nil || again.GetLeaseId() != first.GetLeaseId() {
		t.Errorf("the retry gave lease %q, %v, want %q", again.GetLeaseId(), err, first.GetLeaseId())
	}
	same.Priority = proto.Uint32(3)
	_, err = online.NotifyOnline(ctx, same)
	checkError(t, "a request id for another announcement", err, refusal{codes.AlreadyExists, "REQUEST_ID_REUSED", "use a new id"})

	if end := p.do("complete %s", foreign); end != gpreemptv1.LeaseEnd_LEASE_END_COMPLETED.String() {
		t.Errorf("its owner completes the lease: %s", end)
	}
	if said := p.do("renew %s", foreign); said != "UNKNOWN_LEASE" {
		t.Errorf("its owner renews the ended lease: %s", said)
	}
	conn.Close()
	d.awaitEnd(first.GetLeaseId())
	d.settled(before, fds, cmpopts.EquateEmpty(), protocmp.IgnoreFields(&gpreemptv1.GetStatusResponse{}, "lease_count", "suspended_count"))
	if n := d.status().GetLeaseCount(); n != 0 {
		t.Errorf("%d leases are left", n)
	}
	d.checkRuns(pid)
	d.stopJob(pid)
}

// settled waits until the daemon holds what it held before.
func (d *daemon) settled(before *gpreemptv1.GetStatusResponse, fds int, opts ...cmp.Option) {
	d.t.Helper()
	defer func() {
		if d.t.Failed() {
			d.t.Logf("the daemon has open: %q", d.openFiles())
		}
	}()
	// Fewer is no leak: a scan may have had files open when fds was counted.
	d.eventually(fmt.Sprintf("back to %d descriptors", fds), func() bool { return d.fds() <= fds })
	opts = append(opts, protocmp.Transform(), statusWithoutRevisions)
	var diff string
	defer func() {
		if diff != "" {
			d.t.Logf("the daemon is not as it was (-before +after):\n%s", diff)
		}
	}()
	d.eventually("the daemon is as it was", func() bool { // the last resume may still be under way
		diff = cmp.Diff(before, d.status(), opts...)
		return diff == ""
	})
}

func TestTenThousandLeasesMeetTheLimits(t *testing.T) {
	t.Parallel()
	const asked = 10_000
	const perClient, total = 512, 4096 // the defaults
	d := start(t, atOnce+"limits:\n  requests_per_user: 1000000\n")
	pid := d.startOffline()
	before, fds := d.status(), d.fds()
	long := announcement()
	long.Ttl = durationpb.New(time.Minute)

	// One client, over one stream.
	stream, err := d.online.Session(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	open := make(chan struct{}, 64) // has an element for each frame that is not answered
	go func() {
		for tag := range uint64(asked) {
			open <- struct{}{}
			if stream.Send(announceFrame(tag, long)) != nil {
				return // Recv reports why
			}
		}
	}()
	got := map[gpreempt.Reason]int{}
	var refused error
	for range asked {
		resp, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		<-open
		err = client.FromFrame(resp.GetError())
		got[gpreempt.ReasonOf(err)]++
		if err != nil {
			refused = api.ToStatus(err)
		}
	}
	if diff := cmp.Diff(map[gpreempt.Reason]int{"": perClient, "LEASES_PER_CLIENT": asked - perClient}, got); diff != "" {
		t.Errorf("how one client's announcements were answered (-want +got):\n%s", diff)
	}
	checkError(t, "one lease too many", refused, wantLeasesPerClient)

	// The admins, whom only the limit of the host binds, apart from the clients.
	conn := dial(t, d.socket)
	admin := gpreemptv1.NewAdminServiceClient(conn)
	leases := make([]string, 0, total)
	for refused = nil; refused == nil; {
		var resp *gpreemptv1.CreateLeaseResponse
		if resp, refused = admin.CreateLease(t.Context(), &gpreemptv1.CreateLeaseRequest{Announce: long}); refused == nil {
			leases = append(leases, resp.GetAnnounced().GetLeaseId())
		}
	}
	checkError(t, "one lease too many for the host", refused, refusal{codes.ResourceExhausted, "LEASES_TOTAL", "gpctl lease list"})
	if n := d.status().GetLeaseCount(); n != total+perClient || len(leases) != total {
		t.Errorf("%d leases live, %d of them an admin's, want %d and %d", n, len(leases), total+perClient, total)
	}
	var list gpreemptv1.ListLeasesResponse
	d.ctlJSON(&list, "lease", "list")
	if n := len(list.GetLeases()); n != total+perClient {
		t.Errorf("gpctl lists %d leases, want %d", n, total+perClient)
	}

	since := d.revision()
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for _, lease := range leases {
		if _, err := admin.ReleaseLease(t.Context(), &gpreemptv1.ReleaseLeaseRequest{LeaseId: lease}); err != nil {
			t.Fatal(err)
		}
	}
	d.awaitTarget(pid, since, running)
	conn.Close()
	d.settled(before, fds)
	d.stopJob(pid)
}

func TestStreamsOfAClientMeetTheirLimit(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	before, fds := d.status(), d.fds()
	conn := dial(t, d.socket)
	online := gpreemptv1.NewOnlineServiceClient(conn)
	// One of 16 streams is the test's own, for events.
	var sessions []grpc.BidiStreamingClient[gpreemptv1.SessionRequest, gpreemptv1.SessionResponse]
	for range 15 {
		session, err := online.Session(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := session.Send(announceFrame(1, announcement())); err != nil {
			t.Fatal(err)
		}
		if _, err := session.Recv(); err != nil {
			t.Fatal(err)
		}
		sessions = append(sessions, session)
	}
	session, err := online.Session(t.Context())
	if err == nil {
		_, err = session.Recv()
	}
	checkError(t, "one stream too many", err, refusal{codes.ResourceExhausted, "STREAMS_PER_CLIENT", "use the open streams"})
	for _, session := range sessions {
		if err := session.CloseSend(); err != nil {
			t.Fatal(err)
		}
	}
	d.eventually("a stream is free again", func() bool {
		session, err := online.Session(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_ = session.CloseSend()
		_, err = session.Recv()
		return status.Code(err) != codes.ResourceExhausted
	})
	conn.Close()
	d.settled(before, fds)
}

// isServed reports whether the daemon serves a new connection. A server speaks first in HTTP/2; a
// connection that it does not want ends, or gets the name of the limit in the same write.
func isServed(t *testing.T, conn net.Conn) bool {
	t.Helper()
	buf := make([]byte, 4096)
	n, err := conn.Read(buf)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	return err == nil && !bytes.Contains(buf[:n], []byte("CONNECTIONS_"))
}

// hasEnded reports whether the daemon has closed a connection.
func hasEnded(t *testing.T, conn net.Conn) bool {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	_, err := conn.Read(make([]byte, 4096))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

func TestConnectionsOfAUserMeetTheirLimit(t *testing.T) {
	t.Parallel()
	const most, asked = 256, 300
	d := start(t, atOnce)
	pid := d.startOffline()
	before, fds := d.status(), d.fds()
	var conns, served []net.Conn
	for range asked {
		conn, err := net.Dial("unix", d.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		if isServed(t, conn) {
			served = append(served, conn)
		}
	}
	// A few that were refused are kept for a second, so that a call on them gets the reason.
	d.eventually(fmt.Sprintf("%d connections are served", most-1), func() bool { // one is the test's own
		served = slices.DeleteFunc(served, func(conn net.Conn) bool { return hasEnded(t, conn) })
		return len(served) <= most-1
	})
	if len(served) != most-1 {
		t.Errorf("%d connections are served, want %d", len(served), most-1)
	}
	// Those there are go on.
	lease := d.announce(t.Context())
	d.checkFrozen(pid)
	d.complete(lease.GetLeaseId())
	for _, conn := range conns {
		conn.Close()
	}
	d.settled(before, fds)
	d.stopJob(pid)
}
