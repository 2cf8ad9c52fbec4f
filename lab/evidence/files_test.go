package evidence_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

func TestReadReturnsWhatWasWritten(t *testing.T) {
	want := sample()
	dir := filepath.Join(t.TempDir(), "new", "run")
	if err := evidence.Write(dir, want); err != nil {
		t.Fatal(err)
	}
	got, err := evidence.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	plan, err := os.ReadFile(filepath.Join(dir, evidence.PlanFile))
	if err != nil || string(plan) != want.Plan {
		t.Errorf("the plan is %q: %v", plan, err)
	}
}

func TestAppendAddsARepeatToTheFolder(t *testing.T) {
	run := sample()
	dir := t.TempDir()
	more := evidence.Repeat{Seconds: 3, Requests: []evidence.Request{{At: 1, Total: 2}}, WorkUnit: "steps", Work: 7}
	if err := evidence.Append(dir, run, "protected", &more); err != nil {
		t.Fatal(err)
	}
	got, err := evidence.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(run, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := evidence.Append(dir, run, "none", &more); err == nil {
		t.Error("an arm that the run does not have was accepted")
	}
}

// run.json is written last: after a crash before it, some of the other files have rows of a repeat that it does not have.
func TestCrashWhileARepeatIsAppendedLeavesTheRunBefore(t *testing.T) {
	before, after := sample(), sample()
	after.Arms[3].Repeats = append(after.Arms[3].Repeats, after.Arms[3].Repeats[0])
	old, err := evidence.Encode(before)
	if err != nil {
		t.Fatal(err)
	}
	files, err := evidence.Encode(after)
	if err != nil {
		t.Fatal(err)
	}
	want, err := evidence.ReadFS(old)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range files {
		if name == evidence.RunFile {
			continue
		}
		old[name] = f // one file more is new
		got, err := evidence.ReadFS(old)
		if err != nil {
			t.Fatalf("with a new %s: %v", name, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("with a new %s (-want +got):\n%s", name, diff)
		}
	}
	old[evidence.RunFile] = files[evidence.RunFile]
	if got, err := evidence.ReadFS(old); err != nil || len(got.Arms[3].Repeats) != 2 {
		t.Errorf("with all files new: %+v, %v", got, err)
	}
}

func TestDamagedFilesAreRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		file, old, with, want string
	}{
		"another format":  {evidence.RunFile, `"format": 1`, `"format": 2`, "has format 2"},
		"unknown key":     {evidence.RunFile, `"name"`, `"nom"`, "unknown field"},
		"unknown origin":  {evidence.RunFile, `"origin": "emulated"`, `"origin": "guessed"`, `the origin "guessed" is not known`},
		"no JSON":         {evidence.RunFile, `{`, `[`, "run.json"},
		"lost row":        {"suspends.csv", "protected,0,11,0.5\n", "", "rows of this run"},
		"unknown arm":     {"suspends.csv", "protected,0,11,0.5", "other,0,11,0.5", `line 2: the run has no arm "other"`},
		"not a number":    {"suspends.csv", "0.5", "NaN", `"NaN" is not a number`},
		"missing column":  {"suspends.csv", "at_ms,ms", "at_ms", "suspends.csv"},
		"negative repeat": {"suspends.csv", "protected,0,11,0.5", "protected,-1,11,0.5", "a repeat is negative"},
		"value twice":     {"samples.csv", "hqds_active", "cpu", "two values cpu"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := evidence.Write(dir, sample()); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, tc.file)
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			damaged := strings.Replace(string(text), tc.old, tc.with, 1)
			if damaged == string(text) {
				t.Fatalf("%s does not have %q:\n%s", tc.file, tc.old, text)
			}
			if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := evidence.Read(dir); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}

// The folder of a run may come from another user.
func TestRunWhoseFilesAreNoneIsRefused(t *testing.T) {
	for _, file := range []string{evidence.RunFile, "requests.csv", "suspends.csv"} {
		for want, replace := range map[string]func(path string) error{
			"a FIFO":       func(path string) error { return syscall.Mkfifo(path, 0o600) },
			"a directory":  func(path string) error { return os.Mkdir(path, 0o700) },
			"a device":     func(path string) error { return os.Symlink("/dev/zero", path) },
			"is too large": func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 2<<30)) },
		} {
			dir := t.TempDir()
			if err := evidence.Write(dir, sample()); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, file)
			if err := errors.Join(os.Remove(path), replace(path)); err != nil {
				t.Fatal(err)
			}
			if _, err := evidence.Read(dir); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v, want %q", file, err, want)
			}
		}
	}
}

