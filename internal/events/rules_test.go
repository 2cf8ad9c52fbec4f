package events

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var namedMetric = regexp.MustCompile(`\bgpreempt_[a-z_]+`)

// Prometheus itself evaluates the queries in test/e2e.
func TestDashboardAndRulesUseMetricsThatExist(t *testing.T) {
	var names []string
	for _, m := range table {
		names = append(names, m.name)
		if m.typeName() == "histogram" {
			names = append(names, m.name+"_bucket", m.name+"_sum", m.name+"_count")
		}
	}
	used := map[string]bool{}
	for _, file := range []string{"gpreempt.json", "alerts.yaml", "alerts_test.yaml"} {
		text, err := os.ReadFile("../../deploy/grafana/" + file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range namedMetric.FindAllString(string(text), -1) {
			used[name] = true
			if !slices.Contains(names, name) {
				t.Errorf("%s uses %s, which is no metric", file, name)
			}
		}
	}
	uses := uses(t)
	for _, m := range table {
		if !slices.ContainsFunc([]string{"", "_bucket", "_count"}, func(suffix string) bool { return used[m.name+suffix] }) {
			t.Errorf("neither dashboard nor rules use %s", m.name)
		}
		if strings.Contains(uses[m.name], "alert Gpreempt") {
			alert := regexp.MustCompile(`Gpreempt\w+`).FindString(uses[m.name])
			if rules, err := os.ReadFile("../../deploy/grafana/alerts.yaml"); err != nil || !strings.Contains(string(rules), "alert: "+alert+"\n") {
				t.Errorf("%s names the alert %s, which is none (%v)", m.name, alert, err)
			}
		}
	}
}
