package scenario

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTracesAreRead(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       []Arrival
	}{
		{
			"Azure", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n",
			[]Arrival{{Prompt: 374, Output: 44}, {At: 4314579 * time.Microsecond, Prompt: 396, Output: 109}},
		},
		{
			"Azure with a zone", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10 00:00:01.009930+00:00,3,4\n",
			[]Arrival{{Prompt: 1, Output: 2}, {At: time.Second, Prompt: 3, Output: 4}},
		},
		{"milliseconds", "ms\n0.5\n20\n", []Arrival{{At: 500 * time.Microsecond}, {At: 20 * ms}}},
		{"other columns", "user,at_ms,prompt,output\na,1,2,3\n", []Arrival{{At: ms, Prompt: 2, Output: 3}}},
	} {
		got, err := ParseTrace(strings.NewReader(c.text))
		if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", c.name, err, diff)
		}
	}
}

func TestErrorsOfATraceNameTheLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                       "the file is empty: begin with a line that names the columns, such as at_ms",
		"a,b\n1,2\n":             `line 1: no column says when a request arrives, in "a,b": name one TIMESTAMP, ms or at_ms`,
		"ms\n":                   "the file has no requests: add a line for each",
		"ms\n5\n4\n":             "line 3: it is earlier than the line before: sort the file by time",
		"ms\n-1\n":               `line 2: "-1" is not a time: write milliseconds from 0 to 604800000`,
		"ms\nNaN\n":              `line 2: "NaN" is not a time: write milliseconds from 0 to 604800000`,
		"ms,prompt\n1,2\n2,x\n":  `line 3: "x" is not a number of tokens: write 0 to 2097151`,
		"TIMESTAMP\nyesterday\n": `line 2: "yesterday" is not a time: write one such as 2023-11-16 18:15:46.680`,
		"ms,prompt\n1\n":         "not CSV: record on line 2: wrong number of fields",
		"TIMESTAMP\n2023-01-01 00:00:00\n2024-01-01 00:00:00\n": `line 3: "2024-01-01 00:00:00" is more than 168h0m0s after the first: use a part of the file`,
	} {
		got, err := ParseTrace(strings.NewReader(text))
		if err == nil || err.Error() != want || got != nil {
			t.Errorf("%q: %v, %v; want %s", text, got, err, want)
		}
	}
}

// azureTrace returns the path of the Azure LLM inference trace 2023, conversation (Microsoft,
// CC-BY 4.0, github.com/Azure/AzurePublicDataset), which is not part of this repository.
func azureTrace(t *testing.T) string {
	t.Helper()
	const name = "azure-llm-2023-conv.csv"
	dirs := []string{os.Getenv("GPREEMPT_TRACES")}
	for up := ""; len(dirs) < 7; up = filepath.Join(up, "..") {
		dirs = append(dirs, filepath.Join(up, "shared", "traces"))
	}
	for _, dir := range dirs {
		if path := filepath.Join(dir, name); dir != "" && exists(path) {
			return path
		}
	}
	t.Skipf("no trace here: set GPREEMPT_TRACES to a directory that has %s", name)
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestLLMServingHasTheMeansOfTheAzureTrace(t *testing.T) {
	path := azureTrace(t)
	s, err := ByName("llm-serving")
	if err != nil {
		t.Fatal(err)
	}
	before := s.Online[0]
	if err := s.UseTrace(path); err != nil {
		t.Fatal(err)
	}
	points := s.Online[0].Arrivals.Points
	if len(points) != 19366 {
		t.Fatalf("%d requests, want 19366", len(points))
	}
	var prompt, output float64
	for _, p := range points {
		prompt += float64(p.Prompt) / float64(len(points))
		output += float64(p.Output) / float64(len(points))
	}
	if !near(prompt, float64(before.LLM.PromptTokens), 0.005) || !near(output, float64(before.LLM.OutputTokens), 0.005) {
		t.Errorf("the trace has %.1f tokens in and %.1f out, the scenario %d and %d", prompt, output, before.LLM.PromptTokens, before.LLM.OutputTokens)
	}
	if speed := s.Online[0].Arrivals.Speed; !near(speed, 0.1, 0.005) {
		t.Errorf("the trace is replayed at %.4f of its speed, want a tenth", speed)
	}
}

func FuzzParseTrace(f *testing.F) {
	f.Add("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n")
	f.Add("at_ms,prompt,output\n1.5,2,3\n2e3,4,5\n")
	f.Add("ms\n\"1\n")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := ParseTrace(strings.NewReader(text))
		if (err == nil) != (len(all) > 0) {
			t.Fatalf("%d requests with error %v", len(all), err)
		}
		for i, a := range all {
			if a.At < 0 || a.At > MaxDuration || a.Prompt < 0 || a.Output < 0 || i > 0 && a.At < all[i-1].At {
				t.Fatalf("request %d: %+v", i, a)
			}
		}
	})
}
