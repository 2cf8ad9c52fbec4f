package otlp

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

const (
	callersTrace, callersSpan = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	// patience is how long anything may take on a slow machine.
	patience = 30 * time.Second
)

// host is an event log whose traces are exported.
type host struct {
	*Exporter
	log  *events.Log
	lost chan error
}

// newHost exports to an endpoint; its clock stands at a minute.
func newHost(t testing.TB, endpoint string) *host {
	t.Helper()
	h := &host{log: events.NewLog(1024), lost: make(chan error, 64)}
	var err error
	h.Exporter, err = New(t.Context(), Config{
		Endpoint: endpoint, Events: h.log, Now: func() scheduler.Time { return time.Minute }, Version: "v0.3.0", Backend: "simulated",
		LeaseID: func(id scheduler.LeaseID) string { return fmt.Sprintf("e-%d", id) },
		Lost:    func(err error) { h.lost <- err },
	})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// start runs the exporter until the test ends or stop is called, which waits for it.
func (h *host) start(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); h.Run(ctx) }()
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return stop
}

// calling is the context of a call with a traceparent.
func calling(ctx context.Context, parent string) context.Context {
	if parent == "" {
		return ctx
	}
	return metadata.NewIncomingContext(ctx, metadata.Pairs("traceparent", parent, "tracestate", "vendor=1"))
}

func sampled() string { return "00-" + callersTrace + "-" + callersSpan + "-01" }

// preempt appends what a lease of 8 ms that suspends two targets leaves in the log.
func (h *host) preempt(lease scheduler.LeaseID) {
	const ms = time.Millisecond
	lt := func(at scheduler.Time, from, to scheduler.LeaseState, cause scheduler.Cause) {
		r := scheduler.Record{At: at, Kind: scheduler.RecordLease, Lease: lease, FromLease: from, ToLease: to, Cause: cause}
		if to == scheduler.LeaseEnded {
			r.End = scheduler.EndCompleted
		}
		h.log.Append(time.Time{}, r, "sim")
	}
	tt := func(at scheduler.Time, pid int32, from, to scheduler.TargetState, cause scheduler.Cause, took time.Duration) {
		r := scheduler.Record{At: at, Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: pid, Start: uint64(lease)}, FromTarget: from, ToTarget: to, Cause: cause, Took: took}
		if to == scheduler.TargetSuspending {
			r.Lease = lease
		}
		h.log.Append(time.Time{}, r, "sim")
	}
	t0 := 10 * time.Second
	lt(t0, scheduler.LeaseNone, scheduler.LeaseWaiting, scheduler.CauseAnnounced)
	lt(t0, scheduler.LeaseWaiting, scheduler.LeaseQuiescing, scheduler.CauseStarted)
	for pid := range int32(2) {
		tt(t0, 1+pid, scheduler.TargetRunning, scheduler.TargetSuspending, scheduler.CauseLease, 0)
	}
	tt(t0+1*ms, 1, scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.CauseDone, ms)
	tt(t0+2*ms, 2, scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.CauseDone, 2*ms)
	lt(t0+2*ms, scheduler.LeaseQuiescing, scheduler.LeaseHeld, scheduler.CauseQuiet)
	lt(t0+8*ms, scheduler.LeaseHeld, scheduler.LeaseEnded, "")
	for pid := range int32(2) {
		tt(t0+8*ms, 1+pid, scheduler.TargetSuspended, scheduler.TargetResuming, scheduler.CauseLeaseEnded, 0)
	}
	for pid := range int32(2) {
		tt(t0+9*ms, 1+pid, scheduler.TargetResuming, scheduler.TargetRunning, scheduler.CauseDone, ms)
	}
}

// spansOfPreemption is how many spans that makes.
const spansOfPreemption = 8

func (h *host) announced(t *testing.T, lease scheduler.LeaseID, parent string) {
	t.Helper()
	const at = 10 * time.Second
	h.Announced(calling(t.Context(), parent), lease, at-20*time.Microsecond, at+5*time.Microsecond)
}

