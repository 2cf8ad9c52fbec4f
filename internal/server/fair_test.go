package server

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// ofUser is a connection of another user than the test's.
type ofUser struct{ auth.Conn }

// someUser is a user and its group.
const someUser = 4242

func (ofUser) Peer() auth.Peer {
	return auth.Process{PID: 4_000_100, Start: 1, UID: someUser, GID: someUser}
}

// onlineUser is a policy by which someUser has the right Online.
func onlineUser() auth.Policy {
	return auth.Policy{OwnerUID: uint32(os.Getuid()), OnlineGIDs: []uint32{someUser}}
}

// While all seats are taken, the calls of users that read the state wait. Announcements, the calls
// of admins, and Diagnose do not.
func TestReadsOfUsersWaitForASeat(t *testing.T) {
	self := identity(t)
	for name, c := range map[string]struct {
		peer auth.Conn
		want map[string]bool
	}{
		"user":  {ofUser{self}, map[string]bool{"announce": false, "diagnose": false, "list": true, "events": true}},
		"admin": {self, map[string]bool{"announce": false, "diagnose": false, "list": false, "events": false}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := startInMemory(t, c.peer)
				h.setRights(onlineUser())
				conn := h.dial(t)
				admin := gpreemptv1.NewAdminServiceClient(conn)
				seats := h.server.seats
				for range cap(seats) {
					seats <- struct{}{}
				}
				waits := map[string]bool{}
				var answers []<-chan error
				call := func(name string, rpc func() error) {
					answer := make(chan error, 1)
					go func() { answer <- rpc() }()
					synctest.Wait()
					waits[name], answers = len(answer) == 0, append(answers, answer)
				}
				call("announce", func() error {
					_, err := gpreemptv1.NewOnlineServiceClient(conn).NotifyOnline(t.Context(), &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(0)})
					return err
				})
				call("diagnose", func() error {
					_, err := admin.Diagnose(t.Context(), &gpreemptv1.DiagnoseRequest{})
					return err
				})
				call("list", func() error {
					_, err := admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
					return err
				})
				call("events", func() error {
					st, err := admin.WatchEvents(t.Context(), &gpreemptv1.WatchEventsRequest{FromStart: true})
					if err == nil {
						_, err = st.Recv()
					}
					return err
				})
				if diff := cmp.Diff(c.want, waits); diff != "" {
					t.Errorf("calls that wait (-want +got):\n%s", diff)
				}
				for range cap(seats) {
					<-seats
				}
				for _, answer := range answers {
					if err := testutil.Receive(t, answer, "an answer"); err != nil {
						t.Error(err)
					}
				}
				synctest.Wait()
				if len(seats) != 0 {
					t.Errorf("%d seats are taken after the answers", len(seats))
				}
			})
		})
	}
}

// A call that ends while it waits for a seat takes none.
func TestCallThatEndsTakesNoSeat(t *testing.T) {
	s := &Server{seats: make(chan struct{}, 1)}
	s.seats <- struct{}{}
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the client has left")
	cancel(gone)
	if _, err := s.takeSeat(ctx, &connection{rights: auth.Read}, gpreemptv1.AdminService_ListTargets_FullMethodName); !errors.Is(err, gone) {
		t.Errorf("the error is %v, want %v", err, gone)
	}
}

// A stream whose client does not read leaves its seat to others.
func TestStreamThatIsNotReadKeepsNoSeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{seats: make(chan struct{}, 1)}
		read, sent := make(chan struct{}), make(chan error, 1)
		ctx := withCaller(t.Context(), &connection{rights: auth.Read})
		go func() { sent <- s.seated(ctx, func() error { <-read; return nil }) }()
		synctest.Wait()
		if len(s.seats) != 1 {
			t.Fatal("the stream sends without a seat")
		}
		free, err := sit(ctx, s.seats) // waits
		if err != nil {
			t.Fatal(err)
		}
		free()
		close(read)
		if err := <-sent; err != nil {
			t.Error(err)
		}
	})
}

// proving is credentials that prove every peer.
type proving struct {
	credentials.TransportCredentials
}

func (proving) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return raw, nil, nil
}

// at is a connection with a local address.
type at struct {
	net.Conn
	net.Addr
}

func (a at) LocalAddr() net.Addr { return a.Addr }

