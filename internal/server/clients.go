package server

import (
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// A ClientID is a process written as a number: the pid in the high bits, its
// start time in the low ones. So a process is the same client on each of its
// connections and after it reconnects, and nothing has to remember it. The
// kernel's pids have at most 22 bits; 42 bits of clock ticks are 1394 years.
//
// Whoever holds a certificate is the client with pid 0 and a digest of its names
// for a start time, and so the same client on each of its connections too. That
// two of n such clients are taken for one has a chance of n² in 2⁴³.
const startBits = 42

// clientOf returns the client a peer is.
func clientOf(p authz.Peer) scheduler.ClientID {
	if key := p.Process(); !key.IsZero() {
		return ClientOf(key)
	}
	digest := sha256.Sum256([]byte(p.Principal()))
	return max(1, ClientOf(gpreempt.ProcessKey{Start: binary.BigEndian.Uint64(digest[:])}))
}

// ClientOf returns the client a process is. It is never 0, the admin's, for a
// process that exists.
func ClientOf(key gpreempt.ProcessKey) scheduler.ClientID {
	return scheduler.ClientID(uint64(key.PID)<<startBits | key.Start&(1<<startBits-1))
}

// ProcessOf is the inverse of ClientOf. The pid is 0 when the client is no process
// of this host.
func ProcessOf(id scheduler.ClientID) gpreempt.ProcessKey {
	return gpreempt.ProcessKey{PID: int32(uint64(id) >> startBits), Start: uint64(id) & (1<<startBits - 1)}
}

// holder is what a lease ends with: a connection or a Session stream.
type holder struct {
	ended bool // guarded by client.mu
}

// held is what the server remembers of a lease.
type held struct {
	// by is what the lease ends with: whatever announced it last. nil for a lease
	// by hand, which ends with nothing.
	by    *holder
	label string
	// admin is who made a lease by hand.
	admin authz.Peer
	// waiting is the number of calls that wait for the answer.
	waiting int
}

// client is a process or the holder of a certificate with connections, or the one
// with id 0 and no peer: the admins.
type client struct {
	id   scheduler.ClientID
	peer authz.Peer
	user *user // nil for the admins

	// conns is guarded by clients.mu.
	conns int

	mu      sync.Mutex // guards all below; taken after clients.mu, before the scheduler's lock
	leases  map[scheduler.LeaseID]held
	prune   int // len(leases) at which ended ones are looked for
	streams int
	gpus    gpuCache

	meter    meter
	refusals scarce // lines of the audit log
}

// minPrune is how many leases a client may have before the server looks which of
// them ended without a word to it: by expiry, idleness or an admin.
const minPrune = 64

func newClient(id scheduler.ClientID, peer authz.Peer, u *user) *client {
	return &client{id: id, peer: peer, user: u, leases: map[scheduler.LeaseID]held{}, prune: minPrune}
}

// keep notes that the lease ends with by from now on. known tells that it had
// been announced before, alive that by has not ended meanwhile; when it has, the
// caller must end the lease.
func (c *client) keep(s *Server, id scheduler.LeaseID, h held) (known, alive bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.by != nil && h.by.ended {
		return false, false
	}
	before, known := c.leases[id]
	h.waiting += before.waiting
	c.leases[id] = h
	if len(c.leases) >= c.prune {
		c.dropEnded(s)
	}
	return known, true
}

// dropEnded forgets leases that ended. Looking only when their number has
// doubled since the last look makes it cheap for each.
func (c *client) dropEnded(s *Server) {
	s.cfg.Scheduler.View(func(core *scheduler.Core) {
		for id := range c.leases {
			if _, _, ended := core.Ended(id); ended || core.Owned(0, id) != nil {
				delete(c.leases, id)
			}
		}
	})
	c.prune = max(minPrune, 2*len(c.leases))
}

// answered notes that a call no longer waits for the answer.
func (c *client) answered(id scheduler.LeaseID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h, ok := c.leases[id]; ok {
		h.waiting--
		c.leases[id] = h
	}
}

// abandon notes that a call went away before its answer, and reports whether the
// lease should end for it: not when a retry took the lease over.
func (c *client) abandon(id scheduler.LeaseID, by *holder) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	h, ok := c.leases[id]
	if !ok {
		return true
	}
	h.waiting--
	c.leases[id] = h
	return h.by == by && h.waiting <= 0
}

// drop forgets a lease.
func (c *client) drop(id scheduler.LeaseID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.leases, id)
}

