package server

import (
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// A request above the rate is refused, and a refusal costs the daemon about as
// much as the request. So the bytes of a connection are charged as well, with a
// price for each refusal, and a connection in debt is not read. The kernel then
// stops the client, which costs nothing, whatever the client sends: calls, frames
// without meaning, or one connection after another.

const (
	// requestBytes is the price of a request in the long run, with all that belongs
	// to it. An announcement has 50 to 150 bytes.
	requestBytes = 256
	// refusalBytes and connectionBytes are the price of a refusal, and of a new
	// connection, which costs the daemon some 50 us.
	refusalBytes    = 512
	connectionBytes = 4 << 10
	// turnBytes is the price of being read after a wait. With it, connections of one
	// client that waited together are read in turns; without it, each would be read
	// before the first is charged for its refusals.
	turnBytes = 2 << 10
	// minBytes is the least that may be sent in a second, and at once, whatever the
	// limit on requests.
	minBytes = 128 << 10
	// maxDebt bounds how long a connection is not read.
	maxDebt = 5 * time.Second
	// connectDebt is the debt of a user above which its new connections are refused.
	connectDebt = time.Second
)

// quota is how many requests are allowed per second, and at once.
type quota struct{ perSecond, burst int }

// own is the quota of a client.
func (l Limits) own() quota { return quota{l.RequestsPerSecond, l.Burst} }

// shared is the quota of all clients of a user together: at least that of one.
func (l Limits) shared() quota {
	perSecond := max(l.RequestsPerUser, l.RequestsPerSecond)
	return quota{perSecond, l.Burst * perSecond / l.RequestsPerSecond}
}

// meter measures what a client, or all clients of a user, request. The zero meter
// has measured nothing. Its methods are safe for concurrent use.
type meter struct {
	mu              sync.Mutex // guards all below
	quota           quota
	requests, bytes *rate.Limiter
}

// limiters returns the limiters of requests and of bytes, which are new and full
// when the quota has changed.
func (m *meter) limiters(q quota) (requests, bytes *rate.Limiter) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if q != m.quota || m.requests == nil {
		m.quota = q
		m.requests = rate.NewLimiter(rate.Limit(q.perSecond), q.burst)
		m.bytes = rate.NewLimiter(rate.Limit(max(q.perSecond*requestBytes, minBytes)), max(q.burst*requestBytes, minBytes))
	}
	return m.requests, m.bytes
}

// take takes one request, and reports whether the quota allows it.
func (m *meter) take(now time.Time, q quota) bool {
	requests, _ := m.limiters(q)
	return requests.AllowN(now, 1)
}

// charge takes n bytes, which may end in debt.
func (m *meter) charge(now time.Time, q quota, n int) {
	_, bytes := m.limiters(q)
	if debtOf(bytes, now) < maxDebt {
		bytes.ReserveN(now, min(n, bytes.Burst()))
	}
}

// debt returns the time until the bytes are paid.
func (m *meter) debt(now time.Time, q quota) time.Duration {
	_, bytes := m.limiters(q)
	return debtOf(bytes, now)
}

// debtOf returns the time until a limiter has no fewer than 0 tokens.
func debtOf(l *rate.Limiter, now time.Time) time.Duration {
	return max(0, time.Duration(-l.TokensAt(now)/float64(l.Limit())*float64(time.Second)))
}

// full reports whether a new meter would allow no more than this one.
func (m *meter) full(now time.Time, q quota) bool {
	requests, bytes := m.limiters(q)
	return requests.TokensAt(now) >= float64(requests.Burst()) && bytes.TokensAt(now) >= float64(bytes.Burst())
}

// takeRequest takes one request of the client and of its user. A refusal is
// charged to both.
func (c *client) takeRequest(l Limits) error {
	now := time.Now()
	e := &gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited}
	switch {
	case !c.meter.take(now, l.own()):
		e.Message = fmt.Sprintf("%v sends more than %d requests per second", c.peer, l.RequestsPerSecond)
		e.Next = "send fewer, or raise limits.requests_per_second"
	case !c.user.meter.take(now, l.shared()):
		e.Message = fmt.Sprintf("the clients of %s together send more than %d requests per second", c.user.id, l.RequestsPerUser)
		e.Next = "send fewer, or raise limits.requests_per_user"
	default:
		return nil
	}
	c.charge(l, refusalBytes)
	return e
}

