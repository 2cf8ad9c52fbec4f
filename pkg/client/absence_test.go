package client

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestDialReadsTheCertificateForTCPOnly(t *testing.T) {
	ca := testutil.NewAuthority(t, "ours")
	cert, key := ca.Issue()
	for _, tc := range []struct {
		addr, cert, key, ca string
		err                 string // part of it
	}{
		{"tcp://gpu7:7443", cert, key, ca.File, ""},
		{"tcp://gpu7:7443", "/nowhere", key, ca.File, "/nowhere"},
		{"tcp://gpu7:7443", cert, key, "/nowhere", "/nowhere"},
		{"tcp://gpu7:7443", cert, key, key, key},
		{"", cert, key, ca.File, "does not use certificates"},
		{"/run/other.sock", cert, key, ca.File, "does not use certificates"},
	} {
		c, err := Dial(tc.addr, Certificate(tc.cert, tc.key, tc.ca))
		if err == nil {
			c.Close()
		}
		if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}

func TestAddress(t *testing.T) {
	for _, tc := range []struct{ addr, target, err string }{
		{"", "unix:///run/gpreempt/gpreemptd.sock", ""},
		{"/run/other.sock", "unix:///run/other.sock", ""},
		{"unix:///run/other.sock", "unix:///run/other.sock", ""},
		{"unix:other.sock", "unix:other.sock", ""},
		{"localhost:50051", "", `invalid address "localhost:50051" of gpreemptd: use the form unix:///run/gpreempt/gpreemptd.sock or tcp://HOST:PORT`},
		{"other.sock", "", `invalid address "other.sock" of gpreemptd: use the form unix:///run/gpreempt/gpreemptd.sock or tcp://HOST:PORT`},
		{"tcp://gpu7:7443", "", `address "tcp://gpu7:7443" of gpreemptd needs a certificate: use the option Certificate`},
		{"tcp://gpu7", "", `invalid address "tcp://gpu7" of gpreemptd: use the form tcp://HOST:PORT`},
		{"tcp://:7443", "", `invalid address "tcp://:7443" of gpreemptd: use the form tcp://HOST:PORT`},
	} {
		c, err := Dial(tc.addr)
		if err != nil {
			if err.Error() != tc.err {
				t.Errorf("%q: %v, want %q", tc.addr, err, tc.err)
			}
			continue
		}
		if got := c.cc.Target(); got != tc.target || tc.err != "" {
			t.Errorf("%q has the target %q, want %q%s", tc.addr, got, tc.target, tc.err)
		}
		c.Close()
	}
}

func TestWithoutADaemonWorkRunsUnprotectedAndIsReportedOnce(t *testing.T) {
	path := socketPath(t)
	got, hook := reports()
	c := newClient(t, path, hook)
	for range 3 {
		for _, l := range []*Lease{acquire(t, c, testRequest), acquire(t, c, testRequest)} {
			if reason := gpreempt.ReasonOf(l.Cause()); reason != gpreempt.ReasonDaemonUnavailable {
				t.Errorf("cause %v", l.Cause())
			}
			want := facts{Cause: l.Cause(), GPUs: []gpreempt.GPUID{}}
			if diff := cmp.Diff(want, factsOf(l)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			release(t, l)
			if isLost(l) {
				t.Error("an unprotected lease is lost")
			}
		}
	}
	ran := false
	if err := c.Do(t.Context(), testRequest, func(context.Context) error { ran = true; return nil }); err != nil || !ran {
		t.Errorf("Do: ran %v, %v", ran, err)
	}
	if err := <-got; gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable || !strings.Contains(err.Error(), path) {
		t.Errorf("reported %v", err)
	}

	var overload atomic.Bool
	d := newDaemon()
	d.on = func(_ context.Context, request any) error {
		if overload.Load() {
			return &gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited, Message: "too many"}
		}
		return nil
	}
	d.listen(t, path)
	if err := <-got; err != nil {
		t.Errorf("reported %v, want that protection is back", err)
	}
	for _, l := range []*Lease{acquire(t, c, testRequest), acquire(t, c, testRequest)} {
		if !l.Protected() {
			t.Errorf("unprotected: %v", l.Cause())
		}
	}
	if len(got) > 0 {
		t.Errorf("reported again: %v", <-got)
	}

	overload.Store(true)
	for range 3 {
		for _, l := range []*Lease{acquire(t, c, testRequest), acquire(t, c, testRequest)} {
			if reason := gpreempt.ReasonOf(l.Cause()); reason != gpreempt.ReasonRateLimited {
				t.Errorf("cause %v of a daemon that refuses", l.Cause())
			}
		}
	}
	if err := <-got; gpreempt.ReasonOf(err) != gpreempt.ReasonRateLimited {
		t.Errorf("reported %v", err)
	}
	if len(got) > 0 {
		t.Errorf("reported again: %v", <-got)
	}
}

func TestDefaultIsOneLogLine(t *testing.T) {
	var log strings.Builder
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	})))
	defer slog.SetDefault(before)
	c, err := Dial(socketPath(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 3 {
		acquire(t, c, testRequest)
	}
	if !strings.HasPrefix(log.String(), `level=WARN msg="gpreempt: inference runs unprotected" error="gpreemptd cannot be reached: `) ||
		strings.Count(log.String(), "\n") != 1 {
		t.Errorf("logged:\n%s", log.String())
	}
}

func TestFailClosedReturnsTheError(t *testing.T) {
	path := socketPath(t)
	c := newClient(t, path, FailClosed())
	if _, err := c.Acquire(t.Context(), testRequest); gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable {
		t.Errorf("client: %v", err)
	}
}

func TestOnlyPermanentRefusalsAreErrors(t *testing.T) {
	for _, tc := range []struct {
		code      gpreempt.Code
		reason    gpreempt.Reason
		temporary bool
	}{
		{gpreempt.CodeInvalidArgument, gpreempt.ReasonUnknownGPU, false},
		{gpreempt.CodeNotFound, gpreempt.ReasonUnknownLease, false},
		{gpreempt.CodeAlreadyExists, gpreempt.ReasonRequestIDReused, false},
		{gpreempt.CodePermissionDenied, gpreempt.ReasonNotOnline, false},
		{gpreempt.CodeFailedPrecondition, gpreempt.ReasonNotOffline, false},
		{gpreempt.CodeOutOfRange, gpreempt.ReasonRevisionCompacted, false},
		{gpreempt.CodeUnauthenticated, gpreempt.ReasonNoIdentity, false},
		{gpreempt.CodeResourceExhausted, gpreempt.ReasonMessageTooLarge, false},
		{gpreempt.CodeResourceExhausted, gpreempt.ReasonLeasesPerClient, true},
		{gpreempt.CodeResourceExhausted, gpreempt.ReasonRateLimited, true},
		{gpreempt.CodeInternal, gpreempt.ReasonInternal, true},
		{gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown, true},
	} {
		refusal := &gpreempt.Error{Code: tc.code, Reason: tc.reason, Message: "no", Next: "retry"}
		try := func(t *testing.T, wantErr bool, opts ...Option) {
			t.Helper()
			_, quiet := reports()
			c, d := newPair(t, append([]Option{quiet}, opts...)...)
			d.on = func(context.Context, any) error { return refusal }
			l, err := c.Acquire(t.Context(), testRequest)
			if !wantErr && err == nil {
				err = l.Cause()
			} else if !wantErr || err == nil {
				t.Errorf("lease %v, error %v", l, err)
			}
			if diff := cmp.Diff(error(refusal), err); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		}
		t.Run(string(tc.reason), func(t *testing.T) {
			try(t, !tc.temporary)
			try(t, true, FailClosed())
		})
	}
}

// hang is an on of a daemon that never answers.
func hang(ctx context.Context, _ any) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestHungDaemonDelaysOneAcquireOnly(t *testing.T) {
	for name, tc := range map[string]struct {
		request Request
		want    time.Duration
	}{
		"stated":   {Request{MaxWait: 20 * time.Millisecond}, 120 * time.Millisecond},
		"unstated": {Request{}, 300 * time.Millisecond},
		"none":     {Request{MaxWait: NoWait}, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDaemon()
				d.on = hang
				got, hook := reports()
				c, end := newBubble(t, d, hook)
				defer end()
				begun := time.Now()
				l := acquire(t, c, tc.request)
				if took := time.Since(begun); took != tc.want || l.Protected() {
					t.Errorf("protected %v after %v, want false after %v", l.Protected(), took, tc.want)
				}
				begun = time.Now()
				acquire(t, c, tc.request)
				if took := time.Since(begun); took != 0 {
					t.Errorf("the next took %v, want 0", took)
				}
				if err := <-got; gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable {
					t.Errorf("reported %v", err)
				}
			})
		})
	}
}

func TestAcquireEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDaemon()
		d.on = hang
		c, end := newBubble(t, d)
		defer end()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := c.Acquire(ctx, testRequest); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if c.protection.unreachable() != nil {
			t.Error("the daemon counts as unavailable, but the context of the caller ended")
		}
	})
}

func TestProbeWaitsForADaemonThatServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var refuse atomic.Bool
		refuse.Store(true)
		d := newDaemon()
		d.on = func(context.Context, any) error {
			if refuse.Load() {
				return &gpreempt.Error{Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonShuttingDown, Message: "shutting down"}
			}
			return nil
		}
		got, hook := reports()
		c, end := newBubble(t, d, hook)
		defer end()
		d.health.SetServing(false)
		acquire(t, c, testRequest)
		if err := <-got; gpreempt.ReasonOf(err) != gpreempt.ReasonShuttingDown {
			t.Errorf("reported %v", err)
		}
		time.Sleep(time.Minute)
		if len(got) > 0 {
			t.Errorf("reported %v while the daemon does not serve", <-got)
		}
		refuse.Store(false)
		d.health.SetServing(true)
		begun := time.Now()
		if err := <-got; err != nil {
			t.Errorf("reported %v", err)
		}
		if took := time.Since(begun); took > probeMax {
			t.Errorf("reported after %v, want at most %v", took, probeMax)
		}
		if l := acquire(t, c, testRequest); !l.Protected() {
			t.Errorf("unprotected: %v", l.Cause())
		}
	})
}

func TestOverloadIsReportedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int64
		var overload atomic.Bool
		overload.Store(true)
		d := newDaemon()
		d.on = func(_ context.Context, request any) error {
			if _, ok := request.(*gpreemptv1.NotifyOnlineRequest); ok && overload.Load() && calls.Add(1)%2 == 1 {
				return &gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited, Message: "too many"}
			}
			return nil
		}
		got, hook := reports()
		c, end := newBubble(t, d, hook)
		defer end()
		granted := 0
		for range 10 {
			if acquire(t, c, testRequest).Protected() {
				granted++
			}
			time.Sleep(100 * time.Millisecond)
		}
		if granted != 5 {
			t.Errorf("%d of 10 protected, want 5", granted)
		}
		overload.Store(false)
		time.Sleep(settle)
		acquire(t, c, testRequest)
		acquire(t, c, testRequest)
		var reported []gpreempt.Reason
		for len(got) > 0 {
			reported = append(reported, gpreempt.ReasonOf(<-got))
		}
		if diff := cmp.Diff([]gpreempt.Reason{gpreempt.ReasonRateLimited, ""}, reported); diff != "" {
			t.Errorf("reports (-want +got):\n%s", diff)
		}
	})
}

func TestLeasesAreLostWhenTheDaemonRestarts(t *testing.T) {
	path := socketPath(t)
	got, hook := reports()
	c := newClient(t, path, hook)
	for range 3 {
		d := newDaemon()
		d.ttl = time.Hour // they are not lost by time
		stop := d.listen(t, path)
		var leases []*Lease
		// The client may have detected the time without a daemon.
		for range 2 {
			l := acquire(t, c, testRequest)
			for !l.Protected() {
				for err := range got {
					if err == nil {
						break
					}
				}
				l = acquire(t, c, testRequest)
			}
			leases = append(leases, l)
		}
		stop()
		for _, l := range leases {
			testutil.Receive(t, l.Lost(), "the loss of a lease")
			release(t, l)
		}
	}
}

func TestConcurrentCallersKeepNoLease(t *testing.T) {
	path := socketPath(t)
	_, hook := reports()
	c := newClient(t, path, hook)
	var callers sync.WaitGroup
	for range 16 {
		callers.Go(func() {
			for range 20 {
				if err := c.Do(t.Context(), testRequest, func(context.Context) error { return nil }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	// The daemon starts and stops meanwhile.
	for range 3 {
		newDaemon().listen(t, path)()
	}
	d := newDaemon()
	d.listen(t, path)
	callers.Wait()
	if d.leases() != 0 {
		t.Errorf("%d leases were not completed", d.leases())
	}
}
