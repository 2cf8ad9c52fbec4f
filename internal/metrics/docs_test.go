package metrics

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var goVersion = regexp.MustCompile(`goversion="[^"]*"`)

const metricsIntro = `# Metrics

With ` + "`metrics.address: 127.0.0.1:9477`" + ` in the config file, gpreemptd serves ` + "`/metrics`" + ` for Prometheus. It is off by default.
Everything is read from the records that the event stream and the log are made from; nothing is counted twice. Writing and
counting them is about 1 % of an announcement and its Complete where a suspend costs nothing (section d of [performance.md](performance.md); simulated GPU).

- Histograms come in both forms. A Prometheus that scrapes native histograms (` + "`scrape_native_histograms: true`" + `, or
  ` + "`--enable-feature=native-histograms`" + ` before 3.8) gets 8 buckets to each factor of 2; any other gets the classic buckets. Dashboard and rules read
  the classic ones: where native ones are scraped, set ` + "`always_scrape_classic_histograms: true`" + ` too (Prometheus 3).
- Labels are bounded: GPUs of the host, and words of ours. There is no pid, command, user, client or lease in them.
- ` + "`gpreempt_build_info`" + ` says by its label ` + "`backend`" + ` whether GPUs are simulated or emulated: then no latency says anything about hardware.
- Beside these there are those of the Go runtime and of the process (` + "`go_*`, `process_*`" + `).
- ` + "`/healthz`" + ` answers 200 when the scheduler answers; while it hangs, so does the answer. ` + "`/readyz`" + ` answers 200 while the daemon
  serves, and 503 once it is about to end. A GPU in trouble changes neither: that is a metric.

Dashboard and alert rules are in deploy/grafana. This file is written by ` + "`go test ./internal/metrics -update`" + `.

| metric | type | unit | labels | meaning | use |
|---|---|---|---|---|---|
`

const warningsIntro = `# Warnings

What an admin should know of a daemon that runs. The same in ` + "`gpctl status`" + `, in the API (GetStatus), in the log (when one begins to hold,
and when it is over), and in ` + "`gpreempt_warnings`" + ` of [metrics.md](metrics.md). Codes are stable. A warning means that gpreempt does its
work with less than it could have, an error that a part of its work is not done; in both cases whatever is not suspended runs.

This file is written by ` + "`go test ./internal/metrics -update`" + ` from the table in pkg/gpreempt/warning.go.

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

func TestDocumentOfTheMetrics(t *testing.T) {
	var doc strings.Builder
	doc.WriteString(metricsIntro)
	for _, m := range table {
		labels := strings.Join(m.labels, ", ")
		if labels == "" {
			labels = "-"
		}
		fmt.Fprintf(&doc, "| `%s` | %s | %s | %s | %s | %s |\n", m.name, m.typeName(), m.unit(), labels, cell(m.help), cell(m.use))
	}
	compareWithFile(t, "../../docs/metrics.md", doc.String())
}

func TestDocumentOfTheWarnings(t *testing.T) {
	var doc strings.Builder
	doc.WriteString(warningsIntro)
	for _, k := range gpreempt.WarningKinds() {
		fmt.Fprintf(&doc, "| `%s` | %s | %s | %s |\n", k.Code, k.Severity, cell(k.Means), cell(k.Remedy))
	}
	compareWithFile(t, "../../docs/warnings.md", doc.String())
}
