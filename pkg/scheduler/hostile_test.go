package scheduler

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// hostile is a set of clients that want offline work off the GPUs for good, on a
// punctual machine: several processes of several users that announce, renew,
// overlap, complete, vanish and come back, alone and together.
type hostile struct {
	*punctual
	clients map[ClientID][]LeaseID // those that live, and what they may hold
	next    ClientID
}

// hostileUsers is how many users collude.
const hostileUsers = 3

func (h *hostile) spawn() ClientID {
	h.next++
	h.clients[h.next] = nil
	return h.next
}

// any returns one of the clients that live.
func (h *hostile) any() ClientID {
	n := h.roll(len(h.clients))
	for id := ClientID(1); id <= h.next; id++ {
		if _, lives := h.clients[id]; lives {
			if n == 0 {
				return id
			}
			n--
		}
	}
	panic("unreachable")
}

// announce asks for as much as the core grants anybody.
func (h *hostile) announce(id ClientID) error {
	ttl := min(h.span(9), h.core.policy.MaxTTL)
	if h.roll(2) == 0 {
		ttl = h.core.policy.MaxTTL
	}
	last := h.lastID
	err := h.request(LeaseRequested{
		Client: id, User: UserID(fmt.Sprint("u", id%hostileUsers)), GPUs: []gpreempt.GPUID{1, 2}[:1+h.roll(2)], Priority: gpreempt.MaxPriority, TTL: ttl,
	})
	if h.lastID > last {
		h.clients[id] = append(h.clients[id], h.lastID)
	}
	return err
}

// act has the clients do one thing.
func (h *hostile) act() error {
	id := h.any()
	held := h.clients[id]
	switch h.roll(8) {
	case 0: // a fork
		if len(h.clients) < 12 {
			id = h.spawn()
		}
		return h.announce(id)
	case 1: // all at once
		for id := range h.next {
			if _, lives := h.clients[id+1]; lives {
				if err := h.announce(id + 1); err != nil {
					return err
				}
			}
		}
		return nil
	case 2: // it reconnects, or another takes its place
		delete(h.clients, id)
		if err := h.step(ClientGone{id, EndDisconnected}); err != nil {
			return err
		}
		if h.roll(2) == 0 {
			h.clients[id] = nil
		} else {
			id = h.spawn()
		}
		return h.announce(id)
	case 3:
		if len(held) > 0 {
			return h.step(LeaseFinished{held[h.roll(len(held))], EndCompleted})
		}
	case 4, 5: // everything is renewed for as long as can be
		for _, lease := range held {
			if err := h.step(LeaseRenewed{lease, h.core.policy.MaxTTL}); err != nil {
				return err
			}
		}
		return nil
	}
	return h.announce(id)
}

// checkHold checks that no stretch away outlasts max_suspend, and that after one
// that was cut short the target ran min_run at least. from is when the resume of a
// stretch was due, so what the mechanism needs comes on top.
func checkHold(p Policy, past []episode) error {
	for i, e := range past {
		if held := e.resumeAt - e.from; held > p.MaxSuspend+e.beyond() {
			return fmt.Errorf("held for %v from %v on, max_suspend is %v", held, e.from, p.MaxSuspend)
		}
		if cut := e.resumeAt-e.from >= p.MaxSuspend; cut && i+1 < len(past) && past[i+1].from-e.to < p.MinRun {
			return fmt.Errorf("suspended again %v after max_suspend, min_run is %v", past[i+1].from-e.to, p.MinRun)
		}
	}
	return nil
}

// TestNoSetOfClientsKeepsOfflineWorkSuspended: whatever clients do, alone or
// together, each offline target gets its share floor over every stretch of time, no
// suspension outlasts max_suspend, and no user holds more than a user may.
func TestNoSetOfClientsKeepsOfflineWorkSuspended(t *testing.T) {
	suspended := 0
	rapid.Check(t, func(t *rapid.T) {
		roll := drawn(t)
		p := DefaultPolicy()
		p.ShareFloor = []float64{0, 0.05, 0.1, 0.5, 0.9}[roll(5)]
		p.ShareWindow = []time.Duration{100 * time.Millisecond, time.Second}[roll(2)]
		p.MaxSuspend = []time.Duration{10 * time.Millisecond, 200 * time.Millisecond, 2 * time.Second}[roll(3)]
		p.MinRun = []time.Duration{time.Millisecond, 20 * time.Millisecond}[roll(2)]
		p.SuspendWhen, p.Linger = SuspendAtOnce, Linger(1+roll(3))
		h := &hostile{punctual: newPunctual(p, roll), clients: map[ClientID][]LeaseID{}}
		h.cost = func(ActionKind) time.Duration { return time.Duration(1+roll(20)) * 100 * time.Microsecond }
		h.fail = func() bool { return false }
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		for id := range gpreempt.GPUID(2) {
			must(h.step(GPUAdded{id + 1}))
		}
		for i, gpus := range [][]gpreempt.GPUID{{1}, {2}, {1, 2}} {
			must(h.step(TargetSeen{
				Target: gpreempt.ProcessKey{PID: int32(100 + i), Start: 1}, Class: gpreempt.Offline, GPUs: gpus,
			}))
		}
		h.spawn()
		for range 10 + roll(30) {
			must(h.act())
			must(h.run(h.now + h.span(7)))
			for user, n := range h.core.perUser {
				if n > worldLimits.LeasesPerUser {
					t.Fatalf("user %s holds %d leases, may hold %d", user, n, worldLimits.LeasesPerUser)
				}
			}
		}
		// Whoever is away now comes back by itself, with every lease renewed until then.
		must(h.run(h.now + p.MaxSuspend + time.Second))
		for key, past := range h.past {
			suspended += len(past)
			must(checkHold(p, past))
			if p.ShareFloor > 0 {
				if _, err := checkShare(p, past); err != nil {
					t.Fatalf("target %v: %v", key, err)
				}
			}
		}
		for key, e := range h.away {
			if held := h.now - e.from; held > p.MaxSuspend+10*time.Millisecond {
				t.Fatalf("target %v is away for %v, max_suspend is %v", key, held, p.MaxSuspend)
			}
		}
	})
	t.Logf("%d suspensions", suspended)
	if suspended < 1000 {
		t.Error("the clients are too mild to prove anything")
	}
}
