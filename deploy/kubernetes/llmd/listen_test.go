package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/gpreempt/gpreempt/deploy/kubernetes/llmd/gen/snapshotpb"
)

// authority writes a certificate that is its own authority, and its key.
func authority(t *testing.T, dir, name string) (certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"node"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	text, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	certificate, key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	for path, block := range map[string]*pem.Block{certificate: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: text}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certificate, key
}

// call asks the agent at an address for its status, and returns the code of the answer.
func call(t *testing.T, target string, secure credentials.TransportCredentials) codes.Code {
	t.Helper()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(secure))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = snapshotpb.NewSnapshotAgentServiceClient(conn).Status(t.Context(), &snapshotpb.StatusRequest{})
	return status.Code(err)
}

// serve serves an agent until the test ends.
func serve(t *testing.T, l listening) net.Addr {
	t.Helper()
	listener, secure, err := l.listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	server, served := newServer(newAgent(&node{}, "team"), secure), make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr()
}

func TestTCPIsForHoldersOfACertificate(t *testing.T) {
	dir := t.TempDir()
	certificate, key := authority(t, dir, "node")
	other, otherKey := authority(t, dir, "other")
	address := serve(t, listening{address: "127.0.0.1:0", certificate: certificate, key: key, clientCA: certificate}).String()
	roots := x509.NewCertPool()
	text, err := os.ReadFile(certificate)
	if err != nil || !roots.AppendCertsFromPEM(text) {
		t.Fatal(err)
	}
	with := func(certificate, key string) credentials.TransportCredentials {
		config := &tls.Config{RootCAs: roots, ServerName: "node", MinVersion: tls.VersionTLS13}
		if certificate != "" {
			pair, err := tls.LoadX509KeyPair(certificate, key)
			if err != nil {
				t.Fatal(err)
			}
			config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
		}
		return credentials.NewTLS(config)
	}
	for name, tc := range map[string]struct {
		secure credentials.TransportCredentials
		want   codes.Code
	}{
		"a certificate of its authority": {with(certificate, key), codes.OK},
		"one of another":                 {with(other, otherKey), codes.Unavailable},
		"none":                           {with("", ""), codes.Unavailable},
		"plain TCP":                      {insecure.NewCredentials(), codes.Unavailable},
	} {
		if got := call(t, address, tc.secure); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func TestSocketIsForItsUserAndReplacesOnlyAnotherSocket(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	if err := left.Close(); err != nil { // the file stays, as after a crash
		t.Fatal(err)
	}
	serve(t, listening{address: "unix://" + path})
	if info, err := os.Stat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if got := call(t, "unix://"+path, insecure.NewCredentials()); got != codes.OK {
		t.Errorf("a call: %v", got)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]string{"unix://" + path: "another program listens", "unix://" + file: "address already in use"} {
		if _, _, err := (listening{address: address}).listen(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", address, err, want)
		}
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "text" {
		t.Errorf("the file has %q, %v", text, err)
	}
}

func TestTCPWithoutCertificatesNeedsAFlag(t *testing.T) {
	for want, l := range map[string]listening{
		"needs --certificate":   {address: "127.0.0.1:0"},
		"--insecure is given":   {address: "127.0.0.1:0", certificate: "a", key: "b", clientCA: "c", insecure: true},
		"not a regular file":    {address: "127.0.0.1:0", certificate: "/", key: "b", clientCA: "c"},
		"needs --certificate, ": {address: "127.0.0.1:0", certificate: "a", key: "b"},
	} {
		if _, _, err := l.listen(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want %q", l, err, want)
		}
	}
	if err := run(t.Context(), listening{}, "unix:///nowhere", "", time.Second); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a namespace: %v", err)
	}
	if got := call(t, serve(t, listening{address: "127.0.0.1:0", insecure: true}).String(), insecure.NewCredentials()); got != codes.OK {
		t.Errorf("with --insecure: %v", got)
	}
}

// Every user of a cluster can label a pod with the job of another one.
func TestPodsOfAnotherNamespaceAreInNoJob(t *testing.T) {
	n := &node{}
	n.add("1@1", "train")
	n.add("2@1", "train")
	n.targets[1].Container.Namespace = "mallory"
	n.refuse = map[string]error{"2@1": status.Error(codes.FailedPrecondition, "it is traced")}
	a := newAgent(n, "team")
	if err := a.suspend(t.Context(), "train"); err != nil {
		t.Error(err)
	}
	if off := n.off(); len(off) != 1 || off[0] != "1@1" {
		t.Errorf("suspended: %v", off)
	}
	found, err := newAgent(n, "other").targets(t.Context())
	if err != nil || len(found) != 0 {
		t.Errorf("%v, %v", found, err)
	}
}
