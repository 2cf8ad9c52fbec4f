package events

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	namedMetric = regexp.MustCompile(`\bgpreempt_[a-z_]+`)
	// recorded are the names that recording rules give: what the value is of, the subject, and how it was made.
	recorded = regexp.MustCompile(`\b(instance|fleet|mechanism|version|code|floor):gpreempt_[a-z_]+:[a-z0-9_]+`)
)

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
	for _, file := range []string{"gpreempt.json", "alerts.yaml", "alerts_test.yaml", "fleet.json", "fleet_rules.yaml", "fleet_rules_test.yaml"} {
		text, err := os.ReadFile("../../deploy/grafana/" + file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range namedMetric.FindAllString(recorded.ReplaceAllString(string(text), ""), -1) {
			used[name] = true
			if !slices.Contains(names, name) {
				t.Errorf("%s uses %s, which is no metric", file, name)
			}
		}
	}
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

func TestDashboardOfTheFleetShowsWhatTheRulesRecord(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile("../../deploy/grafana/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	defined := map[string]bool{}
	for _, m := range regexp.MustCompile(`record: (\S+)`).FindAllStringSubmatch(read("fleet_rules.yaml"), -1) {
		if !recorded.MatchString(m[1]) {
			t.Errorf("the name of the rule %s has not the form of the others", m[1])
		}
		defined[m[1]] = false
	}
	dashboard := read("fleet.json")
	for _, name := range recorded.FindAllString(dashboard, -1) {
		if _, ok := defined[name]; !ok {
			t.Errorf("the dashboard uses %s, which no rule records", name)
		}
		defined[name] = true
	}
	for name, used := range defined {
		if !used && strings.HasPrefix(name, "fleet:") {
			t.Errorf("the dashboard does not show %s", name)
		}
	}
	if len(defined) < 10 {
		t.Errorf("%d rules, want all of them", len(defined))
	}
	tests := read("fleet_rules_test.yaml")
	for _, m := range regexp.MustCompile(`alert: (\S+)`).FindAllStringSubmatch(read("fleet_rules.yaml"), -1) {
		if !strings.Contains(tests, `alertname="`+m[1]+`"`) {
			t.Errorf("no test has the alert %s fire", m[1])
		}
	}
}
