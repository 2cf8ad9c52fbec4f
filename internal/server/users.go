package server

import (
	"fmt"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// user is whoever answers for clients: what its processes may have together.
type user struct {
	id    scheduler.UserID
	meter meter

	conns int // guarded by clients.mu

	mu    sync.Mutex // guards calls
	calls int        // in flight, without streams
}

// MayConnect reports whether a user may have one more connection. It is what
// peercred.Admit asks: a flood of connections is to cost little.
func (s *Server) MayConnect(uid uint32) error {
	cs := s.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	u, err := cs.mayConnect(peercred.Peer{UID: uid}.Principal())
	if err == nil {
		u.meter.charge(time.Now(), cs.s.cfg.Limits().shared(), connectionBytes/2) // join charges the other half
	}
	return err
}

// mayConnect returns the user who wants to connect, or why it may not. A user without
// connections is forgotten when its account is even, and not before: who connects
// anew gets nothing new. The caller holds mu.
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
		refused.Message = fmt.Sprintf("%s has %d connections, the most it may", name, u.conns)
		refused.Next = "use those it has, or raise limits.connections_per_user"
	case len(cs.byLink) >= l.ConnectionsTotal:
		refused.Reason = gpreempt.ReasonConnsTotal
		refused.Message = fmt.Sprintf("there are %d connections, the most there may be", len(cs.byLink))
		refused.Next = "see who has them (ss -xp), or raise limits.connections_total"
	case u.meter.debt(now) > connectDebt:
		refused.Reason = gpreempt.ReasonRateLimited
		refused.Message = fmt.Sprintf("the clients of %s ask and connect too often", name)
		refused.Next = "use the connections it has, or raise limits.requests_per_user"
	default:
		return u, nil
	}
	u.meter.charge(now, shared, refusalBytes)
	return nil, refused
}

// begin counts a call in; end counts it out.
func (u *user) begin() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.calls >= callsPerUser {
		return &gpreempt.Error{
			Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited,
			Message: fmt.Sprintf("the clients of %s have %d calls in flight, the most they may", u.id, u.calls),
			Next:    "wait for answers before asking more, or use a Session stream",
		}
	}
	u.calls++
	return nil
}

func (u *user) end() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.calls--
}
