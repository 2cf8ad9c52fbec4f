package events

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var goVersion = regexp.MustCompile(`goversion="[^"]*"`)

const metricsIntro = `# Metrics

With ` + "`metrics.address: 127.0.0.1:9477`" + ` in the config file, gpreemptd serves ` + "`/metrics`" + ` for Prometheus. It is off by default.

- Histograms have both forms. A Prometheus that scrapes native histograms (` + "`scrape_native_histograms: true`" + `, or
  ` + "`--enable-feature=native-histograms`" + ` before 3.8) gets 8 buckets to each factor of 2; any other gets the classic buckets. Dashboard and rules read
  the classic ones: where native ones are scraped, set ` + "`always_scrape_classic_histograms: true`" + ` too (Prometheus 3).
- Labels are bounded: GPUs of the host, and names defined by gpreempt. They contain no pids, commands, users, clients or leases.
- ` + "`gpreempt_build_info`" + ` has the label ` + "`backend`" + `: with simulated or emulated GPUs, latencies say nothing about hardware.
- The metrics of the Go runtime and of the process are served as well (` + "`go_*`, `process_*`" + `).
- ` + "`/healthz`" + ` answers 200 when the scheduler answers; while the scheduler hangs, the answer hangs. ` + "`/readyz`" + ` answers 200 while the daemon
  serves, and 503 once it stops. A GPU that fails changes neither: that is a metric.

Dashboards and alert rules are in deploy/grafana. This page is generated from the table in internal/events (` + "`make gen`" + `).

| metric | type | unit | labels | meaning | use |
|---|---|---|---|---|---|
`

const warningsIntro = `# Warnings

Conditions of a running daemon that an admin should know. They are in ` + "`gpctl status`" + `, in the API (GetStatus), in the log (when one is raised
and when it is cleared), and in ` + "`gpreempt_warnings`" + ` of the [metrics](metrics.md). Codes are stable. With a warning gpreempt works
with less information or fewer functions; with an error a part of it does not work.

This page is generated from the table in pkg/gpreempt/warning.go (` + "`make gen`" + `).

| code | severity | meaning | what to do |
|---|---|---|---|
`

func (m *metric) typeName() string {
	switch m.kind {
	case prometheus.CounterValue:
		return "counter"
	case prometheus.GaugeValue:
		return "gauge"
	default:
		return "histogram"
	}
}

func (m *metric) unit() string {
	name := strings.TrimSuffix(m.name, "_total")
	for _, unit := range []string{"seconds", "ratio"} {
		if strings.HasSuffix(name, "_"+unit) {
			return unit
		}
	}
	return "-"
}

func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

func TestReferenceOfTheMetrics(t *testing.T) {
	var doc strings.Builder
	doc.WriteString(metricsIntro)
	var names []string
	for _, m := range table {
		names = append(names, m.name)
		labels := strings.Join(m.labels, ", ")
		if labels == "" {
			labels = "-"
		}
		fmt.Fprintf(&doc, "| `%s` | %s | %s | %s | %s | %s |\n", m.name, m.typeName(), m.unit(), labels, cell(m.help), cell(uses[m.name]))
	}
	slices.Sort(names)
	if diff := cmp.Diff(names, slices.Sorted(maps.Keys(uses))); diff != "" {
		t.Errorf("metrics (-), and those for which uses has a line (+):\n%s", diff)
	}
	compareWithFile(t, "../../docs/reference/metrics.md", doc.String())
}

func TestReferenceOfTheWarnings(t *testing.T) {
	var doc strings.Builder
	doc.WriteString(warningsIntro)
	for _, k := range gpreempt.WarningKinds() {
		fmt.Fprintf(&doc, "| `%s` | %s | %s | %s |\n", k.Code, k.Severity, cell(k.Means), cell(k.Remedy))
	}
	compareWithFile(t, "../../docs/reference/warnings.md", doc.String())
}
