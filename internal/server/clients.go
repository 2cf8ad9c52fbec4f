package server

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// clientOf returns the client ID of a peer. A process is the same client on each of its connections
// and after it reconnects. So is the owner of a certificate, whose ID has a digest of its names: two
// of n such clients have the same ID with a probability of n² in 2⁶⁵.
func clientOf(p auth.Peer) scheduler.ClientID {
	if key := p.Key(); !key.IsZero() {
		return scheduler.ClientID(key)
	}
	digest := sha256.Sum256([]byte(p.Principal()))
	return scheduler.ClientID{Start: max(1, binary.BigEndian.Uint64(digest[:]))}
}

// scope is what a lease ends with: a connection or a Session stream.
type scope struct {
	ended bool // guarded by client.mu
}

// leaseNote is what the server stores of a lease in addition to the scheduler.
type leaseNote struct {
	// scope is the scope of the last announcement of the lease; nil for a lease of an
	// admin, which does not end with a connection.
	scope *scope
	// admin is the admin who created the lease.
	admin auth.Peer
	// waiting is the number of calls that wait for the answer.
	waiting int
}

// client is a process or the owner of a certificate, with connections; or, with the zero id
// and no peer, the admins together.
type client struct {
	id   scheduler.ClientID
	peer auth.Peer
	user *user // nil for the admins

	// conns is guarded by clients.mu.
	conns int
	// owner is done once the directory knows that the process announces.
	owner sync.Once

	mu     sync.Mutex // guards leases and prune; taken after clients.mu, before the scheduler's lock
	leases map[scheduler.LeaseID]leaseNote
	prune  int // len(leases) at which ended ones are looked for

	streams places
	meter   meter
}

// minPrune is how many leases a client may have before the server looks for those
// that ended without a call to it: by expiry, idleness or an admin.
const minPrune = 64

func newClient(id scheduler.ClientID, peer auth.Peer, u *user) *client {
	return &client{id: id, peer: peer, user: u, leases: map[scheduler.LeaseID]leaseNote{}, prune: minPrune, streams: make(places, streamsPerClient)}
}

// announces tells the directory, before the first announcement of the client, and returns its
// process; the zero key for the owner of a certificate.
func (c *client) announces(s *Server) gpreempt.ProcessKey {
	p, isProcess := c.peer.(auth.Process)
	if !isProcess {
		return gpreempt.ProcessKey{}
	}
	c.owner.Do(func() { s.cfg.Directory.Announces(p.Key(), p.Facts) })
	return p.Key()
}

// gone tells the scheduler and the directory that a client has left. clients.mu is held, so that
// the process does not return meanwhile.
func (c *client) gone(s *Server, end scheduler.LeaseEnd) {
	s.cfg.Scheduler.Post(scheduler.ClientGone{Client: c.id, End: end})
	if key := c.peer.Key(); !key.IsZero() {
		s.cfg.Directory.Departed(key)
	}
}

// addLease stores a note of a lease, which ends with the note's scope from now on.
// known reports whether the lease had been announced before, alive whether the
// scope has not ended meanwhile; if it has, the caller must end the lease.
func (c *client) addLease(s *Server, id scheduler.LeaseID, n leaseNote) (known, alive bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n.scope != nil && n.scope.ended {
		return false, false
	}
	before, known := c.leases[id]
	n.waiting += before.waiting
	c.leases[id] = n
	if len(c.leases) >= c.prune {
		c.dropEnded(s)
	}
	return known, true
}

// dropEnded deletes leases that ended. It runs when their number has doubled since
// the last time, so its cost for each lease is constant.
func (c *client) dropEnded(s *Server) {
	s.cfg.Scheduler.View(func(core *scheduler.Core) {
		for id := range c.leases {
			if _, _, ended := core.Ended(id); ended || core.Owned(scheduler.ClientID{}, id) != nil {
				delete(c.leases, id)
			}
		}
	})
	c.prune = max(minPrune, 2*len(c.leases))
}

// stopWaiting is called when a call no longer waits for the answer. It reports
// whether the lease ends if the call got none: not when a retry has taken it over.
func (c *client) stopWaiting(id scheduler.LeaseID, by *scope) (ends bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.leases[id]
	if !ok {
		return true
	}
	n.waiting--
	c.leases[id] = n
	return n.scope == by && n.waiting <= 0
}

// drop deletes the note of a lease.
func (c *client) drop(id scheduler.LeaseID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.leases, id)
}

// endScope ends a scope, and deletes and returns the leases that end with it.
func (c *client) endScope(sc *scope) []scheduler.LeaseID {
	c.mu.Lock()
	defer c.mu.Unlock()
	sc.ended = true
	var ids []scheduler.LeaseID
	for id, n := range c.leases {
		if n.scope == sc {
			ids = append(ids, id)
			delete(c.leases, id)
		}
	}
	return ids
}

// note returns the note of a lease.
func (c *client) note(id scheduler.LeaseID) leaseNote {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leases[id]
}

// connection is one accepted connection.
type connection struct {
	auth.Conn
	s      *Server
	peer   auth.Peer
	client *client
	rights auth.Rights // when it was made
	// refused is why it does not count as one of the client's, see explain; nil if it does. explained: a
	// call got the reason.
	refused   error
	explained atomic.Bool
	// scope is the scope of leases of unary calls.
	scope scope
	// unread is the answers that are not yet written.
	unread backlog
}

