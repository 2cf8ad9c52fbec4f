//go:build !race

// The race detector makes a minute of simulation six minutes of it, and finds nothing: check-gen runs this test.

package sim

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/template"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/scenario"
)

var update = flag.Bool("update", false, "write docs/reference/validation.md")

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

// TestValidationDocumentIsFresh compares docs/reference/validation.md with what the simulator says now.
func TestValidationDocumentIsFresh(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates for many seconds")
	}
	serving, err := scenario.ByName("llm-serving")
	if err != nil {
		t.Fatal(err)
	}
	if err := serving.UseTrace(azureTrace(t)); err != nil {
		t.Fatal(err)
	}
	v, err := validate()
	if err != nil {
		t.Fatal(err)
	}
	own, err := ownRows(v.Parameters, serving.Online[0].Arrivals.Points)
	if err != nil {
		t.Fatal(err)
	}
	got := validationDocument(t, v, own)
	if strings.Contains(got, "| **missed** |  |") {
		t.Error("a row is missed without a reason")
	}
	const name = "../../docs/reference/validation.md"
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(file), got); diff != "" {
		t.Errorf("docs/reference/validation.md is stale; run this test with -update:\n%s", diff)
	}
}

// validationDocument returns docs/reference/validation.md.
func validationDocument(t *testing.T, v validation, own []ownRow) string {
	t.Helper()
	missed, rows := map[rowUse]int{}, map[rowUse]int{}
	for _, r := range v.Rows {
		rows[r.Use]++
		if !r.Met() {
			missed[r.Use]++
		}
	}
	page := template.Must(template.New("validation.md").Funcs(template.FuncMap{
		"value": func(v float64, unit string) string {
			text := fmt.Sprintf("%.4g", v)
			if unit == "" || unit == "x" {
				return text + unit
			}
			return text + " " + unit
		},
		"percent": func(e float64) string {
			if e = math.Round(1000 * e); e == 0 {
				return "0.0 %" // not -0.0
			}
			return fmt.Sprintf("%+.1f %%", e/10)
		},
		"share": func(f float64) string { return fmt.Sprintf("%.1f %%", 100*f) },
		"policy": func(o ownRow) string {
			if o.Ahead == 0 {
				return o.Policy
			}
			return fmt.Sprintf("%s, %g ms ahead", o.Policy, o.Ahead)
		},
		"ratio": func(f float64) string {
			if f == 0 {
				return ""
			}
			return fmt.Sprintf("%.3f", f)
		},
		"verdict": func(met bool) string {
			if met {
				return "met"
			}
			return "**missed**"
		},
		"cell": func(s string) string { return strings.ReplaceAll(s, "|", "\\|") },
	}).ParseFiles("testdata/validation.md"))
	var out bytes.Buffer
	err := page.Execute(&out, map[string]any{
		"V": v, "Ours": own, "Limit": 100 * errorLimit, "HeldOut": rows[heldOut], "Missed": missed[heldOut], "MissedFits": missed[fitted], "Fitted": rows[fitted],
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}
