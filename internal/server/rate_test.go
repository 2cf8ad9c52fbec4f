package server

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// At any pace of requests, no period has more than the burst and the rate allow, and
// requests at the rate are never refused.
func TestMeterAllowsTheRateAndTheBurstAndNoMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := quota{perSecond: rapid.IntRange(1, 10_000).Draw(t, "per second"), burst: rapid.IntRange(1, 100).Draw(t, "burst")}
		gap := time.Second/time.Duration(q.perSecond) + 1 // rounded up
		var m meter
		began := time.Unix(1000, 0)
		now, allowed := began, 0
		for _, pause := range rapid.SliceOfN(rapid.Int64Range(0, int64(3*gap)), 1, 300).Draw(t, "pauses") {
			now = now.Add(time.Duration(pause))
			if m.take(now, q, 1) {
				allowed++
			}
			// 1e-6: the limiter computes in floating point.
			if most := float64(q.burst) + now.Sub(began).Seconds()*float64(q.perSecond) + 1e-6; float64(allowed) > most {
				t.Fatalf("%d allowed within %v, want at most %v", allowed, now.Sub(began), most)
			}
		}
		for range 50 {
			if now = now.Add(gap); !m.take(now, q, 1) {
				t.Fatalf("refused at the rate of %d per second", q.perSecond)
			}
		}
	})
}

func TestDebtIsPaidByTimeAndBounded(t *testing.T) {
	q := quota{1000, 1000} // 256 000 bytes per second, and at once
	var m meter
	now := time.Unix(1000, 0)
	m.charge(now, q, 256_000)
	got := []time.Duration{m.debt(now, q)}
	m.charge(now, q, 25_600)
	got = append(got, m.debt(now, q), m.debt(now.Add(60*time.Millisecond), q), m.debt(now.Add(time.Second), q))
	for range 1000 {
		m.charge(now, q, 25_600)
	}
	got = append(got, m.debt(now, q))
	want := []time.Duration{0, 100 * time.Millisecond, 40 * time.Millisecond, 0, maxDebt}
	for i := range got { // a byte does not take a whole number of nanoseconds
		got[i] = got[i].Round(time.Millisecond)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("debts (-want +got):\n%s", diff)
	}
}

// endless is a connection that always has a byte to read.
type endless struct{ net.Conn }

func (endless) Read(b []byte) (int, error) { return len(b[:1]), nil }

// openConn is a connection that does not end.
type openConn struct{ auth.Conn }

func (openConn) Done() <-chan struct{} { return nil }

func (openConn) Left() bool { return false }

// leftConn is a connection whose client has closed it.
type leftConn struct{ openConn }

func (leftConn) Left() bool { return true }

// What a client in debt has sent would be read for minutes after it has left.
func TestConnectionInDebtEndsWhenItsClientHasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{RequestsPerSecond: 1000, Burst: 1000, RequestsPerUser: 4000}
		s := &Server{cfg: Config{Limits: func() Limits { return l }}}
		c := newClient(scheduler.ClientID{PID: 1}, auth.Process{}, newUser("uid 7", &meter{}))
		p := &throttledConn{Conn: endless{}, s: s, c: &connection{Conn: leftConn{}, client: c}}
		if n, err := p.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Errorf("without a debt: read %d bytes, %v; want what it has sent", n, err)
		}
		for range 20 {
			c.charge(l, 25_600)
		}
		began := time.Now()
		n, err := p.Read(make([]byte, 10))
		if waited := time.Since(began); n != 0 || !errors.Is(err, io.EOF) || waited != 0 {
			t.Errorf("in debt: read %d bytes, %v, after %v; want the end at once", n, err, waited)
		}
	})
}

