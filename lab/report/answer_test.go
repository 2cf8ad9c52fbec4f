package report

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// planned is the run of "gplab plan mi308x-matmul --cost 0.2ms": policies and floors that make no
// difference.
func planned(t testing.TB) evidence.Run {
	t.Helper()
	s, err := scenario.ByName("mi308x-matmul")
	if err != nil {
		t.Fatal(err)
	}
	run := evidence.Run{Format: evidence.Format, Name: s.Name, Command: "plan", Origin: evidence.Simulated, Backend: "simulated", Seed: 1}
	o := sim.PlanOptions{
		Floors: []float64{0, 0.1, 0.25, 0.5, 0.75}, Options: sim.Options{Seed: 1, Costs: sim.CostsOf(200_000), SpanLimit: 2_000_000_000}, Repeats: 3,
		Keep: func(a evidence.Arm) error {
			run.Arms = append(run.Arms, a)
			return nil
		},
	}
	for _, name := range []string{"balanced", "strict", "share"} {
		p, err := scheduler.PresetByName(name)
		if err != nil {
			t.Fatal(err)
		}
		o.Policies = append(o.Policies, sim.NamedPolicy{Name: name, Policy: p})
	}
	if _, err := sim.PlanScenario(s, o); err != nil {
		t.Fatal(err)
	}
	return run
}

