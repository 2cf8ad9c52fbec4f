package auth

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// listen returns a listener and the path to reach it by.
func listen(t *testing.T, o UnixOptions) (*unixListener, string) {
	t.Helper()
	path := filepath.Join(testutil.TempSocketDir(t), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	pl := NewUnixListener(l, o).(*unixListener)
	t.Cleanup(func() { pl.Close() })
	return pl, path
}

func accept(t *testing.T, l net.Listener) *unixConn {
	t.Helper()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*unixConn)
}

func dial(t *testing.T, path string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// serve reads until the end and closes the connection, as gRPC does.
func serve(c *unixConn) {
	_, _ = io.Copy(io.Discard, c)
	_ = c.Close()
}

// startOf returns the start time of a process.
func startOf(t *testing.T, pid int) uint64 {
	t.Helper()
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(pid)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	return p.Key().Start
}

// myself is this process as a peer.
func myself(t *testing.T) Process {
	t.Helper()
	groups, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	p := Process{PID: int32(os.Getpid()), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Start: startOf(t, os.Getpid())}
	for _, g := range groups {
		p.Groups = append(p.Groups, uint32(g))
	}
	return p
}

var sortGroups = cmp.Options{cmpopts.SortSlices(func(a, b uint32) bool { return a < b }), cmpopts.EquateEmpty()}

func TestPeerIsTheProcessThatConnected(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	dial(t, path)
	c := accept(t, l)
	if diff := cmp.Diff(myself(t), c.Peer(), sortGroups); diff != "" {
		t.Errorf("this process (-want +got):\n%s", diff)
	}

	other := start(t, "client", path, nil)
	got := accept(t, l).peer
	want := myself(t)
	want.PID, want.Start = int32(other.cmd.Process.Pid), got.Start
	if diff := cmp.Diff(want, got, sortGroups); diff != "" {
		t.Errorf("a child (-want +got):\n%s", diff)
	}
	if got.Start < c.peer.Start {
		t.Errorf("the child started at %d, before this process at %d", got.Start, c.peer.Start)
	}
}

func TestPeerIsIdentifiedOnKernelsWithoutPeerPidfd(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	l.open = openPID
	client := start(t, "client", path, nil)
	c := accept(t, l)
	want := myself(t)
	want.PID, want.Start = int32(client.cmd.Process.Pid), startOf(t, client.cmd.Process.Pid)
	if diff := cmp.Diff(want, c.Peer(), sortGroups); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := client.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.Done():
	case <-time.After(maxWait):
		t.Fatal("the connection of a process that was killed has not ended")
	}
	if !c.Died() {
		t.Error("Died is false after SIGKILL")
	}
}

func TestPeerHasEveryGroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to set the groups of a child")
	}
	want := []uint32{7}
	for i := range uint32(100) {
		want = append(want, 70000+i) // more than fit the first buffer
	}
	l, path := listen(t, UnixOptions{})
	start(t, "client", path, func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Gid: 4242, Groups: want}}
	})
	got := accept(t, l).peer
	slices.Sort(got.Groups)
	if diff := cmp.Diff(Process{PID: got.PID, GID: 4242, Groups: want, Start: got.Start}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestClosedConnectionIsNotADeath(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	client := start(t, "client", path, nil)
	c := accept(t, l)
	if c.Died() {
		t.Error("Died is true before the end")
	}
	if c.Left() {
		t.Error("Left is true before the end")
	}
	client.order(t) // to close
	serve(c)
	<-c.Done()
	if !c.Left() {
		t.Error("Left is false after the end")
	}
	if c.Died() {
		t.Error("Died is true, but the process only closed its end")
	}
	if err := c.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestKilledClientIsDoneAndDied(t *testing.T) {
	for name, reader := range map[string]func(*unixConn){
		// The end of the bytes is seen before the death is.
		"while reading": serve,
		// Nobody reads, so only the death ends it.
		"while not reading": func(*unixConn) {},
	} {
		t.Run(name, func(t *testing.T) {
			l, path := listen(t, UnixOptions{})
			for range 5 {
				client := start(t, "client", path, nil)
				c := accept(t, l)
				read := make(chan struct{})
				go func() { defer close(read); reader(c) }()
				if err := client.cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				<-c.Done()
				if !c.Died() {
					t.Error("Died is false after SIGKILL")
				}
				<-read
			}
		})
	}
}

func TestDeathClosesASocketThatAnotherProcessInherited(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	parent := start(t, "parent", path, nil)
	c := accept(t, l)
	if got := parent.line(t); got != "holding" {
		t.Fatalf("the grandchild said %q", got)
	}
	select {
	case <-c.Done():
		t.Fatal("over while its process lives")
	default:
	}
	parent.order(t) // to exit
	serve(c)
	select {
	case <-c.Done():
	case <-time.After(maxWait):
		t.Fatal("the connection of a process that has exited has not ended")
	}
	if !c.Died() {
		t.Error("Died is false, but the process exited")
	}
	if got := parent.line(t); got != "cut off" {
		t.Errorf("the grandchild said %q", got)
	}
}

func TestProcessThatDiesDuringIdentificationIsRefused(t *testing.T) {
	for name, open := range map[string]func(int, int32) (int, uint64, error){"peer pidfd": openPeer, "older kernel": openPID} {
		t.Run(name, func(t *testing.T) {
			refused := make(chan error, 1)
			l, path := listen(t, UnixOptions{Refused: func(err error) { refused <- err }})
			client := start(t, "client", path, nil)
			l.open = func(socket int, pid int32) (int, uint64, error) {
				if pid != int32(client.cmd.Process.Pid) {
					return openPeer(socket, pid)
				}
				pidfd, begun, err := open(socket, pid)
				_ = client.cmd.Process.Kill()
				_ = client.cmd.Wait()
				return pidfd, begun, err
			}
			next := make(chan Process, 1)
			go func() {
				defer close(next)
				c, err := l.Accept()
				if err != nil {
					t.Error(err)
					return
				}
				c.Close()
				next <- c.(*unixConn).peer
			}()
			var err error
			select {
			case err = <-refused:
			case got := <-next:
				t.Fatalf("accepted a connection of pid %d, which has exited", got.PID)
			}
			want := fmt.Sprintf("connection of pid %d, uid %d refused: it has exited", client.cmd.Process.Pid, os.Geteuid())
			if !errors.Is(err, ErrExited) || err.Error() != want {
				t.Errorf("refused with %q, want %q", err, want)
			}
			dial(t, path)
			if got := <-next; got.PID != int32(os.Getpid()) {
				t.Errorf("the next connection is of pid %d", got.PID)
			}
		})
	}
}

func TestProcessOfAnotherPIDNamespaceIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make a pid namespace")
	}
	path := filepath.Join(testutil.TempSocketDir(t), "s")
	server := start(t, "server", path, func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	})
	if got := server.line(t); got != "listening" {
		t.Fatalf("the server said %q", got)
	}
	conn := dial(t, path)
	want := "connection of uid 0 refused: its process is in a pid namespace that gpreemptd cannot see:" +
		" run gpreemptd in the host's pid namespace (hostPID: true in a pod)"
	if got := server.line(t); got != want {
		t.Errorf("refused with %q,\nwant %q", got, want)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("reading gave %v, want the end: refused connections are closed", err)
	}
}

// Many containers run as the same user, and root in one can become any user.
func TestProcessInAContainerIsNoAdminAndReadsItsOwnMemoryOnly(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make a pid namespace")
	}
	l, path := listen(t, UnixOptions{})
	inNamespace := func(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID} }
	client := start(t, "client", path, inNamespace)
	peer := accept(t, l).peer
	want := myself(t)
	want.PID, want.Start, want.Nested = int32(client.cmd.Process.Pid), startOf(t, client.cmd.Process.Pid), true
	want.Account = peer.Account
	if diff := cmp.Diff(want, peer, sortGroups); diff != "" {
		t.Errorf("the peer (-want +got):\n%s", diff)
	}
	var namespace unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", peer.PID), &namespace); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("pid namespace %d", namespace.Ino); peer.Principal() != want {
		t.Errorf("it counts as %q, want %q", peer.Principal(), want)
	}
	policy := Policy{}
	if got := policy.Rights(peer); got != Online|Read {
		t.Errorf("rights %b, want %b", got, Online|Read)
	}
	start(t, "client", path, inNamespace)
	other := accept(t, l).peer
	got := map[string]bool{
		"its own":                 policy.MayReadMemory(peer, peer.Key(), 0),
		"of another container":    policy.MayReadMemory(peer, other.Key(), 0),
		"of the host":             policy.MayReadMemory(peer, myself(t).Key(), 0),
		"of another user":         policy.MayReadMemory(peer, peer.Key(), 5),
		"of a process that ended": policy.MayReadMemory(peer, gpreempt.ProcessKey{PID: peer.PID, Start: 1}, 0),
	}
	if diff := cmp.Diff(map[string]bool{"its own": true, "of another container": false, "of the host": false, "of another user": false, "of a process that ended": false}, got); diff != "" {
		t.Errorf("may read the memory (-want +got):\n%s", diff)
	}
}

