package scheduler

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Limits bounds what clients may hold.
type Limits struct {
	// LeasesPerClient bounds the live leases of one client; admins are exempt.
	LeasesPerClient int
	// LeasesPerUser bounds the live leases of all clients of one user, so that more
	// processes do not get more leases; admins are exempt. LeasesPerClient counts
	// instead where that is more.
	LeasesPerUser int `yaml:"leases_per_user" range:"1 100000"`
	// LeasesTotal bounds the live leases of all clients together, and apart from them those
	// of the admins: clients cannot keep an admin from a lease. The last tenth is for users
	// who hold at most a sixteenth of what is left.
	LeasesTotal int
}

// endedKept is how many ended leases are kept, so that a late Complete or a repeated
// request id is answered rather than rejected.
const endedKept = 4096

// book keeps the leases of clients: who holds which, whether the limits leave room for another, and what
// became of those that ended. It knows nothing of GPUs and targets.
type book struct {
	limits  Limits
	leases  map[LeaseID]*lease
	clients map[ClientID]*client
	perUser map[UserID]int // live leases, except those of admins
	// requests are the ids of requests, of live and of ended leases.
	requests map[requestKey]LeaseID

	ended     []endedLease // ring once endedKept long
	endedNext int
	endedByID map[LeaseID]int

	free []*lease
}

type requestKey struct {
	client ClientID
	id     string
}

// client is a holder of leases.
type client struct {
	id     ClientID
	leases []*lease
	owner  gpreempt.ProcessKey // of its leases; zero for none
}

// endedLease is what is kept of a lease that ended.
type endedLease struct {
	id     LeaseID
	req    LeaseRequested
	end    LeaseEnd
	lived  time.Duration
	answer Answer
}

func newBook(limits Limits) book {
	return book{
		limits: limits, leases: map[LeaseID]*lease{}, clients: map[ClientID]*client{}, perUser: map[UserID]int{},
		requests: map[requestKey]LeaseID{}, endedByID: map[LeaseID]int{},
	}
}

// enter adds a lease, which must not be known.
func (b *book) enter(req LeaseRequested) *lease {
	l := b.newLease()
	l.id, l.req = req.Lease, req
	l.client = b.clients[req.Client]
	if l.client == nil {
		l.client = &client{id: req.Client}
		b.clients[req.Client] = l.client
	}
	l.client.leases = append(l.client.leases, l)
	if !req.Client.IsAdmin() {
		b.perUser[req.User]++
	}
	b.leases[l.id] = l
	if req.RequestID != "" {
		b.requests[requestKey{req.Client, req.RequestID}] = l.id
	}
	return l
}

// strike removes a lease that has ended, and remembers it.
func (b *book) strike(l *lease, end LeaseEnd, lived time.Duration) {
	delete(b.leases, l.id)
	l.client.leases = remove(l.client.leases, l)
	if len(l.client.leases) == 0 && l.client.id.IsAdmin() {
		delete(b.clients, ClientID{})
	}
	if user := l.req.User; !l.client.id.IsAdmin() {
		if b.perUser[user]--; b.perUser[user] == 0 {
			delete(b.perUser, user)
		}
	}
	b.remember(endedLease{id: l.id, req: l.req, end: end, lived: lived, answer: l.answer})
}

func (b *book) newLease() *lease {
	if n := len(b.free); n > 0 {
		l := b.free[n-1]
		b.free = b.free[:n-1]
		*l = lease{gpus: l.gpus[:0]}
		l.timer.owner = l
		return l
	}
	l := &lease{}
	l.timer.owner = l
	return l
}

// remember keeps an ended lease, and forgets the oldest one.
func (b *book) remember(e endedLease) {
	if len(b.ended) < endedKept {
		b.endedByID[e.id] = len(b.ended)
		b.ended = append(b.ended, e)
		return
	}
	old := &b.ended[b.endedNext]
	delete(b.endedByID, old.id)
	if key := (requestKey{old.req.Client, old.req.RequestID}); b.requests[key] == old.id {
		delete(b.requests, key)
	}
	*old = e
	b.endedByID[e.id] = b.endedNext
	b.endedNext = (b.endedNext + 1) % endedKept
}

