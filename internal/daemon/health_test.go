package daemon

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/cli"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// serveSocket makes the daemon serve on a socket, and returns its path.
func (d *daemon) serveSocket(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(testutil.TempSocketDir(t), "d.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	clients, err := d.identified(l)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- d.server.Serve(clients) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		d.server.Shutdown(ctx)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	d.server.SetServing(true)
	return socket
}

func getStatus(t *testing.T, socket string) *gpreemptv1.GetStatusResponse {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	st, err := gpreemptv1.NewAdminServiceClient(conn).GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// All warnings of the table hold at once. API, gpctl, log and metrics must agree.
func TestEachWarningIsTheSameWhereverItIsShown(t *testing.T) {
	var want []gpreempt.Warning
	for _, kind := range gpreempt.WarningKinds() {
		want = append(want, kind.Warn("text of "+kind.Code))
	}
	compare := func(where string, got []gpreempt.Warning) {
		t.Helper()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-table +shown):\n%s", where, diff)
		}
	}
	d := newDaemon(t, noGroups)
	d.warnings.set("test", want...)
	socket := d.serveSocket(t)

	var answered []gpreempt.Warning
	for _, w := range getStatus(t, socket).GetWarnings() {
		answered = append(answered, gpreempt.Warning{Code: w.GetCode(), Severity: w.GetSeverity(), Text: w.GetText(), Remedy: w.GetRemedy()})
	}
	compare("API", answered)

	var out, errs bytes.Buffer
	if code := cli.Program.Main(t.Context(), []string{"--socket", socket, "status"}, strings.NewReader(""), &out, &errs, func(string) string { return "" }); code != term.ExitOK {
		t.Fatalf("gpctl status ends with %d: %s", code, errs.String())
	}
	var printed []gpreempt.Warning
	for _, m := range regexp.MustCompile(`(?m)^(\w+) +([A-Z_]+): (.*)\n  try: (.*)$`).FindAllStringSubmatch(out.String(), -1) {
		printed = append(printed, gpreempt.Warning{Code: m[2], Severity: m[1], Text: m[3], Remedy: m[4]})
	}
	compare("gpctl status", printed)

	core, logs := observer.New(zapcore.InfoLevel)
	reported{}.log(zap.New(core), d.listWarnings())
	var logged []gpreempt.Warning
	for _, e := range logs.All() {
		m := e.ContextMap()
		logged = append(logged, gpreempt.Warning{
			Code: m["code"].(string), Severity: m["severity"].(string), Text: m["text"].(string), Remedy: m["remedy"].(string),
		})
	}
	compare("log", logged)

	// The metrics have code and severity as labels, not the texts.
	page := httptest.NewRecorder()
	events.MetricsHandler(events.MetricsConfig{Snapshot: d.scrape, Alive: func() {}, Ready: func() bool { return true }}).
		ServeHTTP(page, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	var samples, wantSamples []string
	for line := range strings.Lines(page.Body.String()) {
		if strings.HasPrefix(line, "gpreempt_warnings{") {
			samples = append(samples, line)
		}
	}
	for _, w := range want {
		wantSamples = append(wantSamples, fmt.Sprintf("gpreempt_warnings{code=%q,severity=%q} 1\n", w.Code, w.Severity))
	}
	slices.Sort(wantSamples)
	if diff := cmp.Diff(wantSamples, samples); diff != "" {
		t.Errorf("metrics (-table +shown):\n%s", diff)
	}
}
