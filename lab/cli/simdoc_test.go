package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/sim"
)

// azureTrace returns the path of the Azure LLM trace, which is not part of the repository.
func azureTrace(t *testing.T) string {
	t.Helper()
	dirs := []string{os.Getenv("GPREEMPT_TRACES")}
	for up := ".."; len(up) < len("../../../../.."); up = filepath.Join(up, "..") {
		dirs = append(dirs, filepath.Join(up, "shared", "traces"))
	}
	for _, dir := range dirs {
		path := filepath.Join(dir, "azure-llm-2023-conv.csv")
		if _, err := os.Stat(path); dir != "" && err == nil {
			return path
		}
	}
	t.Skip("no Azure LLM trace here: set GPREEMPT_TRACES to a directory that has azure-llm-2023-conv.csv")
	return ""
}

func TestValidationIsShownInTables(t *testing.T) {
	v := simValidation{
		Origin: evidence.Simulated,
		Validation: sim.Validation{
			Parameters: []sim.Parameter{{Set: "A, MI100", Name: "suspend", Meaning: "of a process", Value: 0.61142, Unit: "ms", Row: "latency, gpreempt"}},
			Rows: []sim.Row{
				{Set: "A, MI100", Scenario: "A to E", Scheme: sim.None, Figure: "latency", Unit: "x", Published: 2.701, Simulated: 2.7005, Use: sim.Fitted},
				{Set: "A, MI100", Scenario: "A to E", Scheme: sim.BlockWait, Figure: "p99", Unit: "ms", Published: 10, Simulated: 8, Use: sim.HeldOut, Reason: "not modelled"},
			},
		},
		Ours: []sim.Ours{
			{Scenario: "LLM", Policy: "strict", Cost: 0.4, Mean: 1.01, P99: 1.02, TTFT: 1.03, TPOT: 1.004, Share: 0.538, Preemptions: 1, Goal: "TTFT", Met: true},
			{Scenario: "A to E", Policy: "balanced", Cost: 5, Mean: 2.5, P99: 4.9, Share: 0.324, Preemptions: 1, Goal: "mean", Reason: "mean 2.5"},
		},
	}
	var out bytes.Buffer
	p := &term.Printer{W: &out, Wide: true}
	printValidation(p, v)
	const want = `SIMULATED: a model in virtual time; no hardware is involved

SET       PARAMETER      VALUE  FITTED TO          MEANING
A, MI100  suspend    0.6114 ms  latency, gpreempt  of a process

SET       SCENARIO  SCHEME      FIGURE   PUBLISHED  SIMULATED    ERROR  USE               REASON
A, MI100  A to E    none        latency     2.701x       2.7x    0.0 %  fitted    met
A, MI100  A to E    block-wait  p99          10 ms       8 ms  -20.0 %  held out  MISSED  not modelled

gpreempt in the same scenarios, by the time that a suspend and a resume take; relative to online work alone:
SCENARIO  POLICY      COST   MEAN    P99   TTFT   TPOT  OFFLINE  PREEMPTIONS          GOAL  REASON
LLM       strict    0.4 ms  1.010  1.020  1.030  1.004   53.8 %            1  met     TTFT
A to E    balanced    5 ms  2.500  4.900      -      -   32.4 %            1  MISSED  mean  mean 2.5
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}
