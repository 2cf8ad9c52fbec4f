package server

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"

	"go.uber.org/zap"
	"google.golang.org/grpc/credentials"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// This file has what differs between a process on a unix socket and the owner of a
// certificate on TCP; the rest of the server uses an auth.Conn and an auth.Peer.

// serverCredentials accepts a connection when its peer is proved and has a right, and the
// limits of connections allow it. A connection of any other listener, such as one of
// plain TCP, is refused.
type serverCredentials struct {
	credentials.TransportCredentials
	s *Server
}

func (sc *serverCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	sc.s.drainer.handshake()
	conn, info, err := sc.prove(raw)
	if err != nil {
		sc.s.Refused(err)
		return nil, nil, err
	}
	proved := info.(auth.Info)
	c := sc.s.clients.join(proved.Conn)
	if c.refused != nil && !sc.s.explain(c) {
		return nil, nil, credentials.ErrConnDispatched
	}
	proved.Conn = c
	return &throttledConn{Conn: conn, s: sc.s, c: c}, proved, nil
}

// prove has the peer proved. A handshake of TLS takes about a millisecond of a processor, and nobody
// can be charged for it: all of them take turns, and use at most half of the processors' time.
func (sc *serverCredentials) prove(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if raw.LocalAddr().Network() == "tcp" {
		free, err := sit(sc.s.closing, sc.s.handshakes)
		if err != nil {
			_ = raw.Close()
			return nil, nil, err
		}
		defer within(seatTime, free)()
	}
	return sc.TransportCredentials.ServerHandshake(raw)
}

func (sc *serverCredentials) Clone() credentials.TransportCredentials {
	return &serverCredentials{TransportCredentials: sc.TransportCredentials.Clone(), s: sc.s}
}

// Refused counts and logs a refused connection. A connection that ended without a
// byte, such as that of a probe, is logged at debug level only. Refused does not
// block.
func (s *Server) Refused(err error) {
	if errors.Is(err, io.EOF) {
		s.cfg.Log.Debug("connection ended before its handshake", log.Err(err))
		return
	}
	why := gpreempt.ReasonOf(err)
	if errors.Is(err, auth.ErrFull) {
		why = gpreempt.ReasonConnsTotal
	}
	s.cfg.Events.Refused(cmp.Or(why, gpreempt.ReasonNoIdentity))
	s.cfg.Log.Warn("client connection refused", log.Err(err))
}

// setOwner sets the owner of a lease in a message.
func setOwner(m *gpreemptv1.Lease, p auth.Peer) {
	switch p := p.(type) {
	case auth.Process:
		m.ClientUid = p.UID
	case auth.Certificate:
		m.ClientCertificate = p.Name()
	}
}

// fields returns the fields of the log that describe the peer of a connection.
func (c *connection) fields() []zap.Field {
	switch p := c.peer.(type) {
	case auth.Process:
		fields := []zap.Field{log.UID(p.UID), log.GID(p.GID), log.PID(p.PID), log.Start(p.Start)}
		if origin, known := p.Origin(); known {
			fields = append(fields, log.Exe(origin.Exe), log.Cgroup(origin.Cgroup))
		}
		return fields
	case auth.Certificate:
		return []zap.Field{
			log.Certificate(p.Name()), log.CertificateSubject(p.Subject), log.Serial(p.Serial), log.Address(p.Address),
		}
	}
	return nil
}

// howToGet returns how a peer gets a right, "online" or "admin".
func howToGet(p auth.Peer, right string) string {
	switch p := p.(type) {
	case auth.Process:
		if p.Nested && right == "admin" {
			return "call from outside of the container, or set access.container_admins in the daemon's config file"
		}
		return fmt.Sprintf("join a group of access.%s_groups (%s by default) and log in again, or run as root", right, map[string]string{"online": "gpreempt", "admin": "gpreempt-admin"}[right])
	case auth.Certificate:
		if len(p.Names) == 0 {
			return "issue a certificate with a URI, a DNS name or a common name"
		}
		return fmt.Sprintf("add %.128q to tcp.%s on the daemon's host, and reload gpreemptd", p.Name(), right)
	}
	return "connect over the daemon's unix socket, or over TCP with a certificate"
}
