package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// heirSocket is the descriptor that an heir inherits.
const heirSocket = 3

// process is another process with one connection to the daemon.
type process struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// startProcess starts a client that obeys lines: see clientMain.
func (d *daemon) startProcess() *process {
	d.t.Helper()
	return d.runProcess(exec.Command(os.Args[0]))
}

// runProcess is startProcess with the command given.
func (d *daemon) runProcess(cmd *exec.Cmd) *process {
	d.t.Helper()
	cmd.Env = environment(clientEnv + "=" + d.socket)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		d.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		d.t.Fatal(err)
	}
	if err := cmd.Start(); errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) {
		d.t.Skipf("a client in a namespace or of a user of its own is not allowed here: %v", err)
	} else if err != nil {
		d.t.Fatal(err)
	}
	p := &process{t: d.t, cmd: cmd, in: in, out: bufio.NewScanner(out)}
	d.t.Cleanup(p.end)
	return p
}

// end lets the process end by itself, if it has not.
func (p *process) end() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}

// kill ends the process with SIGKILL.
func (p *process) kill() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		p.t.Fatal(err)
	}
}

// do sends a line and returns the answer.
func (p *process) do(format string, args ...any) string {
	p.t.Helper()
	line := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		p.t.Fatal(err)
	}
	return p.said()
}

// said returns the next line the process, or its heir, wrote.
func (p *process) said() string {
	p.t.Helper()
	if !p.out.Scan() {
		p.t.Fatalf("the process said nothing: %v", p.out.Err())
	}
	return p.out.Text()
}

// clientMain obeys lines on stdin:
//
//	announce       prints a new lease, of a minute
//	session        the same over a Session stream
//	complete ID    prints how the lease ended
//	renew ID       prints "ok"
//	close          closes the connection
//	drain          asks for what only an admin may
//	pass PATH      connects once more, and passes that socket to the listener on PATH
//	bequeath       hands its socket to a process that outlives it; that one says
//	               "cut off" when the daemon has closed the other end
//
// An error is printed as its reason.
func clientMain(socket string, in io.Reader, out io.Writer) int {
	c := &caller{}
	conn, err := connect(socket, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		raw, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err == nil {
			c.raw = raw.(*net.UnixConn)
		}
		return raw, err
	}))
	if err != nil {
		return 1
	}
	defer conn.Close()
	c.conn, c.online = conn, gpreemptv1.NewOnlineServiceClient(conn)
	for orders := bufio.NewScanner(in); orders.Scan(); {
		verb, operand, _ := strings.Cut(orders.Text(), " ")
		answer, err := c.obey(verb, operand)
		if err != nil {
			answer = string(gpreempt.ReasonOf(client.FromStatus(err)))
			if answer == "" {
				answer = err.Error()
			}
		}
		fmt.Fprintln(out, answer)
	}
	return 0
}

// caller is the connection of a client process.
type caller struct {
	conn   *grpc.ClientConn
	raw    *net.UnixConn // written before the first call is answered
	online gpreemptv1.OnlineServiceClient
}

func (c *caller) obey(verb, operand string) (answer string, err error) {
	ctx := context.Background()
	switch verb {
	case "announce":
		resp, err := c.online.NotifyOnline(ctx, announcement())
		return resp.GetLeaseId(), err
	case "session":
		stream, err := c.online.Session(ctx)
		if err != nil {
			return "", err
		}
		if err := stream.Send(announceFrame(1, announcement())); err != nil {
			return "", err
		}
		resp, err := stream.Recv()
		return resp.GetAnnounced().GetLeaseId(), err
	case "complete":
		resp, err := c.online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: operand})
		return resp.GetEnd().String(), err
	case "renew":
		_, err := c.online.Renew(ctx, &gpreemptv1.RenewRequest{LeaseId: operand, Ttl: durationpb.New(time.Minute)})
		return "ok", err
	case "close":
		return "ok", c.conn.Close()
	case "drain":
		_, err := gpreemptv1.NewAdminServiceClient(c.conn).SetDrain(ctx, &gpreemptv1.SetDrainRequest{Drain: true})
		return "ok", err
	case "pass":
		return "ok", c.pass(operand)
	case "bequeath":
		return "ok", c.bequeath()
	}
	return "", fmt.Errorf("unknown order %q", verb)
}

func (c *caller) pass(path string) error {
	passed, err := net.Dial("unix", c.raw.RemoteAddr().String())
	if err != nil {
		return err
	}
	defer passed.Close()
	socket, err := passed.(*net.UnixConn).File()
	if err != nil {
		return err
	}
	defer socket.Close()
	to, err := net.Dial("unix", path)
	if err != nil {
		return err
	}
	defer to.Close()
	_, _, err = to.(*net.UnixConn).WriteMsgUnix([]byte{0}, syscall.UnixRights(int(socket.Fd())), nil)
	return err
}

func (c *caller) bequeath() error {
	socket, err := c.raw.File()
	if err != nil {
		return err
	}
	defer socket.Close()
	heir := exec.Command(os.Args[0])
	heir.Env = append(os.Environ(), clientEnv+"=", heirEnv+"=1")
	heir.Stdout, heir.Stderr = os.Stdout, os.Stderr
	heir.ExtraFiles = []*os.File{socket}
	return heir.Start()
}

// heirMain holds the socket it inherited until the daemon closes its end.
func heirMain(out io.Writer) int {
	socket := os.NewFile(heirSocket, "socket")
	defer socket.Close()
	fmt.Fprintln(out, "inherited")
	if _, err := io.Copy(io.Discard, socket); err != nil {
		return 1
	}
	fmt.Fprintln(out, "cut off")
	return 0
}

func announceFrame(tag uint64, req *gpreemptv1.NotifyOnlineRequest) *gpreemptv1.SessionRequest {
	return &gpreemptv1.SessionRequest{Tag: tag, Frame: &gpreemptv1.SessionRequest_Announce{Announce: req}}
}