// Handshakes of TLS wait for a turn; a process on the unix socket does not wait for them.
func TestHandshakesOfTLSTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{handshakes: make(chan struct{}, 1), closing: t.Context()}
		s.handshakes <- struct{}{}
		proved := map[string]bool{}
		sc := &serverCredentials{TransportCredentials: proving{}, s: s}
		for _, local := range []net.Addr{&net.TCPAddr{}, &net.UnixAddr{Net: "unix"}} {
			go func() {
				_, _, err := sc.prove(at{Addr: local})
				proved[local.Network()] = err == nil
			}()
			synctest.Wait()
		}
		if diff := cmp.Diff(map[string]bool{"unix": true}, proved); diff != "" {
			t.Errorf("proved while another handshake has the turn (-want +got):\n%s", diff)
		}
		<-s.handshakes
		synctest.Wait()
		if diff := cmp.Diff(map[string]bool{"unix": true, "tcp": true}, proved); diff != "" {
			t.Errorf("proved at the end (-want +got):\n%s", diff)
		}
	})
}

// crowded returns connections of users with more requests than twice the rate of one, of a user with
// few requests, and of an admin with many.
func crowded(t *testing.T) map[string]*connection {
	t.Helper()
	l := Limits{RequestsPerSecond: 1000, Burst: 1000, RequestsPerUser: 1000}
	s := &Server{cfg: Config{Limits: func() Limits { return l }}}
	var all meter
	users := map[string]*connection{}
	for _, u := range []struct {
		name     string
		requests int
		rights   auth.Rights
	}{
		{"admin", 500, auth.Online | auth.Read | auth.Admin},
		{"first", 500, auth.Online | auth.Read},
		{"second", 500, auth.Online | auth.Read},
		{"little", 10, auth.Online | auth.Read},
	} {
		c := &connection{s: s, rights: u.rights, client: newClient(scheduler.ClientID{PID: 1}, auth.Process{}, newUser(u.name, &all))}
		for range u.requests {
			if err := c.client.takeRequest(l, 1); err != nil {
				t.Fatalf("%s: %v: it is within its own rate", u.name, err)
			}
		}
		users[u.name] = c
	}
	return users
}

// 1,510 requests at once, where two users together have 40 and 2,000 a second: the users
// with many requests wait until that is paid, although each is within its own rate.
func TestUsersWithTheMostRequestsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		users := crowded(t)
		look := func() map[string]bool {
			wait := map[string]bool{}
			for name, c := range users {
				debt := c.debt(c.s.cfg.Limits())
				wait[name] = debt > 0
				if debt != 0 && (debt < 734*time.Millisecond || debt > 1471*time.Millisecond) {
					t.Errorf("%s waits for %v, want 735 ms to twice as long", name, debt)
				}
			}
			return wait
		}
		if diff := cmp.Diff(map[string]bool{"admin": false, "first": true, "second": true, "little": false}, look()); diff != "" {
			t.Errorf("users that wait (-want +got):\n%s", diff)
		}
		time.Sleep(time.Second)
		if diff := cmp.Diff(map[string]bool{"admin": false, "first": false, "second": false, "little": false}, look()); diff != "" {
			t.Errorf("users that wait a second later (-want +got):\n%s", diff)
		}
	})
}

// Messages of streams to users with many requests are delayed; those to others and to admins are not.
func TestStreamsOfUsersInDebtArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		users := crowded(t)
		for _, name := range []string{"admin", "little", "first"} {
			began := time.Now()
			if err := users[name].pace(t.Context()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if took := time.Since(began); (took > 0) != (name == "first") {
				t.Errorf("a message of %s waited for %v", name, took)
			}
		}
		users = crowded(t)
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := errors.New("the client has left")
		cancel(gone)
		if err := users["first"].pace(ctx); !errors.Is(err, gone) {
			t.Errorf("the error of a stream that has ended is %v, want %v", err, gone)
		}
	})
}

func TestWatchOfAUserInDebtIsDelayed(t *testing.T) {
	self := identity(t)
	synctest.Test(t, func(t *testing.T) {
		h := startInMemory(t, ofUser{self})
		h.setRights(onlineUser())
		st, err := gpreemptv1.NewAdminServiceClient(h.dial(t)).WatchQueues(t.Context(), &gpreemptv1.WatchQueuesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		recvSteps(t, st, 3)
		synctest.Wait()
		l := h.server.cfg.Limits()
		u := h.anyConnection().client.user
		bytes := l.shared().perSecond * requestBytes
		u.meter.charge(time.Now(), l.shared(), bytes) // the burst
		u.meter.charge(time.Now(), l.shared(), bytes/2)
		began := time.Now()
		h.setProcs(h.procs[0])
		recvSteps(t, st, 1)
		if waited := time.Since(began); waited < 400*time.Millisecond {
			t.Errorf("the message came after %v, want half a second", waited)
		}
	})
}
