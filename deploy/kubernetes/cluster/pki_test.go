package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of the cluster, in files of dir.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

// newAuthority makes ca.crt.
func newAuthority(dir string) (*authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	a := &authority{dir: dir, next: 1}
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, key, err := a.sign(template, pkix.Name{CommonName: "cluster"})
	if err != nil {
		return nil, err
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	a.key = key
	return a, a.write("ca", der, key)
}

// issue makes NAME.crt and NAME.key for a user, who is a server at these addresses, too.
func (a *authority) issue(name, user, group string, addresses ...string) error {
	subject := pkix.Name{CommonName: user}
	if group != "" {
		subject.Organization = []string{group}
	}
	template := &x509.Certificate{
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, address := range addresses {
		if ip := net.ParseIP(address); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, address)
		}
	}
	der, key, err := a.sign(template, subject)
	if err != nil {
		return err
	}
	return errors.Join(a.write(name, der, key), a.kubeconfig(name))
}

func (a *authority) sign(template *x509.Certificate, subject pkix.Name) ([]byte, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template.SerialNumber, template.Subject = big.NewInt(a.next), subject
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	a.next++
	parent, signer := a.cert, a.key
	if parent == nil { // itself
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	return der, key, err
}

func (a *authority) write(name string, cert []byte, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(a.file(name+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), 0o600),
		os.WriteFile(a.file(name+".key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600))
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// kubeconfig makes NAME.conf, by which the user reaches the API server.
func (a *authority) kubeconfig(name string) error {
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", certificate-authority: %s}}]
users: [{name: u, user: {client-certificate: %s, client-key: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, nodeIP, a.file("ca.crt"), a.file(name+".crt"), a.file(name+".key"))
	return os.WriteFile(a.file(name+".conf"), []byte(text), 0o600)
}
