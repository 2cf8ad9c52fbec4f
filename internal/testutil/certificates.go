package testutil

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority issues certificates, in files that are removed when the test ends.
type Authority struct {
	// File has its own certificate, PEM.
	File string

	tb   testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

// NewAuthority returns a new authority.
func NewAuthority(tb testing.TB, name string) *Authority {
	tb.Helper()
	a := &Authority{tb: tb, next: 2}
	a.key = a.newKey()
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	a.File = a.write("ca.pem", "CERTIFICATE", a.sign(a.cert, a.cert, &a.key.PublicKey))
	return a
}

// Issue returns the files of a certificate and its key. By default it is a client's, without a name, and valid from an hour ago for two hours.
func (a *Authority) Issue(change ...func(*x509.Certificate)) (cert, key string) {
	a.tb.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{Organization: []string{"Example"}},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	a.next++
	for _, fn := range change {
		fn(template)
	}
	secret := a.newKey()
	der, err := x509.MarshalPKCS8PrivateKey(secret)
	if err != nil {
		a.tb.Fatal(err)
	}
	return a.write("cert.pem", "CERTIFICATE", a.sign(template, a.cert, &secret.PublicKey)), a.write("key.pem", "PRIVATE KEY", der)
}

// ForServer makes a certificate valid for servers on this host.
func ForServer(c *x509.Certificate) {
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	c.DNSNames = []string{"localhost"}
}

// Named sets the DNS names of a certificate.
func Named(dns ...string) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.DNSNames = dns }
}

// WithURI adds a URI to a certificate.
func WithURI(text string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		if u, err := url.Parse(text); err == nil {
			c.URIs = append(c.URIs, u)
		}
	}
}

// Valid sets the validity of a certificate, relative to now.
func Valid(from, until time.Duration) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(from), time.Now().Add(until) }
}

func (a *Authority) newKey() *ecdsa.PrivateKey {
	a.tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.tb.Fatal(err)
	}
	return key
}

func (a *Authority) sign(template, parent *x509.Certificate, public *ecdsa.PublicKey) []byte {
	a.tb.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, a.key)
	if err != nil {
		a.tb.Fatal(err)
	}
	return der
}

func (a *Authority) write(name, kind string, der []byte) (path string) {
	a.tb.Helper()
	path = filepath.Join(a.tb.TempDir(), name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.tb.Fatal(err)
	}
	return path
}
