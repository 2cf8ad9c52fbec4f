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

// What differs between a process on a unix socket and the holder of a certificate
// on TCP is in this file; the rest of the server sees a link and an authz.Peer.

// link is an accepted connection whose peer is proved: a *peercred.Conn or a
// *mtls.Conn.
type link interface {
	Close() error
	// Done is closed when the connection is over.
	Done() <-chan struct{}
	// Died tells, once Done is closed, that it ended because its process died.
	Died() bool
	// Exiting tells that its process has exited or is about to.
	Exiting() bool
}

// linkIn returns the connection a handshake was about; nil when nothing was proved.
func linkIn(info credentials.AuthInfo) link {
	switch info := info.(type) {
	case peercred.AuthInfo:
		return info.Conn
	case mtls.AuthInfo:
		return info.Conn
	}
	return nil
}

// peerOf returns who is at the other end of a connection.
func peerOf(l link) authz.Peer {
	switch l := l.(type) {
	case *peercred.Conn:
		return l.Peer()
	case *mtls.Conn:
		return l.Peer()
	}
	return nil
}

// linkOf returns the connection a call came by; nil when nothing was proved.
func linkOf(ctx context.Context) link {
	if p, ok := peer.FromContext(ctx); ok {
		return linkIn(p.AuthInfo)
	}
	return nil
}

// doorkeeper lets a connection in when its peer is proved and its principal has
// not too many already. Refusing here costs no goroutine, no memory and no
// descriptor for longer than the refusal takes; the client sees its connection
// closed. There is no third way in: a connection of any other listener, such as
// one of plain TCP, proves nothing.
type doorkeeper struct {
	credentials.TransportCredentials // for processes
	certified                        credentials.TransportCredentials
	clients                          *clients
}

func (d *doorkeeper) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	d.clients.s.door.begun()
	way := d.TransportCredentials
	if _, ok := raw.(*mtls.Conn); ok {
		way = d.certified
	}
	conn, info, err := way.ServerHandshake(raw)
	if err != nil {
		d.clients.s.Refused(err)
		return nil, nil, err
	}
	c, err := d.clients.join(linkIn(info))
	if err != nil {
		d.clients.s.Refused(err)
		return nil, nil, err
	}
	return &paced{Conn: conn, s: d.clients.s, of: c}, info, nil
}

func (d *doorkeeper) Clone() credentials.TransportCredentials {
	return &doorkeeper{TransportCredentials: d.TransportCredentials.Clone(), certified: d.certified.Clone(), clients: d.clients}
}

// Refused counts and logs a connection that was not let in. One that says nothing, such as that of a prober, is no
// trouble. It does not block.
func (s *Server) Refused(err error) {
	if errors.Is(err, io.EOF) {
		s.cfg.Log.Debug("a connection ended before it began", logkey.Err(err))
		return
	}
	why := gpreempt.ReasonOf(err)
	if errors.Is(err, peercred.ErrFull) {
		why = gpreempt.ReasonConnsTotal
	}
	s.cfg.Events.Refused(cmp.Or(why, gpreempt.ReasonNoIdentity))
	s.cfg.Log.Warn("a connection is refused", logkey.Err(err))
}

// setHolder says in a message whose a lease is.
func setHolder(m *gpreemptv1.Lease, p authz.Peer) {
	switch p := p.(type) {
	case peercred.Peer:
		m.ClientUid = p.UID
	case mtls.Peer:
		m.ClientCertificate = p.Name()
	}
}

// fields returns what the log says of whoever is at the other end of a connection.
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

// howToGet says what gives a peer a right, "online" or "admin".
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
	return "connect by the daemon's unix socket, or by TCP with a certificate"
}
