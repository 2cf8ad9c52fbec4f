package main

import (
	"bytes"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testutil.VerifyMain(m))
}

const grafana = "../../deploy/grafana"

// scrapeAt returns what a new host serves of gpreempt's metrics after a time.
func scrapeAt(t *testing.T, n int, after time.Duration) string {
	t.Helper()
	h, err := newHost(n, 8, func() time.Duration { return after })
	if err != nil {
		t.Fatal(err)
	}
	answer := httptest.NewRecorder()
	h.handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	if answer.Code != http.StatusOK {
		t.Fatalf("status %d: %s", answer.Code, answer.Body)
	}
	var text strings.Builder
	for line := range strings.Lines(answer.Body.String()) {
		if strings.Contains(line, "gpreempt_") {
			text.WriteString(line)
		}
	}
	return text.String()
}

func TestHostServesTheMetricsOfTheDocument(t *testing.T) {
	document, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(gpreempt_\\w+)` ").FindAllSubmatch(document, -1) {
		want = append(want, string(row[1]))
	}
	for _, line := range regexp.MustCompile(`(?m)^# TYPE (\w+) `).FindAllStringSubmatch(scrapeAt(t, 0, 10*time.Minute), -1) {
		got = append(got, line[1])
	}
	// The hosts refuse nothing.
	want = slices.DeleteFunc(want, func(name string) bool { return name == "gpreempt_refusals_total" })
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics of docs/reference/metrics.md (-want) and of a simulated host (+got):\n%s", diff)
	}
}

func TestHostsWorkWithoutMoreSeries(t *testing.T) {
	early, late := scrapeAt(t, 0, time.Minute), scrapeAt(t, 0, 10*time.Minute)
	values := regexp.MustCompile(`(?m)^gpreempt_announcements_total\{reason="done"\} (\d+)`)
	if a, b := values.FindStringSubmatch(early), values.FindStringSubmatch(late); a == nil || b == nil || a[1] == "0" || a[1] == b[1] {
		t.Errorf("announcements: %v after one minute, %v after ten", a, b)
	}
	// Only the states of the targets differ.
	states := regexp.MustCompile(`(?m)^gpreempt_targets\{.*\n`)
	if diff := cmp.Diff(kinds(states.ReplaceAllString(early, "")), kinds(states.ReplaceAllString(late, "")), cmp.AllowUnexported(kind{})); diff != "" {
		t.Errorf("series after one minute (-) and after ten (+):\n%s", diff)
	}
}

func TestHostsDifferAndRepeat(t *testing.T) {
	if diff := cmp.Diff(scrapeAt(t, 3, time.Minute), scrapeAt(t, 3, time.Minute)); diff != "" {
		t.Errorf("the same host, twice:\n%s", diff)
	}
	if scrapeAt(t, 3, time.Minute) == scrapeAt(t, 4, time.Minute) {
		t.Error("two hosts do the same")
	}
}

func TestKindsCountEachSeriesOnce(t *testing.T) {
	got := kinds(`# HELP gpreempt_x_bucket{ no series
gpreempt_lease_seconds_bucket{le="1"} 3
gpreempt_lease_seconds_bucket{le="+Inf"} 3
gpreempt_lease_seconds_count 3
gpreempt_gpu_leases{gpu="7"} 1
gpreempt_gpu_leases{gpu="8"} 1
gpreempt_warnings{code="A",severity="error"} 0
go_goroutines 5
`)
	want := []kind{{"buckets of histograms", 2}, {"one for each GPU", 2}, {"one for each warning code", 1}, {"other of gpreempt", 1}, {"Go runtime and process", 1}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(kind{})); diff != "" {
		t.Error(diff)
	}
}

func TestQueriesOfTheDashboardsHaveNoVariablesLeft(t *testing.T) {
	for _, dashboard := range []string{"gpreempt.json", "fleet.json"} {
		all, err := dashboardQueries(filepath.Join(grafana, dashboard), "gpu-0001", 15*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range all {
			if strings.Contains(q, "$") {
				t.Error(q)
			}
		}
	}
}

func TestWithoutPrometheusTheCommandSkipsByName(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	var out bytes.Buffer
	if err := run(t.Context(), &out, nil); err != nil {
		t.Fatal(err)
	}
	if want := "SKIP fleet-scale: prometheus is not installed: apt-get install --no-install-recommends prometheus\n"; out.String() != want {
		t.Errorf("%q", out.String())
	}
}

func TestImpossibleOptionsAreErrors(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // not even one of them may start Prometheus
	for _, args := range [][]string{{"-hosts", "0"}, {"-gpus", "0"}, {"-repeats", "0"}, {"-interval", "10ms"}, {"-time", "59s"}} {
		const want = "at least one host, GPU and repeat, an interval of 1s and a time of four intervals are needed"
		if err := run(t.Context(), io.Discard, args); err == nil || err.Error() != want {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// TestSmallFleetIsMeasured has a real Prometheus scrape three hosts.
func TestSmallFleetIsMeasured(t *testing.T) {
	path, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("needs prometheus (apt-get install prometheus)")
	}
	o := options{hosts: 3, gpus: 2, repeats: 1, interval: time.Second, window: 4 * time.Second, grafana: grafana, prometheus: path}
	r, err := measure(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	served := 0
	for _, k := range r.kinds {
		served += k.series
	}
	if stored := r.to.series / 3; stored < float64(served+5) {
		t.Errorf("a host serves %d series; Prometheus has %.1f of each, fewer than those and its own 5", served, stored)
	}
	if r.after.series < r.before.series+3*float64(served) {
		t.Errorf("%v series before every host got another label, %v after that", r.before.series, r.after.series)
	}
	if r.traffic.requests == 0 || r.traffic.bytes == 0 || r.to.added <= r.from.added || r.disk.samples == 0 || r.disk.chunks == 0 {
		t.Errorf("nothing was scraped or written: %+v, %v samples before and %v after, %+v", r.traffic, r.from.added, r.to.added, r.disk)
	}
	found := map[string]bool{}
	for _, a := range r.answered {
		for _, q := range a.asked {
			found[a.set] = found[a.set] || q.series > 0 && q.samples > 0
		}
	}
	want := map[string]bool{
		"dashboard, one host, now": true, "dashboard, one host, range": true, "dashboard, all hosts, now": true, "dashboard, all hosts, range": true,
		"fleet dashboard, range": true, "what its rules record, range": true,
	}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("sets with data (-want +got):\n%s", diff)
	}
	var text bytes.Buffer
	if err := r.write(&text); err != nil || !strings.Contains(text.String(), "3 SIMULATED hosts with 2 GPUs") {
		t.Errorf("%v:\n%s", err, &text)
	}
}
