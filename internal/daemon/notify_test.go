package daemon

import (
	"bytes"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// notifySocket replaces systemd's notification socket for the rest of the test. The channel
// receives a value for each READY=1, from this process or from a child.
func notifySocket(tb testing.TB) (ready <-chan struct{}) {
	tb.Helper()
	path := filepath.Join(testutil.TempSocketDir(tb), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		tb.Fatalf("notification socket: %v", err)
	}
	tb.Setenv("NOTIFY_SOCKET", path)
	all, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		state := make([]byte, 4096)
		for {
			n, err := conn.Read(state)
			if err != nil {
				return
			}
			if bytes.HasPrefix(state[:n], []byte("READY=1")) {
				select {
				case all <- struct{}{}:
				default: // more than any test expects
				}
			}
		}
	}()
	tb.Cleanup(func() {
		_ = conn.Close() // ends the goroutine
		<-ended
	})
	return all
}

// A systemd that does not read blocks neither the scheduler's loop nor the end of the daemon.
func TestSystemdThatDoesNotReadIsNotWaitedFor(t *testing.T) {
	path := filepath.Join(testutil.TempSocketDir(t), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	sent := 0
	for err == nil { // the kernel keeps a number of messages, or of bytes
		if err = sdNotify("WATCHDOG=1", time.Second); err == nil {
			sent++
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("message %d: %v, want a time-out", sent+1, err)
	}
	state := make([]byte, 100)
	for range sent {
		if n, err := conn.Read(state); err != nil || string(state[:n]) != "WATCHDOG=1" {
			t.Errorf("read %q: %v", state[:n], err)
		}
	}
	if err := sdNotify("STOPPING=1", notifyTime); err != nil {
		t.Errorf("with room again: %v", err)
	}
}
