package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the expected files")

// recorded is a run of the demo: its summary, without the raw samples.
func recorded(t *testing.T) *Result {
	t.Helper()
	text, err := os.ReadFile("testdata/demo.json")
	if err != nil {
		t.Fatal(err)
	}
	var r Result
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return &r
}

// is compares text with a file. -update writes the file.
func is(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}

func TestBarsOfTheTerminal(t *testing.T) {
	var out bytes.Buffer
	if err := recorded(t).Print(&out); err != nil {
		t.Fatal(err)
	}
	is(t, "testdata/demo.txt", out.String())
}

// The chart in README.md is made by this test: go test ./emu/cmd/kfdemu -run TestPicture -update.
func TestPictureOfTheRecordedRun(t *testing.T) {
	got := recorded(t).svg()
	is(t, "../../../docs/images/demo.svg", got)
	wellFormed(t, got)
}

func TestPictureSaysThatNoHardwareIsInvolved(t *testing.T) {
	for _, emulated := range []bool{false, true} {
		r := runs()
		r.Simulated, r.Emulated = !emulated, emulated
		is, isNot := "SIMULATED", "EMULATED"
		if emulated {
			is, isNot = isNot, is
		}
		if got := r.svg(); !strings.Contains(got, "<title>"+is+" mi300x") || strings.Contains(strings.ToUpper(got), isNot) {
			t.Errorf("not called %s:\n%s", is, got)
		}
	}
}

func TestPictureWithoutRequestsIsDrawn(t *testing.T) {
	r := &Result{Emulated: true, Machine: `<"&'>`, Arms: []ArmSummary{{Arm: OnlineAlone}, {Arm: Shared}, {Arm: Protected}}}
	wellFormed(t, r.svg())
	if strings.Contains(r.svg()+r.bars(), "NaN") {
		t.Errorf("a bar has no length:\n%s", r.svg())
	}
}

func wellFormed(t *testing.T, svg string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
	}
}

func TestCellsOfABar(t *testing.T) {
	for length, want := range map[float64]string{0: "", 0.05: "", 0.125: "▏ ", 1: "█ ", 2.5: "██▌ ", 2.99: "███ "} {
		if got := cells(length); got != want {
			t.Errorf("%v cells: %q, want %q", length, got, want)
		}
	}
}

// README.md shows the bars of the recorded run, in English and in Chinese.
func TestREADMEShowsTheRecordedBars(t *testing.T) {
	for _, path := range []string{"../../../README.md", "../../../README.zh-CN.md"} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if bars := recorded(t).bars(); !strings.Contains(string(text), "```\n"+bars+"```\n") {
			t.Errorf("%s does not show\n%s", path, bars)
		}
	}
}