func listen(t *testing.T, network, address string) net.Listener {
	t.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func patient(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func all(*tracepb.Span) bool { return true }

func within(inner, outer *tracepb.Span) bool {
	return inner.GetStartTimeUnixNano() >= outer.GetStartTimeUnixNano() && inner.GetEndTimeUnixNano() <= outer.GetEndTimeUnixNano()
}

func TestPreemptionIsOnePartOfTheCallersTrace(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	for _, where := range []struct{ network, address, prefix string }{
		{"tcp", "127.0.0.1:0", ""}, {"unix", filepath.Join(dir, "collector.sock"), "unix:"},
	} {
		t.Run(where.network, func(t *testing.T) {
			l := listen(t, where.network, where.address)
			collector := testutil.StartCollector(t, l)
			h := newHost(t, where.prefix+l.Addr().String())
			h.start(t)
			h.announced(t, 7, sampled())
			h.preempt(7)
			got := collector.Await(patient(t), t, spansOfPreemption, all)
			count := map[string]int{}
			announce := got["announce"][0]
			for name, list := range got {
				for _, s := range list {
					count[name]++
					if hex.EncodeToString(s.GetTraceId()) != callersTrace || s.GetTraceState() != "vendor=1" {
						t.Errorf("%s is of trace %x, %q", name, s.GetTraceId(), s.GetTraceState())
					}
					parent := hex.EncodeToString(announce.GetSpanId())
					if name == "announce" {
						parent = callersSpan
					}
					if hex.EncodeToString(s.GetParentSpanId()) != parent {
						t.Errorf("%s is below %x, want %s", name, s.GetParentSpanId(), parent)
					}
				}
			}
			want := map[string]int{"announce": 1, "decide": 1, "quiescing": 1, "online": 1, "suspend": 2, "resume": 2}
			if fmt.Sprint(count) != fmt.Sprint(want) {
				t.Fatalf("spans %v, want %v", count, want)
			}
			took := func(s *tracepb.Span) time.Duration {
				return time.Duration(s.GetEndTimeUnixNano() - s.GetStartTimeUnixNano())
			}
			if announce.GetKind() != tracepb.Span_SPAN_KIND_SERVER || took(announce) != 2*time.Millisecond+20*time.Microsecond || announce.GetEvents()[0].GetName() != "quiesced" {
				t.Errorf("the announcement is %v", announce)
			}
			quiescing, online := got["quiescing"][0], got["online"][0]
			for _, s := range append(got["suspend"], got["decide"][0], quiescing) {
				if !within(s, announce) {
					t.Errorf("%s is not within the announcement", s.GetName())
				}
			}
			for _, s := range got["suspend"] {
				if !within(s, quiescing) {
					t.Errorf("a suspend is not within quiescing")
				}
			}
			if took(got["decide"][0]) != 25*time.Microsecond || took(online) != 6*time.Millisecond || online.GetStartTimeUnixNano() != announce.GetEndTimeUnixNano() {
				t.Errorf("decide took %v; online took %v from %v", took(got["decide"][0]), took(online), online.GetStartTimeUnixNano())
			}
			for _, s := range got["resume"] {
				if s.GetStartTimeUnixNano() != online.GetEndTimeUnixNano() {
					t.Error("a resume does not begin with the end of the lease")
				}
			}
		})
	}
}

func TestCallerDecidesWhatIsSampled(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	collector := testutil.StartCollector(t, l)
	h := newHost(t, l.Addr().String())
	h.start(t)
	const unwanted = "11111111111111111111111111111111"
	parents := []string{
		"00-" + unwanted + "-" + callersSpan + "-00", sampled(),
		// No context: a trace of its own.
		"", "nonsense", "00-00000000000000000000000000000000-0000000000000000-01", strings.Repeat("0", 10_000),
	}
	for i, parent := range parents {
		h.announced(t, scheduler.LeaseID(i+1), parent)
		h.preempt(scheduler.LeaseID(i + 1))
	}
	got := collector.Await(patient(t), t, (len(parents)-1)*spansOfPreemption, all)
	roots := 0
	for _, s := range got["announce"] {
		if hex.EncodeToString(s.GetTraceId()) == unwanted {
			t.Error("what its caller does not sample was sent")
		}
		if len(s.GetParentSpanId()) == 0 {
			roots++
		}
	}
	if len(got["announce"]) != 5 || roots != 4 {
		t.Errorf("%d announcements, %d of them without a caller; want 5, 4", len(got["announce"]), roots)
	}
}

// next returns what Lost was told next.
func (h *host) next(t *testing.T) error {
	t.Helper()
	select {
	case err := <-h.lost:
		return err
	case <-time.After(patience):
		t.Fatal("nothing is told of spans that are lost")
		return nil
	}
}

func TestLossIsToldUntilItIsOver(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	collector := testutil.StartCollector(t, l)
	collector.Refuse(status.Error(codes.PermissionDenied, "no such tenant"))
	h := newHost(t, l.Addr().String())
	h.start(t)
	h.announced(t, 1, "")
	h.preempt(1)
	if err := h.next(t); err == nil || !strings.Contains(err.Error(), "8 lost since the start") || !strings.Contains(err.Error(), "no such tenant") {
		t.Errorf("told %v", err)
	}
	collector.Refuse(nil)
	h.announced(t, 2, "")
	h.preempt(2)
	collector.Await(patient(t), t, spansOfPreemption, all)
	if err := h.next(t); err != nil {
		t.Errorf("told %v, want that it is over", err)
	}
}

func TestDeadCollectorHoldsUpNeitherCallsNorTheEnd(t *testing.T) {
	silent := listen(t, "tcp", "127.0.0.1:0") // takes connections and never answers
	dead := listen(t, "tcp", "127.0.0.1:0")
	nobody := dead.Addr().String()
	if err := errors.Join(dead.Close()); err != nil {
		t.Fatal(err)
	}
	for name, address := range map[string]string{"nobody": nobody, "silent": silent.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, address)
			stop := h.start(t)
			began := time.Now()
			for i := range scheduler.LeaseID(2 * leasesKept) {
				h.announced(t, i+1, sampled())
			}
			h.preempt(1)
			if took := time.Since(began); took > patience/3 {
				t.Errorf("%d announcements took %v", 2*leasesKept, took)
			}
			h.mu.Lock()
			waiting := len(h.inbox)
			h.mu.Unlock()
			if waiting > leasesKept {
				t.Errorf("%d announcements are kept, want %d at most", waiting, leasesKept)
			}
			began = time.Now()
			stop()
			if took := time.Since(began); took > 2*lastExportTime {
				t.Errorf("the end took %v", took)
			}
		})
	}
	if err := silent.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestChangesThatAreOverwrittenAreToldAndNoEnd(t *testing.T) {
	h := newHost(t, "127.0.0.1:1")
	for range 200 {
		h.preempt(3)
	}
	if got := h.take(t.Context(), 1); got != h.log.Revision() {
		t.Errorf("it goes on from %d, want %d", got, h.log.Revision())
	}
	if err := h.next(t); !errors.Is(err, events.ErrCompacted) {
		t.Errorf("told %v", err)
	}
	h.discard(t)
}

