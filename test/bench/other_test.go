package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A checkout's bench is a program that writes bench.txt in the directory of -o.
func TestFiguresOfACheckoutAreItsMediansByName(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\nmkdir -p \"$4\"; cat >\"$4/bench.txt\" <<END\n" + `BenchmarkStep-2 10 5 ns/op
BenchmarkFigure/section=d/NotifyOnline_/_echo_p50-2 1 1.5 x
BenchmarkFigure/section=d/NotifyOnline_/_echo_p50-2 1 1 x
BenchmarkFigure/section=d/NotifyOnline_/_echo_p50-2 1 1.2 x
END
`
	bench := filepath.Join(dir, "bench")
	if err := os.WriteFile(bench, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	got, err := checkout{dir, bench}.measure(t.Context(), "d", filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]float64{"d NotifyOnline / echo p50, x": 1.2}, got); diff != "" {
		t.Error(diff)
	}
}

func TestSectionsThatAreMeasuredTogetherAreMeasuredOnce(t *testing.T) {
	if diff := cmp.Diff([]string{"d", "f", "h"}, onceEach("defh")); diff != "" {
		t.Errorf("sections (-want +got):\n%s", diff)
	}
}

func TestPairsAreComparedOneByOne(t *testing.T) {
	var out strings.Builder
	both := map[string][2][]float64{
		"d announce, x":  {{1.1, 1.2, 1.8}, {1, 1.2, 1.2}}, // new, old
		"e only new, µs": {{4, 5, 6}, nil},
	}
	if err := writePairs(&out, both, 3); err != nil {
		t.Fatal(err)
	}
	const want = `| figure | old | new | new / old | pairs |
|---|---|---|---|---|
| d announce, x | 1.20 | 1.20 | 1.10 | 1.00..1.50 |
| e only new, µs |  |  | measured by one side only |  |
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}
