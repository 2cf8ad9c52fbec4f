package client

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

// transport implements gRPC's credentials. On a unix socket nothing is encrypted, and
// the daemon's kernel identifies this process; on TCP certificates identify both sides.
// It wraps each socket in a *connection, so that a call knows the connection of its
// lease.
type transport struct{ c *Client }

func (t transport) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if t.c.certificate != nil {
		secured, err := t.c.certificate.secure(ctx, authority, raw)
		if err != nil {
			return nil, nil, err
		}
		raw = secured
	}
	conn := &connection{Conn: raw, c: t.c}
	return conn, authInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		conn:           conn,
	}, nil
}

func (transport) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("gpreempt client: these credentials are for clients")
}

func (transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: protocol}
}

// protocol is the name that gRPC shows for these credentials.
const protocol = "gpreempt"

func (t transport) Clone() credentials.TransportCredentials { return t }

func (transport) OverrideServerName(string) error { return nil }

type authInfo struct {
	credentials.CommonAuthInfo
	conn *connection
}

func (authInfo) AuthType() string { return protocol }

// connection is the link of the leases of unary calls. A later call for a lease may use
// another connection; the daemon does not know the lease then.
type connection struct {
	net.Conn
	c    *Client
	held leaseSet
	once sync.Once
	err  error
}

// Close is called by gRPC as soon as the connection fails.
func (l *connection) Close() error {
	l.once.Do(func() {
		l.err = l.Conn.Close()
		l.held.breakAll()
	})
	return l.err
}

func (l *connection) leases() *leaseSet { return &l.held }

func (l *connection) complete(ctx context.Context, id string) error {
	_, err := l.c.online.Complete(ctx, &gpreemptv1.CompleteRequest{LeaseId: id})
	return api.FromStatus(err)
}

func (l *connection) renew(ctx context.Context, id string, ttl time.Duration) (time.Duration, error) {
	answer, err := l.c.online.Renew(ctx, &gpreemptv1.RenewRequest{LeaseId: id, Ttl: durationpb.New(ttl)})
	return answer.GetTtl().AsDuration(), api.FromStatus(err)
}

// announce announces by a unary call.
func (c *Client) announce(ctx context.Context, a *gpreemptv1.NotifyOnlineRequest) (*gpreemptv1.NotifyOnlineResponse, link, error) {
	var via peer.Peer
	answer, err := c.online.NotifyOnline(ctx, a, grpc.Peer(&via))
	if err != nil {
		return nil, nil, api.FromStatus(err)
	}
	return answer, via.AuthInfo.(authInfo).conn, nil
}
