package report

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

var update = flag.Bool("update", false, "write testdata: the made-up run and its report")

// madeUp returns a run with made-up figures, the same for the same seed.
func madeUp() evidence.Run {
	random := rand.New(rand.NewPCG(19, 42))
	near := func(center, part float64) float64 {
		return math.Round(1e4*center*math.Exp(part*random.NormFloat64())) / 1e4
	}
	const seconds, gap = 24, 200.0
	run := evidence.Run{
		Format: evidence.Format, Name: "made-up example", Command: "trial", Origin: evidence.Emulated, Backend: "emulated mi300x", Planned: 3, Seed: 19,
		Plan:        "version: 1\nname: made-up example\nrate: 5\n",
		Environment: map[string]string{"gplab": "v0.0.0", "driver": "emulated 6.12", "gpus": "1 x gfx942", "num_kcq": "8"},
		Work:        []string{"online: python3 serve.py", "offline: python3 train.py"},
		Began:       time.Date(2026, 11, 26, 4, 0, 0, 0, time.UTC),
		Alarms:      []evidence.Alarm{{At: time.Date(2026, 11, 26, 4, 1, 0, 0, time.UTC), From: "daemon", Text: "BREAKER_OPEN: made up, to show an alarm"}},
		Arms: []evidence.Arm{
			{Name: "offline alone", Kind: evidence.OfflineAlone},
			{Name: "online alone", Kind: evidence.OnlineAlone},
			{Name: "shared", Kind: evidence.Shared},
			{Name: "strict", Kind: evidence.Protected, Mechanism: "dbgtrap", Policy: "strict"},
			{Name: "balanced", Kind: evidence.Protected, Mechanism: "dbgtrap", Policy: "balanced"},
		},
	}
	rates := []float64{40, 0, 36, 31, 33}
	for i := range run.Arms {
		for repeat := range 3 {
			r := evidence.Repeat{Seconds: seconds}
			if rates[i] > 0 {
				r.Work, r.WorkUnit = math.Round(seconds*near(rates[i], 0.01)), "steps"
			}
			for n := range int(seconds * 1000 / gap) {
				at := float64(n) * gap
				q := evidence.Request{At: at}
				switch i {
				case 0:
					continue
				case 1:
					q.Start, q.Service = near(0.2, 0.1), near(7.6, 0.05)
				case 2:
					q.Start, q.Service = near(6, 0.6), near(14, 0.3)
				default:
					q.Announce, q.Start, q.Service = near(0.8+0.3*float64(i-3), 0.3), near(0.3, 0.2), near(7.7, 0.06)
					q.Preemptions = 1
					r.Suspends = append(r.Suspends, evidence.Timed{At: at, MS: q.Announce})
					end := at + q.Announce + q.Start + q.Service
					r.Resumes = append(r.Resumes, evidence.Timed{At: end, MS: near(0.5, 0.2)})
					if repeat == 0 && n < 12 {
						r.Spans = append(r.Spans,
							evidence.Span{From: max(at-gap+9, 0), To: at, What: "offline", Name: "train"},
							evidence.Span{From: at, To: at + q.Announce, What: "switching", Name: "train"},
							evidence.Span{From: at + q.Announce, To: end, What: "suspended", Name: "train"},
							evidence.Span{From: at + q.Announce, To: end, What: "online", Name: "chat"})
					}
				}
				q.Total = q.Announce + q.Start + q.Service
				r.Requests = append(r.Requests, q)
			}
			for at := 0.0; at < seconds*1000; at += 2000 {
				values := map[string]float64{evidence.GPUBusy: min(near(70+5*float64(i), 0.04), 100), evidence.CPU: near(1.1, 0.05), evidence.RSS: near(900, 0.001)}
				if i > 2 {
					values[evidence.HQDsActive], values[evidence.HQDsSuspended], values[evidence.Backlog] = 10, 0, math.Round(near(40, 0.3))
				}
				r.Samples = append(r.Samples, evidence.Sample{At: at, Values: values})
			}
			run.Arms[i].Repeats = append(run.Arms[i].Repeats, r)
		}
	}
	return run
}

