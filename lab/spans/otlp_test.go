package spans_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/lab/spans"
)

const (
	callersTrace, callersSpan = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	// longest is how long anything may take on a slow machine.
	longest = 60 * time.Second
)

func sampled() string { return "00-" + callersTrace + "-" + callersSpan + "-01" }

func listen(t *testing.T, network, address string) net.Listener {
	t.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// await returns n spans by name.
func await(t *testing.T, c *testutil.Collector, n int) map[string][]*tracepb.Span {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	return c.Await(ctx, t, n, func(*tracepb.Span) bool { return true })
}

// exportRemembered exports all events of a daemon to a collector.
func exportRemembered(t *testing.T, d *daemon, endpoint string) {
	t.Helper()
	e, err := spans.NewExporter(t.Context(), spans.ExporterConfig{Endpoint: endpoint, Daemon: d, Warn: func(err error) { t.Errorf("warned of %v", err) }})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Remembered(t.Context()); err != nil || e.Lost() != 0 {
		t.Fatalf("%v; %d spans lost", err, e.Lost())
	}
}

func TestAPreemptionIsOnePartOfTheClientsTrace(t *testing.T) {
	dir := testutil.TempSocketDir(t)
	for _, where := range []struct{ network, address, prefix string }{
		{"tcp", "127.0.0.1:0", ""}, {"tcp", "127.0.0.1:0", "http://"}, {"unix", filepath.Join(dir, "collector.sock"), "unix:"},
	} {
		t.Run(where.network+where.prefix, func(t *testing.T) {
			l := listen(t, where.network, where.address)
			collector := testutil.StartCollector(t, l)
			d := newDaemon()
			d.preempt(7, sampled())
			exportRemembered(t, d, where.prefix+l.Addr().String())
			checkPreemption(t, await(t, collector, spansOfPreemption))
		})
	}
}

// checkPreemption compares the spans of a preemption, whose client sent sampled().
func checkPreemption(t *testing.T, got map[string][]*tracepb.Span) {
	t.Helper()
	type span struct {
		Name       string
		Kind       tracepb.Span_SpanKind
		Begin, End time.Duration // since the scheduler admitted the announcement
		Below      string        // the name of the parent
		Trace      string
		Events     string
	}
	// The clock of the daemon was at 10 s then; it started at 1000 s.
	admitted := uint64(time.Unix(1010, 0).UnixNano())
	since := func(nanos uint64) time.Duration { return time.Duration(int64(nanos) - int64(admitted)) }
	names := map[string]string{callersSpan: "the client's"}
	for name, list := range got {
		for _, s := range list {
			names[hex.EncodeToString(s.GetSpanId())] = name
		}
	}
	spans := map[string][]span{}
	for name, list := range got {
		for _, s := range list {
			events := ""
			for _, e := range s.GetEvents() {
				events += fmt.Sprint(e.GetName(), " ", since(e.GetTimeUnixNano()))
			}
			spans[name] = append(spans[name], span{
				name, s.GetKind(), since(s.GetStartTimeUnixNano()), since(s.GetEndTimeUnixNano()),
				names[hex.EncodeToString(s.GetParentSpanId())], hex.EncodeToString(s.GetTraceId()) + " " + s.GetTraceState(), events,
			})
		}
	}
	const ms = time.Millisecond
	internal, server := tracepb.Span_SPAN_KIND_INTERNAL, tracepb.Span_SPAN_KIND_SERVER
	of := callersTrace + " vendor=1"
	want := map[string][]span{
		"announce":  {{"announce", server, -20 * time.Microsecond, 2 * ms, "the client's", of, "quiesced 2ms"}},
		"decide":    {{"decide", internal, -20 * time.Microsecond, 0, "announce", of, ""}},
		"quiescing": {{"quiescing", internal, 0, 2 * ms, "announce", of, ""}},
		"suspend":   {{"suspend", internal, 0, 1 * ms, "announce", of, ""}, {"suspend", internal, 0, 2 * ms, "announce", of, ""}},
		"online":    {{"online", internal, 2 * ms, 8 * ms, "announce", of, ""}},
		"resume":    {{"resume", internal, 8 * ms, 9 * ms, "announce", of, ""}, {"resume", internal, 8 * ms, 9 * ms, "announce", of, ""}},
	}
	if diff := cmp.Diff(want, spans); diff != "" {
		t.Errorf("spans (-want +got):\n%s", diff)
	}
}

func TestTheClientDecidesWhatIsSampled(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	collector := testutil.StartCollector(t, l)
	d := newDaemon()
	const unwanted = "11111111111111111111111111111111"
	parents := []string{
		"00-" + unwanted + "-" + callersSpan + "-00", sampled(),
		// No context: a trace of its own.
		"", "nonsense", "00-00000000000000000000000000000000-0000000000000000-01",
	}
	for i, parent := range parents {
		d.preempt(i+1, parent)
	}
	exportRemembered(t, d, l.Addr().String())
	got := await(t, collector, (len(parents)-1)*spansOfPreemption)
	roots := 0
	for _, s := range got["announce"] {
		if hex.EncodeToString(s.GetTraceId()) == unwanted {
			t.Error("a trace that its client does not sample was sent")
		}
		if len(s.GetParentSpanId()) == 0 {
			roots++
		}
	}
	if len(got["announce"]) != 4 || roots != 3 {
		t.Errorf("%d announcements, %d of them without a client; want 4, 3", len(got["announce"]), roots)
	}
}

func TestFollowingSendsWhatHappensFromNowOn(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	collector := testutil.StartCollector(t, l)
	d := newDaemon()
	d.preempt(6, "")
	f := follow(t, d, l.Addr().String())
	d.change(func() { d.down = true })
	if err := f.next(t); err == nil || !strings.Contains(err.Error(), "no daemon there") {
		t.Errorf("warned of %v, want the missing daemon", err)
	}
	d.preempt(7, sampled()) // it reads the events that it missed
	d.change(func() { d.down = false })
	checkPreemption(t, await(t, collector, spansOfPreemption))
	if err := f.next(t); err != nil {
		t.Errorf("warned of %v, want that spans arrive again", err)
	}
}

// Revisions, lease numbers and the clock of a daemon that restarts begin anew.
func TestADaemonThatRestartsIsFollowedFromItsStart(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	collector := testutil.StartCollector(t, l)
	d := newDaemon()
	f := follow(t, d, l.Addr().String())
	d.preempt(7, "")
	await(t, collector, spansOfPreemption)
	d.change(func() { d.started, d.events = d.started.Add(time.Hour), nil })
	d.preempt(7, "")
	got := await(t, collector, 2*spansOfPreemption)
	apart := got["announce"][1].GetStartTimeUnixNano() - got["announce"][0].GetStartTimeUnixNano()
	if time.Duration(apart) != time.Hour {
		t.Errorf("the announcements are %v apart, want the hour between the starts", time.Duration(apart))
	}
	f.stop()
}

func TestLossIsReportedUntilItIsOver(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	collector := testutil.StartCollector(t, l)
	collector.Refuse(status.Error(codes.PermissionDenied, "no such tenant"))
	d := newDaemon()
	f := follow(t, d, l.Addr().String())
	d.preempt(1, "")
	if err := f.next(t); err == nil || !strings.Contains(err.Error(), "spans lost") || !strings.Contains(err.Error(), "no such tenant") {
		t.Errorf("warned of %v", err)
	}
	collector.Refuse(nil)
	d.preempt(2, "")
	if err := f.next(t); err != nil {
		t.Errorf("warned of %v, want that spans arrive again", err)
	}
	f.stop()
	if f.Lost() == 0 {
		t.Error("no span is counted as lost")
	}
}

// A collector that does not answer costs spans, and holds up neither the daemon nor the
// end of the exporter.
func TestADeadCollectorCostsSpansOnly(t *testing.T) {
	silent := listen(t, "tcp", "127.0.0.1:0") // accepts connections and never answers
	for name, address := range map[string]string{"nobody": testutil.FreeAddress(t), "silent": silent.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			d := newDaemon()
			f := follow(t, d, address)
			d.preempt(1, "")
			f.stop()
		})
	}
	if err := silent.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOverwrittenEventsAreCountedAndTheRestIsSent(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	collector := testutil.StartCollector(t, l)
	d := newDaemon()
	d.preempt(1, "")
	f := follow(t, d, l.Addr().String())
	d.change(func() { d.down = true })
	_ = f.next(t) // it reads nothing of the next
	for lease := range 20 {
		d.preempt(2+lease, "")
	}
	d.change(func() { d.kept, d.down = 12, false }) // the events of one preemption
	if got := await(t, collector, spansOfPreemption); len(got["announce"]) != 1 {
		t.Errorf("%d announcements were sent, want the last one", len(got["announce"]))
	}
	f.stop()
	if f.Lost() != 1 {
		t.Errorf("%d losses, want the overwritten events as one", f.Lost())
	}
}

func TestCollectorsThatAreNoAddressAreRejected(t *testing.T) {
	for _, endpoint := range []string{"", "4317", "localhost", "unix:", "ftp://h:1", "https://h", "h:1:2"} {
		if _, err := spans.NewExporter(t.Context(), spans.ExporterConfig{Endpoint: endpoint}); err == nil || !strings.Contains(err.Error(), "invalid collector") {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
}
