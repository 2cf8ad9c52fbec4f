package peercred

import (
	"context"
	"errors"
	"fmt"
	"net"

	"google.golang.org/grpc/credentials"
)

// protocol is the name gRPC shows for these credentials.
const protocol = "unix-peercred"

// AuthInfo is the credentials.AuthInfo of a connection of this package.
type AuthInfo struct {
	credentials.CommonAuthInfo
	// Conn is never nil.
	Conn *Conn
}

// AuthType returns the name of the protocol.
func (AuthInfo) AuthType() string { return protocol }

// Credentials returns server credentials for connections of NewListener; the handshake
// of any other connection fails. Nothing is exchanged on the wire: the kernel has
// identified the peer, and no third process can read or write a unix socket, so its
// security level is privacy and integrity.
func Credentials() credentials.TransportCredentials { return transport{} }

type transport struct{}

func (transport) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, ok := raw.(*Conn)
	if !ok {
		return nil, nil, fmt.Errorf("peercred: %T has no identified peer: serve gRPC on a listener of peercred.NewListener", raw)
	}
	return conn, AuthInfo{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		Conn:           conn,
	}, nil
}

func (transport) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("peercred: these credentials are for servers: a client needs none on a unix socket")
}

func (transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: protocol}
}

func (t transport) Clone() credentials.TransportCredentials { return t }

func (transport) OverrideServerName(string) error { return nil }