// clients are the connections and the clients behind them.
type clients struct {
	s *Server

	mu     sync.Mutex // guards all below; taken before client.mu and the scheduler's lock
	left   sync.Cond  // signaled when a connection has been removed
	conns  map[*connection]bool
	byID   map[scheduler.ClientID]*client
	users  map[string]*user // by principal
	all    meter            // of all users
	admins int              // connections made with the right Admin
	// pruneUsers is len(users) at which those without connections are looked for.
	pruneUsers int

	unread   atomic.Int64 // bytes of answers that are not yet written, of all connections
	watching atomic.Bool  // closeStuck will be called
}

func newClients(s *Server) *clients {
	cs := &clients{
		s:     s,
		conns: map[*connection]bool{},
		byID:  map[scheduler.ClientID]*client{},
		users: map[string]*user{},
	}
	cs.left.L = &cs.mu
	return cs
}

// join adds a new connection until it ends, or returns it refused, and does not add it.
func (cs *clients) join(conn auth.Conn) *connection {
	peer := conn.Peer()
	id := clientOf(peer)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	rights := cs.s.cfg.Authz().Rights(peer) // with mu held: RightsChanged misses no connection
	u := cs.user(peer.Principal())
	c := &connection{Conn: conn, s: cs.s, peer: peer, rights: rights, unread: backlog{user: &u.unread, all: &cs.unread}}
	err := cs.tooOften(u)
	if err == nil && rights != 0 {
		err = cs.place(u, rights.Allows(auth.Admin))
	}
	shared := cs.s.cfg.Limits().shared()
	if err != nil || rights == 0 {
		u.meter.charge(time.Now(), shared, connectionBytes)
		c.client, c.refused = newClient(id, peer, u), cmp.Or(err, errNoRight)
		return c
	}
	u.meter.charge(time.Now(), shared, connectionBytes/2)
	cl := cs.byID[id]
	if cl == nil {
		cl = newClient(id, peer, u)
		cs.byID[id] = cl
	}
	cl.conns++
	u.conns++
	if rights.Allows(auth.Admin) {
		cs.admins++
	}
	c.client = cl
	cs.conns[c] = true
	go func() { // ends with the connection; wait waits for it
		<-conn.Done()
		cs.leave(c)
	}()
	return c
}

// errNoRight refuses a connection: the refusal of its first call says what is missing.
var errNoRight = errors.New("the peer may not call anything")

// RightsChanged closes the connections of peers that no longer have all rights that they had
// when they connected: their streams and leases end. It is called after Config.Authz returns
// another policy.
func (s *Server) RightsChanged() {
	cs := s.clients
	var lost []*connection
	cs.mu.Lock()
	policy := s.cfg.Authz()
	for c := range cs.conns {
		if !policy.Rights(c.peer).Allows(c.rights) {
			lost = append(lost, c)
		}
	}
	cs.mu.Unlock()
	for _, c := range lost {
		s.cfg.Log.Warn("connection closed: its peer has lost a right", log.Peer(c.peer))
		_ = c.Close()
	}
}

// leave removes a connection and ends its leases. It holds the lock throughout, so
// that a process that reconnects at once finds its old leases ended, and its new
// ones are not ended with them.
func (cs *clients) leave(c *connection) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	defer cs.left.Broadcast()
	delete(cs.conns, c)
	c.unread.end()
	if c.rights.Allows(auth.Admin) {
		cs.admins--
	}
	c.client.user.conns--
	c.client.conns--
	leases := c.client.endScope(&c.scope)
	died := c.Died()
	if c.client.conns == 0 {
		delete(cs.byID, c.client.id)
	}
	// A user that connects again and again has a line a second; the rest is counted in its
	// next line.
	if u := c.client.user; u.conns == 0 && u.refusals.ends.Allow() {
		cs.s.auditSkipped(u)
	}
	switch {
	case died:
		c.client.gone(cs.s, scheduler.EndClientDied)
	case c.client.conns == 0:
		c.client.gone(cs.s, scheduler.EndDisconnected)
	default:
		cs.s.endAll(c.client, leases, scheduler.EndDisconnected)
	}
}

// releaseOrphan ends a lease whose connection or stream ended before the lease was
// granted.
func (cs *clients) releaseOrphan(c *client, id scheduler.LeaseID) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.s.endAll(c, []scheduler.LeaseID{id}, scheduler.EndDisconnected)
	if cs.byID[c.id] == nil {
		// With the lease, the scheduler has stored the client again.
		c.gone(cs.s, scheduler.EndDisconnected)
	}
}

// endAll ends leases because their connection or stream ended.
func (s *Server) endAll(c *client, leases []scheduler.LeaseID, how scheduler.LeaseEnd) {
	for _, id := range leases {
		// The only errors are an unknown lease and one of another client: nothing to end.
		_, _, _ = s.cfg.Scheduler.Complete(c.id, id, how)
	}
}

func (cs *clients) byClient(id scheduler.ClientID) *client {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.byID[id]
}

// wait returns when no connection remains and the leases of all have ended.
func (cs *clients) wait() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for len(cs.conns) > 0 {
		cs.left.Wait()
	}
}
