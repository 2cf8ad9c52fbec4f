package server

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// A client that asks too much is refused, and each refusal costs the daemon about
// as much as what it refuses. So whoever is refused pays besides: the bytes of a
// connection are on account, refusals are dear, and a connection in debt is not
// read. The kernel then stops its client, which costs nothing however fast the
// client would send, and whatever it would send: calls, frames of no meaning, or
// connections one after the other.

const (
	// requestBytes is what a request may have in the long run, with all that belongs
	// to it. An announcement has 50 to 150.
	requestBytes = 256
	// refusalBytes and connectionBytes are the price of a refusal, and of a new
	// connection, which costs the daemon some 50 us.
	refusalBytes    = 512
	connectionBytes = 4 << 10
	// turnBytes is the price of being read after a wait: connections of one client that
	// waited together take turns, or each would be read before any is charged for what
	// is refused of it.
	turnBytes = 2 << 10
	// leastBytes is the least that may be sent in a second, and at once, whatever the
	// limit on requests.
	leastBytes = 128 << 10
	// maxDebt bounds how long a connection is not read.
	maxDebt = 5 * time.Second
	// connectDebt is the debt of a user with which no new connection is let in.
	connectDebt = time.Second
)

// allowance is a rate and what may be had at once, both for requests and for bytes,
// as time: what one costs, and for how long one may have saved.
type allowance struct {
	request, requests time.Duration
	perByte           float64 // nanoseconds
	bytes             time.Duration
}

func newAllowance(perSecond, burst int) allowance {
	a := allowance{request: time.Second / time.Duration(perSecond)}
	a.requests = time.Duration(burst) * a.request
	perSecond, burst = max(perSecond*requestBytes, leastBytes), max(burst*requestBytes, leastBytes)
	a.perByte = float64(time.Second) / float64(perSecond)
	a.bytes = time.Duration(float64(burst) * a.perByte)
	return a
}

// own is what a client may ask.
func (l Limits) own() allowance { return newAllowance(l.RequestsPerSecond, l.Burst) }

// shared is what all clients of a user may ask together: at least what one may.
func (l Limits) shared() allowance {
	perSecond := max(l.RequestsPerUser, l.RequestsPerSecond)
	return newAllowance(perSecond, l.Burst*perSecond/l.RequestsPerSecond)
}

// meter is what one client, or one user, has had. The zero meter has had nothing.
type meter struct {
	mu sync.Mutex // guards all below
	// requests and bytes are the moments up to which an even stream of what was had
	// would reach.
	requests, bytes time.Time
}

// ask takes one request, unless that would be too many.
func (m *meter) ask(now time.Time, a allowance) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := later(m.requests, now.Add(-a.requests)).Add(a.request)
	if next.After(now) {
		return false
	}
	m.requests = next
	return true
}

// charge puts bytes on the account.
func (m *meter) charge(now time.Time, a allowance, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes = later(m.bytes, now.Add(-a.bytes)).Add(time.Duration(float64(n) * a.perByte))
	if most := now.Add(maxDebt); m.bytes.After(most) {
		m.bytes = most
	}
}

// debt is how long it takes until the account is even.
func (m *meter) debt(now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return max(0, m.bytes.Sub(now))
}

// full reports whether nothing would be lost with the meter.
func (m *meter) full(now time.Time, a allowance) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.requests.After(now.Add(-a.requests)) && !m.bytes.After(now.Add(-a.bytes))
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// ask takes one request off what the client and its user may ask now. Whoever is
// refused is charged for it.
func (c *client) ask(l Limits) error {
	now, own, shared := time.Now(), l.own(), l.shared()
	e := &gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited}
	switch {
	case !c.meter.ask(now, own):
		e.Message = fmt.Sprintf("%v asks more than %d times a second", c.peer, l.RequestsPerSecond)
		e.Next = "ask less often, or raise limits.requests_per_second"
	case !c.user.meter.ask(now, shared):
		e.Message = fmt.Sprintf("the clients of %s ask more than %d times a second together", c.user.id, l.RequestsPerUser)
		e.Next = "ask less often, or raise limits.requests_per_user"
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

// paced is a connection that is read as fast as its client may send.
type paced struct {
	net.Conn
	s  *Server
	of *connection
}

func (p *paced) Read(b []byte) (int, error) {
	c := p.of.client
	for waited := false; ; waited = true {
		now := time.Now()
		d := max(c.meter.debt(now), c.user.meter.debt(now))
		if d == 0 && waited {
			c.charge(p.s.cfg.Limits(), turnBytes)
		}
		if d == 0 {
			break
		}
		wait := time.NewTimer(d)
		select {
		case <-wait.C:
		case <-p.of.link.Done():
			wait.Stop()
			return p.Conn.Read(b) // which says why it ended
		}
	}
	n, err := p.Conn.Read(b)
	c.charge(p.s.cfg.Limits(), n)
	return n, err
}
