package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// certificateFiles returns the files of the certificates for TCP.
func certificateFiles(t config.TCP) auth.CertificateFiles {
	return auth.CertificateFiles{Certificate: t.Certificate, Key: t.Key, ClientCA: t.ClientCA}
}

// keyWarnings returns the warning about a private key for TCP to which others have access.
func keyWarnings(t config.TCP) []gpreempt.Warning {
	if t.Address == "" {
		return nil
	}
	problem, remedy := certificateFiles(t).ExposedKey()
	if problem == "" {
		return nil
	}
	return []gpreempt.Warning{gpreempt.WarnPrivateKey.Warn(problem).WithRemedy(remedy)}
}

// listenTCP returns a TLS listener for clients on other hosts; nil if the config has no
// address.
func (d *daemon) listenTCP(ctx context.Context, t config.TCP) (net.Listener, error) {
	if t.Address == "" {
		return nil, nil //nolint:nilnil // not configured
	}
	certificates, err := auth.ReadCertificates(certificateFiles(t))
	if err != nil {
		return nil, fmt.Errorf("serve TCP: %w: fix the file, or remove tcp.address from the config file", err)
	}
	store := auth.NewCertificateStore(certificates)
	l, err := auth.ListenTLS(ctx, t.Address, store, func(err error) { d.server.Refused(err) }) // the server exists before it accepts
	if err != nil {
		return nil, fmt.Errorf("serve TCP: %w: tcp.address must be a free address of this host", err)
	}
	d.certificates = store
	d.warnings.set("key", keyWarnings(t)...)
	return l, nil
}

// identified returns the connections of a listener with the identity of their peers. They
// may use three quarters of the file descriptors, two each: the daemon itself needs some,
// for example to resume a process.
func (d *daemon) identified(listener *net.UnixListener) (net.Listener, error) {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return nil, fmt.Errorf("limit of file descriptors: %w", err)
	}
	most := int(min(files.Cur, 1<<20)) * 3 / 8
	return acceptLog{auth.NewUnixListener(listener, auth.UnixOptions{
		MaxConns: most, Admit: d.server.MayConnect, Refusal: server.Refusal, Refused: d.server.Refused,
		Reserved: func(p auth.Process) bool { return d.authz.Load().Rights(p).Allows(auth.Admin) },
	}), d.log}, nil
}

// acceptLog logs that Accept fails; gRPC waits and retries.
type acceptLog struct {
	net.Listener
	log *zap.Logger
}

func (l acceptLog) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		l.log.Warn("cannot accept connections; open connections continue", log.Err(err))
	}
	return conn, err
}
