package daemon

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func get(t *testing.T, url string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func TestMetricsOfASimulatedDaemon(t *testing.T) {
	opts := simulated(t, testutil.TempSocketDir(t))
	address := testutil.FreeAddress(t)
	write(t, opts.ConfigPath, noGroups+"metrics: {address: \""+address+"\"}\n")
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := notifySocket(t), make(chan error, 1)
	go func() { ended <- Run(ctx, opts) }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	_, body := get(t, "http://"+address+"/metrics")
	for _, want := range []string{
		`backend="simulated mi300x"`, `gpreempt_gpu_breaker_open{gpu="`, `gpreempt_suspends_total{mechanism="dbgtrap"} 0`,
		`gpreempt_discovery_source_available{source="sysfs"} 1`, `gpreempt_warnings{code="NO_KFD",severity="error"} 0`, "process_resident_memory_bytes", "go_goroutines",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("the metrics have no %s:\n%s", want, body)
		}
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if status, _ := get(t, "http://"+address+path); status != http.StatusOK {
			t.Errorf("%s answers %d, want 200", path, status)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestMetricsAddressThatIsTakenIsAnError(t *testing.T) {
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	opts := simulated(t, testutil.TempSocketDir(t))
	write(t, opts.ConfigPath, noGroups+"metrics: {address: \""+l.Addr().String()+"\"}\n")
	if err := Run(t.Context(), opts); err == nil || !strings.Contains(err.Error(), "metrics.address must be a free") {
		t.Errorf("the daemon ends with %v, want an error about metrics.address", err)
	}
}
