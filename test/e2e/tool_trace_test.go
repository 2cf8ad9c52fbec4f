package e2e

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/metadata"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// traced is a trace that gplab exported.
type traced struct {
	OtherData   map[string]string `json:"otherData"`
	TraceEvents []struct {
		Name string         `json:"name"`
		PH   string         `json:"ph"`
		TS   float64        `json:"ts"`
		Dur  float64        `json:"dur"`
		Args map[string]any `json:"args"`
	} `json:"traceEvents"`
}

// readTrace reads a trace that must be of Chrome's format.
func readTrace(t *testing.T, path string) traced {
	t.Helper()
	var schema jsonschema.Schema
	var trace traced
	var raw any
	for file, to := range map[string][]any{"../../lab/cli/testdata/trace-event-format.schema.json": {&schema}, path: {&trace, &raw}} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, into := range to {
			if err := json.Unmarshal(text, into); err != nil {
				t.Fatalf("%v in %s", err, text)
			}
		}
	}
	resolved, err := schema.Resolve(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := resolved.Validate(raw); err != nil {
		t.Error(err)
	}
	return trace
}

func TestExportedTraceShowsAPreemptionFromEndToEnd(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	pid := d.startOffline()
	since := d.revision()
	lease := d.announce(t.Context()).GetLeaseId()
	d.complete(lease)
	d.awaitTarget(pid, since, running)

	file := filepath.Join(t.TempDir(), "trace.json")
	d.export("no hardware is involved", "--lease", lease, "--output-file", file)
	trace := readTrace(t, file)
	if got, want := trace.OtherData["backend"], d.status().GetBackend(); got != want {
		t.Errorf("the trace is of %q, want %q", got, want)
	}
	// Each begins where the one before ends, or within it.
	begin, end := map[string]int64{}, map[string]int64{} // nanoseconds
	for _, e := range trace.TraceEvents {
		if e.PH == "X" || e.PH == "i" {
			if _, twice := begin[e.Name]; twice {
				t.Errorf("two spans %s", e.Name)
			}
			begin[e.Name], end[e.Name] = int64(math.Round(e.TS*1000)), int64(math.Round((e.TS+e.Dur)*1000))
		}
		if target, ok := e.Args["target_id"].(string); ok && pidOf(target) != pid {
			t.Errorf("%s is of %s", e.Name, target)
		}
	}
	for _, order := range [][2]int64{
		{begin["lease"], begin["requested"]},
		{end["requested"], begin["quiescing"]},
		{begin["quiescing"], begin["suspend"]},
		{begin["suspend"] + 1000, end["suspend"]}, // the model takes longer than a microsecond
		{end["suspend"], begin["suspended"]},
		{end["suspend"], end["quiescing"]},
		{end["quiescing"], begin["answered"]},
		{begin["answered"], begin["online"]},
		{begin["online"], end["online"]},
		{end["online"], end["lease"]},
		{end["lease"], begin["resume"]},
		{end["suspended"], begin["resume"]},
		{begin["resume"], end["resume"]},
	} {
		if order[0] > order[1] {
			t.Fatalf("out of order: %v, %v", begin, end)
		}
	}
	if len(begin) != 8 {
		t.Errorf("spans %v", begin)
	}
	d.export("", "--output-file", file)
	readTrace(t, file)
}

func TestCallersTraceContinuesInTheDaemon(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(testutil.TempSocketDir(t), "collector.sock")
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	collector := testutil.StartCollector(t, l)
	d := start(t, atOnce)
	pid := d.startOffline()

	const byCall, byStream, span = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	calling := func(trace string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "traceparent", fmt.Sprintf("00-%s-%s-01", trace, span))
	}
	d.complete(d.announce(calling(byCall)).GetLeaseId())
	session, err := d.online.Session(calling(byStream))
	if err != nil {
		t.Fatal(err)
	}
	if err := session.Send(&gpreemptv1.SessionRequest{Tag: 1, Frame: &gpreemptv1.SessionRequest_Announce{Announce: announcement()}}); err != nil {
		t.Fatal(err)
	}
	answer, err := session.Recv()
	if err != nil {
		t.Fatal(err)
	}
	since := d.revision()
	d.complete(answer.GetAnnounced().GetLeaseId())
	d.awaitTarget(pid, since, running)
	d.export("", "--otlp", "unix:"+socket)

	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	for name, trace := range map[string]string{"a call": byCall, "a stream": byStream} {
		// Announce, decide, quiescing, online, and the job's suspend and resume.
		got := collector.Await(ctx, t, 6, func(s *tracepb.Span) bool { return hex.EncodeToString(s.GetTraceId()) == trace })
		for _, want := range []string{"announce", "decide", "quiescing", "suspend", "online", "resume"} {
			if len(got[want]) != 1 {
				t.Fatalf("%s: %d spans %s: %v", name, len(got[want]), want, got)
			}
		}
		if parent := hex.EncodeToString(got["announce"][0].GetParentSpanId()); parent != span {
			t.Errorf("%s: the announcement is below %s, want the caller's %s", name, parent, span)
		}
	}
}