func TestConnectionInDebtIsNotReadUntilItIsPaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{RequestsPerSecond: 1000, Burst: 1000, RequestsPerUser: 4000}
		s := &Server{cfg: Config{Limits: func() Limits { return l }}}
		c := newClient(scheduler.ClientID{PID: 1}, auth.Process{}, newUser("uid 7", &meter{}))
		p := &throttledConn{Conn: endless{}, s: s, c: &connection{Conn: openConn{}, client: c}}
		read := func() time.Duration {
			began := time.Now()
			if _, err := p.Read(make([]byte, 10)); err != nil {
				t.Fatal(err)
			}
			return time.Since(began).Round(time.Millisecond)
		}
		free := read()
		for range 11 { // of its own: 100 ms
			c.charge(l, 25_600)
		}
		own := read()
		for range 3 { // of its user's: about 2 s
			c.user.meter.charge(time.Now(), l.shared(), 1024_000)
		}
		shared := read()
		if free != 0 || own != 100*time.Millisecond || shared < time.Second || shared > 3*time.Second {
			t.Errorf("reads waited %v, %v and %v; want 0, 100ms and about 2s", free, own, shared)
		}
	})
}

func TestWaitingConnectionsAreReadInTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const connections = 50
		l := Limits{RequestsPerSecond: 1000, Burst: 1000, RequestsPerUser: 4000}
		s := &Server{cfg: Config{Limits: func() Limits { return l }}}
		c := newClient(scheduler.ClientID{PID: 1}, auth.Process{}, newUser("uid 7", &meter{}))
		for range 11 {
			c.charge(l, 25_600)
		}
		began, read := time.Now(), make(chan time.Duration, connections)
		for range connections {
			go func() {
				p := &throttledConn{Conn: endless{}, s: s, c: &connection{Conn: openConn{}, client: c}}
				if _, err := p.Read(make([]byte, 10)); err != nil {
					t.Error(err)
				}
				read <- time.Since(began)
			}()
		}
		var last time.Duration
		for range connections {
			last = max(last, <-read)
		}
		// A turn takes 8 ms at this rate; two may look at the same time.
		if took := last - 100*time.Millisecond; took < connections/4*8*time.Millisecond {
			t.Errorf("%d connections were read within %v", connections, took)
		}
	})
}

// The meter of a user outlives its connections and processes.
func TestNewConnectionsDoNotRenewTheQuota(t *testing.T) {
	h := startHost(t)
	h.setLimits(func(l *Limits) { l.RequestsPerSecond, l.Burst, l.RequestsPerUser = 1, 5, 1 })
	complete := func() gpreempt.Reason {
		conn := h.dial(t)
		defer conn.Close()
		_, err := gpreemptv1.NewOnlineServiceClient(conn).Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: "x"})
		return reason(err)
	}
	child := h.startChild(t)
	refused, refusedChild := 0, 0
	for range 30 {
		if complete() == gpreempt.ReasonRateLimited {
			refused++
		}
		h.server.clients.wait() // the client is deleted
	}
	for range 5 { // within the quota of a client
		if child.do(t, "complete x") == string(gpreempt.ReasonRateLimited) {
			refusedChild++
		}
	}
	if refused == 0 || refusedChild == 0 {
		t.Errorf("%d of 30 calls over a connection each were refused, and %d of 5 of another process; want some of both", refused, refusedChild)
	}
	if n := h.events.Stats().Refused[gpreempt.ReasonRateLimited]; n != uint64(refused+refusedChild) {
		t.Errorf("%d refusals are counted, %d were returned", n, refused+refusedChild)
	}
}