// remove deletes l and clears the free slot.
func remove(leases []*lease, l *lease) []*lease {
	if i := slices.Index(leases, l); i >= 0 {
		return slices.Delete(leases, i, i+1)
	}
	return leases
}

// room returns an error when the limits leave no room for another lease of a client.
func (b *book) room(id ClientID, user UserID) error {
	full := func(reason gpreempt.Reason, what string, n int) error {
		return &Refusal{Reason: reason, What: what, Value: int64(n), Limit: int64(n)}
	}
	if cl := b.clients[id]; !id.IsAdmin() && cl != nil && len(cl.leases) >= b.limits.LeasesPerClient {
		return full(gpreempt.ReasonLeasesPerClient, "client", len(cl.leases))
	}
	if n := b.perUser[user]; !id.IsAdmin() && n >= max(b.limits.LeasesPerUser, b.limits.LeasesPerClient) {
		return full(gpreempt.ReasonLeasesPerUser, "user", n)
	}
	live := 0 // of the admins
	if admins := b.clients[ClientID{}]; admins != nil {
		live = len(admins.leases)
	}
	of, most := "admins", b.limits.LeasesTotal
	if !id.IsAdmin() {
		live, of = len(b.leases)-live, "clients"
		// The last tenth is for users with few leases.
		if b.perUser[user] > (b.limits.LeasesTotal-live)/16 {
			most -= b.limits.LeasesTotal / 10
		}
	}
	if live >= most {
		return full(gpreempt.ReasonLeasesTotal, of, live)
	}
	return nil
}

// lost reports whether a lease ended because its client disconnected or died: a retry of
// that announcement after reconnecting is a new one.
func (b *book) lost(id LeaseID) bool {
	end, _, ended := b.Ended(id)
	return ended && (end == EndDisconnected || end == EndClientDied)
}

func (b *book) sameRequest(id LeaseID, req LeaseRequested) error {
	var first LeaseRequested
	if l := b.leases[id]; l != nil {
		first = l.req
	} else {
		first = b.ended[b.endedByID[id]].req
	}
	same := slices.Equal(first.GPUs, req.GPUs)
	first.Lease, first.GPUs, req.Lease, req.GPUs = 0, nil, 0, nil
	if same && equalRequests(first, req) {
		return nil
	}
	return &Refusal{Reason: gpreempt.ReasonRequestIDReused, What: req.RequestID}
}

func equalRequests(a, b LeaseRequested) bool {
	return a.Client == b.Client && a.User == b.User && a.Priority == b.Priority && a.TTL == b.TTL && a.MaxWait == b.MaxWait && a.ETA == b.ETA &&
		a.OnIdle == b.OnIdle
}

// Answered returns the answer to a lease, also after it ended; ok is false while there is
// none.
func (b *book) Answered(id LeaseID) (answer Answer, ok bool) {
	if l := b.leases[id]; l != nil {
		return l.answer, l.answered
	}
	if at, known := b.endedByID[id]; known {
		a := b.ended[at].answer
		return Answer{Reason: CauseEnded, Waited: a.Waited}, true
	}
	return Answer{}, false
}

// Ended returns how a lease ended and how long it lived; false for one that is not kept.
func (b *book) Ended(id LeaseID) (end LeaseEnd, lived time.Duration, ok bool) {
	at, ok := b.endedByID[id]
	if !ok {
		return EndNone, 0, false
	}
	return b.ended[at].end, b.ended[at].lived, true
}

// Owned checks that a lease is known and that the client may act on it; an admin may
// act on any. Errors are *Refusal.
func (b *book) Owned(client ClientID, id LeaseID) error {
	var owner ClientID
	if l := b.leases[id]; l != nil {
		owner = l.req.Client
	} else if at, ok := b.endedByID[id]; ok {
		owner = b.ended[at].req.Client
	} else {
		return errUnknownLease
	}
	if !client.IsAdmin() && client != owner {
		return &Refusal{Reason: gpreempt.ReasonForeignLease}
	}
	return nil
}

var errUnknownLease = &Refusal{Reason: gpreempt.ReasonUnknownLease}
