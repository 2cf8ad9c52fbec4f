package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

const webToken = "TOKEN"

// webDaemonFake is a daemon that can fail and counts its readings.
type webDaemonFake struct {
	topDaemon
	away     bool
	readings int
	during   func() // called in each reading, unless it is nil
}

func (d *webDaemonFake) GetStatus(ctx context.Context, req *gpreemptv1.GetStatusRequest, opts ...grpc.CallOption) (*gpreemptv1.GetStatusResponse, error) {
	if d.away {
		return nil, status.Error(codes.Internal, "broken for the test")
	}
	d.readings++
	if d.during != nil {
		d.during()
	}
	return d.topDaemon.GetStatus(ctx, req, opts...)
}

func (d *webDaemonFake) ExplainTarget(_ context.Context, req *gpreemptv1.ExplainTargetRequest, _ ...grpc.CallOption) (*gpreemptv1.ExplainTargetResponse, error) {
	for _, target := range topReading(d.clock).targets {
		if target.GetTargetId() == req.GetTargetId() {
			return &gpreemptv1.ExplainTargetResponse{
				Verdict: "Explained: " + target.GetComm() + ".", Target: target,
				Checks:         []*gpreemptv1.ExplainCheck{{Check: "lease", Result: gpreemptv1.CheckResult_CHECK_RESULT_SUSPEND, Decides: true, Detail: "highest lease\x1b[31m"}},
				Classification: []*gpreemptv1.ClassifyStep{{By: "rule training", Class: gpreemptv1.Class_CLASS_OFFLINE, Matches: true, Decides: true, Detail: "comm is trainer"}, {By: "default", Class: gpreemptv1.Class_CLASS_UNMANAGED}},
			}, nil
		}
	}
	return nil, status.Error(codes.NotFound, "unknown target")
}

// page is the handler of gpctl web on a clock that the test moves.
type page struct {
	http.Handler
	daemon *webDaemonFake
	model  *webModel
	now    time.Duration
}

// newPage returns a page 105 s after the start of its daemon, of which it has followed the last 5.
func newPage() *page {
	a := topApp()
	p := &page{daemon: &webDaemonFake{topDaemon: topDaemon{clock: 105 * time.Second}}}
	a.Now = func() time.Time { return time.Unix(43200, 0).UTC().Add(p.now) }
	p.model = newWebModel(a, p.daemon, 500*time.Millisecond)
	p.model.timeline.begin(0, topReading(100*time.Second))
	p.model.monitor = topFilled(a).monitor
	p.Handler = webHandler(p.model, webToken)
	return p
}

// get answers a request for a path of a host.
func (p *page) get(method, host, path string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, nil)
	r.Host = host
	w := httptest.NewRecorder()
	p.ServeHTTP(w, r)
	return w
}

