package scenario

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
)

const ms = time.Millisecond

// every has every key of the format.
const every = `
version: 1
name: every key
about: A sentence
source: a paper
gpus: 4
duration: 1m
online:
  - name: chat
    gpus: [0, 1]
    arrivals: {kind: trace, trace: day.csv, speed: 0.5}
    prepare: 200us
    llm:
      max_batch: 8
      prefill_base: 5ms
      prefill_token: 20us
      decode_base: 6ms
      decode_sequence: 0.1ms
      prompt_tokens: 100
      output_tokens: 10
      kernels_per_step: 50
      tpot: 8ms
    slo: 300ms
    priority: 12
  - name: vision
    arrivals: {kind: bursts, rate: 19, cv: 0.3, burst: 4, burst_gap: 7ms}
    request: {kernels: 10, mean: 30us, p50: 20us, p90: 50us, max: 100us, total: 200us, occupancy: 0.5}
  - name: batch
    arrivals: {kind: closed, clients: 2, think: 1s}
    request: {model: vgg-mi50}
offline:
  - name: training
    gpus: [2, 3]
    processes: 2
    queues: 5
    step: {mean: 2ms}
    priority: 3
  - name: scoring
    arrivals: {kind: gamma, rate: 5, cv: 2}
    step: {kernels: 4, total: 8ms}
`

func parsed(t *testing.T, text string) Scenario {
	t.Helper()
	s, err := Parse("s.yaml", []byte(text))
	if err != nil {
		t.Fatalf("Parse:\n%v", err)
	}
	return s
}