func TestLeasesOfAUserAreBoundedOverItsProcesses(t *testing.T) {
	h := startHost(t, func(_ *Config, l *scheduler.Limits) { l.LeasesPerClient, l.LeasesPerUser = 2, 3 })
	online := h.online(t)
	for range 2 {
		if _, err := online.NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	child := h.startChild(t)
	if got := child.do(t, "announce"); len(got) < 16 {
		t.Errorf("the third lease: %s", got)
	}
	if got := child.do(t, "announce"); got != string(gpreempt.ReasonLeasesPerUser) {
		t.Errorf("the fourth lease: %s, want LEASES_PER_USER", got)
	}
}

// gRPC refuses these messages itself.
func TestTooLargeMessageIsCounted(t *testing.T) {
	h := startHost(t)
	large := &gpreemptv1.NotifyOnlineRequest{Label: string(make([]byte, 5<<20))}
	_, err := h.online(t).NotifyOnline(t.Context(), large)
	c := h.session(t)
	_ = c.stream.Send(announceFrame(1, large)) // an error shows below
	_, streamErr := c.stream.Recv()
	if reason(err) != gpreempt.ReasonMessageTooLarge || reason(streamErr) != gpreempt.ReasonMessageTooLarge {
		t.Errorf("%v and %v, want both refused for their size", err, streamErr)
	}
	counted := func() uint64 { return h.events.Stats().Refused[gpreempt.ReasonMessageTooLarge] }
	// The status is sent before it is counted.
	for late := time.After(time.Minute); counted() < 2; {
		select {
		case <-late:
			t.Fatalf("%d are counted, want 2", counted())
		default:
			runtime.Gosched()
		}
	}
}

// A call without its message ends its connection, and is counted.
func TestCallWithoutItsMessageEndsItsConnection(t *testing.T) {
	t.Parallel() // it waits for messageTime
	h := startHost(t)
	conn, err := net.Dial("unix", h.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	b := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), rawFrame(4, 0, 0, nil)...)
	b = append(b, rawCall(gpreemptv1.OnlineService_NotifyOnline_FullMethodName)...)
	b = append(b, rawFrame(0, 0, 1, []byte{0, 0, 0, 0, 9, 1})...)
	if _, err := conn.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection is open: %v", err)
	}
	if diff := cmp.Diff(map[gpreempt.Reason]uint64{gpreempt.ReasonSlowRequest: 1}, h.events.Stats().Refused); diff != "" {
		t.Errorf("counted (-want +got):\n%s", diff)
	}
}

func TestCallsInFlightOfAUserAreBounded(t *testing.T) {
	h := startHost(t)
	admin := h.admin(t)
	get := func() error {
		_, err := admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
		return err
	}
	if err := get(); err != nil {
		t.Fatal(err)
	}
	calls := h.anyConnection().client.user.calls
	for calls.take() {
	}
	if len(calls) != callsPerUser {
		t.Errorf("%d calls are in flight, want %d", len(calls), callsPerUser)
	}
	want(t, get(), gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited)
	calls.free()
	if err := get(); err != nil {
		t.Error(err)
	}
}

// taken opens connections of users that do not exist, as many as they get.
func taken(h *host, limits map[string]int, admin map[string]bool) (got map[string]int) {
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	got = map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		u := newUser(name, &cs.all)
		for range limits[name] {
			if cs.place(u, admin[name]) != nil {
				break
			}
			u.conns++
			got[name]++
			c := &connection{Conn: &closable{}, client: newClient(scheduler.ClientID{PID: 1}, auth.Process{}, u)}
			if admin[name] {
				cs.admins++
			}
			cs.conns[c] = true
		}
	}
	clear(cs.conns)
	cs.admins = 0
	return got
}

// Users who take all they can leave places for others, and for admins.
func TestPlacesAreLeftForOthersAndForAdmins(t *testing.T) {
	h := startHost(t)
	h.setLimits(func(l *Limits) { l.ConnectionsTotal, l.ConnectionsPerUser = 1024, 256 })
	for name, c := range map[string]struct{ tried, want map[string]int }{
		"few": {map[string]int{"a": 200, "b": 200, "root": 5}, map[string]int{"a": 200, "b": 200, "root": 5}},
		"too many": {
			map[string]int{"a": 1000, "b": 1000, "c": 1000, "d": 1000, "e": 1000, "f": 1000, "root": 1000},
			map[string]int{"a": 256, "b": 256, "c": 173, "d": 87, "e": 43, "f": 22, "root": 187},
		},
	} {
		if diff := cmp.Diff(c.want, taken(h, c.tried, map[string]bool{"root": true})); diff != "" {
			t.Errorf("%s: places (-want +got):\n%s", name, diff)
		}
	}
	// Thirty users who take all they can leave some for one more.
	crowd := map[string]int{"zoe": 1000}
	for i := range 30 {
		crowd[fmt.Sprintf("%04d", i)] = 1000
	}
	if got := taken(h, crowd, nil)["zoe"]; got != 2 {
		t.Errorf("%d places are left for a user who comes later, want 2", got)
	}
	// Whatever other users do, the reserved places are left for admins.
	crowd = map[string]int{"root": 1000}
	for i := range 5000 {
		crowd[fmt.Sprintf("%04d", i)] = 1
	}
	if got := taken(h, crowd, map[string]bool{"root": true})["root"]; got != 64 {
		t.Errorf("%d places are left for admins, want 64", got)
	}
}

