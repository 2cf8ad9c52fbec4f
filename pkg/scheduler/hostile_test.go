package scheduler_test

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// hostile is a set of clients that want offline work to stay suspended, on a
// punctual machine: several processes of several users that announce, renew,
// overlap, complete, vanish and come back, alone and together.
type hostile struct {
	*punctual
	clients map[scheduler.ClientID][]scheduler.LeaseID // those that live, and what they may hold
	next    scheduler.ClientID
}

// hostileUsers is how many users collude.
const hostileUsers = 3

func (h *hostile) spawn() scheduler.ClientID {
	h.next.PID++
	h.clients[h.next] = nil
	return h.next
}

// any returns one of the clients that live.
func (h *hostile) any() scheduler.ClientID {
	n := h.Roll(len(h.clients))
	for id := (scheduler.ClientID{PID: 1}); id.PID <= h.next.PID; id.PID++ {
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
func (h *hostile) announce(id scheduler.ClientID) error {
	ttl := min(h.Span(9), h.Core.Policy().MaxTTL)
	if h.Roll(2) == 0 {
		ttl = h.Core.Policy().MaxTTL
	}
	last := h.LastID
	err := h.Request(scheduler.LeaseRequested{
		Client: id, User: scheduler.UserID(fmt.Sprint("u", id.PID%hostileUsers)), GPUs: []gpreempt.GPUID{1, 2}[:1+h.Roll(2)], Priority: gpreempt.MaxPriority, TTL: ttl,
	})
	if h.LastID > last {
		h.clients[id] = append(h.clients[id], h.LastID)
	}
	return err
}

// act has the clients do one thing.
func (h *hostile) act() error {
	id := h.any()
	held := h.clients[id]
	switch h.Roll(8) {
	case 0: // a fork
		if len(h.clients) < 12 {
			id = h.spawn()
		}
		return h.announce(id)
	case 1: // all at once
		for id := (scheduler.ClientID{PID: 1}); id.PID <= h.next.PID; id.PID++ {
			if _, lives := h.clients[id]; lives {
				if err := h.announce(id); err != nil {
					return err
				}
			}
		}
		return nil
	case 2: // it reconnects, or another takes its place
		delete(h.clients, id)
		if err := h.Step(scheduler.ClientGone{Client: id, End: scheduler.EndDisconnected}); err != nil {
			return err
		}
		if h.Roll(2) == 0 {
			h.clients[id] = nil
		} else {
			id = h.spawn()
		}
		return h.announce(id)
	case 3:
		if len(held) > 0 {
			return h.Step(scheduler.LeaseFinished{Lease: held[h.Roll(len(held))], End: scheduler.EndCompleted})
		}
	case 4, 5: // everything is renewed for as long as can be
		for _, lease := range held {
			if err := h.Step(scheduler.LeaseRenewed{Lease: lease, TTL: h.Core.Policy().MaxTTL}); err != nil {
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
func checkHold(p scheduler.Policy, past []episode) error {
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
	t.Parallel()
	suspended := 0
	rapid.Check(t, func(t *rapid.T) {
		roll := Drawn(t)
		p := scheduler.DefaultPolicy()
		p.ShareFloor = []float64{0, 0.05, 0.1, 0.5, 0.9}[roll(5)]
		p.ShareWindow = []time.Duration{100 * time.Millisecond, time.Second}[roll(2)]
		p.MaxSuspend = []time.Duration{10 * time.Millisecond, 200 * time.Millisecond, 2 * time.Second}[roll(3)]
		p.MinRun = []time.Duration{time.Millisecond, 20 * time.Millisecond}[roll(2)]
		p.Linger = time.Duration(roll(3)) * 10 * time.Millisecond
		h := &hostile{punctual: newPunctual(p, roll), clients: map[scheduler.ClientID][]scheduler.LeaseID{}}
		h.cost = func(scheduler.ActionKind) time.Duration { return time.Duration(1+roll(20)) * 100 * time.Microsecond }
		h.fail = func() bool { return false }
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		for id := range gpreempt.GPUID(2) {
			must(h.Step(scheduler.GPUAdded{GPU: id + 1}))
		}
		for i, gpus := range [][]gpreempt.GPUID{{1}, {2}, {1, 2}} {
			must(h.Step(scheduler.TargetSeen{
				Target: gpreempt.ProcessKey{PID: int32(100 + i), Start: 1}, Class: gpreempt.Offline, GPUs: gpus,
			}))
		}
		h.spawn()
		for range 5 + roll(20) {
			must(h.act())
			must(h.run(h.Now + h.Span(7)))
			for user, n := range h.Core.LeasesPerUser() {
				if n > WorldLimits.LeasesPerUser {
					t.Fatalf("user %s holds %d leases, may hold %d", user, n, WorldLimits.LeasesPerUser)
				}
			}
		}
		// Targets that are away now run again, although every lease is renewed until then.
		must(h.run(h.Now + p.MaxSuspend + time.Second))
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
			if held := h.Now - e.from; held > p.MaxSuspend+10*time.Millisecond {
				t.Fatalf("target %v is away for %v, max_suspend is %v", key, held, p.MaxSuspend)
			}
		}
	})
	t.Logf("%d suspensions", suspended)
	if suspended < 1000 {
		t.Error("the clients are too mild to prove anything")
	}
}
