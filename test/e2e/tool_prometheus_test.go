package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// grafana is where dashboard and alert rules are.
const grafana = "../../deploy/grafana"

// program returns the path of one that need not be installed.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("needs %s (apt-get install prometheus)", name)
	}
	return path
}

// watched is a config that is scraped at an address, allows one lease, makes all processes
// one job, and has a mistake that is a warning.
func watched(address string) string {
	config := strings.Replace(atOnce, "online_groups: []", "online_groups: [no-such-group]", 1)
	return config + "limits: {leases_per_user: 1}\njobs: [{name: all, cgroup: /}]\nmetrics: {address: \"" + address + "\"}\n"
}

// busy makes something of everything the dashboard shows.
func (d *daemon) busy(pid int32) {
	d.t.Helper()
	since := d.revision()
	lease := d.announce(d.t.Context())
	if _, err := d.online.NotifyOnline(d.t.Context(), announcement()); status.Code(err) != codes.ResourceExhausted {
		d.t.Fatalf("a second lease: %v", err)
	}
	d.complete(lease.GetLeaseId())
	d.awaitTarget(pid, since, running)
}

// prometheus is a real one that scrapes a daemon.
type prometheus struct {
	t       *testing.T
	address string
	log     *lines
}

func startPrometheus(t *testing.T, target string, flags ...string) *prometheus {
	t.Helper()
	path := program(t, "prometheus")
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	rules, err := filepath.Abs(filepath.Join(grafana, "fleet_rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("{global: {scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 1s}, rule_files: [%q], "+
		"scrape_configs: [{job_name: gpreempt, static_configs: [{targets: [%q]}]}]}", rules, target)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &prometheus{t: t, address: testutil.FreeAddress(t), log: &lines{}}
	cmd := exec.CommandContext(t.Context(), path, append([]string{
		"--config.file=" + config, "--storage.tsdb.path=" + filepath.Join(dir, "data"), "--web.listen-address=" + p.address, "--log.level=warn",
	}, flags...)...)
	cmd.Stderr = p.log
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("what Prometheus wrote:\n%s", p.log)
		}
	})
	return p
}

// query returns how many series an expression has now, those without a number not counted.
func (p *prometheus) query(expression string) (int, error) {
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "http://"+p.address+"/api/v1/query?query="+url.QueryEscape(expression), http.NoBody)
	if err != nil {
		return 0, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	var answer struct {
		Status, Error string
		Data          struct {
			Result []struct{ Value [2]any }
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return 0, fmt.Errorf("%s: %w", resp.Status, err)
	}
	if answer.Status != "success" {
		return 0, fmt.Errorf("%s: %s", answer.Status, answer.Error)
	}
	n := 0
	for _, r := range answer.Data.Result {
		if r.Value[1] != "NaN" {
			n++
		}
	}
	return n, nil
}

// dashboardQueries returns every query of a dashboard by panel, as Grafana sends it
// with all hosts selected.
func dashboardQueries(t *testing.T, file string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(grafana, file))
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	queries := map[string][]string{}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			queries[p.Title] = append(queries[p.Title], strings.NewReplacer("$instance", ".*", "$__rate_interval", "20s").Replace(target.Expr))
		}
	}
	if len(queries) < 10 {
		t.Fatalf("%d panels with queries", len(queries))
	}
	return queries
}

// TestEveryQueryOfTheDashboardsReturnsData has a real Prometheus scrape a daemon on
// simulated GPUs that works, until each query has a number.
func TestEveryQueryOfTheDashboardsReturnsData(t *testing.T) {
	program(t, "prometheus")
	address := testutil.FreeAddress(t)
	d := start(t, watched(address))
	pid := d.startOffline()
	classic := startPrometheus(t, address)
	native := startPrometheus(t, address, "--enable-feature=native-histograms")
	type query struct {
		prometheus   *prometheus
		title, query string
	}
	left := []query{{native, "native histograms", "histogram_quantile(0.99, sum(rate(gpreempt_quiesce_seconds[20s])))"}}
	for _, file := range []string{"gpreempt.json", "fleet.json"} {
		for title, all := range dashboardQueries(t, file) {
			for _, q := range all {
				left = append(left, query{classic, file + ": " + title, q})
			}
		}
	}
	answered := 0
	for deadline := time.Now().Add(timeout); ; {
		d.busy(pid)
		var still []query
		var last error
		for _, q := range left {
			switch n, err := q.prometheus.query(q.query); {
			case err != nil:
				last = err
				still = append(still, q)
			case n == 0:
				still = append(still, q)
			default:
				answered++
			}
		}
		if left = still; len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			for _, q := range left {
				t.Errorf("%s: nothing for %s", q.title, q.query)
			}
			t.Fatalf("the last error was %v", last)
		}
	}
	t.Logf("%d queries have data", answered)
	d.stopJob(pid)
}

func TestPromtoolAcceptsRulesAndMetrics(t *testing.T) {
	promtool := program(t, "promtool")
	address := testutil.FreeAddress(t)
	d := start(t, watched(address))
	pid := d.startOffline()
	d.busy(pid)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	check := exec.CommandContext(t.Context(), promtool, "check", "metrics")
	check.Stdin = resp.Body
	rules := exec.CommandContext(t.Context(), promtool, "check", "rules", "--lint-fatal", "alerts.yaml", "fleet_rules.yaml")
	test := exec.CommandContext(t.Context(), promtool, "test", "rules", "alerts_test.yaml", "fleet_rules_test.yaml")
	rules.Dir, test.Dir = grafana, grafana
	for _, cmd := range []*exec.Cmd{check, rules, test} {
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %v\n%s", cmd.Args, err, out)
		}
	}
	d.stopJob(pid)
}
