package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"go.uber.org/zap"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mtls"
	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// This file has what differs between a process on a unix socket and the owner of a
// certificate on TCP; the rest of the server uses a link and an authz.Peer.

// link is an accepted connection whose peer is known: a *peercred.Conn or a
// *mtls.Conn.
type link interface {
	Close() error
	// Done is closed when the connection is over.
	Done() <-chan struct{}
	// Died reports, once Done is closed, whether it ended because its process died.
	Died() bool
	// Exiting reports whether its process has exited or is exiting.
	Exiting() bool
}

// linkIn returns the connection of a handshake; nil when it proved no identity.
func linkIn(info credentials.AuthInfo) link {
	switch info := info.(type) {
	case peercred.AuthInfo:
		return info.Conn
	case mtls.AuthInfo:
		return info.Conn
	}
	return nil
}

// peerOf returns the peer of a connection.
func peerOf(l link) authz.Peer {
	switch l := l.(type) {
	case *peercred.Conn:
		return l.Peer()
	case *mtls.Conn:
		return l.Peer()
	}
	return nil
}

// linkOf returns the connection of a call; nil when it has no proved identity.
func linkOf(ctx context.Context) link {
	if p, ok := peer.FromContext(ctx); ok {
		return linkIn(p.AuthInfo)
	}
	return nil
}

// serverCredentials accepts a connection when its peer is proved and the limits of
// connections allow it. A refusal here costs no goroutine, no memory and no
// descriptor once it is over; the client sees its connection closed. A connection
// of any other listener, such as one of plain TCP, is refused.
type serverCredentials struct {
	credentials.TransportCredentials // of processes
	certified                        credentials.TransportCredentials
	s                                *Server
}

func (sc *serverCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	sc.s.drainer.handshake()
	creds := sc.TransportCredentials
	if _, ok := raw.(*mtls.Conn); ok {
		creds = sc.certified
	}
	conn, info, err := creds.ServerHandshake(raw)
	if err != nil {
		sc.s.Refused(err)
		return nil, nil, err
	}
	c, err := sc.s.clients.join(linkIn(info))
	if err != nil {
		sc.s.Refused(err)
		return nil, nil, err
	}
	return &throttledConn{Conn: conn, s: sc.s, c: c}, info, nil
}

func (sc *serverCredentials) Clone() credentials.TransportCredentials {
	return &serverCredentials{TransportCredentials: sc.TransportCredentials.Clone(), certified: sc.certified.Clone(), s: sc.s}
}

// Refused counts and logs a refused connection. A connection that ended without a
// byte, such as that of a probe, is logged at debug level only. Refused does not
// block.
func (s *Server) Refused(err error) {
	if errors.Is(err, io.EOF) {
		s.cfg.Log.Debug("connection ended before its handshake", logkey.Err(err))
		return
	}
	why := gpreempt.ReasonOf(err)
	if errors.Is(err, peercred.ErrFull) {
		why = gpreempt.ReasonConnsTotal
	}
	s.cfg.Events.Refused(cmp.Or(why, gpreempt.ReasonNoIdentity))
	s.cfg.Log.Warn("client connection refused", logkey.Err(err))
}

// setOwner sets the owner of a lease in a message.
func setOwner(m *gpreemptv1.Lease, p authz.Peer) {
	switch p := p.(type) {
	case peercred.Peer:
		m.ClientUid = p.UID
	case mtls.Peer:
		m.ClientCertificate = p.Name()
	}
}

// fields returns the fields of the log that describe the peer of a connection.
func (c *connection) fields() []zap.Field {
	switch p := c.peer.(type) {
	case peercred.Peer:
		fields := []zap.Field{logkey.UID(p.UID), logkey.GID(p.GID), logkey.PID(p.PID), logkey.Start(p.Start)}
		if origin, known := c.link.(*peercred.Conn).Origin(); known {
			fields = append(fields, logkey.Exe(origin.Exe), logkey.Cgroup(origin.Cgroup))
		}
		return fields
	case mtls.Peer:
		return []zap.Field{
			logkey.Certificate(p.Name()), logkey.CertificateSubject(p.Subject), logkey.Serial(p.Serial), logkey.Address(p.Address),
		}
	}
	return nil
}

// howToGet returns how a peer gets a right, "online" or "admin".
func howToGet(p authz.Peer, right string) string {
	switch p := p.(type) {
	case peercred.Peer:
		return fmt.Sprintf("add the user to one of access.%s_groups, and log in again", right)
	case mtls.Peer:
		if len(p.Names) == 0 {
			return "issue a certificate with a URI, a DNS name or a common name"
		}
		return fmt.Sprintf("add %.128q to tcp.%s on the daemon's host, and reload gpreemptd", p.Name(), right)
	}
	return "connect over the daemon's unix socket, or over TCP with a certificate"
}
