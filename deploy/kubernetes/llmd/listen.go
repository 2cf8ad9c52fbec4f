package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/gpreempt/gpreempt/internal/regular"
)

// listening is where the agent listens, and to whom. Its clients suspend jobs.
type listening struct {
	// address is unix://PATH or HOST:PORT.
	address                    string
	certificate, key, clientCA string
	insecure                   bool
}

// maxPEM bounds a file of certificates, in bytes.
const maxPEM = 1 << 20

func (l listening) listen(ctx context.Context) (net.Listener, credentials.TransportCredentials, error) {
	if path, unix := strings.CutPrefix(l.address, "unix://"); unix {
		listener, err := listenUnix(ctx, path)
		return listener, insecure.NewCredentials(), err
	}
	secure := insecure.NewCredentials()
	switch given := l.certificate != "" && l.key != "" && l.clientCA != ""; {
	case given && l.insecure:
		return nil, nil, errors.New("--insecure is given with certificates: leave one of them out")
	case given:
		config, err := l.config()
		if err != nil {
			return nil, nil, err
		}
		secure = credentials.NewTLS(config)
	case !l.insecure:
		return nil, nil, errors.New("a TCP address needs --certificate, --key and --client-ca, because every client of the agent can suspend jobs; --insecure serves without them")
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", l.address)
	return listener, secure, err
}

func (l listening) config() (*tls.Config, error) {
	var files [3][]byte
	for i, path := range []string{l.certificate, l.key, l.clientCA} {
		var err error
		if files[i], err = regular.ReadSoon(path, maxPEM); err != nil {
			return nil, err
		}
	}
	pair, err := tls.X509KeyPair(files[0], files[1])
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", l.certificate, l.key, err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(files[2]) {
		return nil, fmt.Errorf("%s has no certificate in PEM", l.clientCA)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}, nil
}

// listenUnix makes a socket that only the user of this program, and root, can connect to. It
// replaces that of an agent that has ended.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path); err == nil {
		return nil, errors.Join(fmt.Errorf("another program listens at %s", path), conn.Close())
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	before := syscall.Umask(0o177)
	defer syscall.Umask(before)
	return (&net.ListenConfig{}).Listen(ctx, "unix", path)
}