func TestWriteRefusesWhatReadWouldRefuse(t *testing.T) {
	for name, change := range map[string]func(*evidence.Run){
		"two arms of a name": func(r *evidence.Run) { r.Arms[1].Name = r.Arms[0].Name },
		"arm without a kind": func(r *evidence.Run) { r.Arms[1].Kind = "" },
		"no origin":          func(r *evidence.Run) { r.Origin = "" },
		"no number":          func(r *evidence.Run) { r.Arms[3].Repeats[0].Requests[0].Total = math.NaN() },
		"infinite work":      func(r *evidence.Run) { r.Arms[3].Repeats[0].Work = math.Inf(1) },
		"line in a name":     func(r *evidence.Run) { r.Arms[0].Name = "a\nb" },
	} {
		run := sample()
		change(run)
		dir := t.TempDir()
		if err := evidence.Write(dir, run); err == nil {
			t.Errorf("%s: it was written", name)
		}
		if _, err := evidence.Read(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the folder has a run: %v", name, err)
		}
	}
}

// FuzzRead checks that the reader accepts only what Write can write again.
func FuzzRead(f *testing.F) {
	dir := f.TempDir()
	if err := evidence.Write(dir, sample()); err != nil {
		f.Fatal(err)
	}
	var seeds [4]string
	names := [4]string{evidence.RunFile, "requests.csv", "samples.csv", "spans.csv"}
	for i, name := range names {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			f.Fatal(err)
		}
		seeds[i] = string(text)
	}
	f.Add(seeds[0], seeds[1], seeds[2], seeds[3])
	f.Add(`{"format":1,"origin":"hardware","arms":[],"rows":{}}`, "", "", "")
	f.Fuzz(func(t *testing.T, run, requests, samples, spans string) {
		files := fstest.MapFS{}
		for i, text := range []string{run, requests, samples, spans} {
			files[names[i]] = &fstest.MapFile{Data: []byte(text)}
		}
		files["suspends.csv"] = &fstest.MapFile{Data: []byte("arm,repeat,at_ms,ms\n")}
		files["resumes.csv"] = files["suspends.csv"]
		read, err := evidence.ReadFS(files)
		if err != nil {
			return
		}
		if y := read.Began.Year(); y < 0 || y > 9999 {
			return
		}
		written, err := evidence.Encode(read)
		if err != nil {
			t.Fatalf("a run that was read cannot be written: %v", err)
		}
		again, err := evidence.ReadFS(written)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(asJSON(t, read), asJSON(t, again)); diff != "" {
			t.Errorf("(-first +second):\n%s", diff)
		}
		evidence.Summarize(read)
	})
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// sample is a run with all kinds of samples and one of each fault.
func sample() *evidence.Run {
	return &evidence.Run{
		Format: evidence.Format, Name: "test", Command: "trial", Origin: evidence.Emulated, Backend: "emulated mi300x x1",
		Began: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Seed: 5, Plan: "version: 1\nname: test\n",
		Environment: map[string]string{"kernel": "6.12"}, Missing: map[string]string{"KFD trace": "a reason"}, Planned: 1,
		Arms: []evidence.Arm{
			{Name: "offline alone", Kind: evidence.OfflineAlone, Repeats: []evidence.Repeat{{Seconds: 2, Work: 20, WorkUnit: "steps"}}},
			{Name: "online alone", Kind: evidence.OnlineAlone},
			{Name: "shared", Kind: evidence.Shared, Repeats: []evidence.Repeat{}},
			{
				Name: "protected", Kind: evidence.Protected, Mechanism: "dbgtrap", Policy: "strict",
				Repeats: []evidence.Repeat{{
					Seconds: 2.5, Work: 17.25, WorkUnit: "steps", Lost: 1, Repeated: 2, Unprotected: 3, NotQuiet: 4, SlotsUnread: "a reason",
					Requests: []evidence.Request{
						{At: 10, Total: 7.125, Announce: 0.5, Start: 0.25, Service: 6.375, TTFT: 1, TPOT: 2, Preemptions: 1},
						{At: 1e-9, Total: 1.0 / 3, Failed: "exit status 1, \"quoted\""},
					},
					Suspends: []evidence.Timed{{At: 11, MS: 0.5}},
					Resumes:  []evidence.Timed{{At: 18, MS: 0.25}, {At: 19, MS: 0.125}},
					Samples: []evidence.Sample{
						{At: 0, Values: map[string]float64{evidence.CPU: 0.5, evidence.HQDsActive: 3}},
						{At: 0, Values: map[string]float64{evidence.CPU: 0.75}},
					},
					Spans: []evidence.Span{{From: 1, To: 2, GPU: 0, What: "offline", Name: "train"}},
				}},
			},
		},
		Faults: []evidence.Fault{{Arm: "protected", Repeat: 0, What: "a reason", Fails: true}},
		Alarms: []evidence.Alarm{{At: time.Date(2026, 3, 1, 12, 0, 1, 0, time.UTC), From: "kernel log", Text: "amdgpu: a line"}},
	}
}