func TestExitedProcessCannotBeOpened(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleKey+"=exit")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	_, _, err := openPID(-1, int32(cmd.Process.Pid))
	if err == nil || !strings.Contains(err.Error(), "start time cannot be read") {
		t.Errorf("got %v", err)
	}
}

func TestSilentPeersDoNotDelayAccept(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	for range 3 {
		dial(t, path) // and say nothing
	}
	for range 3 {
		accept(t, l)
	}
	d := startTLS(t)
	for range 3 {
		d.dial(nil)
	}
	d.enter(d.config(d.ca.Issue()))
}

func TestAcceptEndsWithTheListener(t *testing.T) {
	l, path := listen(t, UnixOptions{})
	dial(t, path)
	c := accept(t, l)
	l.Close()
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept gave %v", err)
	}
	select {
	case <-c.Done():
		t.Error("closing the listener closed a connection")
	default:
	}
}

func TestDescriptorsAreClosedAndNotInherited(t *testing.T) {
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	fail := false
	l, path := listen(t, UnixOptions{Refused: func(error) { fail = false }})
	l.open = func(socket int, pid int32) (int, uint64, error) {
		if fail {
			return -1, 0, ErrExited
		}
		return openPeer(socket, pid)
	}
	before := count()
	for i := range 20 {
		client, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		if fail = i%2 == 1; fail { // then Accept refuses and takes the next
			client.Close()
			if client, err = net.Dial("unix", path); err != nil {
				t.Fatal(err)
			}
		}
		c := accept(t, l)
		raw, err := c.pidfd.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		err = raw.Control(func(fd uintptr) {
			if flags, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("the pidfd has flags %#x, %v; want close on exec", flags, err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		client.Close()
		c.Close()
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestRefusedUserIsNotIdentified(t *testing.T) {
	why := errors.New("too many")
	refused := make(chan error, 1)
	l, path := listen(t, UnixOptions{Admit: func(p Process) error {
		if p.UID != uint32(os.Geteuid()) {
			t.Errorf("asked for %v", p)
		}
		return why
	}, Refusal: func(err error) []byte { return []byte(err.Error()) }, Refused: func(err error) { refused <- err }})
	l.open = func(int, int32) (int, uint64, error) {
		t.Error("a refused connection is identified")
		return -1, 0, ErrExited
	}
	go func() { _, _ = l.Accept() }() // ends with the listener
	conn := dial(t, path)
	err := <-refused
	if !errors.Is(err, why) {
		t.Errorf("refused with %v, want %v", err, why)
	}
	if got, end := io.ReadAll(conn); string(got) != err.Error() || end != nil {
		t.Errorf("read %q, %v; want %q and the end", got, end, err)
	}
}

func TestConnectionsBeyondTheLimitAreRefusedUntilOneEnds(t *testing.T) {
	var reserved atomic.Bool
	outcomes, conns := make(chan error, 1), make(chan net.Conn, 32)
	l, path := listen(t, UnixOptions{
		MaxConns: 16, Reserved: func(Process) bool { return reserved.Load() }, Refused: func(err error) { outcomes <- err },
	})
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			conns <- c
			outcomes <- nil
		}
	}()
	t.Cleanup(func() {
		for len(conns) > 0 {
			(<-conns).Close()
		}
	})
	expect := func(n int, want error) {
		t.Helper()
		for i := range n {
			dial(t, path)
			if err := testutil.Receive(t, outcomes, "the outcome of a connection"); !errors.Is(err, want) {
				t.Fatalf("connection %d of %d: %v, want %v", i+1, n, err, want)
			}
		}
	}
	expect(15, nil)
	expect(3, ErrFull)
	reserved.Store(true)
	expect(1, nil)
	expect(3, ErrFull)
	first := <-conns
	for range 2 { // closing twice counts once
		if err := first.Close(); err != nil {
			t.Error(err)
		}
	}
	expect(1, nil)
	expect(3, ErrFull)
}
