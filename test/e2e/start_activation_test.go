package e2e

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// keepSocket listens, as systemd does, where daemons in a directory serve. The test
// closes it, and with that takes the path away, before the daemons are cleaned up after.
func keepSocket(t *testing.T) (dir string, l *net.UnixListener) {
	t.Helper()
	dir = testutil.TempSocketDir(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "gpreemptd.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	return dir, l
}

// passedSocket prepares a daemon that gets its socket as systemd passes it.
func passedSocket(t *testing.T, dir string, l *net.UnixListener) *daemon {
	t.Helper()
	passed, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { passed.Close() })
	d := prepare(t, dir, atOnce)
	d.process.Path = "/bin/sh" // who alone knows the pid before the daemon runs
	d.process.Args = append([]string{"sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"`}, d.process.Args...)
	d.process.ExtraFiles = []*os.File{passed}
	return d
}

func TestClientsWaitInAPassedSocketForTheNextDaemon(t *testing.T) {
	dir, l := keepSocket(t)
	defer l.Close()
	for _, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		d := passedSocket(t, dir, l)
		answer := make(chan result, 1)
		go func() { answer <- d.ctl("status") }() // there is no daemon yet
		d.run()
		if r := <-answer; r.Code != 0 {
			t.Errorf("gpctl, called while no daemon ran: %+v", r)
		}
		d.signal(how)
		d.checkExit(map[syscall.Signal]int{syscall.SIGKILL: -1, syscall.SIGTERM: 0}[how])
		if _, err := os.Lstat(l.Addr().String()); err != nil {
			t.Errorf("after %v: the socket is systemd's: %v", how, err)
		}
	}
}

// The caller of while one daemon follows another is answered by one of them.
func TestClientsAreAnsweredAcrossDaemonRestarts(t *testing.T) {
	dir, l := keepSocket(t)
	defer l.Close()
	const daemons, callers = 10, 4
	var calls sync.WaitGroup
	over := make(chan struct{})
	for range callers {
		calls.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-over:
					return
				default:
				}
				if err := askOnce(t.Context(), l.Addr().String()); err != nil {
					t.Errorf("call %d: %v", n, err)
				}
			}
		})
	}
	for range daemons {
		d := passedSocket(t, dir, l)
		d.run()
		d.awaitServing()
		d.signal(syscall.SIGTERM)
		d.checkExit(0)
	}
	last := passedSocket(t, dir, l)
	last.run()
	close(over)
	calls.Wait()
}

// askOnce asks for the status on a connection of its own.
func askOnce(ctx context.Context, socket string) error {
	conn, err := connect(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_, err = gpreemptv1.NewAdminServiceClient(conn).GetStatus(ctx, &gpreemptv1.GetStatusRequest{})
	return err
}

// A daemon may take its time to start.
func TestClientWaitsInAPassedSocketBeyondOneConnectAttempt(t *testing.T) {
	t.Parallel()
	dir, l := keepSocket(t)
	defer l.Close()
	d := passedSocket(t, dir, l)
	answer := make(chan result, 1)
	go func() { answer <- d.ctl("--timeout", "1m", "status") }()
	select {
	case r := <-answer:
		t.Errorf("gpctl, called while no daemon ran: %+v", r)
	case <-time.After(3 * time.Second): // it waits
		d.run()
		if r := <-answer; r.Code != 0 {
			t.Errorf("gpctl, called 3 s before a daemon ran: %+v", r)
		}
	}
}
