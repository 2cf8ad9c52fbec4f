package client

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"

	"google.golang.org/grpc/credentials"

	"github.com/gpreempt/gpreempt/internal/regular"
)

// tcpScheme begins the address of a daemon on another host.
const tcpScheme = "tcp://"

// Certificate sets the PEM files for a daemon on another host: the client's
// certificate and key, and the certificates of the authorities that issued the
// daemon's certificate. Dial reads them, so that it can return errors early, and each
// connection reads them again, so that they can be renewed. Addresses that begin with
// "tcp://" need this option, and others must not have it.
func Certificate(cert, key, ca string) Option {
	return func(c *Client) { c.certificate = &certificate{cert: cert, key: key, ca: ca} }
}

type certificate struct{ cert, key, ca string }

// config reads the files, for a daemon whose certificate is for host.
func (c *certificate) config(host string) (*tls.Config, error) {
	const most = 1 << 20
	cert, err := regular.ReadSoon(c.cert, most)
	key, errKey := regular.ReadSoon(c.key, most)
	pair, errPair := tls.X509KeyPair(cert, key)
	if err := cmp.Or(err, errKey, errPair); err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", c.cert, c.key, err)
	}
	pem, err := regular.ReadSoon(c.ca, most)
	if err != nil {
		return nil, fmt.Errorf("certificates of the daemon's authorities: %w", err)
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("certificates of the daemon's authorities: %s has no certificate in PEM", c.ca)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: authorities, ServerName: host, NextProtos: []string{"h2"},
	}, nil
}

// ClientHandshake makes the TLS handshake with the daemon at authority, "HOST:PORT".
func (c *certificate) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	host, _, err := net.SplitHostPort(authority)
	if err != nil {
		return nil, nil, err
	}
	config, err := c.config(host)
	if err != nil {
		return nil, nil, err
	}
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, nil, err
	}
	return conn, credentials.TLSInfo{State: conn.ConnectionState(), CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}, nil
}

// ServerHandshake, Info, Clone and OverrideServerName are the rest of gRPC's credentials.
func (*certificate) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("gpreempt client: these credentials are for clients")
}

func (*certificate) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

func (c *certificate) Clone() credentials.TransportCredentials { return c }

func (*certificate) OverrideServerName(string) error { return nil }

// target returns the gRPC target of addr.
func (c *Client) target(addr string) (string, error) {
	switch {
	case strings.HasPrefix(addr, tcpScheme):
		at := strings.TrimPrefix(addr, tcpScheme)
		if host, port, err := net.SplitHostPort(at); err != nil || host == "" || port == "" {
			return "", fmt.Errorf("invalid address %q of gpreemptd: use the form tcp://HOST:PORT", addr)
		}
		if c.certificate == nil {
			return "", fmt.Errorf("address %q of gpreemptd needs a certificate: use the option Certificate", addr)
		}
		if _, err := c.certificate.config(""); err != nil {
			return "", err
		}
		return "dns:///" + at, nil
	case c.certificate != nil:
		return "", fmt.Errorf("address %q of gpreemptd does not use certificates: leave out the option Certificate, or use the form tcp://HOST:PORT", addr)
	case addr == "":
		return DefaultAddr, nil
	case strings.HasPrefix(addr, "/"):
		return "unix://" + addr, nil
	case !strings.HasPrefix(addr, "unix:"):
		return "", fmt.Errorf("invalid address %q of gpreemptd: use the form %s or tcp://HOST:PORT", addr, DefaultAddr)
	}
	return addr, nil
}
