package proc

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// roleEnv is set in the children that the tests start from this binary.
const roleEnv = "GPREEMPT_PROC_TEST_CHILD"

func init() {
	if os.Getenv(roleEnv) != "" {
		runtime.LockOSThread() // main runs on the main thread, which "end-main-thread" ends
	}
}

// playChild answers each line of its input; the end of the input ends it.
func playChild() {
	fmt.Println("ready")
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		switch line {
		case "exec\n":
			_ = syscall.Exec("/proc/self/exe", os.Args, os.Environ())
			os.Exit(1)
		case "end-main-thread\n":
			go func() {
				fmt.Println("ending")
				_, _ = in.ReadString('\n')
				os.Exit(0)
			}()
			_, _, _ = syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
		}
	}
}

// child is a child of the test, which waits for it.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	key gpreempt.ProcessKey
	in  io.WriteCloser
	out *bufio.Reader
}

func startChild(t *testing.T) *child {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=1", "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: cmd, in: in, out: bufio.NewReader(out)}
	t.Cleanup(c.end)
	p := open(t, gpreempt.ProcessKey{PID: int32(cmd.Process.Pid)})
	c.key = p.Key()
	c.expect("ready")
	return c
}

func (c *child) say(line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.in, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
}

func (c *child) expect(want string) {
	c.t.Helper()
	got, err := c.out.ReadString('\n')
	if got != want+"\n" {
		c.t.Fatalf("the child says %q, %v; want %q", got, err, want)
	}
}

// die ends the child and returns when it is a zombie: its output is closed then, or
// about to be.
func (c *child) die() {
	c.t.Helper()
	_ = c.cmd.Process.Kill()
	_, _ = io.Copy(io.Discard, c.out)
}

// end ends the child, if it has not ended, and frees its pid.
func (c *child) end() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

func open(t *testing.T, key gpreempt.ProcessKey) *Process {
	t.Helper()
	p, err := OpenWithPidfd("/", key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// lastPID is the pid that the kernel assigned last in this pid namespace; the next one
// is the one after it (pid_ns_ctl_handler).
const lastPID = "/proc/sys/kernel/ns_last_pid"

// startAs starts a child with the pid of a process that has ended, and with another
// start time. Other processes start meanwhile and may take the pid: it tries again.
func startAs(t *testing.T, former gpreempt.ProcessKey) *child {
	t.Helper()
	for range 100 {
		err := os.WriteFile(lastPID, []byte(strconv.Itoa(int(former.PID)-1)), 0)
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EROFS) {
			t.Skipf("choosing a pid needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE, and CONFIG_CHECKPOINT_RESTORE: %v", err)
		} else if err != nil {
			t.Fatal(err)
		}
		c := startChild(t)
		if c.key.PID == former.PID && c.key.Start != former.Start {
			return c
		}
		c.end()
	}
	t.Skip("no child got the pid in 100 attempts: other processes start all the time")
	return nil
}

// tree is a directory with a proc that tests write.
type tree struct {
	t    *testing.T
	root string
}

func newTree(t *testing.T) tree {
	t.Helper()
	return tree{t, t.TempDir()}
}

func (w tree) write(path, text string) {
	w.t.Helper()
	path = w.root + "/proc/" + path
	if err := os.MkdirAll(path[:strings.LastIndexByte(path, '/')], 0o700); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// statLine returns a line as in /proc/PID/stat, of a process that started at tick 9.
func statLine(pid int, state byte, flags uint32, threads int) string {
	return fmt.Sprintf("%d (name) %c 1 1 1 0 -1 %d 0 0 0 0 0 0 0 0 20 0 %d 0 9 0 0\n", pid, state, flags, threads)
}
