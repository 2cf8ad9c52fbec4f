package cluster

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// programsEnv is the directory with the programs that make cluster builds. Without it every test is
// skipped.
const programsEnv = "GPREEMPT_CLUSTER"

// stageEnv says how far a process of the test binary is: outside of the namespaces if it is
// empty, process 1 in them, or the one that runs the tests.
const stageEnv = "GPREEMPT_CLUSTER_STAGE"

const (
	stageInit  = "init"
	stageTests = "tests"
)

// needed are programs of the host, and the Debian packages that have them.
var needed = map[string]string{
	"etcd": "etcd-server", "containerd": "containerd", "containerd-shim-runc-v2": "containerd", "ctr": "containerd",
	"/usr/sbin/runc": "runc", "/usr/lib/cni/bridge": "containernetworking-plugins", "ip": "iproute2",
}

func TestMain(m *testing.M) {
	flag.Parse()
	var code int
	var err error
	switch stage := os.Getenv(stageEnv); {
	case missing() != "":
		code = m.Run() // each test says why it is skipped
	case stage == "":
		code, err = outside()
	case stage == stageInit:
		code, err = processOne()
	default:
		code = m.Run()
		err = stopCluster()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// missing returns what a cluster lacks here, "" for nothing.
func missing() string {
	if os.Getenv(programsEnv) == "" {
		return programsEnv + " is not set: make cluster builds the programs and sets it"
	}
	if os.Geteuid() != 0 {
		return "it takes root for namespaces, mounts and control groups"
	}
	for program, pkg := range needed {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Sprintf("%s is not installed: apt-get install -y --no-install-recommends %s", program, pkg)
		}
	}
	for _, program := range programs {
		if _, err := os.Stat(built(program)); err != nil {
			return fmt.Sprintf("%v: make cluster builds it", err)
		}
	}
	return ""
}

// programs are those that make cluster builds.
var programs = []string{"kube", "node", "kfdemu", "gpctl", "gpreempt-csi", "gpreempt-node", "v1/gpreemptd", "v2/gpreemptd"}

func built(program string) string { return filepath.Join(os.Getenv(programsEnv), program) }

// outside runs the tests in namespaces and removes what could remain.
func outside() (code int, err error) {
	name := fmt.Sprintf("gpreempt-cluster-%d", os.Getpid())
	defer func() { err = errors.Join(err, removeGroups(name)) }()
	if err := makeGroups(name); err != nil {
		return 1, err
	}
	// The kernel sends Pdeathsig when this thread ends.
	runtime.LockOSThread()
	// Its own process group: a terminal's signals come here only.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	cmd := self(stageInit)
	cmd.Env = append(cmd.Env, groupEnv+"="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGTERM, Setpgid: true,
	}
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err = <-ended:
	case s := <-signals:
		err = errors.Join(cmd.Process.Kill(), fmt.Errorf("ended by the signal %v", s))
		<-ended
	}
	err = errors.Join(err, killGroup(name))
	return status(err)
}

func self(stage string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), stageEnv+"="+stage)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd
}

func status(err error) (int, error) {
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		return max(ended.ExitCode(), 1), nil
	}
	return 0, err
}

// processOne prepares the node and runs the tests. Orphans, such as shims of a containerd that was
// killed, are its children. It is in the host's pid namespace, in which the daemon must be, so control groups
// and not a namespace hold all that it starts.
func processOne() (int, error) {
	if err := errors.Join(joinGroups(os.Getenv(groupEnv)), unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)); err != nil {
		return 1, err
	}
	if err := prepareNode(); err != nil {
		return 1, err
	}
	exe, err := os.Executable()
	if err != nil {
		return 1, err
	}
	if err := errors.Join(os.Setenv(stageEnv, stageTests), os.Setenv("TMPDIR", nodeTemp)); err != nil {
		return 1, err
	}
	tests, err := syscall.ForkExec("/proc/self/exe", append([]string{exe}, os.Args[1:]...), &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, 1, 2},
	})
	if err != nil {
		return 1, err
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 1, err
		case pid == tests && status.Exited():
			return status.ExitStatus(), nil
		case pid == tests:
			return 1, fmt.Errorf("the tests ended by signal %v", status.Signal())
		}
	}
}

// groupEnv is the name of the control groups.
const groupEnv = "GPREEMPT_CLUSTER_GROUP"

const groups = "/sys/fs/cgroup"

// hierarchies returns the roots of the control groups: of each controller with version 1, or one.
func hierarchies() ([]string, error) {
	if _, err := os.Stat(groups + "/cgroup.controllers"); err == nil {
		return []string{groups}, nil
	}
	all, err := filepath.Glob(groups + "/*/cgroup.procs")
	for i := range all {
		all[i] = filepath.Dir(all[i])
	}
	return all, err
}

func makeGroups(name string) error {
	all, err := hierarchies()
	if err != nil || len(all) == 0 {
		return errors.Join(err, errors.New("no control groups are mounted at "+groups))
	}
	for _, root := range all {
		if err := os.Mkdir(filepath.Join(root, name), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// joinGroups moves this process, and what it will start, into the control groups.
func joinGroups(name string) error {
	all, err := hierarchies()
	errs := []error{err}
	for _, root := range all {
		dir := filepath.Join(root, name)
		if filepath.Base(root) == "cpuset" { // it has no CPU and no memory by default
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				text, err := os.ReadFile(filepath.Join(root, file))
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, file), text, 0o644)
				}
				errs = append(errs, err)
			}
		}
		errs = append(errs, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0o644))
	}
	return errors.Join(errs...)
}

// killGroup kills every process of the control groups, and waits until they have ended.
func killGroup(name string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	late := time.After(30 * time.Second)
	for {
		left := map[int]bool{}
		for _, root := range all {
			err := filepath.WalkDir(filepath.Join(root, name), func(path string, d fs.DirEntry, err error) error {
				if err != nil || d.Name() != "cgroup.procs" {
					return nil //nolint:nilerr // a group that has gone
				}
				text, _ := os.ReadFile(path)
				for _, field := range strings.Fields(string(text)) {
					if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
						left[pid] = true
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		if len(left) == 0 {
			return nil
		}
		for pid := range left {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return err
			}
		}
		select {
		case <-late:
			return fmt.Errorf("%d processes of the cluster do not end", len(left))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// removeGroups removes the control groups with those that kubelet and containerd made in them.
func removeGroups(name string) error {
	all, err := hierarchies()
	errs := []error{err}
	for _, root := range all {
		errs = append(errs, removeGroup(filepath.Join(root, name)))
	}
	return errors.Join(errs...)
}

func removeGroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, removeGroup(filepath.Join(dir, e.Name())))
		}
	}
	err = syscall.Rmdir(dir)
	if err != nil {
		procs, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		err = fmt.Errorf("remove the control group %s: %w; its processes: %q", dir, err, strings.Fields(string(procs)))
	}
	return errors.Join(append(errs, err)...)
}