func (p *page) data(t *testing.T, query string) (d webData) {
	t.Helper()
	resp := p.get(http.MethodGet, "127.0.0.1:9478", "/"+webToken+"/data"+query)
	if resp.Code != http.StatusOK {
		t.Fatalf("data%s: status %d", query, resp.Code)
	}
	if err := json.NewDecoder(resp.Body).Decode(&d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestWebAnswersOnlyReadersWithTheTokenOnLoopback(t *testing.T) {
	p := newPage()
	type request struct{ method, host, path string }
	for r, want := range map[request]int{
		{"GET", "127.0.0.1:9478", "/TOKEN/"}:                                       200,
		{"GET", "127.0.0.1:9478", "/TOKEN/page.js"}:                                200,
		{"GET", "127.0.0.1:9478", "/TOKEN/page.css"}:                               200,
		{"GET", "127.0.0.1:9478", "/TOKEN/icon.svg"}:                               200,
		{"GET", "127.0.0.1:9478", "/TOKEN/data"}:                                   200,
		{"GET", "localhost:80", "/TOKEN/"}:                                         200, // a forwarded port
		{"GET", "[::1]:9478", "/TOKEN/"}:                                           200,
		{"GET", "127.0.0.1", "/TOKEN/"}:                                            200,
		{"GET", "127.0.0.1:9478", "/TOKEN"}:                                        404,
		{"GET", "127.0.0.1:9478", "/"}:                                             404,
		{"GET", "127.0.0.1:9478", "/page.js"}:                                      404,
		{"GET", "127.0.0.1:9478", "/token/"}:                                       404,
		{"GET", "127.0.0.1:9478", "/TOKENS/data"}:                                  404,
		{"GET", "127.0.0.1:9478", "//data"}:                                        404,
		{"GET", "127.0.0.1:9478", "/TOKEN/other"}:                                  404,
		{"GET", "127.0.0.1:9478", "/TOKEN/../web.go"}:                              404,
		{"GET", "attacker.example:9478", "/TOKEN/"}:                                403, // DNS rebinding
		{"GET", "localhost.attacker.example", "/TOKEN/data"}:                       403,
		{"GET", "127.0.0.1.attacker.example:9478", "/TOKEN/"}:                      403,
		{"GET", "192.168.0.1:9478", "/TOKEN/"}:                                     403,
		{"GET", "", "/TOKEN/"}:                                                     403,
		{"POST", "127.0.0.1:9478", "/TOKEN/data"}:                                  405,
		{"HEAD", "127.0.0.1:9478", "/TOKEN/"}:                                      405,
		{"OPTIONS", "127.0.0.1:9478", "/TOKEN/data"}:                               405,
		{"DELETE", "127.0.0.1:9478", "/TOKEN/"}:                                    405,
		{"GET", "127.0.0.1:9478", "/TOKEN/data?after=x"}:                           400,
		{"GET", "127.0.0.1:9478", "/TOKEN/data?target=" + strings.Repeat("1", 65)}: 400,
	} {
		resp := p.get(r.method, r.host, r.path)
		if resp.Code != want {
			t.Errorf("%s %s of host %q: status %d, want %d", r.method, r.path, r.host, resp.Code, want)
		}
		got := http.Header{}
		for name := range resp.Header() {
			if name != "Content-Type" && name != "Content-Length" && name != "Accept-Ranges" && name != "Allow" {
				got[name] = resp.Header()[name]
			}
		}
		headers := http.Header{
			"Cache-Control":                {"no-store"},
			"Content-Security-Policy":      {"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
			"Cross-Origin-Opener-Policy":   {"same-origin"},
			"Cross-Origin-Resource-Policy": {"same-origin"},
			"Referrer-Policy":              {"no-referrer"},
			"X-Content-Type-Options":       {"nosniff"},
		}
		if diff := cmp.Diff(headers, got); diff != "" {
			t.Errorf("%s %s of host %q: headers (-want +got):\n%s", r.method, r.path, r.host, diff)
		}
	}
}

func TestWebShowsWhatTheDaemonAnswers(t *testing.T) {
	p := newPage()
	p.now = 300 * time.Millisecond
	got := p.data(t, "?target=5001@1")
	for i := range got.Preemptions {
		got.Preemptions[i].At = "" // of the time zone of the host
	}
	got.Preemptions, got.Quiet.Recent = got.Preemptions[:1], got.Quiet.Recent[:2]
	if !strings.Contains(got.Explanation.Facts, "process      5001 trainer, uid 0\n") {
		t.Errorf("facts %q", got.Explanation.Facts)
	}
	got.Explanation.Facts = ""
	want := webData{
		Column: 1, Daemon: webDaemon{Backend: "emulated mi300x", Model: "emulated", Policy: "balanced", Up: "1m45s"}, Warnings: []webWarning{},
		Quiet: webQuietTimes{Count: 20, P50: "1ms", P95: "1.9ms", P99: "2ms", Max: "2ms", Recent: []float64{0.1, 0.2}},
		GPUs: []webGPU{
			{ID: 63420, Name: "gfx942", Queues: 4, Slots: 24, Leases: 1, Suspended: 50, Columns: []int{0, 100, 0, 100}},
			{ID: 61531, Index: 1, Name: "gfx942", Queues: 2, Slots: 24, Breaker: "12s"},
		},
		Tracks: []webTrack{
			{ID: "5001@1", PID: 5001, Comm: "trainer", GPUs: []uint32{63420}, Columns: []int{0, 100, 0, 0, 100, 0}},
			{ID: "5002@1", PID: 5002, Comm: "python3", GPUs: []uint32{61531}},
		},
		Targets: []webTarget{
			{ID: "5001@1", PID: 5001, Comm: "trainer", Class: "offline", State: "suspended", Suspended: "50", Rate: "10.0", Queues: 2, Backlog: "41 packets", GPUs: "0", Where: "ml/bert-0", Why: "Explained: trainer."},
			{ID: "5002@1", PID: 5002, Comm: "python3", Class: "offline", State: "running", Suspended: "0", Rate: "0.0", Queues: 2, Backlog: "-", GPUs: "1", Why: "Explained: python3."},
			{ID: "7000@1", PID: 7000, Comm: "server", Class: "online", State: "running", Suspended: "0", Rate: "0.0", Queues: 2, Backlog: "-", GPUs: "0", Why: "Explained: server."},
		},
		Leases:      []webLease{{ID: "9f-3", Label: "chat", State: "held", Prio: "8", GPUs: "0", Owner: "pid 7000", Age: "1.3s", Expires: "4s"}},
		Preemptions: []webPreemption{{PID: "5001", Comm: "trainer", Took: "1ms", For: "lease 9f-19"}},
		Explanation: &webExplanation{
			ID: "5001@1", Verdict: "Explained: trainer.", Checks: []webCheck{{"lease", "suspend", true, "highest lease?[31m"}},
			Class:  []webCheck{{"rule training", "offline", true, "comm is trainer"}, {"default", "no", false, ""}},
			Queues: []webQueue{{ID: 1, GPU: 63420, Ring: "0B", Backlog: "41 packets"}, {ID: 2, GPU: 63420, Ring: "0B", Backlog: "-"}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("data (-want +got):\n%s", diff)
	}

	// Later only the new columns are sent, and all of them to a page that has others.
	p.now = 500 * time.Millisecond
	type sent struct {
		First, Column int64
		Columns       []int
	}
	for query, want := range map[string]sent{
		"?after=1": {2, 3, []int{0, 100, 0, 100}}, "?after=3": {4, 3, nil}, "?after=4": {0, 3, []int{0, 100, 0, 100, 0, 100, 0, 100}}, "?after=-1": {0, 3, []int{0, 100, 0, 100, 0, 100, 0, 100}},
	} {
		d := p.data(t, query)
		if diff := cmp.Diff(want, sent{d.First, d.Column, d.GPUs[0].Columns}); diff != "" {
			t.Errorf("data%s (-want +got):\n%s", query, diff)
		}
	}
	if d := p.data(t, "?target=1@1"); d.Explanation == nil || d.Explanation.Error == "" {
		t.Errorf("explanation of a target that does not exist: %+v", d.Explanation)
	}
}

func TestWebReadsTheDaemonOnceForAllPages(t *testing.T) {
	p := newPage()
	for range 3 {
		p.data(t, "")
	}
	if p.daemon.readings != 1 {
		t.Errorf("the daemon was read %d times at once", p.daemon.readings)
	}
	p.now += 500 * time.Millisecond
	p.data(t, "")
	if p.daemon.readings != 2 {
		t.Errorf("the daemon was read %d times, half a second later", p.daemon.readings)
	}
}

func TestWebSaysWhyTheDaemonIsAwayAndReturns(t *testing.T) {
	p := newPage()
	p.daemon.away = true
	if d := p.data(t, ""); d.Lost == "" || len(d.Targets) != 3 {
		t.Errorf("without its daemon: lost %q, %d targets", d.Lost, len(d.Targets))
	}
	p.daemon.away = false
	p.now += time.Second
	if d := p.data(t, ""); d.Lost != "" {
		t.Errorf("with its daemon again: lost %q", d.Lost)
	}
	// A reader that leaves says nothing about the daemon.
	p.now += time.Second
	ctx, cancel := context.WithCancel(t.Context())
	p.daemon.during = cancel
	if _, err := p.model.data(ctx, -1, ""); err == nil || p.model.monitor.lost != "" {
		t.Errorf("after a reader has left: %v, lost %q", err, p.model.monitor.lost)
	}
	// Nor does a reading that takes too long keep a reader waiting.
	p.now += time.Second
	p.model.busy <- struct{}{}
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/TOKEN/data", nil).WithContext(ctx)
	r.Host = "localhost"
	p.ServeHTTP(w, r)
	if w.Code != http.StatusGatewayTimeout {
		t.Errorf("status %d while another request waits for the daemon", w.Code)
	}
}

func TestWebListensOnLoopbackOnly(t *testing.T) {
	for _, listen := range []string{"0.0.0.0:80", ":80", "192.168.0.1:80", "[::]:80", "localhost:80", "127.0.0.1", "example.org:80"} {
		var errs strings.Builder
		a := topApp()
		a.Err = &errs
		if code := Program.Run(t.Context(), []string{"web", "--listen", listen}, a.IO); code != term.ExitUsage || !strings.Contains(errs.String(), "use a loopback address") {
			t.Errorf("--listen %q: exit status %d, %s", listen, code, errs.String())
		}
	}
}

// The page is files of this directory: it names no other host, and has no script or style in its
// markup, which the policy would refuse.
func TestWebPageIsComplete(t *testing.T) {
	for name, refused := range map[string][]string{
		"index.html": {"://", "<style", "style=", "onclick=", "javascript:"},
		"page.css":   {"://", "@import", "url("},
		"page.js":    {"://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("},
	} {
		text, err := webFiles.ReadFile("web/" + name)
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range refused {
			if strings.Contains(string(text), word) {
				t.Errorf("%s contains %q", name, word)
			}
		}
	}
}
