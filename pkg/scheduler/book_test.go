package scheduler

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestABookHasRoomUpToItsLimits(t *testing.T) {
	b := newBook(Limits{LeasesPerClient: 2, LeasesPerUser: 3, LeasesTotal: 10})
	var last LeaseID
	fill := func(client ClientID, user UserID) (n int, why gpreempt.Reason) {
		for ; ; n++ {
			if err := b.room(client, user); err != nil {
				return n, gpreempt.ReasonOf(err)
			}
			last++
			b.enter(LeaseRequested{Lease: last, Client: client, User: user})
		}
	}
	type outcome struct {
		N   int
		Why gpreempt.Reason
	}
	var got []outcome
	for _, c := range []struct {
		client int32
		user   UserID
	}{{1, "a"}, {2, "a"}, {3, "b"}, {0, ""}} {
		n, why := fill(ClientID{PID: c.client}, c.user)
		got = append(got, outcome{n, why})
	}
	want := []outcome{
		{2, gpreempt.ReasonLeasesPerClient},
		{1, gpreempt.ReasonLeasesPerUser},
		{2, gpreempt.ReasonLeasesPerClient},
		{10, gpreempt.ReasonLeasesTotal}, // admins have as many as all clients together
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	b.strike(b.leases[1], EndCompleted, time.Second)
	if err := b.room(ClientID{PID: 1}, "a"); err != nil {
		t.Errorf("after the end of a lease: %v", err)
	}
}

func TestABookRemembersTheLastLeasesThatEnded(t *testing.T) {
	b := newBook(Limits{})
	req := LeaseRequested{Client: ClientID{PID: 1}, User: "a", RequestID: "r", TTL: time.Second}
	for id := range LeaseID(endedKept + 1) {
		req.Lease = id + 1
		req.RequestID = ""
		if id == 0 {
			req.RequestID = "r"
		}
		b.strike(b.enter(req), EndExpired, time.Duration(id))
		if id > 0 {
			continue
		}
		first := req
		first.Lease = 0
		if err := b.sameRequest(1, first); err != nil {
			t.Errorf("a retry: %v", err)
		}
		first.TTL++
		if got := gpreempt.ReasonOf(b.sameRequest(1, first)); got != gpreempt.ReasonRequestIDReused {
			t.Errorf("another announcement with its id: %v", got)
		}
	}
	if _, _, known := b.Ended(1); known || len(b.requests) != 0 || len(b.ended) != endedKept {
		t.Errorf("the first is known: %v, %d request ids, %d leases kept", known, len(b.requests), len(b.ended))
	}
	if end, held, known := b.Ended(endedKept + 1); end != EndExpired || held != endedKept || !known {
		t.Errorf("the last: %v, %v, %v", end, held, known)
	}
	if got := gpreempt.ReasonOf(b.Owned(ClientID{PID: 2}, endedKept+1)); got != gpreempt.ReasonForeignLease {
		t.Errorf("another client: %v", got)
	}
}
