package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
	"github.com/gpreempt/gpreempt/lab/trial"
)

// writeRuns writes runs for the scripts below a directory: run-pass, run-fail and run-slow (another
// of the same plan), and run-other, which is unlike the others.
func writeRuns(dir string) error {
	for name, slower := range map[string]float64{"run-pass": 0, "run-fail": 0, "run-slow": 1.5, "run-other": 0} {
		run := madeUpRun(slower)
		switch name {
		case "run-fail":
			run.Arms[3].Repeats[1].Lost = 2
			run.Faults = []evidence.Fault{{Arm: "shared", Repeat: 0, What: "job 1 ended early, with exit status 1"}}
		case "run-other":
			run.Environment["gpreemptd"] = "v0.2.0"
		}
		if err := evidence.Write(filepath.Join(dir, name), run); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// madeUpRun is a run with figures that nobody measured.
func madeUpRun(slower float64) *evidence.Run {
	run := &evidence.Run{
		Name: "made-up", Command: "trial", Origin: evidence.Simulated, Backend: "simulated mi300x", Plan: "version: 1\nname: made-up\nprofile: loss-20\n",
		Environment: map[string]string{"gpreemptd": "v0.3.0", "kernel": "6.12"}, Planned: 2,
		Arms: []evidence.Arm{
			{Name: "offline alone", Kind: evidence.OfflineAlone},
			{Name: "online alone", Kind: evidence.OnlineAlone},
			{Name: "shared", Kind: evidence.Shared},
			{Name: "protected:strict", Kind: evidence.Protected, Policy: "strict", Mechanism: "dbgtrap"},
		},
	}
	latency := map[evidence.ArmKind]float64{evidence.OnlineAlone: 6, evidence.Shared: 20, evidence.Protected: 7.5 + slower}
	work := map[evidence.ArmKind]float64{evidence.OfflineAlone: 1000, evidence.Shared: 950, evidence.Protected: 920}
	for i := range run.Arms {
		arm := &run.Arms[i]
		for repeat := range run.Planned {
			r := evidence.Repeat{Seconds: 10}
			if w := work[arm.Kind]; w > 0 {
				r.Work, r.WorkUnit = w+float64(repeat), "steps"
			}
			for n := range 100 {
				if latency[arm.Kind] == 0 {
					break
				}
				at := float64(100 * n)
				q := evidence.Request{At: at, Total: latency[arm.Kind] + float64(n%10)/10}
				if arm.Kind == evidence.Protected {
					q.Announce = 1
					r.Suspends = append(r.Suspends, evidence.Timed{At: at, MS: 0.4 + float64(n%7)/100})
					r.Resumes = append(r.Resumes, evidence.Timed{At: at + q.Total, MS: 0.3})
				}
				q.Service = q.Total - q.Announce
				r.Requests = append(r.Requests, q)
			}
			if arm.Kind == evidence.Protected {
				r.Samples = []evidence.Sample{{At: 10000, Values: map[string]float64{
					evidence.HQDsActive: 8, evidence.HQDsSuspended: 0, evidence.HQDsAfter: 8, evidence.CPU: 0.25,
				}}}
			}
			arm.Repeats = append(arm.Repeats, r)
		}
	}
	return run
}

// Each plan that gplab brings can be shown with the user's work, without a daemon.
func TestShippedPlansAreShownWithoutBeingRun(t *testing.T) {
	for _, name := range trial.PlanNames() {
		file, text, err := trial.ReadPlan(name)
		if err != nil {
			t.Fatal(err)
		}
		want, err := trial.Parse(file, text)
		if err != nil {
			t.Fatal(err)
		}
		args := []string{"trial", "--plan", name, "--dry-run", "-o", "json", "--socket", "/nonexistent/socket"}
		if want.Online.Command == "" {
			want.Online.Command, want.Online.Request, want.Offline.Commands = "serve", trial.RequestByLine, []string{"train"}
			args = append(args, "--offline", "train", "--online", "serve", "--request", "stdin")
		}
		if err := want.Check(); err != nil {
			t.Fatal(err)
		}
		var out, errs bytes.Buffer
		if code := Program.Main(t.Context(), args, strings.NewReader(""), &out, &errs, func(string) string { return "" }); code != term.ExitOK {
			t.Errorf("%s: exit code %d: %s", name, code, &errs)
			continue
		}
		var got struct {
			Name, Plan string
			Repeats    int
			Seconds    float64
			Arms       []string
		}
		if err := json.Unmarshal(out.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want.YAML(), got.Plan); diff != "" || got.Name != name || got.Repeats != want.Repeats || got.Seconds != want.Estimate().Seconds() ||
			len(got.Arms) != len(want.Arms) {
			t.Errorf("%+v (-want +got):\n%s", got, diff)
		}
	}
}

// Beside a trial the driver is recorded until the repeat ends.
func TestDriverIsRecordedBesideATrial(t *testing.T) {
	dir := t.TempDir()
	record := func(host traceHost) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		return recordBeside(host)(ctx, filepath.Join(dir, "kfd", "shared-1"), cancel)
	}
	read := func() (names []string) {
		files, err := filepath.Glob(filepath.Join(dir, "kfd*", "*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			names = append(names, filepath.Base(file))
		}
		return names
	}
	none := traceHost{tracefs: func() (kfdtrace.FS, error) { return nil, &kfdtrace.Error{What: "tracefs is not mounted"} }}
	if err := record(none); err == nil || err.Error() != "tracefs is not mounted" || len(read()) > 0 {
		t.Errorf("%v, files %v", err, read())
	}
	if err := record(hostWith(newPlainTracefs(t, createdOne))); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"shared-1.json", "shared-1.txt"}, read()); diff != "" {
		t.Fatal(diff)
	}
	text, err := os.ReadFile(filepath.Join(dir, "kfd", "shared-1.txt"))
	if diff := cmp.Diff(createdOne, string(text)); err != nil || diff != "" {
		t.Errorf("%v, the text (-want +got):\n%s", err, diff)
	}
	var recording kfdRecording
	summary, err := os.ReadFile(filepath.Join(dir, "kfd", "shared-1.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(summary, &recording); err != nil {
		t.Fatal(err)
	}
	if f := recording.Functions; recording.Kernel != "6.12.0-test" || recording.Interrupted || len(f) == 0 || f[0].Name != "kfd_ioctl_create_queue" || f[0].Mean != 1500*time.Microsecond {
		t.Errorf("%s", summary)
	}
}

func TestLongTextOfARecordingIsCut(t *testing.T) {
	var kept bytes.Buffer
	w := &cutWriter{to: &kept, left: 5}
	for _, text := range []string{"abc", "def", "ghi"} {
		if n, err := w.Write([]byte(text)); n != 3 || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	if kept.String() != "abcde" || !w.cut {
		t.Errorf("kept %q, cut %v", &kept, w.cut)
	}
}

// The report in the folder of a run is that of gplab report with the profile of the plan, also
// without a verdict.
func TestTrialWritesAReportOfEachRun(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(*evidence.Run)
		profile string // for gplab report; "" where it has none
		verdict string
	}{
		"passed": {func(*evidence.Run) {}, "loss-20", "| made-up | PASS | loss-20 | simulated |"},
		"failed": {func(run *evidence.Run) { run.Arms[3].Repeats[1].Lost = 2 }, "loss-20", "| made-up | FAIL | loss-20 | simulated |"},
		"broken": {func(run *evidence.Run) {
			run.Arms[3].Repeats = nil
			run.Faults = []evidence.Fault{{Arm: "shared", What: "job 1 ended early, with exit status 1"}}
		}, "loss-20", "| made-up | CANNOT TELL | loss-20 | simulated |"},
		"with slots that were not read": {func(run *evidence.Run) {
			run.Origin, run.Backend = evidence.Emulated, "emulated mi300x" // a model has no slots
			r := &run.Arms[3].Repeats[1]
			r.Samples, r.SlotsUnread = nil, "a reason"
		}, "loss-20", "| made-up | protected:strict | whether the hardware slots of suspended processes are empty, in 1 of 2 repeats: a reason |"},
		"without a trace":   {func(run *evidence.Run) { run.Missing = map[string]string{"KFD trace": "a reason"} }, "loss-20", "| no KFD trace | a reason |"},
		"without an arm":    {func(run *evidence.Run) { run.Arms = nil }, "loss-20", "| made-up | CANNOT TELL | loss-20 | simulated |"},
		"without a profile": {func(run *evidence.Run) { run.Plan = "version: 1\nname: made-up\nprofile: none\n" }, "", "| made-up | CANNOT TELL | none | simulated |"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			run := madeUpRun(0)
			tc.change(run)
			if err := evidence.Write(dir, run); err != nil {
				t.Fatal(err)
			}
			page, err := reportIn(dir, run)
			if err != nil || page != filepath.Join(dir, "report.html") {
				t.Fatalf("%q, %v", page, err)
			}
			text, err := os.ReadFile(filepath.Join(dir, "report.md"))
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(text), tc.verdict) {
				t.Errorf("the report has not %q:\n%s", tc.verdict, text)
			}
			if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), strings.ToUpper(string(run.Origin))) {
				t.Errorf("%v: %.200s", err, html)
			}
			if tc.profile == "" {
				return
			}
			var out, errs bytes.Buffer
			if code := Program.Main(t.Context(), []string{"report", dir, "--profile", tc.profile}, strings.NewReader(""), &out, &errs, func(string) string { return "" }); code != term.ExitOK {
				t.Fatalf("exit code %d: %s", code, &errs)
			}
			if diff := cmp.Diff(out.String(), string(text)); diff != "" {
				t.Errorf("gplab report and report.md differ (-want +got):\n%s", diff)
			}
		})
	}
}
