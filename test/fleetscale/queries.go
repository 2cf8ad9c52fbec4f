package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/common/model"

	"github.com/gpreempt/gpreempt/internal/stat"
)

func rate(interval time.Duration) string { return model.Duration(4 * interval).String() }

// dashboardQueries returns every query of a dashboard as Grafana sends it, where instance
// is a regular expression.
func dashboardQueries(path, instance string, interval time.Duration) ([]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var dashboard struct {
		Panels []struct{ Targets []struct{ Expr string } }
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	variables := strings.NewReplacer("$instance", instance, "$__rate_interval", rate(interval))
	var all []string
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			all = append(all, variables.Replace(target.Expr))
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no query", path)
	}
	return all, nil
}

// set are queries that are measured together.
type set struct {
	name    string
	queries []string
	ranged  bool // over the window, in steps of an interval, as a panel with an x axis
}

// asked is the result of a query.
type asked struct {
	query   string
	took    time.Duration // median of the repeats
	samples float64       // that were read
	series  int           // of the answer
}

// sets returns what is measured: the dashboards, and what the recording rules record.
func sets(o options, groups []group) ([]set, error) {
	host := filepath.Join(o.grafana, "gpreempt.json")
	one, err := dashboardQueries(host, name(o.hosts/2), o.interval)
	if err != nil {
		return nil, err
	}
	all, err := dashboardQueries(host, ".*", o.interval)
	if err != nil {
		return nil, err
	}
	fleet, err := dashboardQueries(filepath.Join(o.grafana, "fleet.json"), "", o.interval)
	if err != nil {
		return nil, err
	}
	var recorded []string
	for _, g := range groups {
		for _, r := range g.Rules {
			if r.Type == "recording" {
				recorded = append(recorded, r.Query)
			}
		}
	}
	return []set{
		{"dashboard, one host, now", one, false},
		{"dashboard, one host, range", one, true},
		{"dashboard, all hosts, now", all, false},
		{"dashboard, all hosts, range", all, true},
		{"fleet dashboard, range", fleet, true},
		{"what its rules record, range", recorded, true},
	}, nil
}

// ask makes all queries and puts their results into the report.
func (p *prometheus) ask(ctx context.Context, r *report) (err error) {
	if r.groups, err = p.ruleGroups(ctx); err != nil {
		return err
	}
	all, err := sets(r.options, r.groups)
	if err != nil {
		return err
	}
	for _, s := range all {
		result := answered{set: s.name}
		for _, q := range s.queries {
			a, err := p.query(ctx, r.options, q, s.ranged)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			result.asked = append(result.asked, a)
		}
		r.answered = append(r.answered, result)
	}
	return nil
}

// query makes a query several times.
func (p *prometheus) query(ctx context.Context, o options, query string, ranged bool) (asked, error) {
	var data struct {
		Result []json.RawMessage
		Stats  struct {
			Samples struct{ TotalQueryableSamples float64 }
		}
	}
	took := make([]time.Duration, o.repeats)
	for i := range took {
		now := time.Now()
		call, values := "query", url.Values{"query": {query}, "stats": {"all"}}
		if ranged {
			call = "query_range"
			values.Set("start", seconds(now.Add(-o.window)))
			values.Set("end", seconds(now))
			values.Set("step", model.Duration(o.interval).String())
		}
		if err := p.api(ctx, http.MethodGet, call, values, &data); err != nil {
			return asked{}, err
		}
		took[i] = time.Since(now)
	}
	return asked{query, stat.Median(took), data.Stats.Samples.TotalQueryableSamples, len(data.Result)}, nil
}

func seconds(t time.Time) string {
	return strconv.FormatFloat(float64(t.UnixMilli())/1e3, 'f', 3, 64)
}

// group is a group of rules and the time of its last evaluation, in seconds.
type group struct {
	Name           string
	EvaluationTime float64
	Rules          []struct{ Type, Query, LastError string }
}

func (p *prometheus) ruleGroups(ctx context.Context) ([]group, error) {
	var data struct{ Groups []group }
	if err := p.api(ctx, http.MethodGet, "rules", nil, &data); err != nil {
		return nil, err
	}
	for _, g := range data.Groups {
		for _, rule := range g.Rules {
			if rule.LastError != "" {
				return nil, fmt.Errorf("a rule of the group %s: %s", g.Name, rule.LastError)
			}
		}
	}
	return data.Groups, nil
}

// answered are the results of a set.
type answered struct {
	set   string
	asked []asked
}

// slowest returns the query that took longest.
func (a answered) slowest() asked {
	return slices.MaxFunc(a.asked, func(x, y asked) int { return int(x.took - y.took) })
}

// times returns the times of all queries, ascending.
func (a answered) times() []time.Duration {
	all := make([]time.Duration, len(a.asked))
	for i, q := range a.asked {
		all[i] = q.took
	}
	slices.Sort(all)
	return all
}
