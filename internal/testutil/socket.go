package testutil

import (
	"net"
	"os"
	"testing"
)

// maxSocketDir is the longest directory that leaves room for a name in a unix
// socket's address, which holds 108 bytes with its final zero.
const maxSocketDir = 80

// TempSocketDir returns a new directory whose path is at most 80 bytes long, and
// removes it when the test ends. t.TempDir cannot be used for sockets: its path contains
// the name of the test, and the path of a socket has at most 107 bytes.
func TempSocketDir(tb testing.TB) string {
	tb.Helper()
	parent := os.TempDir()
	const suffix = len("/gp-0123456789")
	if len(parent)+suffix > maxSocketDir {
		parent = "/tmp"
	}
	dir, err := os.MkdirTemp(parent, "gp-") //nolint:usetesting // tb.TempDir is what this replaces
	if err != nil {
		tb.Fatalf("create a directory for sockets: %v", err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Errorf("remove the directory for sockets: %v", err)
		}
	})
	return dir
}

// FreeAddress returns an unused address of the loopback interface, for servers that do not
// accept a listener.
func FreeAddress(tb testing.TB) string {
	tb.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatalf("find a free address: %v", err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}
