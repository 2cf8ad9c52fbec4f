package workload

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// childEnv makes the test binary run child instead of the tests.
const childEnv = "KFDWORK_TEST_CHILD"

func child(what string) int {
	switch what {
	case "crash":
		if err := crash(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		select {}
	default:
		return exitUsage
	}
}

func TestCrashEndsBySIGSEGV(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=crash")
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) {
		t.Fatalf("the child ended with %v", err)
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); !ok || status.Signal() != unix.SIGSEGV {
		t.Errorf("the child ended with %v, want SIGSEGV", exit)
	}
}

// A child of fork has the descriptors of its parent, but not the GPU's memory.
func TestForkedChildTriesTheDescriptor(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	child, err := forkAndTry(int(null.Fd()), time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if child.PID <= 0 || child.Errno != unix.ENOTTY {
		t.Errorf("the child is %d and got %v, want a pid and %v", child.PID, child.Errno, unix.ENOTTY)
	}
	if err := child.Wait(); err != nil {
		t.Errorf("waiting for the child: %v", err)
	}
	if _, err := unix.Wait4(child.PID, nil, unix.WNOHANG, nil); !errors.Is(err, unix.ECHILD) {
		t.Errorf("after Wait the child is still there: %v", err)
	}
}

// Memory of the GPU is not in a child, according to the flags of the mapping.
func TestRegionsAreKeptFromChildren(t *testing.T) {
	r, err := newRegion(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.free(); err != nil {
			t.Error(err)
		}
	}()
	flags, err := mappingFlags(r.addr(0))
	if err != nil {
		t.Fatal(err)
	}
	const dontCopy = "dc"
	if !flags[dontCopy] {
		t.Errorf("the mapping's flags are %v, want %s among them", flags, dontCopy)
	}
}