// page returns the page of runs by a profile.
func pageOf(t testing.TB, profile string, runs ...evidence.Run) string {
	t.Helper()
	limits, err := evidence.LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(runs, limits)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := r.HTML(&out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

var (
	notShown = regexp.MustCompile(`(?s)<head>.*?</head>|<p class="everypage".*?</p>|<svg class="key".*?</svg>`)
	ofChart  = regexp.MustCompile(`(?s)<text .*?>(.*?)</text>`)
	element  = regexp.MustCompile(`(?s)<[^>]*>`)
	blanks   = regexp.MustCompile(`[ \n]*\n[ \n]*`)
)

// firstScreen returns the text of a page above what is folded, with the texts of its chart.
func firstScreen(page string) string {
	above, _, _ := strings.Cut(page, "<details>")
	text := ofChart.ReplaceAllString(notShown.ReplaceAllString(above, ""), "\n$1\n")
	text = strings.NewReplacer("</td>", " ", "</th>", " ").Replace(text)
	return strings.TrimSpace(blanks.ReplaceAllString(html.UnescapeString(element.ReplaceAllString(text, "")), "\n")) + "\n"
}

// openRun is a run with too few requests for its limits.
func openRun() evidence.Run {
	run := madeUp()
	run.Name, run.Alarms = "short example", nil
	for i := range run.Arms {
		for j := range run.Arms[i].Repeats {
			r := &run.Arms[i].Repeats[j]
			r.Requests, r.Suspends = r.Requests[:min(len(r.Requests), 20)], r.Suspends[:min(len(r.Suspends), 20)]
			r.Work = run.Arms[0].Repeats[j].Work
		}
	}
	return run
}

// TestFirstScreen keeps what a reader sees without unfolding anything: at most 300 words.
func TestFirstScreen(t *testing.T) {
	quiet := madeUp()
	quiet.Alarms = nil
	second := openRun()
	second.Name = "second example"
	for name, page := range map[string]string{
		"pass": pageOf(t, "default", planned(t)), "fail": pageOf(t, "loss-5", quiet), "fault": pageOf(t, "loss-5", madeUp()), "open": pageOf(t, "loss-20", openRun()),
		"two": pageOf(t, "default", openRun(), second), "nothing": pageOf(t, "default", evidence.Run{Name: "r", Origin: evidence.Hardware, Backend: "kfd"}),
	} {
		t.Run(name, func(t *testing.T) {
			got := firstScreen(page)
			path := filepath.Join("testdata", "first-screen-"+name+".txt")
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
			if n := len(strings.Fields(got)); n > 300 {
				t.Errorf("%d words before the fold", n)
			}
			above, _, _ := strings.Cut(page, "<details>")
			if n := strings.Count(above, "<figure>"); n > 1 {
				t.Errorf("%d charts before the fold", n)
			}
		})
	}
}

// A plan whose settings make no difference is short, and names no hardware.
func TestEqualSettingsAreOneArm(t *testing.T) {
	page := pageOf(t, "default", planned(t))
	const all = "balanced, strict, share; share floor 0.00, 0.10, 0.25, 0.50, 0.75"
	if !strings.Contains(page, "Protected is "+all+". These 15 settings make no difference here.") || strings.Contains(page, "<td class=\"\">balanced, share floor 0.10</td>") {
		t.Error("equal settings are not one arm")
	}
	if strings.Contains(page, "hardware slots") {
		t.Error("a simulation speaks of hardware slots")
	}
	if size, rows, svg := len(page), strings.Count(page, "<tr>"), strings.Count(page, "<svg"); size > 200_000 || rows > 120 || svg > 80 {
		t.Errorf("%d bytes, %d rows, %d SVG", size, rows, svg)
	}
}

func TestTablesSayEqualThingsOnce(t *testing.T) {
	got := table{Head: []string{"run", "arm", ">p99", "unit", "why"}, Rows: [][]string{
		{"r", "strict", "1", "ms", "-"}, {"r", "share", "1", "ms", "-"}, {"r", "shared", "2", "ms", "-"},
	}}
	got.compact()
	want := table{
		Head: []string{"arm", ">p99"}, Rows: [][]string{{"strict, share", "1"}, {"shared", "2"}},
		Above: "In every row: run = r; unit = ms. Arms with the same figures are one row: these settings make no difference here.",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	whole := table{Whole: true, Head: []string{"fact", "value"}, Rows: [][]string{{"a", "-"}, {"b", "-"}}}
	whole.compact()
	if len(whole.Head) != 2 || whole.Above != "" {
		t.Errorf("%+v", whole)
	}
	same := table{Head: []string{"run", "reason"}, Rows: [][]string{{"r", "x"}, {"r", "x"}}}
	same.compact()
	if diff := cmp.Diff([]string{"run"}, same.Head); diff != "" || same.Above != "In every row: reason = x." {
		t.Errorf("%+v", same)
	}
}

// The first screen shows an arm that the verdict is about.
func TestFirstScreenShowsAnArmThatDecides(t *testing.T) {
	run := madeUp()
	run.Alarms = nil
	v := evidence.Judge(&run, evidence.Profile{Name: "p", Limits: map[string]float64{"online_p99_ms": 10.3}})
	a := AnswerOf(&run, &v)
	if v.Result == evidence.Pass || a.Protected != "balanced. One other setting is below" || a.Columns[2].Latency() != "10.5 ms" {
		t.Errorf("%s: %+v", v.Result, a)
	}
	for i := range run.Arms[2].Repeats {
		run.Arms[2].Repeats[i].Requests = run.Arms[1].Repeats[i].Requests
	}
	a = AnswerOf(&run, &v)
	if !strings.HasSuffix(a.Protected, ". Its requests are no faster than shared") {
		t.Errorf("protected as slow as shared: %q", a.Protected)
	}
	run.Arms[0].Repeats = nil
	a = AnswerOf(&run, &v)
	if a.Columns[2].Work() != "-" || a.Columns[0].Work() != "-" || a.Columns[1].Latency() == "-" {
		t.Errorf("without offline alone: %+v", a.Columns)
	}
}

func TestEachCriterionHasWords(t *testing.T) {
	for _, c := range evidence.Criteria() {
		if plain[c.Name] == "" {
			t.Errorf("%s has no words for a sentence", c.Name)
		}
	}
}

// anyRun returns a run with random figures, of which some are missing.
func anyRun(random *rand.Rand) evidence.Run {
	origin := []evidence.Origin{evidence.Simulated, evidence.Emulated, evidence.Hardware}[random.IntN(3)]
	run := evidence.Run{Name: "r", Origin: origin, Backend: map[bool]string{true: "kfd", false: string(origin)}[origin == evidence.Hardware], Planned: 2}
	scale := math.Pow(10, 3*random.Float64()-1)
	for i, kind := range []evidence.ArmKind{evidence.OfflineAlone, evidence.OnlineAlone, evidence.Shared, evidence.Protected, evidence.Protected, evidence.Baseline} {
		a := evidence.Arm{Name: fmt.Sprint(kind, i), Kind: kind, Policy: "strict"}
		for range random.IntN(8)/7*-1 + 2 {
			r := evidence.Repeat{Seconds: 10}
			if kind != evidence.OnlineAlone {
				r.Work, r.WorkUnit = 100*random.Float64(), "steps"
			}
			for n := range 60 * min(1, random.IntN(9)) {
				if kind == evidence.OfflineAlone {
					break
				}
				q := evidence.Request{At: float64(100 * n), Total: scale * (1 + random.Float64()/10)}
				if random.IntN(20_000) == 0 {
					q.Failed = "no answer"
				}
				r.Requests = append(r.Requests, q)
				if kind == evidence.Protected {
					r.Suspends = append(r.Suspends, evidence.Timed{At: q.At, MS: scale / 5 * (1 + random.Float64()/10)})
					r.Resumes = append(r.Resumes, evidence.Timed{At: q.At, MS: 0.3})
				}
			}
			a.Repeats = append(a.Repeats, r)
		}
		run.Arms = append(run.Arms, a)
	}
	if random.IntN(10) == 0 {
		run.Alarms = []evidence.Alarm{{From: "kernel", Text: "x"}}
	}
	return run
}

// The recommendation follows from the verdict, whatever was measured: nobody who keeps the limits is
// sent elsewhere, nobody who exceeds them is asked to stay, and the next stage, a patched driver,
// is for suspensions that were too slow on hardware.
func TestRecommendationNeverContradictsTheVerdict(t *testing.T) {
	random := rand.New(rand.NewPCG(4, 2))
	var profiles []evidence.Profile
	for _, name := range evidence.ProfileNames() {
		p, err := evidence.LoadProfile(name)
		if err != nil {
			t.Fatal(err)
		}
		delete(p.Limits, "protected_seconds")
		profiles = append(profiles, p)
	}
	profiles = append(profiles, evidence.Profile{Name: "none"}, evidence.Profile{Name: "work", Limits: map[string]float64{"offline_loss_percent": 99}})
	seen := map[advice]int{}
	for range 1500 {
		run := anyRun(random)
		v := evidence.Judge(&run, profiles[random.IntN(len(profiles))])
		does := recommend(&v, slowness(arms([]evidence.Run{run}), &v))
		seen[does]++
		if (v.Result == evidence.Pass) != (does == adviceStay) || (v.Result == evidence.CannotTell) != (does == adviceMeasure) {
			t.Fatalf("%s and %q: %q", v.Result, does, v.Reasons)
		}
		next := does == adviceNext || does == adviceConsider
		if next && (v.Result != evidence.Fail || v.Origin != evidence.Hardware || !slices.ContainsFunc(v.Criteria, func(c evidence.Criterion) bool {
			return c.Result == evidence.Fail && !strings.HasPrefix(c.Name, "offline_")
		})) {
			t.Fatalf("%s on %s and %q: %q", v.Result, v.Origin, does, v.Reasons)
		}
		a := AnswerOf(&run, &v)
		if strings.Contains(a.Change, "next stage") != next || strings.HasPrefix(a.Change, "Keep") != (v.Result == evidence.Pass) || a.Result != v.Result || len(a.Why) < 10 {
			t.Fatalf("%+v", a)
		}
	}
	for _, does := range []advice{adviceStay, adviceMeasure, adviceRepair, adviceWork, adviceTune, adviceHardware, adviceConsider, adviceNext} {
		if seen[does] == 0 {
			t.Errorf("no run was recommended to %s: %v", does, seen)
		}
	}
}
