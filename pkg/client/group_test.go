package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// newGroup returns a group of hosts with a fake daemon each.
func newGroup(t *testing.T, hosts int, opts ...Option) (*Group, []*daemon) {
	t.Helper()
	var members []Member
	var daemons []*daemon
	for i := range hosts {
		c, d := newPair(t, opts...)
		members, daemons = append(members, Member{Name: fmt.Sprint("node", i), Client: c}), append(daemons, d)
	}
	return NewGroup(members...), daemons
}

func leasesOf(daemons []*daemon) (all []int) {
	for _, d := range daemons {
		all = append(all, d.leases())
	}
	return all
}

func acquireAll(t *testing.T, g *Group) *GroupLease {
	t.Helper()
	l, err := g.Acquire(t.Context(), testRequest)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestGroupAnnouncesOnAllHostsAtOnce(t *testing.T) {
	g, daemons := newGroup(t, 3)
	g.members[1].GPUs = []GPU{GPUByNode(4)}
	var together sync.WaitGroup // every host has received the announcement before any answers
	together.Add(len(daemons))
	requests := make([]*gpreemptv1.NotifyOnlineRequest, len(daemons))
	for i, d := range daemons {
		d.on = func(_ context.Context, request any) error {
			if r, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
				requests[i] = r
				together.Done()
				together.Wait()
			}
			return nil
		}
	}
	r := testRequest
	r.GPUs, r.Label = []GPU{GPUByNode(2)}, "chat"
	l, err := g.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	other := r
	other.GPUs = []GPU{GPUByNode(4)}
	want := []*gpreemptv1.NotifyOnlineRequest{r.announcement(), other.announcement(), r.announcement()}
	if diff := cmp.Diff(want, requests, protocmp.Transform()); diff != "" {
		t.Errorf("announcements (-want +got):\n%s", diff)
	}
	if !l.Protected() || !l.Quiet() || l.Unprotected() != nil || len(l.Leases()) != 3 {
		t.Errorf("protected %v, quiet %v, unprotected: %v, %d leases", l.Protected(), l.Quiet(), l.Unprotected(), len(l.Leases()))
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]int{0, 0, 0}, leasesOf(daemons)); diff != "" {
		t.Errorf("leases after Release (-want +got):\n%s", diff)
	}
}

func TestGroupRunsWithTheHostsThatAnswerAndNamesTheOthers(t *testing.T) {
	g, daemons := newGroup(t, 2)
	reported, report := reports()
	g.members = append(g.members, Member{Name: "node9", Client: newClient(t, socketPath(t), report)})
	l := acquireAll(t, g)
	if l.Protected() || l.Quiet() {
		t.Errorf("protected %v, quiet %v without the daemon of a host", l.Protected(), l.Quiet())
	}
	if err := l.Unprotected(); err == nil || !strings.HasPrefix(err.Error(), "host node9: ") || strings.Contains(err.Error(), "\n") {
		t.Errorf("unprotected: %v, want the one host", err)
	}
	if err := <-reported; err == nil {
		t.Error("the client of the host does not report it")
	}
	if diff := cmp.Diff([]int{1, 1}, leasesOf(daemons)); diff != "" {
		t.Errorf("leases (-want +got):\n%s", diff)
	}
	ran := false
	if err := g.Do(t.Context(), testRequest, func(context.Context) error { ran = true; return nil }); err != nil || !ran {
		t.Errorf("Do returns %v, ran: %v", err, ran)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestGroupWithAHostThatFailsClosedKeepsAllLeasesOrNone(t *testing.T) {
	g, daemons := newGroup(t, 2)
	g.members = append(g.members, Member{Name: "node9", Client: newClient(t, socketPath(t), FailClosed())})
	_, err := g.Acquire(t.Context(), testRequest)
	if gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable || !strings.HasPrefix(err.Error(), "host node9: ") {
		t.Errorf("error %v, want that of node9", err)
	}
	if diff := cmp.Diff([]int{0, 0}, leasesOf(daemons)); diff != "" {
		t.Errorf("leases (-want +got):\n%s", diff)
	}
	err = g.Do(t.Context(), testRequest, func(context.Context) error { t.Error("it runs"); return nil })
	if gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable {
		t.Errorf("Do returns %v", err)
	}
}

func TestGroupReturnsTheErrorOfEveryHostThatFailsClosed(t *testing.T) {
	g, daemons := newGroup(t, 3, FailClosed())
	refusal := &gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonUnknownGPU, Message: "no such GPU", Next: "gpctl gpu list"}
	for _, d := range daemons[1:] {
		d.on = func(_ context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
				return refusal
			}
			return nil
		}
	}
	_, err := g.Acquire(t.Context(), testRequest)
	for _, host := range []string{"host node1: ", "host node2: "} {
		if err == nil || !strings.Contains(err.Error(), host) {
			t.Errorf("error %v, want that of %q too", err, host)
		}
	}
	if diff := cmp.Diff([]int{0, 0, 0}, leasesOf(daemons)); diff != "" {
		t.Errorf("leases (-want +got):\n%s", diff)
	}
}

func TestGroupWaitsNoLongerThanOneHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var members []Member
		for i := range 4 {
			d := newDaemon()
			if i > 0 {
				d.on = func(ctx context.Context, _ any) error { <-ctx.Done(); return ctx.Err() }
			}
			_, report := reports()
			c, end := newBubble(t, d, report)
			defer end()
			members = append(members, Member{Name: fmt.Sprint("node", i), Client: c})
		}
		begun := time.Now()
		l, err := NewGroup(members...).Acquire(t.Context(), Request{GPUs: OwnGPUs(), MaxWait: 20 * time.Millisecond, NoRenew: true})
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took != 120*time.Millisecond {
			t.Errorf("took %v, want max_wait and 100ms", took)
		}
		if l.Protected() || !l.Leases()[0].Protected() {
			t.Errorf("protected: group %v, the host that answers %v", l.Protected(), l.Leases()[0].Protected())
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestLossOnOneHostIsALossOfTheGroup(t *testing.T) {
	g, _ := newGroup(t, 2)
	d, path := newDaemon(), socketPath(t)
	stop := d.listen(t, path)
	_, report := reports()
	g.members = append(g.members, Member{Name: "node9", Client: newClient(t, path, report)})
	l, second := acquireAll(t, g), acquireAll(t, g)
	stop()
	<-l.Lost()
	<-second.Lost()
	if l.Protected() || !l.Leases()[0].Protected() || !l.Leases()[1].Protected() {
		t.Error("the leases of the other hosts do not continue")
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}

	// A lease that was lost before the group looked.
	lost := acquire(t, g.members[0].Client, testRequest)
	lost.lose()
	reported := false
	lost.whenLost(func() { reported = true })
	if !reported {
		t.Error("a loss before whenLost is not reported")
	}
}

func TestGroupsThatAnnounceCrosswiseDoNotWaitForEachOther(t *testing.T) {
	g, daemons := newGroup(t, 2)
	crosswise := NewGroup(g.members[1], g.members[0])
	var both sync.WaitGroup
	for _, group := range []*Group{g, crosswise} {
		both.Go(func() {
			for range 20 {
				if err := group.Do(t.Context(), testRequest, func(context.Context) error { return nil }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	both.Wait()
	held := acquireAll(t, g)
	if l := acquireAll(t, crosswise); !l.Quiet() {
		t.Error("a group waits for the lease of another")
	} else if err := errors.Join(l.Release(t.Context()), held.Release(t.Context())); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]int{0, 0}, leasesOf(daemons)); diff != "" {
		t.Errorf("leases (-want +got):\n%s", diff)
	}
}
