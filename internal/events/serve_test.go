package events

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
)

func TestNothingElseIsServed(t *testing.T) {
	ready := false
	h := MetricsHandler(MetricsConfig{Snapshot: history(t).snapshot, Alive: func() {}, Ready: func() bool { return ready }})
	ask := func(method, path string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, http.NoBody))
		return w.Code
	}
	got := map[string]int{}
	for _, path := range []string{"/metrics", "/healthz", "/readyz", "/", "/debug/pprof/", "/metrics/x"} {
		got["GET "+path] = ask(http.MethodGet, path)
		got["POST "+path] = ask(http.MethodPost, path)
	}
	ready = true
	got["GET /readyz, ready"] = ask(http.MethodGet, "/readyz")
	want := map[string]int{
		"GET /metrics": 200, "GET /healthz": 200, "GET /readyz": 503, "GET /readyz, ready": 200,
		"GET /": 404, "GET /debug/pprof/": 404, "GET /metrics/x": 404,
		"POST /metrics": 405, "POST /healthz": 405, "POST /readyz": 405, "POST /": 404, "POST /debug/pprof/": 404, "POST /metrics/x": 404,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("answers (-want +got):\n%s", diff)
	}
}

func TestServeEndsWithItsContextAndClosesConnections(t *testing.T) {
	l, err := Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		ServeMetrics(ctx, l, MetricsHandler(MetricsConfig{Snapshot: history(t).snapshot, Alive: func() {}, Ready: func() bool { return true }}), zap.NewNop())
		close(ended)
	}()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.Addr().String()+"/metrics", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/vnd.google.protobuf") || !strings.Contains(string(body), "gpreempt_quiesce_seconds") {
		t.Errorf("%s of %d bytes, want protobuf, which alone has native histograms", resp.Header.Get("Content-Type"), len(body))
	}
	cancel()
	<-ended
	if resp, err := client.Do(req); err == nil {
		_ = resp.Body.Close()
		t.Error("it is still served")
	}
}
