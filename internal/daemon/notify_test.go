package daemon

import (
	"bytes"
	"net"
	"path/filepath"
	"testing"

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
