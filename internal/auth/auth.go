// Package auth identifies the callers of the daemon and determines their rights.
//
// A caller is a process of this host, identified by the kernel on a unix socket, or
// the owner of a certificate on TCP. The kernel reports the process that called
// connect, at that time, in the daemon's own pid and user namespaces. That identity
// does not change when the socket is inherited or passed on, and it ends with that
// process: the connection is closed then, even if another process holds the socket.
// On TCP only TLS 1.3 is served, and only to clients with a certificate that the
// configured authorities have issued for use as a client. The connection ends when
// that certificate expires, and when new authorities no longer accept it.
package auth

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Peer is an identified caller: a Process or a Certificate.
type Peer interface {
	// Key returns the process, zero when the peer is not a process of this host.
	Key() gpreempt.ProcessKey
	// Principal returns the user of a process or the names of a certificate, as one
	// text: limits beyond one process are counted by it.
	Principal() string
	// String returns the peer for a person to read.
	String() string
}

// Conn is a connection of NewUnixListener or ListenTLS. Its methods may be called
// from any goroutine.
type Conn interface {
	net.Conn
	// Peer returns the caller. It is nil before the handshake of Credentials.
	Peer() Peer
	// Done is closed when the connection has ended: gRPC called Close at the end of the
	// stream of bytes, or the identity ended, which closes the connection.
	Done() <-chan struct{}
	// Died reports whether the connection ended because its process died. It is false
	// before Done is closed, and always on TCP.
	Died() bool
	// Exiting reports whether the process has exited or is exiting. It is true before
	// a dying process loses its sockets, which is before Done; on TCP it is false.
	Exiting() bool
	// Left reports whether the peer has closed its end, or reset the connection. What it had
	// sent before may not have been read. It does not block.
	Left() bool

	// handshake identifies the peer. gRPC bounds its time.
	handshake() error
}

// Info is the gRPC credentials.AuthInfo of a Conn.
type Info struct {
	credentials.CommonAuthInfo
	// Conn is never nil.
	Conn Conn
}

// AuthType returns the name of these credentials.
func (Info) AuthType() string { return protocol }

// protocol is the name that gRPC shows for these credentials.
const protocol = "gpreempt"

// FromContext returns the connection of a gRPC call; false when it is not one of
// this package.
func FromContext(ctx context.Context) (Conn, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, false
	}
	info, ok := p.AuthInfo.(Info)
	return info.Conn, ok
}

// Credentials returns server credentials for the connections of this package; any
// other connection fails the handshake. On a unix socket nothing is sent for it: the
// kernel has identified the peer, and no other process can read or write the
// connection, so its security level counts as privacy and integrity.
func Credentials() credentials.TransportCredentials { return transport{} }

type transport struct{}

func (transport) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := raw.(Conn)
	if !ok {
		return nil, nil, fmt.Errorf("auth: a %T does not identify its peer: serve gRPC on auth.NewUnixListener or auth.ListenTLS", raw)
	}
	if err := c.handshake(); err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c, Info{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, Conn: c}, nil
}

func (transport) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("auth: these credentials are for servers")
}

func (transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: protocol}
}

func (t transport) Clone() credentials.TransportCredentials { return t }

func (transport) OverrideServerName(string) error { return nil }

// left implements Conn.Left for a connection with a descriptor.
func left(conn net.Conn) bool {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return true // it is closed
	}
	events := []unix.PollFd{{Events: unix.POLLRDHUP}}
	err = raw.Control(func(fd uintptr) {
		events[0].Fd = int32(fd)
		_, _ = unix.Poll(events, 0) // on an error no event is set
	})
	return err != nil || events[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
}
