package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// examples is where the examples are. Those in Python are tested in bindings/python, the one
// in C by TestCLibraryIsInstalledForPkgConfig, and the manifests in deploy/kubernetes.
const examples = "../../examples"

func TestGoExampleAnnouncesEachBatch(t *testing.T) {
	program := filepath.Join(t.TempDir(), "inference")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = filepath.Join(examples, "go")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build in examples/go: %v\n%s", err, out)
	}
	d := start(t, atOnce)
	for socket, want := range map[string]string{
		d.socket:              "A protected=true quiet=true\nB protected=true quiet=true\n",
		"/nonexistent/socket": "A protected=false quiet=false\nB protected=false quiet=false\n",
	} {
		run := exec.CommandContext(t.Context(), program)
		run.Env, run.Stdin = environment("GPREEMPT_SOCKET="+socket), strings.NewReader("a\nb\n")
		got, err := run.Output()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("with %s (-want +got):\n%s", socket, diff)
		}
	}
	stats, err := d.admin.GetStatistics(t.Context(), &gpreemptv1.GetStatisticsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if n := stats.GetStatistics().GetAnnouncements(); n != 2 {
		t.Errorf("%d announcements, want 2", n)
	}
}

func TestRulesOfExamplesMakeTheirJobsOffline(t *testing.T) {
	slurm := gpreempt.Process{UID: 1000, Cgroup: gpreempt.Cgroup{Path: "/system.slice/slurmstepd.scope/job_7/step_0/user/task_3", Slice: "system.slice"}}
	serving := slurm
	serving.UID = 990
	for _, tt := range []struct {
		file string
		gpreempt.Process
		want string
	}{
		{"slurm", slurm, "offline, rule slurm-batch"},
		{"slurm", serving, "online, rule slurm-serving"},
		{"slurm", gpreempt.Process{UID: 1000, Cgroup: gpreempt.Cgroup{Path: "/user.slice", Slice: "user.slice"}}, "unmanaged, default"},
		{"systemd", gpreempt.Process{Cgroup: gpreempt.Cgroup{Path: "/batch.slice/training.service", Unit: "training.service", Slice: "batch.slice"}}, "offline, rule batch-slice"},
		{"systemd", gpreempt.Process{Cgroup: gpreempt.Cgroup{Path: "/system.slice/inference.service", Unit: "inference.service", Slice: "system.slice"}}, "unmanaged, default"},
	} {
		file := filepath.Join(examples, tt.file, "gpreemptd.yaml")
		if out, err := exec.CommandContext(t.Context(), gpreemptd, "config", "check", file).Output(); err != nil || !strings.HasPrefix(string(out), file+": valid") {
			t.Errorf("gpreemptd config check: %v, %q", err, out)
		}
		cfg, err := config.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		rules, err := classify.New(cfg.Rules, cfg.Jobs)
		if err != nil {
			t.Fatal(err)
		}
		d := rules.Decide(&classify.Subject{Process: tt.Process})
		if got := d.Class.String() + ", " + d.By; got != tt.want {
			t.Errorf("%s: a process in %s is %s, want %s", file, tt.Cgroup.Path, got, tt.want)
		}
	}
}

func TestUnitsOfTheExampleAreValid(t *testing.T) {
	for _, path := range []string{"systemd-analyze", "/usr/bin/python3"} {
		if _, err := exec.LookPath(path); err != nil {
			t.Skipf("needs %s: apt-get install systemd python3", path)
		}
	}
	units, err := filepath.Glob(filepath.Join(examples, "systemd", "*.s[el][ri]*"))
	if err != nil || len(units) != 3 {
		t.Fatalf("units %v: %v", units, err)
	}
	out, err := exec.CommandContext(t.Context(), "systemd-analyze", append([]string{"verify", "--man=no"}, units...)...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "examples/") {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

// slurmStubs are programs of Slurm and of the job.
func slurmStubs(t *testing.T) (path string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range map[string]string{
		"srun":    `exec "$@"`,
		"python3": `exec ` + kfdemuBinary + ` work --runtime`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/bash\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return "PATH=" + dir + ":" + filepath.Dir(gpctl) + ":" + os.Getenv("PATH")
}

// TestJobOfTheSlurmExampleIsSuspended runs the job script and the prolog with real processes on
// an emulated GPU; srun and the training are stubs.
func TestJobOfTheSlurmExampleIsSuspended(t *testing.T) {
	prolog := exec.CommandContext(t.Context(), filepath.Join(examples, "slurm", "task_prolog.sh"))
	prolog.Env = environment("SLURM_JOB_PARTITION=batch")
	printed, err := prolog.Output()
	if err != nil {
		t.Fatal(err)
	}
	tag, ok := strings.CutPrefix(strings.TrimSpace(string(printed)), "export ")
	if !ok {
		t.Fatalf("the prolog printed %q", printed)
	}
	prolog = exec.CommandContext(t.Context(), filepath.Join(examples, "slurm", "task_prolog.sh"))
	prolog.Env = environment("SLURM_JOB_PARTITION=serve")
	if printed, err := prolog.Output(); err != nil || len(printed) > 0 {
		t.Errorf("in another partition the prolog printed %q: %v", printed, err)
	}

	m := emulate(t, kfdemu.Config{})
	d := m.start(atOnce)
	path := slurmStubs(t)
	for name, job := range map[string]struct{ args, env []string }{
		"job script": {[]string{"bash", filepath.Join(examples, "slurm", "train.sbatch")}, []string{path}},
		"prolog":     {[]string{"srun", "python3", "train.py"}, []string{path, tag}},
	} {
		cmd := m.Command(context.Background(), "/usr/bin/env", append(append([]string{}, job.env...), job.args...)...)
		w := m.spawn(cmd)
		w.PID = w.await("ready").PID                                        // its parents are the shell and srun
		t.Cleanup(func() { _ = syscall.Kill(int(w.PID), syscall.SIGKILL) }) // it may have ended
		d.offlineTarget(w, 1)
		if by := d.target(w.PID).GetDecidedBy(); by != "tag" {
			t.Errorf("%s: its class is by %q, want tag", name, by)
		}
		lease := d.announce(t.Context())
		if n := lease.GetSuspendedTargets(); n != 1 {
			t.Errorf("%s: %d targets are suspended, want 1", name, n)
		}
		m.checkFrozen(w)
		d.complete(lease.GetLeaseId())
		w.stop()
	}
}
