package trial

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// repeatOf returns a repeat of an arm of a run in dir.
func repeatOf(dir string, origin evidence.Origin, repeat int) *play {
	return &play{
		trial: &trial{Config: Config{Dir: dir, Socket: "/run/s"}, run: &evidence.Run{Origin: origin}},
		arm:   Arm{Kind: evidence.Protected, Policy: "strict"}, repeat: repeat,
	}
}

func TestRunSaysWhyTheDriverWasNotRecorded(t *testing.T) {
	works := func(ctx context.Context, _ string, started func()) error {
		started()
		<-ctx.Done()
		return nil
	}
	for name, tc := range map[string]struct {
		origin evidence.Origin
		off    bool
		trace  func(context.Context, string, func()) error
		calls  int // in two repeats
		want   map[string]string
	}{
		"recorded": {origin: evidence.Hardware, trace: works, calls: 2},
		"refused": {
			origin: evidence.Hardware, trace: func(context.Context, string, func()) error { return errors.New("permission denied\nnext") }, calls: 1,
			want: map[string]string{kfdTrace: "protected:strict, repeat 1: permission denied"},
		},
		"lost at its end": {
			origin: evidence.Hardware, trace: func(ctx context.Context, path string, started func()) error {
				return errors.Join(works(ctx, path, started), errors.New("the disk is full"))
			}, calls: 1,
			want: map[string]string{kfdTrace: "protected:strict, repeat 1: the disk is full"},
		},
		"emulated": {
			origin: evidence.Emulated, trace: works,
			want: map[string]string{kfdTrace: "the machine is emulated, and this host's driver has no part in it"},
		},
		"switched off": {origin: evidence.Hardware, off: true, trace: works, want: map[string]string{kfdTrace: "the plan has none"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := repeatOf("/run", tc.origin, 0)
			p.plan.NoKFDTrace = tc.off
			calls := 0
			p.TraceKFD = func(ctx context.Context, path string, started func()) error {
				calls++
				if want := "/run/kfd/protected-strict-" + string(rune('0'+calls)); path != want {
					t.Errorf("the path is %s, want %s", path, want)
				}
				return tc.trace(ctx, path, started)
			}
			for range 2 {
				p.traceKFD(t.Context())()
				p.repeat++
			}
			if diff := cmp.Diff(tc.want, p.run.Missing); diff != "" || calls != tc.calls {
				t.Errorf("%d calls, want %d (-want +got):\n%s", calls, tc.calls, diff)
			}
		})
	}
}

func TestCommandsWriteTheirHIPLogIntoTheFolder(t *testing.T) {
	for name, tc := range map[string]struct {
		own  string // AMD_LOG_LEVEL of this process
		plan int
		want string
	}{
		"by default": {want: "2"}, "of this process": {own: "4", want: "4"}, "none": {own: "0", want: "0"}, "of the plan": {own: "4", plan: 3, want: "3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("AMD_LOG_LEVEL", tc.own)
			t.Setenv("AMD_LOG_LEVEL_FILE", "/elsewhere")
			dir := t.TempDir()
			p := repeatOf(dir, evidence.Emulated, 1)
			p.plan.HIPLog = tc.plan
			env, err := p.environment("job-1-1")
			if err != nil {
				t.Fatal(err)
			}
			job, err := startProcess("job", `echo "$AMD_LOG_LEVEL" > "${AMD_LOG_LEVEL_FILE}_$$"`, p.log("job-1-1"), env, nil)
			if err != nil {
				t.Fatal(err)
			}
			<-job.ended
			job.stop(stopTime)
			files, err := filepath.Glob(filepath.Join(dir, "logs", "protected-strict-2-job-1-1.hip_*"))
			if err != nil || len(files) != 1 {
				t.Fatalf("%v, %v", files, err)
			}
			if text, err := os.ReadFile(files[0]); err != nil || strings.TrimSpace(string(text)) != tc.want {
				t.Errorf("level %q, %v, want %s", text, err, tc.want)
			}
			p.checkHIPLogs()
			if p.run.Missing[hipLogs] != "" {
				t.Error(p.run.Missing)
			}
			if err := os.Remove(files[0]); err != nil {
				t.Fatal(err)
			}
			p.plan.Offline.PIDs = []int32{5}
			p.checkHIPLogs()
			want := map[string]string{
				hipLogs: "no command that the trial started wrote one at AMD_LOG_LEVEL=" + tc.want, hipLogs + " of running jobs": "they have the environment with which they were started",
			}
			if diff := cmp.Diff(want, p.run.Missing); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestPIDMapHasTheFinishedRepeatsOnly(t *testing.T) {
	dir := t.TempDir()
	run := &evidence.Run{Arms: []evidence.Arm{{Name: "shared", Repeats: make([]evidence.Repeat, 1)}, {Name: "protected"}}}
	if rows, err := readPIDs(dir, run); err != nil || rows != nil {
		t.Errorf("without a map: %v, %v", rows, err)
	}
	kept := pidRow{Arm: "shared", Role: "offline", PID: 7, NamespacePIDs: []int32{1}}
	if err := evidence.WriteJSON(dir, evidence.PIDsFile, []pidRow{{Arm: "protected", PID: 8}, kept, {Arm: "shared", Repeat: 1, PID: 9}}); err != nil {
		t.Fatal(err)
	}
	rows, err := readPIDs(dir, run)
	if diff := cmp.Diff([]pidRow{kept}, rows); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if err := os.WriteFile(filepath.Join(dir, evidence.PIDsFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readPIDs(dir, run); err == nil || !strings.Contains(err.Error(), "the pid map of the run") {
		t.Errorf("a damaged map: %v", err)
	}
}
