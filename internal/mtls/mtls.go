// Package mtls hides how certificates prove who is at both ends of a TCP
// connection, and how they are replaced while connections stand.
//
// TLS 1.3 only, and never without a certificate of the client that the
// configured authorities vouch for, for the use as a client, now. A connection
// ends when the certificates that prove its client expire, and when new
// authorities no longer vouch for them.
package mtls

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// Files are PEM files on the daemon's host.
type Files struct {
	// Certificate is the daemon's, with what leads from it to an authority its
	// clients trust, and Key the private key of it.
	Certificate, Key string
	// ClientCA has the certificates of the authorities that vouch for clients.
	ClientCA string
}

// Keeper has the certificates in force and the connections they let in. Its
// methods may be called from any goroutine.
type Keeper struct {
	mu      sync.Mutex // guards all below
	config  *tls.Config
	clients *x509.CertPool
	ca      []byte // what clients was read from
	conns   map[*Conn]struct{}
}

// NewKeeper reads the files. The error names the one that is wrong.
func NewKeeper(f Files) (*Keeper, error) {
	k := &Keeper{conns: map[*Conn]struct{}{}}
	if err := k.Load(f); err != nil {
		return nil, err
	}
	return k, nil
}

// Load reads the files and uses them. After an error, which names the file that is
// wrong, nothing changes.
func (k *Keeper) Load(f Files) error {
	c, err := Read(f)
	if err != nil {
		return err
	}
	k.Use(c)
	return nil
}

// Certificates are the contents of Files.
type Certificates struct {
	config  *tls.Config
	clients *x509.CertPool
	ca      []byte // the file of clients
}

// Read reads the files. An error names the file that is wrong.
func Read(f Files) (*Certificates, error) {
	certificate, err := tls.LoadX509KeyPair(f.Certificate, f.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", f.Certificate, f.Key, err)
	}
	ca, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("authorities of clients: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("authorities of clients: %s has no certificate in PEM", f.ClientCA)
	}
	return &Certificates{&tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{certificate},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    clients,
		NextProtos:   []string{"h2"},
		// A resumed session would be let in by what was true when it began.
		SessionTicketsDisabled: true,
	}, clients, ca}, nil
}

// Use uses other certificates for new connections, and closes the connections whose
// client certificate the new authorities did not sign.
func (k *Keeper) Use(c *Certificates) {
	for _, conn := range k.replace(c.config, c.clients, c.ca) {
		_ = conn.Close() // its reader gets an error
	}
}

// replace puts new certificates in force and returns the connections they do not
// let in.
func (k *Keeper) replace(config *tls.Config, clients *x509.CertPool, ca []byte) (foreign []*Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	same := bytes.Equal(ca, k.ca)
	k.config, k.clients, k.ca = config, clients, ca
	if same {
		return nil
	}
	for c := range k.conns {
		if _, err := verify(c.certificates, clients); err != nil {
			foreign = append(foreign, c)
		}
	}
	return foreign
}

// inForce returns what a new connection is judged by.
func (k *Keeper) inForce() *tls.Config {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.config
}

// admit takes in a connection whose handshake is done, and tells until when its
// client is proved. The authorities may have changed during the handshake.
func (k *Keeper) admit(c *Conn) (until time.Time, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if until, err = verify(c.certificates, k.clients); err != nil {
		return until, err
	}
	k.conns[c] = struct{}{}
	return until, nil
}

func (k *Keeper) forget(c *Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.conns, c)
}

// verify tells until when authorities vouch for the first of certificates; the
// others lead to them.
func verify(certificates []*x509.Certificate, authorities *x509.CertPool) (until time.Time, err error) {
	if len(certificates) == 0 {
		return until, errors.New("no certificate was shown")
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