// release forgets and returns the leases that end with by, which takes no more.
func (c *client) release(by *holder) []scheduler.LeaseID {
	c.mu.Lock()
	defer c.mu.Unlock()
	by.ended = true
	var ids []scheduler.LeaseID
	for id, h := range c.leases {
		if h.by == by {
			ids = append(ids, id)
			delete(c.leases, id)
		}
	}
	return ids
}

// note returns what is remembered of a lease.
func (c *client) note(id scheduler.LeaseID) held {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leases[id]
}

// connection is one accepted connection.
type connection struct {
	link   link
	peer   authz.Peer
	client *client
	// holder is for the leases of unary calls.
	holder holder
}

// clients knows the connections and the clients behind them.
type clients struct {
	s *Server

	mu     sync.Mutex // guards all below; taken before client.mu and the scheduler's lock
	left   sync.Cond  // a connection left
	byLink map[link]*connection
	byID   map[scheduler.ClientID]*client
	users  map[string]*user // by principal
	// pruneUsers is len(users) at which those without connections are looked for.
	pruneUsers int
}

func newClients(s *Server) *clients {
	cs := &clients{
		s:      s,
		byLink: map[link]*connection{},
		byID:   map[scheduler.ClientID]*client{},
		users:  map[string]*user{},
	}
	cs.left.L = &cs.mu
	return cs
}

// join takes in a new connection and watches over it. The error says why not.
func (cs *clients) join(l link) (*connection, error) {
	peer := peerOf(l)
	id := clientOf(peer)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	u, err := cs.mayConnect(peer.Principal())
	if err != nil {
		return nil, err
	}
	u.meter.charge(time.Now(), cs.s.cfg.Limits().shared(), connectionBytes/2)
	cl := cs.byID[id]
	if cl == nil {
		cl = newClient(id, peer, u)
		cs.byID[id] = cl
	}
	cl.conns++
	u.conns++
	c := &connection{link: l, peer: peer, client: cl}
	cs.byLink[l] = c
	go func() { // ends with the connection; wait waits for it
		<-l.Done()
		cs.leave(c)
	}()
	return c, nil
}

// leave ends what ends with a connection. The lock is held through it, so that a
// process that reconnects at once finds its old leases ended and its new ones
// left alone.
func (cs *clients) leave(c *connection) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	defer cs.left.Broadcast()
	delete(cs.byLink, c.link)
	c.client.user.conns--
	c.client.conns--
	leases := c.client.release(&c.holder)
	died := c.link.Died()
	if c.client.conns == 0 {
		delete(cs.byID, c.client.id)
		cs.s.auditRest(c)
	}
	switch {
	case died:
		cs.s.cfg.Scheduler.Post(scheduler.ClientGone{Client: c.client.id, End: scheduler.EndClientDied})
	case c.client.conns == 0:
		cs.s.cfg.Scheduler.Post(scheduler.ClientGone{Client: c.client.id, End: scheduler.EndDisconnected})
	default:
		cs.s.endAll(c.client, leases, scheduler.EndDisconnected)
	}
}

// disown ends a lease whose connection or stream was gone before the lease was
// given.
func (cs *clients) disown(c *client, id scheduler.LeaseID) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.s.endAll(c, []scheduler.LeaseID{id}, scheduler.EndDisconnected)
	if cs.byID[c.id] == nil {
		// The lease made the scheduler remember the client again.
		cs.s.cfg.Scheduler.Post(scheduler.ClientGone{Client: c.id, End: scheduler.EndDisconnected})
	}
}

// endAll ends leases because their connection or stream did.
func (s *Server) endAll(c *client, leases []scheduler.LeaseID, how scheduler.LeaseEnd) {
	for _, id := range leases {
		// The only errors are that it is forgotten or not ours: nothing to end.
		_, _, _ = s.cfg.Scheduler.Complete(c.id, id, how)
	}
}

func (cs *clients) of(l link) *connection {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.byLink[l]
}

func (cs *clients) byClient(id scheduler.ClientID) *client {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.byID[id]
}

func (cs *clients) ids() []scheduler.ClientID {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	ids := make([]scheduler.ClientID, 0, len(cs.byID))
	for id := range cs.byID {
		ids = append(ids, id)
	}
	return ids
}

// wait returns when no connection is left and all that ends with one has ended.
func (cs *clients) wait() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for len(cs.byLink) > 0 {
		cs.left.Wait()
	}
}
