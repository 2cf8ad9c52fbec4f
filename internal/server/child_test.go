package server

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	goclient "github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// childEnv is the socket of the server that a child process calls.
const childEnv = "GPREEMPT_SERVER_TEST_SOCKET"

// childMain reads commands from stdin: "announce" prints a new lease, "complete ID"
// and "renew ID" print the reason of the error or "ok".
func childMain(socket string, in io.Reader, out io.Writer) int {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return 1
	}
	defer conn.Close()
	online := gpreemptv1.NewOnlineServiceClient(conn)
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var verb, id string
		_, _ = fmt.Sscan(lines.Text(), &verb, &id)
		var err error
		switch verb {
		case "announce":
			var r *gpreemptv1.NotifyOnlineResponse
			if r, err = online.NotifyOnline(context.Background(), &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute)}); err == nil {
				fmt.Fprintln(out, r.GetLeaseId())
				continue
			}
		case "complete":
			_, err = online.Complete(context.Background(), &gpreemptv1.CompleteRequest{LeaseId: id})
		case "renew":
			_, err = online.Renew(context.Background(), &gpreemptv1.RenewRequest{LeaseId: id})
		}
		if err != nil {
			fmt.Fprintln(out, gpreempt.ReasonOf(goclient.FromStatus(err)))
		} else {
			fmt.Fprintln(out, "ok")
		}
	}
	return 0
}

// child is a client process.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

func (h *host) startChild(t *testing.T) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+h.socket, "GORACE=atexit_sleep_ms=0")
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
	c := &child{cmd: cmd, in: in, lines: bufio.NewScanner(out)}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	return c
}

// do sends a line and returns the answer.
func (c *child) do(t *testing.T, line string) string {
	t.Helper()
	if _, err := fmt.Fprintln(c.in, line); err != nil {
		t.Fatal(err)
	}
	if !c.lines.Scan() {
		t.Fatalf("the child did not answer %q: %v", line, c.lines.Err())
	}
	return c.lines.Text()
}
