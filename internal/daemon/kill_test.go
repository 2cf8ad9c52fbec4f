package daemon

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// roleEnv is the role of this binary when a test starts it again.
const (
	roleEnv    = "GPREEMPT_DAEMON_TEST_ROLE"
	roleVictim = "victim" // a process that is paused
	roleDaemon = "daemon" // a daemon that is killed
)

// victimMain echoes every line.
func victimMain(in io.Reader, out io.Writer) int {
	for lines := bufio.NewScanner(in); lines.Scan(); {
		if _, err := fmt.Fprintln(out, lines.Text()); err != nil {
			return 1
		}
	}
	return 0
}

// daemonMain runs a daemon on a host with real processes and a fake list of GPU processes.
func daemonMain(config, root, run string, stderr io.Writer) int {
	err := Run(context.Background(), Options{
		ConfigPath: config, ConfigGiven: true, Socket: filepath.Join(run, "d.sock"), Log: zap.NewNop(),
		Host: Host{
			Dir: root, RunDir: run,
			Open: func() (*kfd.Device, error) { return nil, fs.ErrNotExist },
		},
	})
	fmt.Fprintln(stderr, "the daemon ends:", err)
	return 1
}

// child is this binary in a role.
type child struct {
	*exec.Cmd
	in   io.WriteCloser
	pipe *os.File
	out  *bufio.Reader
}

func startChild(t *testing.T, role string, args ...string) *child {
	t.Helper()
	runtime.LockOSThread() // the child is killed when the thread that started it ends
	t.Cleanup(runtime.UnlockOSThread)
	c := &child{Cmd: exec.CommandContext(context.Background(), "/proc/self/exe", args...)}
	c.Env = append(os.Environ(), roleEnv+"="+role)
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.in, c.pipe, c.out = in, out.(*os.File), bufio.NewReader(out)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	return c
}

// kill kills it and waits for its end. A second call does nothing.
func (c *child) kill() {
	_ = c.Process.Kill() // it may have ended
	_ = c.Wait()
}

func (c *child) expect(t *testing.T, want string) {
	t.Helper()
	if err := c.pipe.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if line, err := c.out.ReadString('\n'); line != want+"\n" {
		t.Fatalf("%s says %q, error %v; want %q", c.Env[len(c.Env)-1], line, err, want)
	}
}

// mustRun checks that a victim runs.
func (c *child) mustRun(t *testing.T) {
	t.Helper()
	if _, err := io.WriteString(c.in, "alive\n"); err != nil {
		t.Fatal(err)
	}
	c.expect(t, "alive")
}

// release releases a lease. A client waits for the answer for a second, which a busy host exceeds.
func release(ctx context.Context, lease *client.Lease) error {
	for {
		err := lease.Release(ctx)
		if gpreempt.ReasonOf(err) != gpreempt.ReasonDaemonUnavailable {
			return err
		}
	}
}

// A daemon is killed at random times during suspends and resumes. Then gpreemptd --cleanup
// or the next daemon must resume what it left paused.
func TestNothingStaysStoppedAfterTheDaemonIsKilled(t *testing.T) {
	victim := startChild(t, roleVictim)
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", victim.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := discovery.ParseProcStat(stat)
	if err != nil {
		t.Fatal(err)
	}
	key := gpreempt.ProcessKey{PID: parsed.PID, Start: parsed.Start}

	h := newFakeHost(t, "6.12", trainersAreOffline+"mechanisms: [freezer]\n")
	h.showReal(key, string(stat))
	run := testutil.TempSocketDir(t)
	ready := notifySocket(t)
	random := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	left, round := 0, 0
	for ; round < 12 || left == 0 && round < 260; round++ { // until a kill came during a suspend
		daemon := startChild(t, roleDaemon, h.opts.ConfigPath, h.root, run)
		<-ready
		victim.mustRun(t)
		c, err := client.Dial(filepath.Join(run, "d.sock"), client.FailClosed())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		working, suspended := make(chan struct{}), make(chan struct{})
		go func() { // online work without a pause
			defer close(working)
			for first := true; ; {
				lease, err := c.Acquire(ctx, client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second})
				if err != nil {
					return
				}
				if first && lease.SuspendedTargets() > 0 {
					first = false
					close(suspended)
				}
				if release(ctx, lease) != nil {
					return
				}
			}
		}()
		select {
		case <-suspended:
			<-time.After(time.Duration(random.Int64N(int64(5 * time.Millisecond))))
		case <-working:
			t.Error("online work failed before anything was suspended")
		}
		daemon.kill()
		cancel()
		<-working
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if round%2 == 0 {
			continue
		}
		var said strings.Builder
		if err := cleanUp(t.Context(), &said, Host{RunDir: run}); err != nil {
			t.Error(err)
		}
		if said.String() != "nothing was left paused\n" {
			left++
		}
		victim.mustRun(t)
	}
	if left == 0 {
		t.Error("no daemon was killed during a suspend: nothing was tested")
	}
	t.Logf("%d daemons were killed; of %d with a cleanup, %d left the process paused; it always ran again", round, round/2, left)
}

// showReal lists a real process as a trainer with a queue.
func (h *fakeHost) showReal(key gpreempt.ProcessKey, stat string) {
	proc := fmt.Sprintf("proc/%d/", key.PID)
	h.put(proc+"stat", stat)
	h.put(proc+"status", "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n")
	h.put(proc+"comm", "trainer\n")
	h.put(proc+"cmdline", "trainer\x00")
	h.put(proc+"cgroup", "0::/\n")
	queue := fmt.Sprintf("sys/class/kfd/kfd/proc/%d/queues/0/", key.PID)
	h.put(queue+"gpuid", gpu.String())
	h.put(queue+"size", "4096")
	h.put(queue+"type", "0")
}