func profile(t testing.TB) evidence.Profile {
	t.Helper()
	p, err := evidence.LoadProfile("loss-5")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// reportOf returns the report in all forms.
func reportOf(t testing.TB, runs ...evidence.Run) (page, markdown, samples string) {
	t.Helper()
	r, err := New(runs, profile(t))
	if err != nil {
		t.Fatal(err)
	}
	var out [3]bytes.Buffer
	for i, write := range []func(io.Writer) error{r.HTML, r.Markdown, r.CSV} {
		if err := write(&out[i]); err != nil {
			t.Fatal(err)
		}
	}
	return out[0].String(), out[1].String(), out[2].String()
}

// TestRunOfTheExample keeps the folder that other packages make reports of.
func TestRunOfTheExample(t *testing.T) {
	want := madeUp()
	dir := filepath.Join("testdata", "run")
	if *update {
		if err := evidence.Write(dir, &want); err != nil {
			t.Fatal(err)
		}
	}
	got, err := evidence.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&want, got); diff != "" {
		t.Errorf("run go test -update (-want +got):\n%s", diff)
	}
}

func TestMarkdownOfTheExample(t *testing.T) {
	_, got, _ := reportOf(t, madeUp())
	path := filepath.Join("testdata", "report.md")
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
		t.Errorf("run go test -update (-want +got):\n%s", diff)
	}
}

