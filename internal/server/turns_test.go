package server

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// plenty is a connection that always has as much to read as is asked for.
type plenty struct{ net.Conn }

func (plenty) Read(b []byte) (int, error) { return len(b), nil }

// What a user sends at once is answered in parts, with time for others between them.
func TestBusyUserIsReadInSmallTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Limits{RequestsPerSecond: 1000, Burst: 1000, RequestsPerUser: 1000}
		s := &Server{cfg: Config{Limits: func() Limits { return l }}}
		type turn struct {
			bytes  int
			waited time.Duration
		}
		reads := func(rights auth.Rights) (all []turn) {
			c := newClient(scheduler.ClientID{PID: 1}, auth.Process{}, newUser("uid 7", &meter{}))
			p := &throttledConn{Conn: plenty{}, s: s, c: &connection{Conn: openConn{}, client: c, rights: rights}}
			for range 4 {
				began := time.Now()
				n, err := p.Read(make([]byte, 32<<10))
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, turn{n, time.Since(began)})
			}
			return all
		}
		got := map[string][]turn{"user": reads(0), "admin": reads(auth.Admin)}
		whole := turn{bytes: 32 << 10}
		part := turn{turnBytes, l.turnTime()}
		if diff := cmp.Diff(map[string][]turn{"user": {whole, part, part, part}, "admin": {whole, whole, whole, whole}}, got, cmp.AllowUnexported(turn{})); diff != "" {
			t.Errorf("read (-want +got):\n%s", diff)
		}
	})
}

func TestSeatOfAReaderRestsAsLongAsItWasUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{seats: make(chan struct{}, 1)}
		c := &connection{rights: auth.Read}
		took := func(read time.Duration) (waited time.Duration) {
			began := time.Now()
			free, err := s.takeSeat(t.Context(), c, gpreemptv1.AdminService_ListQueues_FullMethodName)
			if err != nil {
				t.Fatal(err)
			}
			waited = time.Since(began)
			time.Sleep(read)
			free()
			return waited
		}
		got := []time.Duration{took(3 * time.Millisecond), took(time.Millisecond), took(0)}
		if diff := cmp.Diff([]time.Duration{0, 3 * time.Millisecond, time.Millisecond}, got); diff != "" {
			t.Errorf("readers waited (-want +got):\n%s", diff)
		}
		time.Sleep(time.Second) // the last seat is free again before the bubble ends
	})
}
