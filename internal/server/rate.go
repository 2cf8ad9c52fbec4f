package server

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
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
	// before the first is charged for its refusals. No more is read in such a turn: the
	// requests that a full buffer holds, 300 or so, would all be answered before anything
	// that others ask for.
	turnBytes = 2 << 10
	// burstFactor bounds how much faster than its rate a user may spend what it has saved.
	burstFactor = 8
	// minBytes is the least that may be sent in a second, and at once, whatever the
	// limit on requests.
	minBytes = 128 << 10
	// maxDebt bounds how long a connection is not read. maxWait is how soon it is looked at
	// again: its client may have left.
	maxDebt = 5 * time.Second
	maxWait = time.Second
	// aheadTime is how far ahead of its rate a user may be before it gives way to others.
	aheadTime = 20 * time.Millisecond
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

// turnTime is the least time between two turns of a busy user's connection.
func (l Limits) turnTime() time.Duration {
	return turnBytes * time.Second / time.Duration(burstFactor*max(l.shared().perSecond*requestBytes, minBytes))
}

// together is the quota of the users who use up theirs: that of two. Its burst is that of aheadTime,
// so that what they have saved up does not run at once.
func (l Limits) together() quota {
	perSecond := 2 * l.shared().perSecond
	return quota{perSecond, max(1, int(float64(perSecond)*aheadTime.Seconds()))}
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

// take takes n requests, at most the burst, and reports whether the quota allows it.
func (m *meter) take(now time.Time, q quota, n int) bool {
	requests, _ := m.limiters(q)
	return requests.AllowN(now, min(n, q.burst))
}

// charge takes n bytes, which may end in debt.
func (m *meter) charge(now time.Time, q quota, n int) {
	_, bytes := m.limiters(q)
	if debtOf(bytes, now) < maxDebt {
		bytes.ReserveN(now, min(n, bytes.Burst()))
	}
}

// work takes n requests, which may end in debt.
func (m *meter) work(now time.Time, q quota, n int) {
	requests, _ := m.limiters(q)
	if debtOf(requests, now) < maxWait {
		requests.ReserveN(now, min(n, q.burst))
	}
}

// workDebt returns the time until requests and bytes are paid.
func (m *meter) workDebt(now time.Time, q quota) time.Duration {
	requests, bytes := m.limiters(q)
	return max(debtOf(requests, now), debtOf(bytes, now))
}

// busy reports whether more was asked for than the rate allows in aheadTime, and is not yet paid.
func (m *meter) busy(now time.Time, q quota) bool {
	requests, bytes := m.limiters(q)
	used := func(l *rate.Limiter) bool {
		return l.TokensAt(now) < float64(l.Burst())-float64(l.Limit())*aheadTime.Seconds()
	}
	return used(requests) || used(bytes)
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

// takeRequest takes the cost of a request from the client and from its user. A refusal is
// charged to both.
func (c *client) takeRequest(l Limits, cost int) error {
	now := time.Now()
	c.user.all.work(now, l.together(), cost)
	e := &gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited}
	switch {
	case !c.meter.take(now, l.own(), cost):
		e.Message = fmt.Sprintf("%v sends more than %d requests per second", c.peer, l.RequestsPerSecond)
		e.Next = "send fewer, or raise limits.requests_per_user"
	case !c.user.meter.take(now, l.shared(), cost):
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
	c.user.all.charge(now, l.together(), bytes)
}

// debt returns how long a connection has to wait, for what it and its user did, or because all
// users together ask for much and this is one of those with most requests.
func (c *connection) debt(l Limits) time.Duration {
	now, u := time.Now(), c.client.user
	debt := max(c.client.meter.debt(now, l.own()), u.meter.debt(now, l.shared()))
	if debt == 0 && c.busy(l) {
		debt = u.all.workDebt(now, l.together())
		debt += rand.N(debt + 1) //nolint:gosec // G404: only so that not all go on at once
	}
	return debt
}

// nextTurn returns how long a connection has to wait until it is read. A turn after a wait is
// charged in the same step, so that of the connections of a user that waited together one is read.
func (c *connection) nextTurn(l Limits, waited bool) time.Duration {
	if !waited {
		debt := c.debt(l)
		if debt == 0 && c.busy(l) {
			return l.turnTime()
		}
		return debt
	}
	c.client.user.turn.Lock()
	defer c.client.user.turn.Unlock()
	debt := c.debt(l)
	if debt == 0 {
		c.client.charge(l, turnBytes)
	}
	return debt
}

// busy reports whether the user of a connection, no admin, asks for more than its rate.
func (c *connection) busy(l Limits) bool {
	return !c.rights.Allows(auth.Admin) && c.client.user.meter.busy(time.Now(), l.shared())
}

// places bounds how much of something there is at a time: it has an element for each.
type places chan struct{}

// take takes a place if one is free, and reports whether it did; free returns a place.
func (p places) take() bool {
	select {
	case p <- struct{}{}:
		return true
	default:
		return false
	}
}

// wait takes a place as soon as one is free. The error is the end of ctx.
func (p places) wait(ctx context.Context) error {
	select {
	case p <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p places) free() { <-p }

// user is the user of processes, or the names of a certificate: it answers for its
// clients together.
type user struct {
	id    scheduler.UserID
	meter meter
	all   *meter // of all users
	// refusals limits the lines of the audit log.
	refusals *logLimiter

	conns int // guarded by clients.mu

	unread atomic.Int64 // bytes of answers that are not yet written

	turn sync.Mutex // held while a connection that waited is charged

	calls      places // in flight, without streams
	reads      places // calls that read the state, while they do
	explaining places // refused connections in explain
}

// readsPerUser is how many calls of a user read the daemon's state at a time; the others
// wait. Such an answer may need a megabyte before it is encoded.
const readsPerUser = 2

// The calls that read the state, of all users without the right Admin together, use at most half
// of the processors' time: a seat for each processor, which rests as long as it was used. So
// announcements, completions and renewals, which never wait here, find the rest free, also with
// one processor.
// The others wait in the order of their arrival; with readsPerUser no user has more of that queue
// than another. Diagnose may wait for the driver, and is computed once at a time.
func newSeats(processors int) chan struct{} { return make(chan struct{}, max(1, processors)) }

// takeSeat waits until a caller may read; free lets the next one do so.
func (s *Server) takeSeat(ctx context.Context, c *connection, method string) (free func(), err error) {
	need, _ := auth.Need(method)
	if need != auth.Read || method == gpreemptv1.AdminService_Diagnose_FullMethodName || c.rights.Allows(auth.Admin) {
		return func() {}, nil
	}
	return sit(ctx, s.seats)
}

// sit takes one of seats; free lets the next one have it, after as long as it was used.
func sit(ctx context.Context, seats chan struct{}) (free func(), err error) {
	select {
	case seats <- struct{}{}:
		began := time.Now()
		return func() { time.AfterFunc(time.Since(began), func() { <-seats }) }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// seatTime is how long a seat is kept at most by what may wait for a client.
const seatTime = 5 * time.Millisecond

// seated has a stream send in a seat: what happens on the host is sent to all who watch, so the cost
// of an event grows with them.
func (s *Server) seated(ctx context.Context, send func() error) error {
	if callerOf(ctx).rights.Allows(auth.Admin) {
		return send()
	}
	free, err := sit(ctx, s.seats)
	if err != nil {
		return err
	}
	defer within(seatTime, free)()
	return send()
}

// within returns free, which is called once, and no later than in a time.
func within(most time.Duration, free func()) func() {
	free = sync.OnceFunc(free)
	late := time.AfterFunc(most, free)
	return func() { late.Stop(); free() }
}

// pace waits while the users of a connection are in debt: what a stream sends is charged, and a
// user with many streams has no other bound of what they cost together.
func (c *connection) pace(ctx context.Context) error {
	for !c.rights.Allows(auth.Admin) {
		debt := c.debt(c.s.cfg.Limits())
		if debt == 0 {
			return nil
		}
		timer := time.NewTimer(min(debt, maxWait))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
	return nil
}

func newUser(name string, all *meter) *user {
	return &user{
		id: scheduler.UserID(name), all: all, refusals: newLogLimiter(),
		calls: make(places, callsPerUser), reads: make(places, readsPerUser), explaining: make(places, explainingPerUser),
	}
}

// MayConnect returns an error if the user of a process connects, or is refused, too often.
// auth.NewUnixListener calls it before anything else is done for a connection, so that a
// flood of connections costs little.
func (s *Server) MayConnect(p auth.Process) error {
	cs := s.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	u := cs.user(p.Principal())
	if err := cs.tooOften(u); err != nil {
		return err
	}
	u.meter.charge(time.Now(), s.cfg.Limits().shared(), connectionBytes/2) // join charges the other half
	return nil
}

// user returns the account of a user. A user without connections is forgotten once its
// meter is full and not before, so a new connection does not start a new account. The
// caller holds mu.
func (cs *clients) user(name string) *user {
	if u := cs.users[name]; u != nil {
		return u
	}
	if len(cs.users) >= cs.pruneUsers {
		now, shared := time.Now(), cs.s.cfg.Limits().shared()
		for id, u := range cs.users {
			if u.conns == 0 && u.meter.full(now, shared) {
				delete(cs.users, id)
			}
		}
		cs.pruneUsers = max(minPrune, 2*len(cs.users))
	}
	u := newUser(name, &cs.all)
	cs.users[name] = u
	return u
}

// tooOften returns an error if the clients of a user are deep in debt. The caller holds mu.
func (cs *clients) tooOften(u *user) error {
	now, shared := time.Now(), cs.s.cfg.Limits().shared()
	if u.meter.debt(now, shared) <= connectDebt {
		return nil
	}
	u.meter.charge(now, shared, refusalBytes)
	return refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited,
		fmt.Sprintf("the clients of %s send requests and connect too often", u.id),
		"use the open connections, or raise limits.requests_per_user")
}

// reservedPlaces is the part of ConnectionsTotal that is for admins: a sixteenth.
func reservedPlaces(total int) int { return total / 16 }

// place returns an error if a user may not have another connection. Admins may use every
// place; the others have all but the reserved ones, and none of them more than as many as
// are left beyond a tenth, so that a few users cannot take the places of all. The tenth is
// for users with few: none has more than a sixteenth of what is left. The caller holds mu.
func (cs *clients) place(u *user, admin bool) error {
	l := cs.s.cfg.Limits()
	left := l.ConnectionsTotal - len(cs.conns)
	if !admin {
		left = l.ConnectionsTotal - reservedPlaces(l.ConnectionsTotal) - (len(cs.conns) - cs.admins)
	}
	most := max(left-l.ConnectionsTotal/10, left/16+1)
	switch {
	case u.conns >= l.ConnectionsPerUser:
		return refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsPerUser,
			fmt.Sprintf("%s has %d connections, its maximum", u.id, u.conns),
			"use the open connections")
	case left <= 0, !admin && u.conns >= most:
		return refusal(gpreempt.CodeResourceExhausted, gpreempt.ReasonConnsTotal,
			fmt.Sprintf("%d connections are open, %d of them of %s, and %d are left", len(cs.conns), u.conns, u.id, max(0, left)),
			"see which processes have them (ss -xp)")
	}
	return nil
}

// throttledConn is a connection that is read at the rate its client is allowed.
type throttledConn struct {
	net.Conn
	s *Server
	c *connection
}

func (t *throttledConn) Read(b []byte) (int, error) {
	client := t.c.client
	for turn := false; ; turn = true {
		l := t.s.cfg.Limits()
		wait := t.c.nextTurn(l, turn)
		if wait == 0 {
			if turn {
				b = b[:min(len(b), turnBytes)]
			}
			break
		}
		if t.c.debt(l) > 0 && t.c.Left() {
			return 0, errLeft // what it has sent is not worth waiting for
		}
		timer := time.NewTimer(min(wait, maxWait))
		select {
		case <-timer.C:
		case <-t.c.Done():
			timer.Stop()
			return t.Conn.Read(b) // it returns why the connection ended
		}
	}
	n, err := t.Conn.Read(b)
	client.charge(t.s.cfg.Limits(), n)
	return n, err
}

// errLeft ends a connection that nobody reads any more.
var errLeft = fmt.Errorf("the client sent more than it may and has left: %w", io.EOF)

func (t *throttledConn) Write(b []byte) (int, error) {
	writes := &t.c.unread.writes
	writes.Add(1)
	defer writes.Add(1)
	t.s.clients.watchUnread()
	return t.Conn.Write(b)
}
