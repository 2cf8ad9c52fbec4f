package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// recordedLog is the log of plan.txtar.
func recordedLog(t testing.TB) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/plan.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range txtar.Parse(text).Files {
		if f.Name == "log.jsonl" {
			return f.Data
		}
	}
	t.Fatal("plan.txtar has no log.jsonl")
	return nil
}

func TestRecordingHasAnnouncementsAndTargetsFromTheBeginningOfTheLog(t *testing.T) {
	got, err := readRecording(bytes.NewReader(recordedLog(t)))
	if err != nil {
		t.Fatal(err)
	}
	gpu := []gpreempt.GPUID{41235}
	want := sim.Recording{
		Length: 3 * time.Second, GPUs: gpu,
		Targets: []sim.RecordedTarget{{
			Key: gpreempt.ProcessKey{PID: 4242, Start: 1001}, Job: "slurm-2", GPUs: gpu, Until: 3 * time.Second,
			Suspends: []time.Duration{time.Millisecond}, Resumes: []time.Duration{2 * time.Millisecond},
		}},
		Leases: []sim.RecordedLease{
			{GPUs: gpu, Priority: 11, At: time.Second, Work: 100 * time.Millisecond},
			{GPUs: gpu, Priority: 12, At: 2 * time.Second, Work: 980 * time.Millisecond},
		},
	}
	if diff := cmp.Diff(want, got.Recording); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	limits := []string{
		"The log does not say the eta, max_wait and client of an announcement: those of the policy, and none, are assumed.",
		"Work is assumed to last as long as it did, from the answer on: with GPUs that were not quiet it would have been shorter or longer.",
		"Events missing in the log: 1. What they said is not replayed.",
		"Leases that began before the log: 1. They are not replayed.",
		"Suspensions by order of an admin: 1. They are not replayed.",
		"Leases whose priority is not known: 1. 11, the default, is assumed.",
		"Targets that left before the export and were never suspended: 1. They are left out.",
	}
	if diff := cmp.Diff(limits, got.limits()); diff != "" {
		t.Errorf("limits (-want +got):\n%s", diff)
	}
	if got.Policy != "balanced" || got.Backend != "simulated mi300x" || got.Events != 14 {
		t.Errorf("policy %q, backend %q, %d events", got.Policy, got.Backend, got.Events)
	}
}

func TestTargetsWithoutALineAreInferredFromTheirSuspensions(t *testing.T) {
	lines := bytes.SplitAfter(recordedLog(t), []byte("\n"))
	var events []byte
	for _, l := range lines {
		if bytes.HasPrefix(l, []byte(`{"event"`)) {
			events = append(events, l...)
		}
	}
	got, err := readRecording(bytes.NewReader(events))
	if err != nil {
		t.Fatal(err)
	}
	gpu := []gpreempt.GPUID{41235}
	want := []sim.RecordedTarget{{
		Key: gpreempt.ProcessKey{PID: 4242, Start: 1001}, GPUs: gpu, Until: 3 * time.Second,
		Suspends: []time.Duration{time.Millisecond}, Resumes: []time.Duration{2 * time.Millisecond},
	}}
	if diff := cmp.Diff(want, got.Targets); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got.inferred != 1 {
		t.Errorf("%d are inferred", got.inferred)
	}
}

func TestRunOfAPlanIsReadBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	args := []string{"plan", "mi308x-matmul", "--duration", "2s", "--policy", "strict", "--floor", "0,0.5", "--repeats", "2", "--run", dir}
	var stdout, stderr bytes.Buffer
	if code := Program.Main(t.Context(), args, strings.NewReader(""), &stdout, &stderr, func(string) string { return "" }); code != term.ExitOK {
		t.Fatalf("code %d: %s", code, stderr.String())
	}
	run, err := evidence.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	var arms []string
	for _, a := range run.Arms {
		arms = append(arms, fmt.Sprint(a.Name, ": ", len(a.Repeats)))
	}
	want := []string{"offline alone: 2", "online alone: 2", "no preemption: 2", "strict, share floor 0.00: 2", "strict, share floor 0.50: 2"}
	if diff := cmp.Diff(want, arms); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if run.Command != "plan" || run.Origin != evidence.Simulated || !strings.Contains(run.Plan, "name: mi308x-matmul") {
		t.Errorf("command %q, origin %q, plan\n%s", run.Command, run.Origin, run.Plan)
	}
}

func TestErrorsOfAnEventLogNameTheLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                 "it has no event: write it by gpctl events export",
		"{}\n{\"event\"\n": "line 2: unexpected end of JSON input",
		`{"format":2}`:     "line 1: the format is 2 and this gplab reads 1: use the gplab that wrote it",
		`{"event":{"revision":"1","kind":"EVENT_KIND_TARGET","clock":"1s","target_id":"x"}}`: "line 1: target \"x\": want PID or PID@START, as `gpctl target list` prints it",
		`{"event":{"revision":"1","kind":"EVENT_KIND_LEASE","clock":"soon"}}`:                "line 1: proto:",
		`{"event":{"revision":"1","kind":"EVENT_KIND_LEASE","clock":"-1s"}}`:                 "line 1: -1s is not a clock",
	} {
		if _, err := readRecording(strings.NewReader(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func FuzzReadRecording(f *testing.F) {
	f.Add(recordedLog(f))
	f.Add(dayLog(3))
	f.Fuzz(func(t *testing.T, log []byte) {
		rec, err := readRecording(bytes.NewReader(log))
		if (rec == nil) != (err != nil) {
			t.Fatalf("%v with error %v", rec, err)
		}
		if err != nil || len(rec.Leases) == 0 || len(rec.Targets) == 0 || rec.Length > 10*time.Second {
			return // a long one takes long
		}
		f := planFlags{simFlags: simFlags{repeats: 1}}
		o := sim.PlanOptions{Floors: []float64{0.1}, Options: f.options(time.Millisecond), Repeats: 1}
		p, err := policyOf("balanced", nil)
		if err != nil {
			t.Fatal(err)
		}
		o.Policies = []sim.NamedPolicy{{Name: "balanced", Policy: p}}
		if _, err := sim.PlanRecording(rec.Recording, 0, o); err != nil && !strings.Contains(err.Error(), "no offline target") {
			t.Fatal(err)
		}
	})
}

// dayLog returns the log of a host with 8 GPUs, with a target on each and so many preemptions, of
// 8 events each.
func dayLog(preemptions int) []byte {
	var log bytes.Buffer
	const gpus = 8
	for g := range gpus {
		fmt.Fprintf(&log, `{"target":{"target_id":"%d@1","class":"CLASS_OFFLINE","gpu_ids":[%d]}}`+"\n", g+1, g+1)
	}
	revision := 0
	at := 10 * time.Second
	event := func(format string, args ...any) {
		revision++
		// As the daemon writes it, with every key.
		fmt.Fprintf(&log, `{"event":{"revision":"%d","at":"2026-03-01T11:59:57Z",%s,"gpu_id":0,"message":"","clock":"%.9fs"}}`+"\n",
			revision, fmt.Sprintf(format, args...), at.Seconds())
	}
	lease := func(n int, from, to, cause, gpus string) {
		event(`"kind":"EVENT_KIND_LEASE","target_id":"","from_target":"TARGET_STATE_UNSPECIFIED","to_target":"TARGET_STATE_UNSPECIFIED",`+
			`"lease_id":"k3-%d","from_lease":"LEASE_STATE_%s","to_lease":"LEASE_STATE_%s","end":"LEASE_END_UNSPECIFIED","cause":"%s","gpu_ids":[%s]`, n, from, to, cause, gpus)
	}
	target := func(pid, n int, from, to, cause string) {
		event(`"kind":"EVENT_KIND_TARGET","target_id":"%d@1","from_target":"TARGET_STATE_%s","to_target":"TARGET_STATE_%s","lease_id":"k3-%d",`+
			`"from_lease":"LEASE_STATE_UNSPECIFIED","to_lease":"LEASE_STATE_UNSPECIFIED","end":"LEASE_END_UNSPECIFIED","cause":"%s","took":"0.000850s","gpu_ids":[]`, pid, from, to, n, cause)
	}
	for n := range preemptions {
		g := n%gpus + 1
		lease(n+1, "UNSPECIFIED", "REQUESTED", "announced", fmt.Sprint(g))
		lease(n+1, "REQUESTED", "QUIESCING", "started", "")
		target(g, n+1, "RUNNING", "SUSPENDING", "lease")
		at += 850 * time.Microsecond
		target(g, n+1, "SUSPENDING", "SUSPENDED", "done")
		lease(n+1, "QUIESCING", "HELD", "quiet", "")
		at += 10 * time.Millisecond
		lease(n+1, "HELD", "ENDED", "", "")
		target(g, n+1, "SUSPENDED", "RESUMING", "lease-ended")
		at += 800 * time.Microsecond
		target(g, n+1, "RESUMING", "RUNNING", "done")
		at += time.Duration(100+n%7*300) * time.Millisecond
	}
	return log.Bytes()
}

// BenchmarkPlanOfAMillionEvents reads a log of a million events and replays it with one policy, and
// reports events per second.
func BenchmarkPlanOfAMillionEvents(b *testing.B) {
	log := dayLog(125_000)
	p, err := policyOf("balanced", nil)
	if err != nil {
		b.Fatal(err)
	}
	f := planFlags{}
	o := sim.PlanOptions{Policies: []sim.NamedPolicy{{Name: "balanced", Policy: p}}, Floors: []float64{0.1}, Options: f.options(time.Millisecond), Repeats: 1}
	events := 0
	for b.Loop() {
		rec, err := readRecording(bytes.NewReader(log))
		if err != nil {
			b.Fatal(err)
		}
		events += rec.Events
		if _, err := sim.PlanRecording(rec.Recording, 0, o); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(events)/b.Elapsed().Seconds(), "events/s")
}
