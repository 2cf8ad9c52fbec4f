package auth

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/internal/regular"
)

// CertificateFiles are PEM files on the daemon's host.
type CertificateFiles struct {
	// Certificate is the daemon's certificate, with the chain to an authority that its
	// clients trust, and Key its private key.
	Certificate, Key string
	// ClientCA has the certificates of the authorities that issue those of clients.
	ClientCA string
}

// Certificates are the contents of CertificateFiles.
type Certificates struct {
	config  *tls.Config
	clients *x509.CertPool
	ca      []byte // the file of clients
}

// ReadCertificates reads the files. An error names the invalid file.
func ReadCertificates(f CertificateFiles) (*Certificates, error) {
	certificate, err := f.pair()
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", f.Certificate, f.Key, err)
	}
	ca, err := regular.ReadSoon(f.ClientCA, maxPEM)
	if err != nil {
		return nil, fmt.Errorf("certificates of client authorities: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("certificates of client authorities: %s has no certificate in PEM", f.ClientCA)
	}
	return &Certificates{&tls.Config{
		MinVersion:       tls.VersionTLS13,
		Certificates:     []tls.Certificate{certificate},
		ClientAuth:       tls.RequireAndVerifyClientCert,
		ClientCAs:        clients,
		NextProtos:       []string{"h2"},
		VerifyConnection: func(state tls.ConnectionState) error { return forClients(state.PeerCertificates) },
		// A resumed session would skip the check of the certificate.
		SessionTicketsDisabled: true,
	}, clients, ca}, nil
}

// maxPEM bounds a file of certificates, in bytes; those of a host's authorities have some 200 KiB.
const maxPEM = 1 << 20

// pair reads the daemon's certificate and its key.
func (f CertificateFiles) pair() (tls.Certificate, error) {
	certificate, err := regular.ReadSoon(f.Certificate, maxPEM)
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := regular.ReadSoon(f.Key, maxPEM)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(certificate, key)
}

// ExposedKey returns which users other than root and the one of this program have access to the
// private key, and how to change that; "" if there are none but members of its group, who may
// read it. A key whose owner and mode cannot be read is the business of ReadCertificates.
func (f CertificateFiles) ExposedKey() (problem, remedy string) {
	info, err := os.Stat(f.Key)
	if err != nil {
		return "", ""
	}
	owner, mode := info.Sys().(*syscall.Stat_t).Uid, info.Mode().Perm()
	foreign := owner != 0 && owner != uint32(os.Geteuid())
	if !foreign && mode&0o027 == 0 {
		return "", ""
	}
	remedy = "chmod 0600 " + f.Key
	if foreign {
		remedy = fmt.Sprintf("chown %d %s && %s", os.Geteuid(), f.Key, remedy)
	}
	return fmt.Sprintf("the private key %s has owner %d and mode %#o, so other users can read or replace it", f.Key, owner, mode),
		remedy + "; issue another key if a user who could read it is not trusted"
}

// CertificateStore has the certificates in force and the connections that they
// admitted. Its methods may be called from any goroutine.
type CertificateStore struct {
	mu      sync.Mutex // guards all below
	inForce *Certificates
	conns   map[*tlsConn]struct{}
}

// NewCertificateStore returns a store with c in force.
func NewCertificateStore(c *Certificates) *CertificateStore {
	return &CertificateStore{inForce: c, conns: map[*tlsConn]struct{}{}}
}

// Use sets other certificates for new connections, and closes the connections whose
// client certificate the new authorities do not accept.
func (cs *CertificateStore) Use(c *Certificates) {
	for _, conn := range cs.replace(c) {
		_ = conn.Close() // its reader gets the error
	}
}

// replace sets new certificates and returns the connections that they do not admit.
func (cs *CertificateStore) replace(certificates *Certificates) (rejected []*tlsConn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	same := bytes.Equal(certificates.ca, cs.inForce.ca)
	cs.inForce = certificates
	if same {
		return nil
	}
	for c := range cs.conns {
		if _, err := verify(c.certificates, certificates.clients); err != nil {
			rejected = append(rejected, c)
		}
	}
	return rejected
}

// config returns the configuration of new connections.
func (cs *CertificateStore) config() *tls.Config {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.inForce.config
}

// admit adds a connection whose handshake is complete, and returns when its
// certificate expires. The authorities may have changed during the handshake.
func (cs *CertificateStore) admit(c *tlsConn) (until time.Time, err error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if until, err = verify(c.certificates, cs.inForce.clients); err != nil {
		return until, err
	}
	cs.conns[c] = struct{}{}
	return until, nil
}

func (cs *CertificateStore) remove(c *tlsConn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.conns, c)
}

// forClients returns an error unless the first certificate says that it is for clients. One
// without extended key usages is for every use by RFC 5280, section 4.2.1.12, also that of a
// server, whose key then were enough to announce.
func forClients(certificates []*x509.Certificate) error {
	if len(certificates) > 0 && slices.Contains(certificates[0].ExtKeyUsage, x509.ExtKeyUsageClientAuth) {
		return nil
	}
	return errors.New("incompatible key usage: the certificate is not issued for clients: issue one with the extended key usage clientAuth")
}

// verify returns until when authorities accept the first of certificates; the others
// are its chain.
func verify(certificates []*x509.Certificate, authorities *x509.CertPool) (until time.Time, err error) {
	if len(certificates) == 0 {
		return until, errors.New("the client sent no certificate")
	}
	between := x509.NewCertPool()
	for _, c := range certificates[1:] {
		between.AddCert(c)
	}
	chains, err := certificates[0].Verify(x509.VerifyOptions{
		Roots: authorities, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	for _, chain := range chains {
		ends := chain[0].NotAfter
		for _, c := range chain[1:] {
			if c.NotAfter.Before(ends) {
				ends = c.NotAfter
			}
		}
		if ends.After(until) {
			until = ends
		}
	}
	return until, err
}
