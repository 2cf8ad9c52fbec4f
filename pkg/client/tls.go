package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"
)

// tcpScheme begins the address of a daemon on another host.
const tcpScheme = "tcp://"

// Certificate names the PEM files a client of a daemon on another host needs: its
// certificate and key, which prove who it is, and the certificates of the
// authorities that vouch for the daemon. They are read by Dial, to tell mistakes
// early, and again for each connection, so that they can be renewed meanwhile.
// Only addresses that begin with "tcp://" take it, and they need it.
func Certificate(cert, key, ca string) Option {
	return func(c *Client) { c.certificate = &certificate{cert: cert, key: key, ca: ca} }
}

type certificate struct{ cert, key, ca string }

// config reads the files, to talk to a daemon whose certificate is for host.
func (c *certificate) config(host string) (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", c.cert, c.key, err)
	}
	pem, err := os.ReadFile(c.ca)
	if err != nil {
		return nil, fmt.Errorf("authorities of the daemon: %w", err)
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("authorities of the daemon: %s has no certificate in PEM", c.ca)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: authorities, ServerName: host, NextProtos: []string{"h2"},
	}, nil
}

// secure shakes hands with the daemon at authority, "HOST:PORT".
func (c *certificate) secure(ctx context.Context, authority string, raw net.Conn) (net.Conn, error) {
	host, _, err := net.SplitHostPort(authority)
	if err != nil {
		return nil, err
	}
	config, err := c.config(host)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return conn, nil
}

// target returns what gRPC calls the daemon at addr.
func (c *Client) target(addr string) (string, error) {
	switch {
	case strings.HasPrefix(addr, tcpScheme):
		at := strings.TrimPrefix(addr, tcpScheme)
		if host, port, err := net.SplitHostPort(at); err != nil || host == "" || port == "" {
			return "", fmt.Errorf("address %q of gpreemptd: write it as tcp://HOST:PORT", addr)
		}
		if c.certificate == nil {
			return "", fmt.Errorf("address %q of gpreemptd needs a certificate: give the option Certificate", addr)
		}
		if _, err := c.certificate.config(""); err != nil {
			return "", err
		}
		return "dns:///" + at, nil
	case c.certificate != nil:
		return "", fmt.Errorf("address %q of gpreemptd takes no certificate: the kernel tells the daemon who calls; leave Certificate out, or write tcp://HOST:PORT", addr)
	case addr == "":
		return DefaultAddr, nil
	case strings.HasPrefix(addr, "/"):
		return "unix://" + addr, nil
	case !strings.HasPrefix(addr, "unix:"):
		return "", fmt.Errorf("address %q of gpreemptd is no unix socket and no tcp://HOST:PORT: write it as %s", addr, DefaultAddr)
	}
	return addr, nil
}