func (c *client) charge(l Limits, bytes int) {
	now := time.Now()
	c.meter.charge(now, l.own(), bytes)
	c.user.meter.charge(now, l.shared(), bytes)
}

// openStream counts a stream in; closeStream counts it out.
func (c *client) openStream(l Limits) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.streams >= l.StreamsPerClient {
		return refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonStreamsPerClient,
			fmt.Sprintf("%v has %d streams open, its maximum", c.peer, c.streams),
			"use the open streams, or raise limits.streams_per_client")
	}
	c.streams++
	return nil
}

func (c *client) closeStream() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams--
}

// user is the user of processes, or the names of a certificate: it answers for its
// clients together.
type user struct {
	id    scheduler.UserID
	meter meter

	conns int // guarded by clients.mu

	mu    sync.Mutex // guards calls
	calls int        // in flight, without streams
}

// beginCall counts a call in that is not a stream; endCall counts it out.
func (u *user) beginCall() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.calls >= callsPerUser {
		return refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited,
			fmt.Sprintf("the clients of %s have %d calls in flight, their maximum", u.id, u.calls),
			"wait for answers before the next calls, or use a Session stream")
	}
	u.calls++
	return nil
}

func (u *user) endCall() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.calls--
}

// MayConnect reports whether a user may have one more connection. auth.NewUnixListener
// calls it before anything else is done for a connection, so that a flood of
// connections costs little.
func (s *Server) MayConnect(uid uint32) error {
	cs := s.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	u, err := cs.mayConnect(auth.Process{UID: uid}.Principal())
	if err == nil {
		u.meter.charge(time.Now(), s.cfg.Limits().shared(), connectionBytes/2) // join charges the other half
	}
	return err
}

// mayConnect returns the user of a new connection, or an error that says why it is
// refused. A user without connections is forgotten once its meter is full and not
// before, so a new connection does not start a new account. The caller holds mu.
func (cs *clients) mayConnect(name string) (*user, error) {
	l, now := cs.s.cfg.Limits(), time.Now()
	shared := l.shared()
	u := cs.users[name]
	if u == nil {
		if len(cs.users) >= cs.pruneUsers {
			for id, u := range cs.users {
				if u.conns == 0 && u.meter.full(now, shared) {
					delete(cs.users, id)
				}
			}
			cs.pruneUsers = max(minPrune, 2*len(cs.users))
		}
		u = &user{id: scheduler.UserID(name)}
		cs.users[name] = u
	}
	refused := &gpreempt.Error{Code: gpreempt.CodeResourceExhausted}
	switch {
	case u.conns >= l.ConnectionsPerUser:
		refused.Reason = gpreempt.ReasonConnsPerUser
		refused.Message = fmt.Sprintf("%s has %d connections, its maximum", name, u.conns)
		refused.Next = "use the open connections, or raise limits.connections_per_user"
	case len(cs.byConn) >= l.ConnectionsTotal:
		refused.Reason = gpreempt.ReasonConnsTotal
		refused.Message = fmt.Sprintf("%d connections are open, the maximum", len(cs.byConn))
		refused.Next = "see which processes have them (ss -xp), or raise limits.connections_total"
	case u.meter.debt(now, shared) > connectDebt:
		refused.Reason = gpreempt.ReasonRateLimited
		refused.Message = fmt.Sprintf("the clients of %s send requests and connect too often", name)
		refused.Next = "use the open connections, or raise limits.requests_per_user"
	default:
		return u, nil
	}
	u.meter.charge(now, shared, refusalBytes)
	return nil, refused
}

// throttledConn is a connection that is read at the rate its client is allowed.
type throttledConn struct {
	net.Conn
	s *Server
	c *connection
}

func (t *throttledConn) Read(b []byte) (int, error) {
	client := t.c.client
	for waited := false; ; waited = true {
		now, l := time.Now(), t.s.cfg.Limits()
		debt := max(client.meter.debt(now, l.own()), client.user.meter.debt(now, l.shared()))
		if debt == 0 {
			if waited {
				client.charge(l, turnBytes)
			}
			break
		}
		timer := time.NewTimer(debt)
		select {
		case <-timer.C:
		case <-t.c.conn.Done():
			timer.Stop()
			return t.Conn.Read(b) // it returns why the connection ended
		}
	}
	n, err := t.Conn.Read(b)
	client.charge(t.s.cfg.Limits(), n)
	return n, err
}
