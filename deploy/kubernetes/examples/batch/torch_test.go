package batch

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// python is Debian's, with the package python3-torch.
const python = "/usr/bin/python3"

// agent is an agent of torch elastic, of one worker, in place of one on another node. lines has
// what both print, and is closed when they have ended.
type agent struct {
	cmd   *exec.Cmd
	lines chan string
	said  []string
}

// reservedAddress returns an address on which a program may listen that sets SO_REUSEADDR, as the store of PyTorch
// does. It stays bound until the test ends, so that nobody else gets it.
func reservedAddress(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	address, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", address.(*syscall.SockaddrInet4).Port)
}

// startJob starts a job of two agents, as on two nodes. The first one has the store of the rendezvous.
func startJob(t *testing.T, timeout time.Duration, steps int) (first, second *agent) {
	t.Helper()
	if err := exec.CommandContext(t.Context(), python, "-c", "import torch.distributed.run").Run(); err != nil {
		t.Skip("no PyTorch: apt-get install -y --no-install-recommends python3-torch python3-packaging")
	}
	endpoint := reservedAddress(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	start := func() *agent {
		// --redirects and --tee: PyTorch 1.13 with Python 3.11 fails without them.
		a := &agent{cmd: exec.CommandContext(ctx, python, "testdata/torchrun.py", "--nnodes=2", "--nproc_per_node=1", "--max_restarts=3",
			"--monitor_interval=1", "--redirects=1", "--tee=1", "--rdzv_backend=c10d", "--rdzv_id=job", "--rdzv_endpoint="+endpoint,
			"testdata/steps.py", strconv.FormatFloat(timeout.Seconds(), 'f', -1, 64), strconv.Itoa(steps)), lines: make(chan string, 10000)}
		a.cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir())
		a.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		read, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		a.cmd.Stdout, a.cmd.Stderr = write, write
		if err := a.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_ = write.Close()
		go func() {
			defer close(a.lines)
			defer read.Close()
			for lines := bufio.NewScanner(read); lines.Scan(); {
				a.lines <- lines.Text()
			}
			_, _ = io.Copy(io.Discard, read)
		}()
		t.Cleanup(func() { // the worker too
			_ = syscall.Kill(-a.cmd.Process.Pid, syscall.SIGKILL)
			_ = a.cmd.Wait()
		})
		return a
	}
	first = start()
	first.until(t, "attempts to join the next round") // it has the store
	return first, start()
}

// until waits for a line with a text.
func (a *agent) until(t *testing.T, text string) {
	t.Helper()
	for line := range a.lines {
		a.said = append(a.said, line)
		if strings.Contains(line, text) {
			return
		}
	}
	t.Fatalf("no %q in:\n%s", text, strings.Join(a.said, "\n"))
}

// end waits for the end of an agent, and returns its exit status and whether its worker began again.
func (a *agent) end(t *testing.T) string {
	t.Helper()
	for line := range a.lines {
		a.said = append(a.said, line)
	}
	err := a.cmd.Wait()
	begins := 0
	for _, line := range a.said {
		if strings.HasSuffix(line, "step 0") {
			begins++
		}
	}
	switch begins {
	case 0:
		return fmt.Sprintf("%v, without a step", err)
	case 1:
		return fmt.Sprintf("%v, without a restart", err)
	}
	return fmt.Sprintf("%v, restarted", err)
}

// worker returns the worker of an agent.
func (a *agent) worker(t *testing.T) int {
	t.Helper()
	pid := a.cmd.Process.Pid
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		t.Fatal(err)
	}
	worker, err := strconv.Atoi(strings.Fields(string(children))[0])
	if err != nil {
		t.Fatal(err)
	}
	return worker
}

func signal(t *testing.T, s syscall.Signal, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		if err := syscall.Kill(pid, s); err != nil {
			t.Fatal(err)
		}
	}
}

// The freezer of a pod stops the agent as well as the worker.
func TestAJobOfTorchElasticOutlastsAStopOfANodeForLongerThanTheKeepAlive(t *testing.T) {
	first, second := startJob(t, 5*time.Minute, 20)
	second.until(t, "step 2")
	stopped := []int{second.cmd.Process.Pid, second.worker(t)}
	signal(t, syscall.SIGSTOP, stopped...)
	first.until(t, "since they had no heartbeat") // after 15 s: 3 keep-alives
	signal(t, syscall.SIGCONT, stopped...)
	if diff := cmp.Diff([]string{"<nil>, without a restart", "<nil>, without a restart"}, []string{first.end(t), second.end(t)}); diff != "" {
		t.Errorf("ends (-want +got):\n%s", diff)
	}
}

// A stop of the worker alone is like a suspension of its GPU: its program waits, its agent does not.
// The agent of the stopped worker restarts it because it fails, too, or because the other agent is
// waiting: only the first counts as one of the attempts that PyTorch allows.
func TestACollectiveThatWaitsLongerThanItsTimeOutRestartsTheJob(t *testing.T) {
	first, second := startJob(t, 10*time.Second, 20)
	second.until(t, "step 2")
	stopped := second.worker(t)
	signal(t, syscall.SIGSTOP, stopped)
	first.until(t, "Timed out waiting")
	signal(t, syscall.SIGCONT, stopped)
	if diff := cmp.Diff([]string{"<nil>, restarted", "<nil>, restarted"}, []string{first.end(t), second.end(t)}); diff != "" {
		t.Errorf("ends (-want +got):\n%s", diff)
	}
}
