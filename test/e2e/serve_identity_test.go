package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// lease returns what the daemon says of a live lease.
func (d *daemon) lease(id string) *gpreemptv1.Lease {
	d.t.Helper()
	resp, err := d.admin.ListLeases(d.t.Context(), &gpreemptv1.ListLeasesRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	for _, l := range resp.GetLeases() {
		if l.GetLeaseId() == id {
			return l
		}
	}
	d.t.Fatalf("no lease %s", id)
	return nil
}

// checkHolder checks whose a lease is.
func (d *daemon) checkHolder(id string, pid int, uid uint32) {
	d.t.Helper()
	if l := d.lease(id); l.GetClientPid() != int32(pid) || l.GetClientUid() != uid {
		d.t.Errorf("the lease is of pid %d, uid %d; want %d, %d", l.GetClientPid(), l.GetClientUid(), pid, uid)
	}
}

// Root in a container can become any user of the host, so no user and no group has the
// right of an admin there.
func TestRootOfAPIDNamespaceMayAnnounceAndChangesNothing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to make a pid namespace")
	}
	for config, want := range map[string]string{"# defaults": "ADMIN_RIGHT_MISSING", "access: {container_admins: true}": "ok"} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			d := start(t, config)
			cmd := exec.Command(strangersBinary)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
			p := d.runProcess(cmd)
			d.checkHolder(p.do("announce"), p.cmd.Process.Pid, 0)
			if said := p.do("drain"); said != want {
				t.Errorf("root of a pid namespace asks to drain: %s, want %s", said, want)
			}
		})
	}
}

// A client that is root in a user namespace of its own, and process 1 in a pid
// namespace of its own, is who it is on the host: that decides what it may, and its
// lease ends with it.
func TestClientInNamespacesIsIdentifiedByItsHostPID(t *testing.T) {
	uid, gid := uint32(os.Getuid()), uint32(os.Getgid())
	if uid == 0 {
		uid, gid = stranger, stranger
	}
	for name, flags := range map[string]uintptr{
		"user": syscall.CLONE_NEWUSER, "user and pid": syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := startForStrangers(t)
			cmd := exec.Command(strangersBinary)
			cmd.SysProcAttr = &syscall.SysProcAttr{
				Cloneflags:  flags,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(uid), Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(gid), Size: 1}},
				Credential:  &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
			}
			p := d.runProcess(cmd)
			lease := p.do("announce")
			d.checkHolder(lease, p.cmd.Process.Pid, uid)
			if os.Getuid() == 0 { // otherwise it is the daemon's owner, who may
				if said := p.do("drain"); said != "ADMIN_RIGHT_MISSING" {
					t.Errorf("root of a namespace asks to drain: %s, want ADMIN_RIGHT_MISSING", said)
				}
			}
			p.kill()
			if end := d.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED {
				t.Errorf("the lease ended as %v, want CLIENT_DIED", end)
			}
		})
	}
}

func TestClientInAPIDNamespaceIsIdentifiedByItsHostPID(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	cmd := exec.Command(os.Args[0])
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	p := d.runProcess(cmd)
	lease := p.do("announce")
	d.checkHolder(lease, p.cmd.Process.Pid, uint32(os.Getuid()))
	p.kill()
	if end := d.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED {
		t.Errorf("the lease ended as %v, want CLIENT_DIED", end)
	}
}

// A process that receives a connection from another process acts as that process, and no
// longer than it lives.
func TestPassedSocketBelongsToTheProcessThatConnected(t *testing.T) {
	t.Parallel()
	d := start(t, atOnce)
	p := d.startProcess()
	p.do("announce") // it has a connection, and so an address to connect to
	counter, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(filepath.Dir(d.socket), "counter.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer counter.Close()
	if said := p.do("pass %s", counter.Addr()); said != "ok" {
		t.Fatal(said)
	}
	passed := receive(t, counter)
	conn, err := grpc.NewClient("passthrough:passed", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return passed, nil }))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	online := gpreemptv1.NewOnlineServiceClient(conn)
	resp, err := online.NotifyOnline(t.Context(), announcement())
	if err != nil {
		t.Fatal(err)
	}
	d.checkHolder(resp.GetLeaseId(), p.cmd.Process.Pid, uint32(os.Getuid()))
	// This process is another client on its own connection.
	_, err = d.online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: resp.GetLeaseId()})
	checkError(t, "the lease of the passed connection completed by another", err,
		refusal{codes.PermissionDenied, "FOREIGN_LEASE", "gpctl lease release"})
	p.kill()
	if end := d.awaitEnd(resp.GetLeaseId()); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED {
		t.Errorf("the lease ended as %v, want CLIENT_DIED", end)
	}
	// Each connection learns of the death by itself, so this one may be the second.
	d.eventually("the passed connection speaks for nobody, and has no lease", func() bool {
		_, err := online.NotifyOnline(t.Context(), announcement())
		return err != nil && d.status().GetLeaseCount() == 0
	})
}

// receive takes the socket that somebody passes.
func receive(t *testing.T, from *net.UnixListener) net.Conn {
	t.Helper()
	conn, err := from.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	rights := make([]byte, syscall.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 1), rights)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := syscall.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		t.Fatalf("%d control messages: %v", len(messages), err)
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fds[0]), "passed")
	defer file.Close()
	passed, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	return passed
}

// lastPID is the file that sets the pid after which the kernel continues.
const lastPID = "/proc/sys/kernel/ns_last_pid"

// A process that gets the pid of a dead client gets nothing else of it, although the
// dead one's socket lives on.
func TestReusedPIDIsAnotherClient(t *testing.T) {
	if f, err := os.OpenFile(lastPID, os.O_WRONLY, 0); err != nil {
		t.Skipf("no way to choose a pid: %v", err)
	} else if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	d := start(t, atOnce)
	first := d.startProcess()
	pid := first.cmd.Process.Pid
	lease := first.do("announce")
	if said := first.do("bequeath"); said != "ok" && said != "inherited" {
		t.Fatal(said)
	}
	first.said()
	started := d.lease(lease).GetClientPid()
	first.kill()
	if end := d.awaitEnd(lease); end != gpreemptv1.LeaseEnd_LEASE_END_CLIENT_DIED {
		t.Errorf("the lease ended as %v, want CLIENT_DIED", end)
	}
	if said := first.said(); said != "cut off" {
		t.Errorf("the heir says %q, want its socket closed by the daemon", said)
	}
	first.end() // reaped: the pid is free

	var second *process
	for range 50 {
		if err := os.WriteFile(lastPID, fmt.Append(nil, pid-1), 0); err != nil {
			t.Skipf("no way to choose a pid: %v", err)
		}
		if second = d.startProcess(); second.cmd.Process.Pid == pid {
			break
		}
		second.end()
	}
	if second.cmd.Process.Pid != pid {
		t.Skipf("pid %d is taken by another process each time", pid)
	}
	for _, order := range []string{"complete", "renew"} {
		if said := second.do("%s %s", order, lease); said != "FOREIGN_LEASE" {
			t.Errorf("%s of the dead one's lease: %s, want FOREIGN_LEASE", order, said)
		}
	}
	next := second.do("announce")
	if next == lease || started != d.lease(next).GetClientPid() {
		t.Errorf("the second process %d has lease %s of pid %d after %s", pid, next, d.lease(next).GetClientPid(), lease)
	}
}