func TestTitlesEndWithoutAMark(t *testing.T) {
	r, err := New([]evidence.Run{madeUp()}, profile(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range r.doc.Sections {
		titles := []string{s.Title}
		for _, table := range s.Tables {
			titles = append(titles, table.Title)
		}
		for _, title := range titles {
			if strings.TrimRight(title, ".:") != title {
				t.Errorf("%q ends with a mark, and Markdown adds one", title)
			}
		}
	}
}

func TestSameRunMakesTheSameBytes(t *testing.T) {
	page, markdown, samples := reportOf(t, madeUp())
	for range 3 {
		again, text, values := reportOf(t, madeUp())
		if page != again || markdown != text || samples != values {
			t.Fatal("two reports of the same run differ")
		}
	}
}

func TestPageLoadsNothing(t *testing.T) {
	page, _, _ := reportOf(t, madeUp())
	for _, forbidden := range []string{"<script", "<link", "<img", "<iframe", "src=", "url(", "@import", "javascript:"} {
		if strings.Contains(page, forbidden) {
			t.Errorf("the page contains %s", forbidden)
		}
	}
	for _, m := range regexp.MustCompile(`https?://[^"' ]*`).FindAllString(page, -1) {
		if !strings.HasPrefix(m, "http://www.w3.org/") {
			t.Errorf("the page names %s", m)
		}
	}
}

func TestNamesDoNotBecomeMarkup(t *testing.T) {
	run := madeUp()
	const name = "<script>alert(1)</script>|`x`\x1b[31m"
	run.Name, run.Plan, run.Environment["key<b>"] = name, name+"\n```\n# x", name
	for i := range run.Arms {
		run.Arms[i].Name += "<script>&\"'"
		run.Arms[i].Policy = name
	}
	run.Faults = []evidence.Fault{{What: name}}
	page, markdown, _ := reportOf(t, run)
	if strings.Contains(page, "<script") || strings.Contains(page, "\x1b") || strings.Contains(markdown, "<script>alert") && !strings.Contains(markdown, "    <script>") {
		t.Error("a name became markup")
	}
	for _, m := range charts.FindAllStringSubmatch(page, -1) {
		readChart(t, m[2])
	}
	for line := range strings.Lines(markdown) {
		if strings.Contains(line, "alert") && !strings.HasPrefix(line, "    ") && strings.Contains(line, "<script") {
			t.Errorf("in Markdown: %s", line)
		}
	}
}

func TestSamplesAreInLongForm(t *testing.T) {
	run := evidence.Run{Name: "r", Origin: evidence.Simulated, Arms: []evidence.Arm{{Name: "a", Kind: evidence.Protected, Repeats: []evidence.Repeat{{
		Seconds: 2, Work: 7, Lost: 1, Steps: map[string]float64{"train": 7},
		Requests: []evidence.Request{{At: 1, Server: "chat", Total: 3.25, Announce: 1, Service: 2.25, Preemptions: 1}, {At: 2, Server: "chat", Failed: "no answer"}},
		Suspends: []evidence.Timed{{At: 1, MS: 1}}, Resumes: []evidence.Timed{{At: 4, MS: 0.5}},
		Samples: []evidence.Sample{{At: 5, Values: map[string]float64{"b": 2, "a": 1}}},
		Spans:   []evidence.Span{{From: 1, To: 1.5, GPU: 3, What: "online", Name: "chat"}},
	}}}}}
	_, _, samples := reportOf(t, run)
	want := `run,origin,arm,kind,repeat,what,of,at_ms,name,value
r,simulated,a,protected,1,work,,0,seconds,2
r,simulated,a,protected,1,work,,0,work,7
r,simulated,a,protected,1,work,,0,lost,1
r,simulated,a,protected,1,work,,0,repeated,0
r,simulated,a,protected,1,work,train,0,steps,7
r,simulated,a,protected,1,request,chat,1,total_ms,3.25
r,simulated,a,protected,1,request,chat,1,announce_ms,1
r,simulated,a,protected,1,request,chat,1,service_ms,2.25
r,simulated,a,protected,1,request,chat,1,preemptions,1
r,simulated,a,protected,1,request,chat,2,failed,no answer
r,simulated,a,protected,1,suspend,,1,suspend_ms,1
r,simulated,a,protected,1,resume,,4,resume_ms,0.5
r,simulated,a,protected,1,sample,,5,a,1
r,simulated,a,protected,1,sample,,5,b,2
r,simulated,a,protected,1,span,chat,1,gpu 3 online_ms,0.5
`
	if diff := cmp.Diff(want, samples); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if rows, err := csv.NewReader(strings.NewReader(samples)).ReadAll(); err != nil || len(rows) != 16 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
}

// results returns the results of the functional table by check.
func results(run evidence.Run) map[string]string {
	found := map[string]string{}
	runs := []evidence.Run{run}
	s := checkSection(runs, arms(runs))
	for _, row := range s.Tables[0].Rows {
		found[row[1]] = row[2]
	}
	return found
}

func TestBrokenRunsFailTheirCheck(t *testing.T) {
	run := madeUp()
	run.Alarms = nil
	for check, result := range results(run) {
		if result != resultYes {
			t.Errorf("%s: %s in a run without an error", check, result)
		}
	}
	for check, breaks := range map[string]func(*evidence.Run){
		"every arm ran":                                  func(r *evidence.Run) { r.Arms[2].Repeats = nil },
		"online requests have a result":                  func(r *evidence.Run) { r.Arms[1].Repeats[0].Requests[3].Failed = "no answer" },
		"offline work progressed in each repeat":         func(r *evidence.Run) { r.Arms[3].Repeats[1].Work = 0 },
		"no packet of offline work was lost or repeated": func(r *evidence.Run) { r.Arms[3].Repeats[1].Lost = 1 },
		"at most one preemption for each request":        func(r *evidence.Run) { r.Arms[3].Repeats[1].Requests[4].Preemptions = 2 },
		"hardware slots of suspended queues became empty": func(r *evidence.Run) {
			r.Arms[3].Repeats[0].Samples[0].Values[evidence.HQDsSuspended] = 1
		},
		"no fault of the run":          func(r *evidence.Run) { r.Faults = []evidence.Fault{{What: "x"}} },
		"no alarm of daemon or kernel": func(r *evidence.Run) { r.Alarms = []evidence.Alarm{{Text: "x"}} },
	} {
		broken := madeUp()
		broken.Alarms = nil
		breaks(&broken)
		if got := results(broken)[check]; got != resultNo {
			t.Errorf("%s: %q in a broken run", check, got)
		}
	}
	quiet := madeUp()
	for i := range quiet.Arms {
		for j := range quiet.Arms[i].Repeats {
			quiet.Arms[i].Repeats[j].Suspends, quiet.Arms[i].Repeats[j].Samples = nil, nil
		}
	}
	for _, check := range []string{"offline work was suspended and resumed", "hardware slots of suspended queues became empty"} {
		if got := results(quiet)[check]; got != resultUnknown {
			t.Errorf("%s: %q without samples", check, got)
		}
	}
}

func TestBottleneckNamesThePartThatDominates(t *testing.T) {
	a := &arm{name: "p"}
	got := bottleneck(a, [4]float64{1, 1, 5, 0}, [4]float64{4, 1, 6, 1})
	if !strings.HasPrefix(got, "p: of the slow requests' latency, 50.0 % is service (6.00 ms): ") || !strings.Contains(got, "announcement grows most, by 3.00 ms") {
		t.Error(got)
	}
	if got := bottleneck(a, [4]float64{}, [4]float64{}); got != "p: the parts of the latency are all 0." {
		t.Error(got)
	}
}

func TestUnlikeRunsAreRefused(t *testing.T) {
	one, other := madeUp(), madeUp()
	other.Environment["driver"] = "emulated 6.18"
	_, err := New([]evidence.Run{one, other}, profile(t))
	unlike, ok := errors.AsType[*evidence.UnlikeError](err)
	if !ok {
		t.Fatalf("%v", err)
	}
	if diff := cmp.Diff([]string{"driver: emulated 6.12 and emulated 6.18"}, unlike.Differences); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, markdown, _ := reportOf(t, one, madeUp()); !strings.Contains(markdown, "| made-up example: strict, strict (2) |") || !strings.Contains(markdown, "<summary>Comparison</summary>") {
		t.Error("two like runs are not side by side")
	}
}

func TestKnobsOfAPolicyAreOneGroup(t *testing.T) {
	for name, want := range map[string]string{
		"balanced, share floor 0.20": "balanced", "gpreempt balanced share_floor=0.2": "gpreempt balanced", "online alone": "online alone",
	} {
		if got := group(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

func TestServicesHaveTheirOwnLatency(t *testing.T) {
	run := evidence.Run{Name: "r", Origin: evidence.Simulated, Arms: []evidence.Arm{{Name: "p", Kind: evidence.Protected, Repeats: []evidence.Repeat{{
		Seconds: 1, Requests: []evidence.Request{{Server: "chat", Total: 1}, {Server: "search", Total: 4}, {Server: "chat", Total: 3}, {Server: "chat", Failed: "x"}},
	}}}}}
	want := [][]string{
		{"chat", "p", "2", "2.00", "1.41", "1.00", "3.00", "3.00", "3.00"},
		{"search", "p", "1", "4.00", "0.00", "4.00", "4.00", "4.00", "4.00"},
	}
	if diff := cmp.Diff(want, serviceTable(arms([]evidence.Run{run})).Rows); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFrontierMarksDominatedArms(t *testing.T) {
	arm := func(name string, kind evidence.ArmKind, work, latency float64) evidence.Arm {
		a := evidence.Arm{Name: name, Kind: kind, Policy: name, Repeats: []evidence.Repeat{{Seconds: 1, Work: work, WorkUnit: "steps"}}}
		if kind != evidence.OfflineAlone {
			a.Repeats[0].Requests = []evidence.Request{{Total: latency}}
		}
		return a
	}
	run := evidence.Run{Name: "r", Origin: evidence.Simulated, Arms: []evidence.Arm{
		arm("alone", evidence.OfflineAlone, 100, 0), arm("shared", evidence.Shared, 95, 40),
		arm("strict", evidence.Protected, 80, 8), arm("worse", evidence.Protected, 75, 9), arm("equal", evidence.Protected, 80, 9),
	}}
	s := frontierSection(arms([]evidence.Run{run}), "SIMULATED")
	want := [][]string{
		{"1", "shared", "shared", "40.0", "40.0", "95.0 %", "no"},
		{"2", "strict", "strict", "8.00", "8.00", "80.0 %", "no"},
		{"3", "worse", "worse", "9.00", "9.00", "75.0 %", "yes"},
		{"4", "equal", "equal", "9.00", "9.00", "80.0 %", "yes"},
	}
	if diff := cmp.Diff(want, s.Tables[0].Rows); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	r, err := New([]evidence.Run{run}, profile(t))
	if err != nil {
		t.Fatal(err)
	}
	var picture bytes.Buffer
	if err := r.Frontier(&picture); err != nil {
		t.Fatal(err)
	}
	if counts := readChart(t, picture.String()); counts["svg"] != 2 || !strings.Contains(picture.String(), ">SIMULATED: p99") {
		t.Errorf("%v\n%s", counts, picture.String())
	}
}

func FuzzReportOfAnyRun(f *testing.F) {
	small := madeUp()
	small.Arms = []evidence.Arm{small.Arms[0], small.Arms[4]}
	for i := range small.Arms {
		small.Arms[i].Repeats = small.Arms[i].Repeats[:1]
		r := &small.Arms[i].Repeats[0]
		r.Requests, r.Suspends, r.Samples = r.Requests[:min(len(r.Requests), 3)], r.Suspends[:min(len(r.Suspends), 2)], r.Samples[:1]
	}
	text, err := json.Marshal(small)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"arms":[{"kind":"protected","repeats":[{"seconds":1e-300,"requests":[{"at":-1e300,"total":1e300},{"total":-1}],"spans":[{"from":1,"to":0}]}]}]}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var run evidence.Run
		if json.Unmarshal(text, &run) != nil {
			return
		}
		page, _, _ := reportOf(t, run)
		for _, m := range charts.FindAllStringSubmatch(page, -1) {
			readChart(t, m[2])
			if strings.Contains(m[2], "NaN") || strings.Contains(m[2], "Inf") {
				t.Error("a chart has no number")
			}
		}
	})
}

func ExampleReport_Markdown() {
	run := evidence.Run{Name: "example", Origin: evidence.Simulated}
	r, err := New([]evidence.Run{run}, evidence.Profile{Name: "none"})
	if err != nil {
		fmt.Println(err)
		return
	}
	var b strings.Builder
	if err := r.Markdown(&b); err != nil {
		fmt.Println(err)
		return
	}
	first, _, _ := strings.Cut(b.String(), "\n")
	fmt.Println(first)
	// Output: # SIMULATED: example
}
