package client

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestAnnouncementHasTheFieldsOfTheRequest(t *testing.T) {
	for _, tc := range []struct {
		name    string
		request Request
		want    *gpreemptv1.NotifyOnlineRequest
	}{
		{"nothing", Request{}, &gpreemptv1.NotifyOnlineRequest{}},
		{"no waiting", Request{GPUs: OwnGPUs(), MaxWait: NoWait}, &gpreemptv1.NotifyOnlineRequest{MaxWait: &durationpb.Duration{}}},
		{
			"everything",
			Request{
				GPUs:      []GPU{GPUByID(51234), GPUByNode(0), GPUByBDF("c1:00.0"), GPUByRenderMinor(128)},
				RequestID: "r", Priority: 9, TTL: time.Second, NoRenew: true, MaxWait: time.Millisecond, ETA: 2 * time.Millisecond,
				CompleteOnIdle: true, Label: "chat",
			},
			&gpreemptv1.NotifyOnlineRequest{
				Gpus: []*gpreemptv1.GpuSelector{
					{By: &gpreemptv1.GpuSelector_GpuId{GpuId: 51234}},
					{By: &gpreemptv1.GpuSelector_Node{Node: 0}},
					{By: &gpreemptv1.GpuSelector_Bdf{Bdf: "c1:00.0"}},
					{By: &gpreemptv1.GpuSelector_RenderMinor{RenderMinor: 128}},
				},
				RequestId: "r", Priority: new(uint32(9)), Ttl: durationpb.New(time.Second), MaxWait: durationpb.New(time.Millisecond),
				Eta:            durationpb.New(2 * time.Millisecond),
				CompleteOnIdle: true, Label: "chat",
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, tc.request.announcement(), protocmp.Transform()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// facts are the results of a lease's methods.
type facts struct {
	ID                  string
	Protected, Quiesced bool
	Cause               error
	Reason              gpreemptv1.QuiesceReason
	Suspended           int
	GPUs                []gpreempt.GPUID
	TTL                 time.Duration
	Timing              Timing
}

func factsOf(l *Lease) facts {
	return facts{
		ID: l.ID(), Protected: l.Protected(), Quiesced: l.Quiet(), Cause: l.Cause(), Reason: l.Reason(),
		Suspended: l.SuspendedTargets(), GPUs: l.GPUs(), TTL: l.TTL(), Timing: l.Timing(),
	}
}

func TestLeaseHasTheFieldsOfTheAnswer(t *testing.T) {
	c, _ := newPair(t)
	for _, l := range []*Lease{acquire(t, c, testRequest), acquire(t, c, testRequest)} {
		got := factsOf(l)
		want := facts{
			ID: got.ID, Protected: true, Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE,
			Suspended: 2, GPUs: []gpreempt.GPUID{51234, 7}, TTL: time.Minute,
			Timing: Timing{Decide: time.Microsecond, Quiesce: 2 * time.Microsecond, Total: 3 * time.Microsecond, RoundTrip: got.Timing.RoundTrip},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if got.Timing.RoundTrip <= 0 {
			t.Errorf("round trip %v", got.Timing.RoundTrip)
		}
	}
}

func TestReleaseCompletesOnce(t *testing.T) {
	c, d := newPair(t)
	l := acquire(t, c, testRequest)
	d.expect(t, "session begun", "announced lease-1")
	// Often the context of a request has ended when its lease is released.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Release(ctx); err != nil {
		t.Fatal(err)
	}
	d.expect(t, "completed lease-1")
	release(t, l)
	release(t, l)
	if len(d.happened) != 0 {
		t.Errorf("the daemon received another call: %s", <-d.happened)
	}
	if isLost(l) {
		t.Error("a released lease is lost")
	}
}

func TestReleaseOfALeaseThatTheDaemonEndedSucceeds(t *testing.T) {
	c, d := newPair(t)
	l := acquire(t, c, testRequest)
	d.forget()
	release(t, l)
}

func TestReleaseWithoutAnAnswerCanBeRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := true
		d := newDaemon()
		d.on = func(ctx context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.CompleteRequest); ok && hang {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
		c, end := newBubble(t, d)
		defer end()
		l := acquire(t, c, testRequest)
		begun := time.Now()
		err := l.Release(t.Context())
		if gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable || time.Since(begun) != releaseBound {
			t.Errorf("got %v after %v", err, time.Since(begun))
		}
		synctest.Wait()
		hang = false
		release(t, l)
		if d.leases() != 0 {
			t.Error("the lease lives")
		}
	})
}

func TestDoReleasesAlsoAfterErrorsAndPanics(t *testing.T) {
	c, d := newPair(t)
	failed := errors.New("out of memory")
	ran := func() {
		if d.leases() != 1 {
			t.Errorf("%d leases while the work runs", d.leases())
		}
	}
	if err := c.Do(t.Context(), testRequest, func(context.Context) error { ran(); return nil }); err != nil {
		t.Error(err)
	}
	if err := c.Do(t.Context(), testRequest, func(context.Context) error { ran(); return failed }); !errors.Is(err, failed) {
		t.Errorf("got %v, want the error of the work", err)
	}
	func() {
		defer func() {
			if got := recover(); got != "a bug" {
				t.Errorf("recovered %v", got)
			}
		}()
		_ = c.Do(t.Context(), testRequest, func(context.Context) error { ran(); panic("a bug") })
	}()
	if d.leases() != 0 {
		t.Errorf("%d leases remain", d.leases())
	}
}

func TestDoDoesNotRunWhenAcquireFails(t *testing.T) {
	c, _ := newPair(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := c.Do(ctx, testRequest, func(context.Context) error { t.Error("ran"); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestDoReportsFailureToReleaseWhenItFailsClosed(t *testing.T) {
	refuse := &gpreempt.Error{Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal, Message: "no"}
	failed := errors.New("out of memory")
	for _, tc := range []struct {
		name string
		opts []Option
		want bool
	}{{"open", nil, false}, {"closed", []Option{FailClosed()}, true}} {
		t.Run(tc.name, func(t *testing.T) {
			c, d := newPair(t, tc.opts...)
			d.on = func(_ context.Context, request any) error {
				if _, ok := request.(*gpreemptv1.CompleteRequest); ok {
					return refuse
				}
				return nil
			}
			err := c.Do(t.Context(), testRequest, func(context.Context) error { return failed })
			if !errors.Is(err, failed) || errors.Is(err, refuse) != tc.want {
				t.Errorf("got %v", err)
			}
		})
	}
}

// bubble runs a test in a bubble.
func bubble(t *testing.T, test func(t *testing.T, d *daemon, c *Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := newDaemon()
		c, end := newBubble(t, d)
		defer end()
		test(t, d, c)
	})
}

func TestHeldLeaseIsRenewedAtHalfItsTime(t *testing.T) {
	bubble(t, func(t *testing.T, d *daemon, c *Client) {
		t.Helper()
		l := acquire(t, c, Request{GPUs: OwnGPUs(), TTL: 10 * time.Second})
		var renewals []time.Duration
		begun := time.Now()
		for range 3 {
			for s := ""; s != "renewed lease-1"; s = <-d.happened {
			}
			renewals = append(renewals, time.Since(begun))
		}
		if diff := cmp.Diff([]time.Duration{5 * time.Second, 10 * time.Second, 15 * time.Second}, renewals); diff != "" {
			t.Errorf("renewed at (-want +got):\n%s", diff)
		}
		release(t, l)
		time.Sleep(time.Minute)
		for len(d.happened) > 0 {
			if got := <-d.happened; got == "renewed lease-1" {
				t.Error("renewed after its release")
			}
		}
		if isLost(l) {
			t.Error("lost")
		}
	})
}

func TestLeaseThatTheDaemonEndedIsLostAtTheNextRenewal(t *testing.T) {
	bubble(t, func(t *testing.T, d *daemon, c *Client) {
		t.Helper()
		l := acquire(t, c, Request{GPUs: OwnGPUs(), TTL: 10 * time.Second})
		d.forget()
		begun := time.Now()
		<-l.Lost()
		if got := time.Since(begun); got != 5*time.Second {
			t.Errorf("lost after %v, want 5s", got)
		}
		if l.Protected() {
			t.Error("protected")
		}
		release(t, l)
	})
}

func TestRenewalIsRepeatedUntilTheTimeToLivePasses(t *testing.T) {
	refuse := &gpreempt.Error{Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal, Message: "no"}
	bubble(t, func(t *testing.T, d *daemon, c *Client) {
		t.Helper()
		var refusals atomic.Int64 // how many are left
		refusals.Store(3)
		d.on = func(_ context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.RenewRequest); ok {
				if refusals.Add(-1) >= 0 {
					return refuse
				}
			}
			return nil
		}
		l := acquire(t, c, Request{GPUs: OwnGPUs(), TTL: 10 * time.Second})
		for s := ""; s != "renewed lease-1"; s = <-d.happened {
		}
		if isLost(l) {
			t.Error("lost although a renewal succeeded")
		}
		refusals.Store(1000)
		begun := time.Now()
		<-l.Lost()
		if got := time.Since(begun); got != 10*time.Second {
			t.Errorf("lost %v after the last renewal, want 10s", got)
		}
	})
}

func TestLeaseWithoutRenewalEndsWithItsTTL(t *testing.T) {
	bubble(t, func(t *testing.T, d *daemon, c *Client) {
		t.Helper()
		begun := time.Now()
		l := acquire(t, c, Request{GPUs: OwnGPUs(), TTL: 10 * time.Second, NoRenew: true})
		<-l.Lost()
		if got := time.Since(begun); got != 10*time.Second {
			t.Errorf("ended after %v, want 10s", got)
		}
		for len(d.happened) > 0 {
			if got := <-d.happened; got == "renewed lease-1" {
				t.Error("renewed")
			}
		}
	})
}
