package e2e

// The tests named TestEngine run containers of Debian's Docker and Podman, which they start: make engines.

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// enginesEnv is set by make engines.
const enginesEnv = "GPREEMPT_ENGINES"

// skipEngine skips a test of an engine that is not installed, in a line that make nightly shows.
func skipEngine(t *testing.T, needs ...string) {
	t.Helper()
	if os.Getenv(enginesEnv) == "" {
		t.Skip("it starts engines of containers: make engines runs it")
	}
	why := cannotEmulate()
	for _, program := range needs {
		if _, err := exec.LookPath(program); err != nil && why == "" {
			why = "no " + program + ": apt-get install docker.io podman"
		}
	}
	if why != "" {
		fmt.Printf("SKIP %s: %s\n", t.Name(), why)
		t.Skip(why)
	}
}

// engine calls the command of an engine and returns its output.
type engine func(args ...string) string

// engineOf returns the calls of a command with this environment, which the programs of the test have, too, and
// with a home of its own.
func engineOf(t *testing.T, command, home string, env map[string]string) engine {
	t.Helper()
	for name, value := range env {
		t.Setenv(name, value)
	}
	return func(args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute) // containers end after the test's context
		defer cancel()
		cmd := exec.CommandContext(ctx, command, args...)
		cmd.Env = append(os.Environ(), "HOME="+home)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", command, strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
}

func TestEngineDocker(t *testing.T) {
	skipEngine(t, "dockerd", "docker", "containerd", "runc")
	dir := testutil.TempSocketDir(t)
	address := "unix://" + filepath.Join(dir, "docker.sock")
	log, err := os.Create(filepath.Join(t.TempDir(), "dockerd.log"))
	if err != nil {
		t.Fatal(err)
	}
	dockerd := exec.CommandContext(context.WithoutCancel(t.Context()), "dockerd", "--host", address, "--data-root", filepath.Join(dir, "data"), "--exec-root", filepath.Join(dir, "exec"),
		"--pidfile", filepath.Join(dir, "pid"), "--storage-driver", "vfs", "--bridge", "none", "--iptables=false", "--ip6tables=false")
	dockerd.Stdout, dockerd.Stderr = log, log
	if err := dockerd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- dockerd.Wait() }()
	t.Cleanup(func() {
		if err := dockerd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		<-ended
		_ = log.Close() // it is for people
	})
	for late := time.After(timeout); exec.CommandContext(t.Context(), "docker", "--host", address, "version").Run() != nil; {
		select {
		case err := <-ended:
			ended <- err
			text, _ := os.ReadFile(log.Name())
			t.Fatalf("dockerd ended: %v\n%s", err, text)
		case <-late:
			t.Fatalf("dockerd does not answer within %v", timeout)
		case <-time.After(100 * time.Millisecond):
		}
	}
	trialOfContainer(t, engineOf(t, "docker", dir, map[string]string{"DOCKER_HOST": address}))
}

func TestEnginePodman(t *testing.T) {
	skipEngine(t, "podman", "conmon", "runc") // crun refuses a host with control groups of both versions
	dir := testutil.TempSocketDir(t)
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	file(".config/containers/policy.json", `{"default": [{"type": "insecureAcceptAnything"}]}`)
	conmon, _ := exec.LookPath("conmon")
	runc, _ := exec.LookPath("runc")
	trialOfContainer(t, engineOf(t, "podman", dir, map[string]string{
		"CONTAINERS_STORAGE_CONF": file("storage.conf", fmt.Sprintf("[storage]\ndriver = \"vfs\"\ngraphroot = %q\nrunroot = %q\n", filepath.Join(dir, "data"), filepath.Join(dir, "run"))),
		"CONTAINERS_CONF": file("containers.conf", fmt.Sprintf("[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n[engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nruntime = \"runc\"\nconmon_path = [%q]\ntmp_dir = %q\n[engine.runtimes]\nrunc = [%q]\n",
			conmon, filepath.Join(dir, "tmp"), runc)),
	}))
}

// trialOfContainer runs jobs in a container, one of them by exec, and a trial of the container by its name
// and of its first process by its pid.
func trialOfContainer(t *testing.T, call engine) {
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	image := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", filepath.Join(image, "kfdemu"), "./emu/cmd/kfdemu")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0") // an image has no libc
	archive := filepath.Join(t.TempDir(), "image.tar")
	for _, cmd := range []*exec.Cmd{build, exec.CommandContext(t.Context(), "tar", "-C", image, "-cf", archive, ".")} {
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", cmd, err, out)
		}
	}
	call("import", archive, "kfdemu")
	machine := filepath.Dir(m.Socket())
	tree, err := os.Readlink(filepath.Join(machine, "tree"))
	if err != nil {
		t.Fatal(err)
	}
	job := []string{"/kfdemu", "exec", "--socket", m.Socket(), "--", "/kfdemu", "work", "--train", "--queues", "2"}
	// To join the machine a program mounts its files.
	call(slices.Concat([]string{
		"run", "--detach", "--name", "train", "--network", "none", "--cap-add", "SYS_ADMIN", "--cap-add", "SYS_PTRACE",
		"--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined", "--volume", machine + ":" + machine, "--volume", tree + ":" + tree, "kfdemu",
	}, job)...)
	t.Cleanup(func() { call("rm", "--force", "train") })
	call(slices.Concat([]string{"exec", "--detach", "train"}, job)...)
	d.eventually("both jobs are found", func() bool { return d.status().GetTargetCount() == 2 && d.status().GetQueueCount() == 4 })

	first, err := strconv.Atoi(call("inspect", "--format", "{{.State.Pid}}", "train"))
	if err != nil {
		t.Fatal(err)
	}
	id := call("inspect", "--format", "{{.Id}}", "train")
	var all []int32
	list, err := d.admin.ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range list.GetTargets() {
		all = append(all, target.GetPid())
		if got := target.GetContainer().GetContainerId(); got != id {
			t.Errorf("process %d is in container %q, want %q", target.GetPid(), got, id)
		}
	}
	slices.Sort(all)
	if len(all) != 2 || !slices.Contains(all, int32(first)) {
		t.Fatalf("the engine started %d, and the daemon has %v", first, all)
	}
	for work, want := range map[string][]int32{"--container train": all, fmt.Sprintf("--pid %d", first): {int32(first)}} {
		dir := filepath.Join(t.TempDir(), "run")
		code, stdout, stderr := trialOf(t, m, d, slices.Concat(answering(), strings.Fields(work), []string{
			"--rate", "10", "--count", "15", "--repeats", "1", "--warm-up", "200ms", "--profile", written(t, "lenient.yaml", lenient), "--output-dir", dir,
		})...)
		if code != 0 || !strings.HasPrefix(stdout, "PASS (EMULATED, profile lenient): ") || !strings.Contains(stdout, "\nno arm online alone: the offline jobs run already\n") {
			t.Fatalf("%s: exit code %d:\n%s\n%s", work, code, stdout, stderr)
		}
		for _, arm := range []string{"offline alone", "shared", "protected"} {
			got, _ := pidsOf(t, dir, arm, 0)
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", work, arm, diff)
			}
		}
	}
	fmt.Printf("%s: container %.12s, processes %v: PASS by --container and by --pid\n", t.Name(), id, all)
}
