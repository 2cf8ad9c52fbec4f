package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/net/http2"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Several users take every place they can, and keep it: root's gpctl reads, drains and
// creates a lease, and a user who comes later is served.
func TestRootIsServedWhenOtherUsersHoldEveryPlace(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("needs root, to connect as other users")
	}
	const users, each = 8, 256
	dir := testutil.TempSocketDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	d := startIn(t, dir, forStrangers)
	held := 0
	holders := []func() int{d.hold(each, 0)} // in a container
	for i := range users {
		holders = append(holders, d.hold(each, uint32(100_000+i)))
	}
	for _, served := range holders {
		held += served()
	}
	if most := 1024 - 64; held < most*8/10 || held > most {
		t.Errorf("%d places are held, want most of %d", held, most)
	}
	for _, args := range [][]string{{"status"}, {"drain", "on"}, {"drain", "off"}, {"lease", "create"}} {
		if r := d.ctl(args...); r.Code != 0 {
			t.Errorf("gpctl %v of root: exit status %d: %s", args, r.Code, r.Err)
		}
	}
	if is := d.attack(attack{Reason: true})(); is.Failure != "" {
		t.Errorf("another user's call is refused: %s", is.Failure)
	}
	if d.refusals()[string(gpreempt.ReasonConnsTotal)] == 0 {
		t.Error("no connection was refused for lack of places")
	}
}

// hold opens connections as a user of the group of forStrangers, root in a pid namespace of
// its own. They stay until the end of the test; served returns how many there are.
func (d *daemon) hold(connections int, uid uint32) (served func() int) {
	d.t.Helper()
	who := user(uid)
	if uid == 0 {
		who = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	}
	_, out := d.hostile(who, attack{Hold: connections})
	return func() int { return d.held(out) }
}

// held returns how many of what it asked for a hostile client has got.
func (d *daemon) held(out io.Reader) (n int) {
	d.t.Helper()
	if _, err := fmt.Fscan(out, &n); err != nil {
		d.t.Fatalf("a hostile client prints no number: %v", err)
	}
	return n
}

// holdMain opens connections, prints how many are served, and keeps them until in ends.
func holdMain(a attack, in io.Reader, out io.Writer) int {
	var conns []net.Conn
	for range a.Hold {
		c, err := net.Dial("unix", a.Socket)
		if err != nil {
			fmt.Fprintln(out, err)
			return 1
		}
		defer c.Close()
		_, _ = c.Write(slices.Concat(hello, frame(framePing, 0, 0, make([]byte, 8)))) // an error is the refusal
		conns = append(conns, c)
	}
	// A connection that is served answers a ping. One that is refused is closed, and may be sent
	// the settings of HTTP/2 before.
	var served atomic.Int64
	var all sync.WaitGroup
	for _, c := range conns {
		all.Go(func() {
			frames := http2.NewFramer(c, c)
			for {
				f, err := frames.ReadFrame()
				if err != nil { // the refusal
					return
				}
				if _, ok := f.(*http2.PingFrame); ok {
					served.Add(1)
					return
				}
			}
		})
	}
	all.Wait()
	fmt.Fprintln(out, served.Load())
	_, _ = io.Copy(io.Discard, in)
	return 0
}

// reasonMain makes a call, and prints its error as the failure of the tally.
func reasonMain(a attack, out io.Writer) int {
	fmt.Fprintln(out, "ready")
	var is tally
	conn, err := connect(a.Socket)
	if err == nil {
		defer conn.Close()
		_, err = gpreemptv1.NewAdminServiceClient(conn).GetPolicy(context.Background(), &gpreemptv1.GetPolicyRequest{})
	}
	if err != nil {
		is.Failure = string(gpreempt.ReasonOf(client.FromStatus(err)))
	}
	if err := json.NewEncoder(out).Encode(is); err != nil {
		return 1
	}
	return 0
}
