package e2e

// The tests named TestSlurm run Debian's Slurm, slurmctld and slurmd with munge, on an emulated node: make slurm. All of
// it runs in namespaces of its own, so it meets no Slurm of the host and ends with the tests.

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// slurmEnv is set by make slurm. Its other values are of the processes that the tests start.
const slurmEnv = "GPREEMPT_SLURM"

const (
	slurmOutside = "1"
	slurmInit    = "init"
	slurmInside  = "inside"
)

// slurmBinaries has the directory of the binaries under test.
const slurmBinaries = "GPREEMPT_SLURM_BINARIES"

// slurmMain is TestMain for make slurm. It reports whether it has run.
func slurmMain(m *testing.M) (code int, ran bool) {
	var err error
	switch os.Getenv(slurmEnv) {
	default:
		return 0, false
	case slurmOutside:
		if os.Geteuid() != 0 {
			return 0, false // the tests skip
		}
		code, err = slurmFromOutside()
	case slurmInit:
		code, err = slurmFirst()
	case slurmInside:
		setBinaries(os.Getenv(slurmBinaries))
		timeout = time.Minute // of a step; all tests together have 5 minutes
		code = m.Run()
		fmt.Println("Proved with Slurm on emulated GPUs:")
		for _, line := range slurmProofs {
			fmt.Println(" -", line)
		}
		return code, true
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "make slurm:", err)
		return 1, true
	}
	return code, true
}

// slurmProofs are what the tests have shown so far. They run one after the other.
var slurmProofs []string

// proved adds to the list that make slurm prints at its end.
func proved(t *testing.T, what string) {
	t.Helper()
	if !t.Failed() {
		slurmProofs = append(slurmProofs, what)
	}
}

// again is this program with the same arguments, with another value of slurmEnv.
func again(role string, more ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(append(os.Environ(), slurmEnv+"="+role), more...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd
}

// exitStatus returns the exit status of a command that has ended.
func exitStatus(err error) (int, error) {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// slurmFromOutside builds the binaries and runs the tests in namespaces. The end of their first process ends every
// process in them.
func slurmFromOutside() (code int, err error) {
	dir, err := os.MkdirTemp("", "gpreempt-slurm-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	if err := build(dir); err != nil {
		return 0, err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return 0, err
	}
	runtime.LockOSThread() // the first process ends with the thread that starts it
	cmd := again(slurmInit, slurmBinaries+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC, Pdeathsig: unix.SIGKILL,
	}
	code, err = exitStatus(cmd.Run())
	return code, errors.Join(err, removeSlurmCgroups())
}

// slurmCgroups are the control groups of the node. Slurm does not remove those of the node itself.
func slurmCgroups() []string {
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*/slurm_" + slurmNode) // the pattern is valid
	return dirs
}

// removeSlurmCgroups removes all control groups of the node.
func removeSlurmCgroups() (err error) {
	for _, dir := range slurmCgroups() {
		var below []string
		walk := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				below = append(below, path)
			}
			return err
		})
		err = errors.Join(err, walk)
		for _, dir := range slices.Backward(below) {
			err = errors.Join(err, os.Remove(dir))
		}
	}
	return err
}

// slurmFirst is the first process in the namespaces: it prepares them, runs the tests and waits for the processes that
// have lost their parent.
func slurmFirst() (code int, err error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return 0, fmt.Errorf("make all mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return 0, fmt.Errorf("mount /proc: %w", err)
	}
	// The records of jobs are below /run, the setting of the prolog is in /etc/default.
	for _, dir := range []string{"/run", "/etc/default"} {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
			return 0, fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	if err := errors.Join(unix.Sethostname([]byte(slurmController)), slurmNetwork()); err != nil {
		return 0, err
	}
	cmd := again(slurmInside)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case pid == cmd.Process.Pid && status.Exited():
			return status.ExitStatus(), nil
		case pid == cmd.Process.Pid:
			return 0, fmt.Errorf("the tests ended by %v", status.Signal())
		}
	}
}

// slurmAddress is the address of both daemons. Slurm asks for addresses that are not of the loopback network.
var slurmAddress = [4]byte{10, 99, 0, 1}

// slurmNetwork sets up the only interface.
func slurmNetwork() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	up, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	up.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	second, err := unix.NewIfreq("lo:1")
	if err != nil {
		return err
	}
	if err := errors.Join(unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, up), second.SetInet4Addr(slurmAddress[:]),
		unix.IoctlIfreq(fd, unix.SIOCSIFADDR, second)); err != nil {
		return fmt.Errorf("set up the loopback interface: %w", err)
	}
	return nil
}
