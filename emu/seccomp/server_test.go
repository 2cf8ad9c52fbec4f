package seccomp

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// supervisor is a server whose programs use a device.
type supervisor struct {
	*Server
	socket string
	joined chan struct{}
	failed chan error

	mu        sync.Mutex
	listeners []*Listener
}

// supervise serves programs until the test ends.
func supervise(t *testing.T, d served) *supervisor {
	t.Helper()
	return superviseOn(t, socketPath(t), d)
}

func socketPath(t *testing.T) string {
	t.Helper()
	return filepath.Join(testutil.TempSocketDir(t), "socket")
}

func superviseOn(t *testing.T, socket string, d served) *supervisor {
	t.Helper()
	needSupport(t)
	s := &supervisor{socket: socket, joined: make(chan struct{}, 16), failed: make(chan error, 16)}
	var err error
	s.Server, err = Serve(s.socket, func(fd int) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.listeners = append(s.listeners, NewListener(fd, d.handle))
		s.joined <- struct{}{}
		return nil
	}, func(err error) { s.failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		for _, l := range s.listeners {
			if err := l.Wait(); err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

// enter runs a client that enters the supervisor and becomes another.
func (s *supervisor) enter(t *testing.T, client string, args ...string) string {
	t.Helper()
	return runCommand(t, command(t, "enter", append([]string{s.socket, client}, args...)...))
}

func runCommand(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	out := output(cmd)
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v, it printed %q", err, out())
	}
	return out()
}

func TestProgramsEnter(t *testing.T) {
	d := newDevice(t)
	s := supervise(t, d)
	for i := range 3 {
		if got, want := s.enter(t, "echo", "1", "2"), "1 0\n2 0\n"; got != want {
			t.Errorf("program %d printed %q, want %q", i, got, want)
		}
		<-s.joined
	}
	if diff := cmp.Diff(map[int]int{3: 2}, d.echoCounts()); diff != "" {
		t.Errorf("how many calls were seen how often (-want +got):\n%s", diff)
	}
}

func TestProgramEntersOnce(t *testing.T) {
	s := supervise(t, newDevice(t))
	if got, want := s.enter(t, "reenter", s.socket), "true\n5 0\n"; got != want {
		t.Errorf("is it %v, and the calls after it: got %q, want %q", ErrAlready, got, want)
	}
}

func TestProgramGetsTheReasonOfARefusal(t *testing.T) {
	needSupport(t)
	socket := socketPath(t)
	failed := make(chan error, 1)
	s, err := Serve(socket, func(int) error {
		return errors.New("the device is full" + strings.Repeat("!", 2*maxMessage))
	}, func(err error) { failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	got := runCommand(t, command(t, "enter", socket, "echo"))
	if want := "refuses: the device is full!"; !strings.Contains(got, want) {
		t.Errorf("the program got %q, want %q in it", got, want)
	}
	if err := <-failed; !strings.Contains(err.Error(), "the device is full") {
		t.Errorf("the supervisor got %v", err)
	}
}

func TestOtherUsersAreRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to be another user")
	}
	s := superviseOn(t, fmt.Sprintf("@gpreempt-seccomp-%d", os.Getpid()), newDevice(t))
	cmd := command(t, "enter", s.socket, "echo", "1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if got, want := runCommand(t, cmd), "user 65534 cannot enter: the supervisor serves its own user 0 and root"; !strings.Contains(got, want) {
		t.Errorf("the program got %q, want %q in it", got, want)
	}
	if err := <-s.failed; !strings.Contains(err.Error(), "of user 65534") {
		t.Errorf("the supervisor got %v", err)
	}
	if len(s.joined) != 0 {
		t.Error("it was accepted")
	}
}

func TestAllowedPeers(t *testing.T) {
	for _, tc := range []struct {
		peer unix.Ucred
		euid uint32
		want bool
	}{
		{unix.Ucred{Pid: 5, Uid: 1000}, 1000, true},
		{unix.Ucred{Pid: 5, Uid: 0}, 1000, true},
		{unix.Ucred{Pid: 5, Uid: 1001}, 1000, false},
		{unix.Ucred{Pid: 5, Uid: 1001}, 0, false},
		{unix.Ucred{Pid: 0, Uid: 0}, 0, false}, // in a pid namespace that is not visible
	} {
		if err := mayEnter(&tc.peer, tc.euid); (err == nil) != tc.want {
			t.Errorf("%+v at a supervisor of user %d: %v", tc.peer, tc.euid, err)
		}
	}
}

func TestMessagesWithoutAListenerAreRefused(t *testing.T) {
	s := supervise(t, newDevice(t))
	for name, send := range map[string]func(*net.UnixConn) error{
		"no descriptor": func(c *net.UnixConn) error { _, err := c.Write([]byte{protocol}); return err },
		"another version": func(c *net.UnixConn) error {
			_, _, err := c.WriteMsgUnix([]byte{protocol + 1}, unix.UnixRights(0), nil)
			return err
		},
		"more than one descriptor": func(c *net.UnixConn) error {
			_, _, err := c.WriteMsgUnix([]byte("hello"), unix.UnixRights(0, 0, 0), nil)
			return err
		},
	} {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: s.socket, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		if err := send(conn); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, maxMessage)
		n, err := conn.Read(answer)
		if err != nil || n < 2 || answer[0] != refused {
			t.Errorf("%s: answer %q, %v, want a refusal", name, answer[:n], err)
		}
		conn.Close()
		<-s.failed
	}
}

func TestCloseCancelsTransfers(t *testing.T) {
	socket := socketPath(t)
	failed := make(chan error, 1)
	s, err := Serve(socket, func(int) error { return nil }, func(err error) { failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on")
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket's file: %v, want it gone", err)
	}
}

func TestMissingSupervisorIsAnError(t *testing.T) {
	got := runCommand(t, command(t, "enter", socketPath(t), "echo"))
	if !strings.Contains(got, "connect to the supervisor") {
		t.Errorf("got %q", got)
	}
}

// A program whose supervisor is killed gets errors, and does not hang.
func TestCallsFailWithENOSYSOnceTheSupervisorIsKilled(t *testing.T) {
	needSupport(t)
	socket := socketPath(t)
	supervisor := command(t, "supervisor", socket)
	stdout, err := supervisor.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := supervisor.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	expect := func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("the supervisor printed %q, %v, want %q", lines.Text(), lines.Err(), want)
		}
	}
	expect("ready")
	client := command(t, "enter", socket, "twice")
	out := output(client)
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	expect("blocked")
	if err := supervisor.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = supervisor.Wait() // killed
	if err := client.Wait(); err != nil {
		t.Fatal(err)
	}
	if got, want := out(), fmt.Sprintf("%d %d\n", int(unix.ENOSYS), int(unix.ENOSYS)); got != want {
		t.Errorf("errnos %q, want ENOSYS twice, %q", got, want)
	}
}

// Without privilege a program enters with no_new_privs.
func TestProgramWithoutPrivilegeEnters(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to take the privilege away")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "marker"), []byte("here"), 0o644); err != nil {
		t.Fatal(err)
	}
	s := supervise(t, newDevice(t))
	cmd := command(t, "unprivileged", s.socket, "where")
	cmd.Dir = dir
	if got, want := runCommand(t, cmd), dir+" here 1\n"; got != want {
		t.Errorf("directory, marker, no_new_privs: got %q, want %q", got, want)
	}
}
