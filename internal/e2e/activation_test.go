package e2e

import (
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

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
	dir := testutil.TempSocketDir(t)
	path := filepath.Join(dir, "gpreemptd.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
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
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("after %v: the socket is systemd's: %v", how, err)
		}
	}
}