// When others have all places, the refusal names the limit, and an admin is served.
func TestAdminIsServedWhenOthersHaveAllPlaces(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to connect as another user")
	}
	h := startHost(t)
	var others []uint32
	for i := range uint32(8) {
		others = append(others, nobody-i)
	}
	h.setRights(auth.Policy{OnlineGIDs: []uint32{uint32(os.Getgid())}})
	h.setLimits(func(l *Limits) { l.ConnectionsTotal = 16 })
	served := 0
	for _, uid := range others {
		var err error
		for ; err == nil && served < 16; served++ {
			_, err = gpreemptv1.NewAdminServiceClient(h.dialAs(t, uid)).GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
		}
		served-- // the last was refused
		want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsTotal)
	}
	if served != 15 {
		t.Errorf("others have %d of 16 places, want 15", served)
	}
	if _, err := h.admin(t).GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{}); err != nil {
		t.Errorf("the admin: %v", err)
	}
	if h.events.Stats().Refused[gpreempt.ReasonConnsTotal] == 0 {
		t.Error("no refusal is counted")
	}
}

// A peer without a right takes no place, whatever it calls, and the error has what it needs.
func TestPeerWithoutARightGetsNoConnection(t *testing.T) {
	h := startHost(t)
	h.setRights(auth.Policy{OwnerUID: 1 << 30})
	conn := h.dialAsNobody(t)
	_, err := gpreemptv1.NewOnlineServiceClient(conn).NotifyOnline(t.Context(), minute(gpuA))
	want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotOnline)
	_, err = gpreemptv1.NewAdminServiceClient(conn).SetDrain(t.Context(), &gpreemptv1.SetDrainRequest{})
	want(t, err, gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin)
	if _, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("health: %v, want PERMISSION_DENIED", err)
	}
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.conns)+len(cs.byID) > 0 {
		t.Errorf("%d connections and %d clients are kept", len(cs.conns), len(cs.byID))
	}
}

// Refused connections on which nothing is sent delay the reason for others only briefly,
// and hold at most a few descriptors.
func TestRefusedConnectionsThatAreSilentAreClosed(t *testing.T) {
	h := startHost(t)
	h.setLimits(func(l *Limits) { l.ConnectionsPerUser = 0 })
	var silent []net.Conn
	for range 4 * explaining {
		conn, err := net.Dial("unix", h.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		// The least that ends the handshake, whose time gRPC bounds itself: the preface and empty settings.
		_, _ = conn.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")) // refused ones may be closed
		silent = append(silent, conn)
	}
	notified := 0
	for i, conn := range silent {
		// gRPC itself closes them after a minute.
		if err := conn.SetReadDeadline(time.Now().Add(30 * explainTime)); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(conn) // the end may be a reset
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d is not closed", i)
		}
		if bytes.Contains(got, []byte("CONNECTIONS_PER_USER: uid")) {
			notified++
		}
	}
	if notified < len(silent)-explaining/2 || notified > len(silent)-explainingPerUser {
		t.Errorf("%d of %d silent connections receive the reason", notified, len(silent))
	}
	_, err := h.admin(t).GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsPerUser)
}

// Users without connections are deleted once their meters are full.
func TestUsersWithFullMetersAreDeleted(t *testing.T) {
	h := startHost(t)
	for uid := range uint32(100_000) {
		if err := h.server.MayConnect(auth.Process{UID: uid}); err != nil {
			t.Fatal(err)
		}
	}
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if n := len(cs.users); n > 50_000 {
		t.Errorf("%d users are kept", n)
	}
}

// A connection that is closed without reading, because its user connects too often or because
// too many refused ones wait, gets the name of the limit.
func TestClientSeesWhyItsConnectionIsClosed(t *testing.T) {
	h := startHost(t)
	h.setLimits(func(l *Limits) { l.ConnectionsPerUser = 0 })
	for range explainingPerUser { // they wait for a call
		conn, err := net.Dial("unix", h.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	// Where the GOAWAY is read before the call is sent, or the end before the GOAWAY, gRPC says only that
	// the connection ends.
	var err error
	testutil.Until(t, "a call that gets the reason", func() bool {
		_, err = h.admin(t).GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
		return status.Code(err) != codes.Unavailable
	})
	want(t, err, gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsPerUser)
}
