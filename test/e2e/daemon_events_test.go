package e2e

import (
	"cmp"
	"slices"
	"sync"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// eventLog is the part of the daemon's event stream that the test has received. It is
// what tests wait on.
type eventLog struct {
	t *testing.T

	mu   sync.Mutex // guards all below
	all  []*gpreemptv1.Event
	wake chan struct{} // closed and replaced by the next event, and by the end
	err  error         // why the stream ended
}

// watchEvents follows the events of a daemon from its start, until the test or
// the daemon ends.
func watchEvents(t *testing.T, admin gpreemptv1.AdminServiceClient) *eventLog {
	t.Helper()
	stream, err := admin.WatchEvents(t.Context(), &gpreemptv1.WatchEventsRequest{FromStart: true})
	if err != nil {
		t.Fatal(err)
	}
	l := &eventLog{t: t, wake: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			m, err := stream.Recv()
			l.add(m.GetEvent(), err)
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() { <-ended }) // the test's context ended before
	return l
}

// eventsKept bounds the log, for tests that run for days.
const eventsKept = 100_000

func (l *eventLog) add(e *gpreemptv1.Event, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		l.all = append(l.all, e)
	}
	if len(l.all) > 2*eventsKept {
		l.all = slices.Clone(l.all[eventsKept:])
	}
	l.err = err
	close(l.wake)
	l.wake = make(chan struct{})
}

// next is closed when there is more to see.
func (l *eventLog) next() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.wake
}

// after returns the events seen after a revision.
func (l *eventLog) after(revision uint64) (events []*gpreemptv1.Event, next <-chan struct{}, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at, _ := slices.BinarySearchFunc(l.all, revision+1, func(e *gpreemptv1.Event, r uint64) int {
		return cmp.Compare(e.GetRevision(), r)
	})
	return l.all[at:len(l.all):len(l.all)], l.wake, l.err
}

// await returns the first event after a revision that matches.
func (l *eventLog) await(what string, revision uint64, match func(*gpreemptv1.Event) bool) *gpreemptv1.Event {
	l.t.Helper()
	late := time.After(timeout)
	for {
		events, next, err := l.after(revision)
		for _, e := range events {
			if match(e) {
				return e
			}
			revision = e.GetRevision()
		}
		if err != nil {
			l.t.Fatalf("%s: the event stream ended before: %v", what, err)
		}
		select {
		case <-next:
		case <-late:
			l.t.Fatalf("%s: no such event within %v", what, timeout)
		}
	}
}

// revision is where the daemon's event log stands now: what happens later has
// a higher one.
func (d *daemon) revision() uint64 { return d.status().GetEventRevision() }

// awaitTarget waits until the process with that pid has come to a state.
func (d *daemon) awaitTarget(pid int32, since uint64, state gpreemptv1.TargetState) {
	d.t.Helper()
	d.events.await(state.String(), since, func(e *gpreemptv1.Event) bool {
		return e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_TARGET && pidOf(e.GetTargetId()) == pid &&
			e.GetToTarget() == state && e.GetFromTarget() != state
	})
}

// awaitEnd waits until a lease has ended and returns how.
func (d *daemon) awaitEnd(lease string) gpreemptv1.LeaseEnd {
	d.t.Helper()
	return d.events.await("the end of lease "+lease, 0, func(e *gpreemptv1.Event) bool {
		return e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_LEASE && e.GetLeaseId() == lease &&
			e.GetToLease() == gpreemptv1.LeaseState_LEASE_STATE_ENDED
	}).GetEnd()
}
