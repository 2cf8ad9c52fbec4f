package testutil

import (
	"errors"
	"net"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// A free address stays free until a server listens there, again and again.
func TestFreeAddressIsAssignedToNobodyElse(t *testing.T) {
	address := FreeAddress(t)
	for range 2 {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, text, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		t.Fatal(err)
	}
	// The kernel may choose this port only.
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_LOCAL_PORT_RANGE, port<<16|port); err != nil {
		t.Skip("the ports that the kernel chooses from cannot be limited:", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("the kernel chose the port for a server: %v", err)
	}
	server, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	to := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: server.Addr().(*net.TCPAddr).Port}
	if err := unix.Connect(fd, to); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("the kernel chose the port for a client: %v", err)
	}
}
