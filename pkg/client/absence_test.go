package client

import (
	"context"
	"errors"
	"fmt"
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
		release(t, l)
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

func TestRefusedWorkRunsUnlessTheClientFailsClosed(t *testing.T) {
	for _, reason := range []gpreempt.Error{
		{Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonUnknownGPU},
		{Code: gpreempt.CodeAlreadyExists, Reason: gpreempt.ReasonRequestIDReused},
		{Code: gpreempt.CodePermissionDenied, Reason: gpreempt.ReasonNotOnline},
		{Code: gpreempt.CodeUnauthenticated, Reason: gpreempt.ReasonNoIdentity},
		{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonMessageTooLarge},
		{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonLeasesPerClient},
		{Code: gpreempt.CodeResourceExhausted, Reason: gpreempt.ReasonRateLimited},
		{Code: gpreempt.CodeInternal, Reason: gpreempt.ReasonInternal},
		{Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonShuttingDown},
	} {
		refusal := &gpreempt.Error{Code: reason.Code, Reason: reason.Reason, Message: "no", Next: "retry"}
		refuse := func(t *testing.T, opts ...Option) (*Lease, error) {
			t.Helper()
			c, d := newPair(t, opts...)
			d.on = func(context.Context, any) error { return refusal }
			return c.Acquire(t.Context(), testRequest)
		}
		t.Run(string(reason.Reason), func(t *testing.T) {
			got, hook := reports()
			l, err := refuse(t, hook)
			if err != nil || l.Protected() {
				t.Fatalf("lease %v, error %v", l, err)
			}
			if diff := cmp.Diff([]error{refusal, refusal}, []error{l.Cause(), <-got}); diff != "" {
				t.Errorf("cause and report (-want +got):\n%s", diff)
			}
			if _, err := refuse(t, FailClosed()); cmp.Diff(error(refusal), err) != "" {
				t.Errorf("with FailClosed: %v", err)
			}
		})
	}
}

func TestRequestWithoutGPUsIsAnErrorWithAndWithoutADaemon(t *testing.T) {
	withDaemon, d := newPair(t)
	for name, c := range map[string]*Client{"with": withDaemon, "without": newClient(t, socketPath(t))} {
		_, err := c.Acquire(t.Context(), Request{Label: "chat"})
		if gpreempt.ReasonOf(err) != gpreempt.ReasonMissingField || !strings.Contains(err.Error(), "client.AllGPUs()") {
			t.Errorf("%s a daemon: %v", name, err)
		}
	}
	if len(d.happened) > 0 {
		t.Errorf("the daemon saw %q", <-d.happened)
	}
}

func TestRefusedGPUsAreReportedOnceAlsoBesideOthers(t *testing.T) {
	bubble(t, func(t *testing.T, d *daemon, _ *Client) {
		t.Helper()
		got, hook := reports()
		c, end := newBubble(t, d, hook)
		defer end()
		refusal := func(node uint32) *gpreempt.Error {
			return &gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonUnknownGPU, Message: fmt.Sprint("node ", node)}
		}
		var restored atomic.Bool
		d.on = func(_ context.Context, request any) error {
			r, ok := request.(*gpreemptv1.NotifyOnlineRequest)
			if node := r.GetGpus(); ok && len(node) > 0 && !restored.Load() {
				return refusal(node[0].GetNode())
			}
			return nil
		}
		for range 3 {
			for node := range uint32(2) {
				acquire(t, c, Request{GPUs: []GPU{GPUByNode(node)}})
				release(t, acquire(t, c, testRequest))
				time.Sleep(2 * settle)
			}
		}
		if diff := cmp.Diff([]error{refusal(0), refusal(1)}, received(got)); diff != "" {
			t.Errorf("reports (-want +got):\n%s", diff)
		}
		restored.Store(true)
		for node := range uint32(2) {
			if early := received(got); len(early) > 0 {
				t.Errorf("reported %v before all is protected", early)
			}
			release(t, acquire(t, c, Request{GPUs: []GPU{GPUByNode(node)}}))
		}
		if diff := cmp.Diff([]error{nil}, received(got)); diff != "" {
			t.Errorf("reports when all is protected (-want +got):\n%s", diff)
		}
	})
}

// received returns what a hook of reports was called with.
func received(got <-chan error) (all []error) {
	for len(got) > 0 {
		all = append(all, <-got)
	}
	return all
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
		"stated":   {Request{GPUs: OwnGPUs(), MaxWait: 20 * time.Millisecond}, 120 * time.Millisecond},
		"unstated": {Request{GPUs: OwnGPUs()}, 300 * time.Millisecond},
		"none":     {Request{GPUs: OwnGPUs(), MaxWait: NoWait}, 100 * time.Millisecond},
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
			l := acquire(t, c, testRequest)
			if l.Protected() {
				granted++
			}
			release(t, l)
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
