package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestAllRequestsInFlightAreProtectedAndSaySo(t *testing.T) {
	for _, count := range []int{200, 1000} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			c, d := newPair(t)
			var calls, running, unprotected atomic.Int64
			d.on = func(context.Context, any) error { calls.Add(1); return nil }
			allRun := make(chan struct{})
			const rounds = 3
			var all sync.WaitGroup
			for range count {
				all.Go(func() {
					for range rounds {
						l := acquire(t, c, testRequest)
						if running.Add(1) == int64(count) {
							close(allRun)
						}
						<-allRun
						if !l.Protected() || !l.Quiet() || l.Cause() != nil {
							unprotected.Add(1)
						}
						release(t, l)
					}
				})
			}
			all.Wait()
			t.Logf("%d calls for %d requests", calls.Load(), rounds*count)
			if n := unprotected.Load(); n != 0 {
				t.Errorf("%d of %d requests are unprotected", n, rounds*count)
			}
			if share := float64(calls.Load()) / float64(rounds*count); share > 0.05 {
				t.Errorf("%v calls for each request, want at most 0.05", share)
			}
			if d.leases() != 0 {
				t.Errorf("%d leases are left", d.leases())
			}
		})
	}
}

func TestLeaseLastsUntilTheLastOfItsRequestsEnds(t *testing.T) {
	c, d := newPair(t)
	first, second := acquire(t, c, testRequest), acquire(t, c, testRequest)
	release(t, first)
	release(t, first)
	if first.ID() != second.ID() || !second.Protected() || d.leases() != 1 {
		t.Errorf("leases %s and %s, protected %v, %d live", first.ID(), second.ID(), second.Protected(), d.leases())
	}
	release(t, second)
	release(t, acquire(t, c, testRequest))
	d.expect(t, "session begun", "announced lease-1", "completed lease-1", "announced lease-2", "completed lease-2")
}

func TestRequestsThatAnnounceSomethingElseHaveTheirOwnLease(t *testing.T) {
	base := Request{GPUs: []GPU{GPUByNode(2)}, Label: "chat", Priority: 9, MaxWait: 10 * time.Second, TTL: time.Minute}
	for name, change := range map[string]func(*Request){
		"GPUs": func(r *Request) { r.GPUs = AllGPUs() }, "own GPUs": func(r *Request) { r.GPUs = OwnGPUs() },
		"label": func(r *Request) { r.Label = "embed" }, "priority": func(r *Request) { r.Priority = 10 },
		"max_wait": func(r *Request) { r.MaxWait = 9 * time.Second }, "ttl": func(r *Request) { r.TTL = time.Hour },
		"request id": func(r *Request) { r.RequestID = "r" }, "no renewal": func(r *Request) { r.NoRenew = true },
		"eta": func(r *Request) { r.ETA = time.Millisecond }, "idle": func(r *Request) { r.CompleteOnIdle = true },
	} {
		t.Run(name, func(t *testing.T) {
			c, d := newPair(t)
			other := base
			change(&other)
			one, another := acquire(t, c, base), acquire(t, c, other)
			if one.ID() == another.ID() || d.leases() != 2 {
				t.Errorf("leases %s and %s, %d live", one.ID(), another.ID(), d.leases())
			}
		})
	}
}

func TestSharedLeaseIsRenewedWhileItIsUsedAndLostForAll(t *testing.T) {
	bubble(t, func(t *testing.T, d *daemon, c *Client) {
		t.Helper()
		r := testRequest
		r.TTL = 10 * time.Second
		l := acquire(t, c, r)
		for range 10 {
			time.Sleep(3 * time.Second)
			next := acquire(t, c, r)
			release(t, l)
			if l = next; l.ID() != "lease-1" || !l.Protected() {
				t.Fatalf("lease %s, protected %v", l.ID(), l.Protected())
			}
		}
		other := acquire(t, c, r)
		d.forget()
		<-l.Lost()
		if !isLost(other) || other.Protected() {
			t.Error("the other is not lost")
		}
		if next := acquire(t, c, r); next.ID() != "lease-2" || !next.Protected() {
			t.Errorf("the next has the lease %s", next.ID())
		}
	})
}

func TestLeaseWhoseTimeToLiveHasPassedIsNotJoined(t *testing.T) {
	bubble(t, func(t *testing.T, _ *daemon, c *Client) {
		t.Helper()
		l := acquire(t, c, testRequest)
		l.mu.Lock()
		l.expires = time.Now() // as after a stop of this process
		l.mu.Unlock()
		if next := acquire(t, c, testRequest); next.ID() == l.ID() {
			t.Error("joined")
		}
	})
}

func TestRefusalIsTheAnswerToAllWhoWaitForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, answer := newDaemon(), make(chan struct{})
		var asked atomic.Int64
		d.on = func(_ context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
				asked.Add(1)
				<-answer
				return &gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonUnknownGPU, Message: "no"}
			}
			return nil
		}
		got, hook := reports()
		c, end := newBubble(t, d, hook)
		defer end()
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				if l := acquire(t, c, testRequest); gpreempt.ReasonOf(l.Cause()) != gpreempt.ReasonUnknownGPU {
					t.Errorf("cause %v", l.Cause())
				}
			})
		}
		synctest.Wait()
		close(answer)
		all.Wait()
		if asked.Load() != 1 || len(got) != 1 {
			t.Errorf("%d announcements and %d reports, want 1 of each", asked.Load(), len(got))
		}
	})
}

func TestEndOfTheFirstRequestBeforeItsAnswerLeavesTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, answer := newDaemon(), make(chan struct{})
		d.on = func(ctx context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok {
				<-answer
			}
			return nil
		}
		c, end := newBubble(t, d)
		defer end()
		leave := make([]context.CancelFunc, 3)
		errs, leases := make([]error, 3), make([]*Lease, 3)
		var all sync.WaitGroup
		for i := range leave {
			var ctx context.Context
			ctx, leave[i] = context.WithCancel(t.Context())
			defer leave[i]()
			all.Go(func() { leases[i], errs[i] = c.Acquire(ctx, testRequest) })
			synctest.Wait()
		}
		leave[2]()
		leave[0]()
		synctest.Wait()
		close(answer)
		all.Wait()
		if !errors.Is(errs[0], context.Canceled) || errs[1] != nil || !errors.Is(errs[2], context.Canceled) {
			t.Fatalf("errors %v", errs)
		}
		if !leases[1].Protected() {
			t.Errorf("unprotected: %v", leases[1].Cause())
		}
		release(t, leases[1])
		synctest.Wait() // the answer to the first, which nobody waited for, is completed too
		if diff := cmp.Diff(0, d.leases()); diff != "" {
			t.Errorf("leases left (-want +got):\n%s", diff)
		}
	})
}
