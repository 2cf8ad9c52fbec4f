package auth

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// With these variables the test binary runs as another process.
const (
	roleKey   = "AUTH_TEST_ROLE"
	socketKey = "AUTH_TEST_SOCKET"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleKey); role != "" {
		if err := play(role, os.Getenv(socketKey)); err != nil {
			fmt.Fprintln(os.Stderr, role+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(testutil.VerifyMain(m))
}

// play is the main function of a child. Each role reads commands from its standard input.
func play(role, socket string) error {
	orders := bufio.NewReader(os.Stdin)
	order := func() { _, _ = orders.ReadString('\n') } // or the end of the test
	switch role {
	case "exit":
		return nil
	case "client": // connect, close on the first line, exit on the second
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		order()
		conn.Close()
		order()
		return nil
	case "owner": // start a member of a new user namespace, and print its pid
		member := exec.Command("/proc/self/exe")
		member.Env = append(os.Environ(), roleKey+"=member")
		member.Stdin, member.Stdout, member.Stderr = os.Stdin, os.Stdout, os.Stderr
		member.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, AmbientCaps: []uintptr{unix.CAP_SETUID}}
		if err := member.Start(); err != nil {
			return err
		}
		fmt.Println(member.Process.Pid)
		return member.Wait()
	case "member": // become root of the namespace, once it has users, and connect
		order()
		if err := syscall.Setuid(0); err != nil {
			return err
		}
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		defer conn.Close()
		order()
		return nil
	case "parent": // connect, leave the socket to a grandchild and exit
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		file, err := conn.(*net.UnixConn).File()
		if err != nil {
			return err
		}
		heir := exec.Command("/proc/self/exe")
		heir.Env = append(os.Environ(), roleKey+"=heir")
		heir.ExtraFiles = []*os.File{file}
		heir.Stdout, heir.Stderr = os.Stdout, os.Stderr
		if err := heir.Start(); err != nil {
			return err
		}
		order()
		return nil
	case "heir": // keep an inherited socket until it ends
		file := os.NewFile(3, "socket")
		conn, err := net.FileConn(file)
		if err != nil {
			return err
		}
		file.Close()
		fmt.Println("holding")
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			return fmt.Errorf("reading the inherited socket gave %w, want the end", err)
		}
		fmt.Println("cut off")
		return nil
	case "server": // accept one connection and print why it is refused
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			return err
		}
		pl := NewUnixListener(l, UnixOptions{Refused: func(err error) { fmt.Println(err) }})
		fmt.Println("listening")
		go func() { _, _ = pl.Accept() }()
		order()
		return nil
	}
	return fmt.Errorf("no such role")
}

// child is another process.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Reader
}

// start starts the test binary in a role; prepare may change how. The child is
// killed and reaped when the test ends.
func start(t *testing.T, role, socket string, prepare func(*exec.Cmd)) *child {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleKey+"="+role, socketKey+"="+socket)
	cmd.Stderr = os.Stderr
	if prepare != nil {
		prepare(cmd)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	// Not StdoutPipe: Wait would close it while a grandchild still writes to it.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = w
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		t.Skipf("starting a child in role %s: %v", role, err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		r.Close()
	})
	return &child{cmd: cmd, in: in, lines: bufio.NewReader(r)}
}

func (c *child) order(t *testing.T) {
	t.Helper()
	if _, err := io.WriteString(c.in, "\n"); err != nil {
		t.Fatal(err)
	}
}

// line returns the next line of the child or of its child.
func (c *child) line(t *testing.T) string {
	t.Helper()
	s, err := c.lines.ReadString('\n')
	if err != nil {
		t.Fatalf("the child said %q and then %v", s, err)
	}
	return strings.TrimSuffix(s, "\n")
}