func TestEveryKeyIsRead(t *testing.T) {
	us := time.Microsecond
	want := Scenario{
		Version: 1, Name: "every key", About: "A sentence", Source: "a paper", GPUs: 4, Duration: time.Minute,
		Online: []Service{
			{
				Name: "chat", GPUs: []int{0, 1}, Arrivals: Arrivals{Kind: Trace, Trace: "day.csv", Speed: 0.5}, Prepare: 200 * us,
				LLM: &LLM{
					MaxBatch: 8, PrefillBase: 5 * ms, PrefillToken: 20 * us, DecodeBase: 6 * ms, DecodeSequence: 100 * us,
					PromptTokens: 100, OutputTokens: 10, KernelsPerStep: 50, TPOT: 8 * ms,
				},
				SLO: 300 * ms, Priority: 12,
			},
			{
				Name: "vision", GPUs: []int{0}, Arrivals: Arrivals{Kind: Bursts, Rate: 19, CV: 0.3, Burst: 4, BurstGap: 7 * ms},
				Request:  Work{Kernels: 10, Mean: 30 * us, P50: 20 * us, P90: 50 * us, Max: 100 * us, Total: 200 * us, Occupancy: 0.5},
				Priority: 11,
			},
			{
				Name: "batch", GPUs: []int{0}, Arrivals: Arrivals{Kind: Closed, Clients: 2, Think: time.Second},
				Request: Work{
					Model: "vgg-mi50", Kernels: 71, Mean: 74600, P50: 40 * us, P90: 204 * us, Max: 252 * us, Total: 4824 * us, Occupancy: 1,
				},
				Priority: 11,
			},
		},
		Offline: []Job{
			{Name: "training", GPUs: []int{2, 3}, Processes: 2, Queues: 5, Step: Work{Kernels: 1, Mean: 2 * ms, Occupancy: 1}, Priority: 3},
			{
				Name: "scoring", GPUs: []int{0}, Processes: 1, Queues: 1, Step: Work{Kernels: 4, Mean: 2 * ms, Total: 8 * ms, Occupancy: 1},
				Arrivals: &Arrivals{Kind: Gamma, Rate: 5, CV: 2},
			},
		},
	}
	if diff := cmp.Diff(want, parsed(t, every)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

const head = "version: 1\nname: x\nduration: 10s\n"

func TestKeysThatAreNotGivenHaveDefaults(t *testing.T) {
	got := parsed(t, head+`
online:
  - {name: a, arrivals: {kind: closed}, request: {mean: 1ms}}
  - {name: b, arrivals: {kind: bursts, rate: 1, burst: 2}, request: {model: resnet18-mi50, total: 4ms}}
  - {name: c, arrivals: {kind: trace, trace: x}, llm: {max_batch: 1, prefill_base: 1ms, decode_base: 1ms}}
offline: [{name: d, step: {model: bert-mi50, kernels: 410}}]
`)
	want := Scenario{
		Version: 1, Name: "x", GPUs: 1, Duration: 10 * time.Second,
		Online: []Service{
			{Name: "a", GPUs: []int{0}, Arrivals: Arrivals{Kind: Closed, Clients: 1}, Request: Work{Kernels: 1, Mean: ms, Occupancy: 1}, Priority: 11},
			{Name: "b", GPUs: []int{0}, Arrivals: Arrivals{Kind: Bursts, Rate: 1, CV: 1, Burst: 2}, Request: models["resnet18-mi50"], Priority: 11},
			{
				Name: "c", GPUs: []int{0}, Arrivals: Arrivals{Kind: Trace, Trace: "x", Speed: 1},
				LLM: &LLM{MaxBatch: 1, PrefillBase: ms, DecodeBase: ms, KernelsPerStep: 1}, Priority: 11,
			},
		},
		Offline: []Job{{Name: "d", GPUs: []int{0}, Processes: 1, Queues: 1, Step: models["bert-mi50"]}},
	}
	b, d := &want.Online[1].Request, &want.Offline[0].Step
	b.Model, b.Total, b.Occupancy = "resnet18-mi50", 4*ms, 1
	d.Model, d.Kernels, d.Total, d.Occupancy = "bert-mi50", 410, 2*d.Total, 1
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestErrorsNameThePlaceAndTheRemedy(t *testing.T) {
	const service = "online:\n  - name: a\n    request: {mean: 1ms}\n    arrivals: "
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"empty", "", []string{"s.yaml: the file is empty: begin with `version: 1` and `name: ...`; docs/reference/scenarios.md has the format"}},
		{"unknown version", "version: 2\nname: x\nduration: 1s\noffline: [{name: a, step: {mean: 1ms}}]\n", []string{
			"s.yaml:1:10: version: version 2 of the format is not known: write version: 1, or use a later gplab",
		}},
		{"no version", "name: x\nduration: 1s\noffline: [{name: a, step: {mean: 1ms}}]\n", []string{
			"s.yaml: version: version 0 of the format is not known: write version: 1, or use a later gplab",
		}},
		{"unknown key", head + service + "{kind: poisson, rates: 2}\n", []string{
			"s.yaml:7:31: online[0].arrivals.rates: unknown key: did you mean rate?",
		}},
		{"no work", head, []string{"s.yaml: there is no work: add a service under online: or a job under offline:"}},
		{"no value", head + service + "{kind: poisson, rate: }\n", []string{
			"s.yaml:7:37: online[0].arrivals.rate: has no value: give one, or remove the key to use the default",
		}},
		{"not a list", head + "online: {name: a}\n", []string{
			"s.yaml:4:9: online: is a mapping: write a list, such as [0, 1] or lines that begin with a dash",
		}},
		{"no unit", "version: 1\nname: x\nduration: 10\noffline: [{name: a, step: {mean: 1ms}}]\n", []string{
			"s.yaml:3:11: duration: 10 has no unit: write a number with its unit, such as 20ms, 1.5s or 1m",
		}},
		{"range", "version: 1\nname: x\nduration: 1s\ngpus: 2\noffline: [{name: a, gpus: [2, 0, 0], priority: 16, step: {mean: 1ms, occupancy: 2}}]\n", []string{
			"s.yaml:5:28: offline[0].gpus[0]: 2 is out of range: choose 0 to 1",
			"s.yaml:5:34: offline[0].gpus[2]: GPU 0 is given twice: keep one",
			"s.yaml:5:48: offline[0].priority: 16 is out of range: choose 0 to 15",
			"s.yaml:5:81: offline[0].step.occupancy: 2 is out of range: choose 0.001 to 1",
		}},
		{"kind", head + service + "{kind: weibull}\n", []string{
			`s.yaml:7:22: online[0].arrivals.kind: "weibull" is not known here: write constant, poisson, gamma, bursts, closed or trace`,
		}},
		{"no kind", head + service + "{rate: 1}\n", []string{
			`s.yaml:7:15: online[0].arrivals.kind: "" is not a kind of arrivals: write constant, poisson, gamma, bursts, closed or trace`,
		}},
		{"key of another kind", head + service + "{kind: poisson, rate: 1, think: 1s}\n", []string{
			"s.yaml:7:47: online[0].arrivals.think: does not apply to kind: poisson: remove it; poisson uses rate",
		}},
		{"too many requests", "version: 1\nname: x\nduration: 2h\n" + service + "{kind: poisson, rate: 10000}\n", []string{
			"s.yaml:7:37: online[0].arrivals.rate: these are 72000000 requests: choose a lower rate or a shorter duration, for at most 10000000",
		}},
		{"bursts overlap", head + service + "{kind: bursts, rate: 100, burst: 3, burst_gap: 20ms}\n", []string{
			"s.yaml:7:62: online[0].arrivals.burst_gap: bursts overlap: 3 requests take longer than they may at 100 requests per second: " +
				"choose a lower rate, a smaller burst or a shorter burst_gap",
		}},
		{"a job with clients", head + "offline: [{name: a, step: {mean: 1ms}, arrivals: {kind: closed}}]\n", []string{
			"s.yaml:4:57: offline[0].arrivals.kind: a job has no clients: remove arrivals: then steps follow each other",
		}},
		{"same name", head + "offline: [{name: a, step: {mean: 1ms}}, {name: a, step: {mean: 1ms}}]\n", []string{
			`s.yaml:4:48: offline[1].name: "a" is the name of offline[0], too: choose another name`,
		}},
		{"unknown model", head + "offline: [{name: a, step: {model: vgg-mi5}}]\n", []string{
			`s.yaml:4:35: offline[0].step.model: "vgg-mi5" is not known: did you mean vgg-mi50?`,
		}},
		{"no duration of the work", head + "offline: [{name: a, step: {kernels: 3}}]\n", []string{
			"s.yaml:4:27: offline[0].step: the duration of the work is missing: set mean, total or model",
		}},
		{"percentiles in the wrong order", head + "offline: [{name: a, step: {mean: 1ms, p50: 3ms, p90: 2ms, max: 4ms}}]\n", []string{
			"s.yaml:4:44: offline[0].step.p50: 3ms is out of range: choose 1ns to 2ms",
		}},
		{"request and llm", head + "online: [{name: a, arrivals: {kind: closed}, request: {mean: 1ms}, llm: {max_batch: 1}}]\n", []string{
			"s.yaml:4:55: online[0].request: a service with llm has no other work: keep request: or llm:",
		}},
		{"incomplete llm", head + "online: [{name: a, arrivals: {kind: closed}, llm: {max_batch: 1}}]\n", []string{
			"s.yaml:4:51: online[0].llm.prefill_base: a prefill takes no time: set prefill_base or prefill_token",
			"s.yaml:4:51: online[0].llm.decode_base: a decode step takes no time: set decode_base or decode_sequence",
			"s.yaml:4:51: online[0].llm.prompt_tokens: 0 is out of range: choose 1 to 2097151",
			"s.yaml:4:51: online[0].llm.output_tokens: 0 is out of range: choose 1 to 2097151",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := Parse("s.yaml", []byte(c.text))
			if err == nil {
				t.Fatalf("no error, but %+v", s)
			}
			if diff := cmp.Diff(c.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestScenarioAsRunIsReadBackTheSame(t *testing.T) {
	all := append(Library(), parsed(t, every))
	for _, want := range all {
		data, err := want.YAML()
		if err != nil {
			t.Fatal(err)
		}
		got, err := Parse("run.yaml", data)
		if err != nil {
			t.Fatalf("%s:\n%v\n%s", want.Name, err, data)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", want.Name, diff)
		}
	}
}

func TestReadFindsTheTraceBesideTheScenario(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("day.csv", "ms,prompt,output\n0,10,20\n1500,30,40\n")
	s, err := Read(write("s.yaml", every))
	if err != nil {
		t.Fatal(err)
	}
	want := []Arrival{{Prompt: 10, Output: 20}, {At: 3 * time.Second, Prompt: 30, Output: 40}}
	if diff := cmp.Diff(want, s.Online[0].Arrivals.Times(1, s.Duration)); diff != "" {
		t.Errorf("at half speed (-want +got):\n%s", diff)
	}
	missing := write("missing.yaml", strings.Replace(every, "day.csv", "night.csv", 1))
	if _, err := Read(missing); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "night.csv") {
		t.Errorf("a trace that does not exist: %v", err)
	}
	if _, err := Read(filepath.Join(dir, "none.yaml")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a scenario that does not exist: %v", err)
	}
	write("day.csv", "ms\n0\n")
	noTokens := strings.NewReplacer("      prompt_tokens: 100\n", "").Replace(every)
	_, err = Read(write("tokens.yaml", noTokens))
	const text = "online[0].llm: request 1 of the trace day.csv has no tokens: set prompt_tokens and output_tokens, for the requests without their own"
	if err == nil || err.Error() != text {
		t.Errorf("a trace without tokens: %v", err)
	}
}

func TestUseTraceKeepsTheMeanRate(t *testing.T) {
	s, err := ByName("llm-serving")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "trace.csv")
	if err := os.WriteFile(path, []byte("at_ms,prompt,output\n0,1,1\n500,1,1\n2000,1,1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.UseTrace(path); err != nil {
		t.Fatal(err)
	}
	got := s.Online[0].Arrivals
	rate := 0.553
	want := Arrivals{Kind: Trace, Trace: path, Speed: rate * 2 / 3, Points: []Arrival{
		{Prompt: 1, Output: 1}, {At: 500 * ms, Prompt: 1, Output: 1}, {At: 2 * time.Second, Prompt: 1, Output: 1},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	other, err := ByName("disb-a")
	if err != nil {
		t.Fatal(err)
	}
	if err := other.UseTrace(path); err == nil || !strings.Contains(err.Error(), "disb-a has no service with llm") {
		t.Errorf("a scenario without llm: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(every)
	for _, name := range names() {
		data, err := fs.ReadFile(library, "library/"+name+".yaml")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(data))
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse("s.yaml", []byte(text))
		if err != nil {
			if _, ok := errors.AsType[yamlfile.Errors](err); !ok || !cmp.Equal(s, Scenario{}) {
				t.Fatalf("%T %v with %+v", err, err, s)
			}
			return
		}
		if err := s.Validate(); err != nil {
			t.Fatalf("Parse accepts what Validate refuses: %v", err)
		}
		data, err := s.YAML()
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse("again.yaml", data)
		if diff := cmp.Diff(s, again); err != nil || diff != "" {
			t.Fatalf("%v (-want +got):\n%s", err, diff)
		}
		for _, a := range s.arrivals() {
			for _, at := range a.Times(1, 10*ms) {
				if at.At < 0 || at.At > 10*ms {
					t.Fatalf("an arrival at %v", at.At)
				}
			}
		}
	})
}
