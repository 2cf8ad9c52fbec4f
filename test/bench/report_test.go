package main

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// measured is a small report.
func measured() *report {
	r := &report{taken: time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC), cpus: 2, GoBenchmarks: "BenchmarkStep-2 10 5 ns/op\n", Skipped: []string{"h: no seccomp"}}
	r.Series = []*series{{Section: "a", Name: "Raw/call=PingPong", Repeats: []summary{{N: 10, Mean: 1500.4, P50: 1200, P99: 9000}}}}
	met, missed := newFigure("d", "NotifyOnline / echo, p50", "x", []float64{1.5, 1, 1.2}), newFigure("i", "SDK's rate", "x", []float64{0.5})
	over := newFigure("e", "over", "x", []float64{1, 1.3, 1.4})
	met.atMost(1.25)
	over.atMost(1.25)
	missed.atLeast(0.7)
	r.Figures = []*figure{met, over, missed, newFigure("a", "ping", "µs", []float64{123.4})}
	return r
}

func TestTableTellsMedianSpreadLimitAndWhatWasMissed(t *testing.T) {
	var out strings.Builder
	if err := measured().writeTable(&out); err != nil {
		t.Fatal(err)
	}
	want := "`make bench` on 21 November 2026 with 2 CPUs, " + runtime.Version() + ". " + simulated + `

|  | figure | median | repeats | limit |  |
|---|---|---|---|---|---|
| d | NotifyOnline / echo, p50 | 1.20 x | 1.00..1.50 | <= 1.25 | met |
| e | over | 1.30 x | 1.00..1.40 | <= 1.25 | MISSED |
| i | SDK's rate | 0.50 x | 0.50..0.50 | >= 0.7 | MISSED |
| a | ping | 123 µs | 123..123 |  |  |

Skipped: h: no seccomp
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestBenchstatGetsALineForEachRepeat(t *testing.T) {
	name := filepath.Join(t.TempDir(), "new", "bench.txt")
	if err := measured().write(name); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	_, lines, _ := strings.Cut(string(text), "test/bench\n")
	const want = `BenchmarkRaw/call=PingPong-2 10 1500 ns/op 1200 p50-ns 9000 p99-ns
BenchmarkFigure/section=d/NotifyOnline_/_echo_p50-2 1 1.5 x
BenchmarkFigure/section=d/NotifyOnline_/_echo_p50-2 1 1 x
BenchmarkFigure/section=d/NotifyOnline_/_echo_p50-2 1 1.2 x
BenchmarkFigure/section=e/over-2 1 1 x
BenchmarkFigure/section=e/over-2 1 1.3 x
BenchmarkFigure/section=e/over-2 1 1.4 x
BenchmarkFigure/section=i/SDKs_rate-2 1 0.5 x
BenchmarkFigure/section=a/ping-2 1 123.4 µs
BenchmarkStep-2 10 5 ns/op
`
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Error(diff)
	}
}

func TestGoBenchmarksAreReadByNameAndUnit(t *testing.T) {
	got := parseBenchmarks(`goos: linux
BenchmarkStep-2         	    2000	      2095 ns/op	         0.2310 x-steady-work	       0 allocs/op
BenchmarkStep-2         	    2000	      2096 ns/op	         0.2249 x-steady-work	       0 allocs/op
BenchmarkScan/first-time 	       1	         7 ns/op
PASS
ok  	github.com/gpreempt/gpreempt/pkg/scheduler	1.654s
`)
	want := map[string]map[string][]float64{
		"Step":            {"ns/op": {2095, 2096}, "x-steady-work": {0.231, 0.2249}, "allocs/op": {0, 0}},
		"Scan/first-time": {"ns/op": {7}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