// The log is read before the call has left its context, by chance.
func TestSpansOfALeaseWaitForItsContext(t *testing.T) {
	h := newHost(t, "127.0.0.1:1")
	h.preempt(7)
	h.take(t.Context(), 0)
	if len(h.batch) != 0 || len(h.early) != spansOfPreemption-1 {
		t.Fatalf("%d spans, %d wait; want 0 and all but decide", len(h.batch), len(h.early))
	}
	h.announced(t, 7, sampled())
	h.take(t.Context(), h.log.Revision())
	if len(h.batch) != spansOfPreemption || len(h.early) != 0 || len(h.lost) != 0 {
		t.Errorf("%d spans, %d wait, %d losses; want all", len(h.batch), len(h.early), len(h.lost))
	}
	// A context that never comes is waited for once.
	h.preempt(8)
	h.take(t.Context(), h.log.Revision()-12)
	h.take(t.Context(), h.log.Revision())
	if err := h.next(t); err == nil || !strings.Contains(err.Error(), "no longer known") || len(h.early) != 0 {
		t.Errorf("told %v, %d wait", err, len(h.early))
	}
	h.discard(t)
}

func TestLeasesThatAreRememberedAreBounded(t *testing.T) {
	h := newHost(t, "127.0.0.1:1")
	for i := range scheduler.LeaseID(leasesKept + 100) {
		h.begin(announced{lease: i + 1}, time.Now())
		h.batch = nil
	}
	if len(h.leases) != leasesKept || h.leases[100] != nil || h.leases[101] == nil {
		t.Errorf("%d leases are known", len(h.leases))
	}
	h.discard(t)
}

// What is kept of a caller is bounded, whatever its headers hold.
func TestLongHeadersAreNotKept(t *testing.T) {
	h := newHost(t, "127.0.0.1:1")
	defer h.discard(t)
	long := strings.Repeat("0", maxState+1)
	for i, headers := range [][]string{{"traceparent", sampled()}, {"traceparent", sampled(), "tracestate", long}, {"traceparent", long, "tracestate", "vendor=1"}} {
		h.Announced(metadata.NewIncomingContext(t.Context(), metadata.Pairs(headers...)), scheduler.LeaseID(i+1), 0, 0)
	}
	want := []announced{{lease: 1, parent: sampled()}, {lease: 2, parent: sampled()}, {lease: 3}}
	if diff := cmp.Diff(want, h.inbox, cmp.AllowUnexported(announced{})); diff != "" {
		t.Errorf("what is kept (-want +got):\n%s", diff)
	}
}

// discard ends an exporter that never ran.
func (h *host) discard(t *testing.T) {
	t.Helper()
	if err := h.exporter.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

// What a call pays when traces are on: its context is looked at, and kept.
func BenchmarkAnnounced(b *testing.B) {
	h := newHost(b, "127.0.0.1:1")
	ctx := calling(b.Context(), sampled())
	b.ReportAllocs()
	var n scheduler.LeaseID
	for b.Loop() {
		n++
		h.Announced(ctx, n, 1, 2)
		if len(h.inbox) == leasesKept {
			h.inbox = h.inbox[:0]
		}
	}
	_ = h.exporter.Shutdown(context.WithoutCancel(b.Context()))
}
