package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// terminal is a pseudo-terminal of 120x40 with a program in it, which it ends with.
type terminal struct {
	t       *testing.T
	program *exec.Cmd
	keys    *os.File // the other side
	shown   lines
	read    chan struct{} // closed when everything was read
}

// inTerminal starts a program as the first of a session in a terminal.
func inTerminal(t *testing.T, cmd *exec.Cmd) *terminal {
	t.Helper()
	keys, tty, err := testutil.Terminal(120, 40)
	if err != nil {
		t.Skip("no pseudo-terminal: ", err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := errors.Join(cmd.Start(), tty.Close()); err != nil {
		t.Fatal(err)
	}
	term := &terminal{t: t, program: cmd, keys: keys, read: make(chan struct{})}
	stuck := time.AfterFunc(3*timeout, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() { stuck.Stop() })
	t.Cleanup(func() { _ = keys.Close() }) // a test may have closed it
	go func() {
		defer close(term.read)
		_, _ = io.Copy(&term.shown, keys) // EIO when no program has the terminal
	}()
	return term
}

// await returns the first group of a pattern once the terminal has shown it.
func (term *terminal) await(pattern string) string {
	term.t.Helper()
	expr := regexp.MustCompile(pattern)
	var found []string
	term.t.Cleanup(func() {
		if found == nil {
			term.t.Logf("the terminal shows\n%s", &term.shown)
		}
	})
	whenTrue(term.t, fmt.Sprintf("%q in the terminal", pattern), func() bool {
		found = expr.FindStringSubmatch(term.shown.String())
		return found != nil
	})
	return found[len(found)-1]
}

// whenTrue returns when cond is true.
func whenTrue(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(timeout); !cond(); {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%s: not within %v", what, timeout)
		}
	}
}

// end waits for the end of the program, and returns its exit status.
func (term *terminal) end() int {
	term.t.Helper()
	_ = term.program.Wait() // its exit status is compared
	return term.program.ProcessState.ExitCode()
}

// liveDemo starts a demo in a terminal, with a directory of its own for temporary files.
func liveDemo(t *testing.T, args ...string) (term *terminal, tmp string) {
	t.Helper()
	if reason := cannotEmulate(); reason != "" && !slices.Contains(args, "--sim") {
		t.Skip(reason)
	}
	tmp = testutil.TempSocketDir(t)
	cmd := exec.Command(kfdemuBinary, append([]string{"demo"}, args...)...)
	cmd.Env = environment("TMPDIR="+tmp, "TERM=xterm-256color", "LC_ALL=C.UTF-8")
	return inTerminal(t, cmd), tmp
}

// empty fails the test if a demo has left something in its directory.
func empty(t *testing.T, tmp string) {
	t.Helper()
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

const socketLine = `GPREEMPT_SOCKET=(\S+)`

func TestDemoWithTopShowsItAndEndsWithIt(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{"emulated": {"--top"}, "simulated": {"--top", "--sim"}} {
		t.Run(name, func(t *testing.T) {
			term, tmp := liveDemo(t, args...)
			term.await(name[1:] + ` +mi300x`) // the first letter may have been there: only changes are sent
			term.await(`SUSPENDED`)
			term.await(`train`)
			if _, err := term.keys.WriteString("q"); err != nil {
				t.Error(err)
			}
			if code := term.end(); code != 0 {
				t.Errorf("exit status %d\n%s", code, &term.shown)
			}
			<-term.read
			says(t, term.shown.String(), "requests were answered")
			empty(t, tmp)
		})
	}
}

func TestDemoWithTopThatIsEndedRestoresTheTerminal(t *testing.T) {
	t.Parallel()
	term, tmp := liveDemo(t, "--top", "--sim")
	term.await(`train`)
	if err := term.program.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if code := term.end(); code != 0 {
		t.Errorf("exit status %d\n%s", code, &term.shown)
	}
	<-term.read
	says(t, term.shown.String(), "\x1b[?1049l") // leave the alternate screen
	empty(t, tmp)
}

func TestDemoWithTopNeedsATerminal(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), kfdemuBinary, "demo", "--top").CombinedOutput()
	if err == nil {
		t.Error("it runs without one")
	}
	says(t, string(out), "--top needs a terminal")
}

