package events

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var goVersion = regexp.MustCompile(`goversion="[^"]*"`)

const metricsIntro = `# Metrics

With ` + "`metrics.address: 127.0.0.1:9477`" + ` in the config file, gpreemptd serves ` + "`/metrics`" + ` for Prometheus. It is off by default.
They are counted from the records that the event stream and the log are made from. Writing and
counting the records is about 1 % of an announcement and its Complete where a suspend costs nothing (section d of [performance.md](performance.md); simulated GPU).

- Histograms have both forms. A Prometheus that scrapes native histograms (` + "`scrape_native_histograms: true`" + `, or
  ` + "`--enable-feature=native-histograms`" + ` before 3.8) gets 8 buckets to each factor of 2; any other gets the classic buckets. Dashboard and rules read
  the classic ones: where native ones are scraped, set ` + "`always_scrape_classic_histograms: true`" + ` too (Prometheus 3).
- Labels are bounded: GPUs of the host, and names defined by gpreempt. They contain no pids, commands, users, clients or leases.
- ` + "`gpreempt_build_info`" + ` has the label ` + "`backend`" + `: with simulated or emulated GPUs, latencies say nothing about hardware.
- The metrics of the Go runtime and of the process are served as well (` + "`go_*`, `process_*`" + `).
- ` + "`/healthz`" + ` answers 200 when the scheduler answers; while the scheduler hangs, the answer hangs. ` + "`/readyz`" + ` answers 200 while the daemon
  serves, and 503 once it stops. A GPU that fails changes neither: that is a metric.

Dashboard and alert rules are in deploy/grafana. This file, except its last column, is written by ` + "`go test ./internal/events -update`" + `.

| metric | type | unit | labels | meaning | use |
|---|---|---|---|---|---|
`

const warningsIntro = `# Warnings

For operators: conditions of a running daemon that an admin should know, each with a remedy. They are in ` + "`gpctl status`" + `, in the API (GetStatus), in the log (when one is raised
and when it is cleared), and in ` + "`gpreempt_warnings`" + ` of [metrics.md](metrics.md). Codes are stable. A warning means that gpreempt works
with less information or fewer functions, an error that a part of it does not work; in both cases offline work runs unless it is suspended.

This file is written by ` + "`go test ./internal/events -update`" + ` from the table in pkg/gpreempt/warning.go.

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

const metricsDocument = "../../docs/metrics.md"

// uses returns the last column of the document by metric: how to use it, or what to do. It
// is written by hand.
func uses(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(metricsDocument)
	if err != nil {
		t.Fatal(err)
	}
	uses := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` .* \\| (.*) \\|$").FindAllStringSubmatch(string(text), -1) {
		uses[row[1]] = row[2]
	}
	return uses
}

func TestDocumentOfTheMetrics(t *testing.T) {
	var doc strings.Builder
	uses := uses(t)
	doc.WriteString(metricsIntro)
	for _, m := range table {
		labels := strings.Join(m.labels, ", ")
		if labels == "" {
			labels = "-"
		}
		fmt.Fprintf(&doc, "| `%s` | %s | %s | %s | %s | %s |\n", m.name, m.typeName(), m.unit(), labels, cell(m.help), uses[m.name])
	}
	compareWithFile(t, metricsDocument, doc.String())
}

func TestDocumentOfTheWarnings(t *testing.T) {
	var doc strings.Builder
	doc.WriteString(warningsIntro)
	for _, k := range gpreempt.WarningKinds() {
		fmt.Fprintf(&doc, "| `%s` | %s | %s | %s |\n", k.Code, k.Severity, cell(k.Means), cell(k.Remedy))
	}
	compareWithFile(t, "../../docs/warnings.md", doc.String())
}
