package testutil

import (
	"net"
	"os"
	"strconv"
	"syscall"
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

// FreeAddress returns an address of the loopback interface for servers that do not accept a
// listener. A socket stays bound to it until the test ends, so the kernel does not choose its port
// for others. Servers with SO_REUSEADDR, such as those in Go, can listen on it.
func FreeAddress(tb testing.TB) string {
	tb.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		tb.Fatalf("find a free address: %v", err)
	}
	tb.Cleanup(func() { _ = syscall.Close(fd) })
	err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err != nil {
		tb.Fatalf("find a free address: %v", err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		tb.Fatalf("find a free address: %v", err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(bound.(*syscall.SockaddrInet4).Port))
}