func TestLiveDemoEndsWithItsTerminal(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"emulated": {"--live"}, "simulated": {"--live", "--sim"}, "emulated, top": {"--top"}, "simulated, top": {"--top", "--sim"},
	} {
		t.Run(name, func(t *testing.T) {
			term, tmp := liveDemo(t, args...)
			socket := ""
			if slices.Contains(args, "--top") {
				term.await(`train`)
				if found, err := filepath.Glob(tmp + "/*/gpreemptd.sock"); err == nil && len(found) == 1 {
					socket = found[0]
				}
			} else {
				socket = term.await(socketLine)
			}
			served := daemonOf(t, socket)
			if err := term.keys.Close(); err != nil {
				t.Error(err)
			}
			term.end()
			empty(t, tmp)
			if err := unix.Kill(served, 0); !errors.Is(err, unix.ESRCH) {
				t.Errorf("process %d of the daemon: %v, want that it has ended", served, err)
			}
		})
	}
}

// daemonOf returns the process that listens on a socket.
func daemonOf(t *testing.T, socket string) int {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return int(peer.Pid)
}

// A daemon that does not answer in time is no reason to end a live demo: requests run
// unprotected, and the hint is not that for a host with systemd.
func TestLiveDemoCountsLateAnswersAndContinues(t *testing.T) {
	t.Parallel()
	term, tmp := liveDemo(t, "--live")
	socket := term.await(socketLine)
	served := daemonOf(t, socket)
	if err := unix.Kill(served, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	term.await(`Requests run unprotected: gpreemptd did not answer an announcement within`)
	if err := unix.Kill(served, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	term.await(`Requests are protected again`)
	// A request is about ten events: with 40 of them, one without a lease has ended.
	events := func() int {
		out, err := exec.CommandContext(t.Context(), gpctl, "--socket", socket, "status", "--jq", ".event_revision").Output()
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.Trim(string(out), "\"\n"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := events()
	whenTrue(t, "40 more events", func() bool { return events() >= before+40 })
	if err := term.program.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	if code := term.end(); code != 0 {
		t.Errorf("exit status %d\n%s", code, &term.shown)
	}
	<-term.read
	if counted := regexp.MustCompile(`\d+ requests were answered, [1-9]\d* of them unprotected`); !counted.MatchString(term.shown.String()) {
		t.Errorf("the requests without a lease are not counted:\n%s", &term.shown)
	}
	if strings.Contains(term.shown.String(), "systemctl") {
		t.Errorf("it names systemd:\n%s", &term.shown)
	}
	empty(t, tmp)
}

func TestLiveDemoKeepsTheDaemonsLogOutOfTheTerminal(t *testing.T) {
	t.Parallel()
	term, tmp := liveDemo(t, "--live")
	socket := term.await(socketLine)
	log := term.await(`tail -f (\S+)`)
	for _, command := range [][]string{{"drain", "on"}, {"drain", "off"}} { // which the audit log has
		if out, err := exec.CommandContext(t.Context(), gpctl, append([]string{"--socket", socket}, command...)...).CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
	whenTrue(t, "the audit log in "+log, func() bool {
		text, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(text), `"audit":true`)
	})
	if err := term.program.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	term.end()
	<-term.read
	if strings.Contains(term.shown.String(), "audit") {
		t.Errorf("the audit log is in the terminal:\n%s", &term.shown)
	}
	empty(t, tmp)
}

// A daemon that was started by hand ends with its terminal and resumes everything first: it would hold the
// lock of the host, unseen. A signal alone is a reload.
func TestDaemonStartedByHandEndsWithItsTerminal(t *testing.T) {
	t.Parallel()
	d := prepare(t, testutil.TempSocketDir(t), atOnce, onHost) // for its paths: it is not run
	cmd := exec.Command(simBinary, "serve-sim", "--config", d.config, "--socket", d.socket, "--job", "train:2:5ms")
	cmd.Env = environment()
	term := inTerminal(t, cmd)
	term.await(`serving`)
	d.writeConfig(strings.Replace(atOnce, "linger: 0s", "linger: 3ms", 1))
	if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	term.await(`policy.linger`)
	d.check(0, "", "lease", "create", "--ttl", "1m")
	if err := term.keys.Close(); err != nil {
		t.Error(err)
	}
	if code := term.end(); code != 0 {
		t.Errorf("exit status %d\n%s", code, &term.shown)
	}
	if _, err := os.Lstat(d.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket after the end: %v", err)
	}
}

func TestDaemonInATerminalLogsText(t *testing.T) {
	t.Parallel()
	dir := testutil.TempSocketDir(t)
	config := filepath.Join(dir, "gpreemptd.yaml")
	if err := os.WriteFile(config, []byte(atOnce), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, simBinary, "serve-sim", "--config", config, "--socket", filepath.Join(dir, "gpreemptd.sock"))
	cmd.Env = environment()
	term := inTerminal(t, cmd)
	line := term.await(`([^\r\n]+)\r?\n`)
	if !regexp.MustCompile(`^\d\d:\d\d:\d\d\.\d{3}  [A-Z]`).MatchString(line) {
		t.Errorf("the first line is not text: %q", line)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	term.end()
}
