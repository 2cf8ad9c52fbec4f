package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// maxWait bounds every wait of a test that fails.
const maxWait = time.Minute

// tlsServer is a listener with its certificates, and the results of handshakes.
type tlsServer struct {
	t        *testing.T
	ca       *testutil.Authority
	files    CertificateFiles
	certs    *CertificateStore
	address  string
	accepted chan *tlsConn
	refused  chan error
}

func startTLS(t *testing.T) *tlsServer {
	t.Helper()
	d := &tlsServer{t: t, ca: testutil.NewAuthority(t, "ours"), accepted: make(chan *tlsConn, 256), refused: make(chan error, 256)}
	cert, key := d.ca.Issue(testutil.ForServer)
	d.files = CertificateFiles{Certificate: cert, Key: key, ClientCA: d.ca.File}
	certificates, err := ReadCertificates(d.files)
	if err != nil {
		t.Fatal(err)
	}
	d.certs = NewCertificateStore(certificates)
	l, err := ListenTLS(t.Context(), "127.0.0.1:0", d.certs, func(err error) { d.refused <- err })
	if err != nil {
		t.Fatal(err)
	}
	d.address = l.Addr().String()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { // as gRPC does
				_ = conn.SetDeadline(time.Now().Add(maxWait))
				if _, _, err := Credentials().ServerHandshake(conn); err != nil {
					d.refused <- err
					_ = conn.Close()
					return
				}
				_ = conn.SetDeadline(time.Time{})
				d.accepted <- conn.(*tlsConn)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
		close(d.accepted)
		for c := range d.accepted {
			_ = c.Close()
		}
	})
	return d
}

// config returns the configuration of a client with a certificate; "" means none.
func (d *tlsServer) config(cert, key string) *tls.Config {
	d.t.Helper()
	pem, err := os.ReadFile(d.ca.File)
	if err != nil {
		d.t.Fatal(err)
	}
	c := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "localhost", NextProtos: []string{"h2"}}
	c.RootCAs.AppendCertsFromPEM(pem)
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			d.t.Fatal(err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c
}

// dial connects, without a handshake.
func (d *tlsServer) dial(c *tls.Config) *tls.Conn {
	d.t.Helper()
	raw, err := net.Dial("tcp", d.address)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = raw.Close() })
	_ = raw.SetDeadline(time.Now().Add(maxWait))
	return tls.Client(raw, c)
}

// enter returns both ends of a connection that must be accepted.
func (d *tlsServer) enter(c *tls.Config) (server *tlsConn, client *tls.Conn) {
	d.t.Helper()
	client = d.dial(c)
	if err := client.Handshake(); err != nil {
		d.t.Fatal(err)
	}
	select {
	case server = <-d.accepted:
	case err := <-d.refused:
		d.t.Fatal(err)
	case <-time.After(maxWait):
		d.t.Fatal("no handshake")
	}
	d.t.Cleanup(func() { _ = server.Close() })
	return server, client
}

// awaitEnd waits for the end of a connection.
func (d *tlsServer) awaitEnd(c *tlsConn, why string) {
	d.t.Helper()
	select {
	case <-c.Done():
	case <-time.After(maxWait):
		d.t.Fatalf("a connection is open, though %s", why)
	}
}

// awaitRefusal returns why a connection was refused.
func (d *tlsServer) awaitRefusal() error {
	d.t.Helper()
	select {
	case err := <-d.refused:
		return err
	case <-d.accepted:
		d.t.Fatal("it was accepted")
	case <-time.After(maxWait):
		d.t.Fatal("it was neither refused nor accepted")
	}
	return nil
}

func TestPeerHasTheNamesOfItsCertificate(t *testing.T) {
	d := startTLS(t)
	cert, key := d.ca.Issue(testutil.Named("web.example", "web"), testutil.WithURI("spiffe://example/web"), func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: "web frontend", Organization: []string{"Example"}}
	})
	server, client := d.enter(d.config(cert, key))
	want := Certificate{
		Names:   []string{"uri:spiffe://example/web", "dns:web.example", "dns:web", "cn:web frontend"},
		Subject: "CN=web frontend,O=Example", Serial: "3", Address: client.LocalAddr().String(),
	}
	if diff := cmp.Diff(want, server.peer); diff != "" {
		t.Errorf("peer (-want +got):\n%s", diff)
	}
	if v := client.ConnectionState().Version; v != tls.VersionTLS13 {
		t.Errorf("TLS version %x", v)
	}
	if server.Left() {
		t.Error("Left is true for a client that is there")
	}
	_ = client.Close()
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read %v, want the end", err)
	}
	if !server.Left() {
		t.Error("Left is false after the client's end")
	}
	_ = server.Close()
	<-server.Done()
	if server.Died() || server.Exiting() {
		t.Error("Died or Exiting is true for a client on another host")
	}
}

func TestHandshakeNeedsAValidCertificate(t *testing.T) {
	d := startTLS(t)
	otherCA := testutil.NewAuthority(t, "ours") // of the same name
	issue := func(a *testutil.Authority, change ...func(*x509.Certificate)) *tls.Config {
		cert, key := a.Issue(append(change, testutil.Named("web.example"))...)
		return d.config(cert, key)
	}
	valid := issue(d.ca)
	old := valid.Clone()
	old.MaxVersion = tls.VersionTLS12
	for _, tc := range []struct {
		name   string
		config *tls.Config
		// client and server are parts of the errors of each.
		client, server string
	}{
		{"no certificate", d.config("", ""), "certificate required", "didn't provide a certificate"},
		{"expired", issue(d.ca, testutil.Valid(-time.Hour, -time.Minute)), "expired certificate", "expired or is not yet valid"},
		{"not yet valid", issue(d.ca, testutil.Valid(time.Minute, time.Hour)), "expired certificate", "expired or is not yet valid"},
		{"of another authority", issue(otherCA), "unknown certificate authority", "unknown authority"},
		{"for servers only", issue(d.ca, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), "bad certificate", "incompatible key usage"},
		{"for no stated use", issue(d.ca, func(c *x509.Certificate) { c.ExtKeyUsage = nil }), "bad certificate", "clientAuth"},
		{"for any use", issue(d.ca, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} }), "bad certificate", "clientAuth"},
		{"TLS 1.2", old, "protocol version", "unsupported versions"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			client := d.dial(tc.config)
			err := client.Handshake()
			if err == nil {
				_, err = client.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) // as gRPC does, before an answer
			}
			if err == nil {
				_, err = client.Read(make([]byte, 1))
			}
			if err == nil || !strings.Contains(err.Error(), tc.client) {
				t.Errorf("the client gets %v, want %q", err, tc.client)
			}
			if err := d.awaitRefusal(); !strings.Contains(err.Error(), tc.server) || !strings.Contains(err.Error(), client.LocalAddr().String()) {
				t.Errorf("the server reports %v, want %q and the address", err, tc.server)
			}
		})
	}
	d.enter(valid) // after the others
}

func TestConnectionWithoutTLSIsRefused(t *testing.T) {
	d := startTLS(t)
	raw, err := net.Dial("tcp", d.address)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := raw.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if err := d.awaitRefusal(); !strings.Contains(err.Error(), "does not look like a TLS handshake") {
		t.Error(err)
	}
	server, client := net.Pipe()
	defer client.Close()
	defer server.Close()
	if _, _, err := Credentials().ServerHandshake(server); err == nil {
		t.Error("a connection of another listener was accepted")
	}
	if _, _, err := Credentials().ClientHandshake(context.Background(), "", server); err == nil {
		t.Error("the handshake of a client succeeded")
	}
}

func TestSocketOptionsDetectADeadHost(t *testing.T) {
	d := startTLS(t)
	cert, key := d.ca.Issue()
	server, _ := d.enter(d.config(cert, key))
	socket, err := server.raw.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	err = socket.Control(func(fd uintptr) {
		for name, option := range map[string]int{
			"unacknowledged, ms": unix.TCP_USER_TIMEOUT, "idle, s": unix.TCP_KEEPIDLE, "interval, s": unix.TCP_KEEPINTVL, "probes": unix.TCP_KEEPCNT,
		} {
			value, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, option)
			if err != nil {
				t.Error(err)
			}
			got[name] = value
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"unacknowledged, ms": 20_000, "idle, s": 10, "interval, s": 4, "probes": 2}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("socket options (-want +got):\n%s", diff)
	}
}

func TestConnectionEndsWithItsCertificate(t *testing.T) {
	d := startTLS(t)
	var server *tlsConn
	var client *tls.Conn
	for valid := 2 * time.Second; server == nil; valid *= 2 { // it may expire before the handshake
		cert, key := d.ca.Issue(testutil.Valid(-time.Hour, valid))
		client = d.dial(d.config(cert, key))
		_ = client.Handshake() // a refusal is seen by the server
		select {
		case server = <-d.accepted:
			t.Cleanup(func() { _ = server.Close() })
		case err := <-d.refused:
			if valid > maxWait/4 || !strings.Contains(err.Error(), "expired") {
				t.Fatal(err)
			}
		case <-time.After(maxWait):
			t.Fatal("no handshake")
		}
	}
	d.awaitEnd(server, "the certificate expired")
	if _, err := client.Read(make([]byte, 1)); err == nil {
		t.Error("the client can still read")
	}
}

func TestNewAuthoritiesCloseConnectionsOfOthers(t *testing.T) {
	d := startTLS(t)
	cert, key := d.ca.Issue()
	before, _ := d.enter(d.config(cert, key))
	other := testutil.NewAuthority(t, "other")
	otherCert, otherKey := other.Issue()

	files := d.files
	use := func(f CertificateFiles) {
		certificates, err := ReadCertificates(f)
		if err != nil {
			t.Fatal(err)
		}
		d.certs.Use(certificates)
	}
	use(files) // the same files
	select {
	case <-before.Done():
		t.Fatal("closed, though its authority is the same")
	default:
	}
	files.ClientCA = other.File
	use(files)
	d.awaitEnd(before, "its authority is gone")
	_ = d.dial(d.config(cert, key)).Handshake() // the client may get the error later
	_ = d.awaitRefusal()
	d.enter(d.config(otherCert, otherKey))
}

func TestErrorNamesTheInvalidFile(t *testing.T) {
	ca := testutil.NewAuthority(t, "ours")
	cert, key := ca.Issue(testutil.ForServer)
	_, otherKey := ca.Issue()
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		files CertificateFiles
		want  string
	}{
		"certificate that blocks": {CertificateFiles{fifo, key, ca.File}, fifo + ": it is not a regular file"},
		"key that blocks":         {CertificateFiles{cert, fifo, ca.File}, fifo + ": it is not a regular file"},
		"authorities that block":  {CertificateFiles{cert, key, fifo}, fifo + ": it is not a regular file"},
		"no certificate":          {CertificateFiles{"/nowhere", key, ca.File}, "/nowhere"},
		"key of another":          {CertificateFiles{cert, otherKey, ca.File}, otherKey},
		"no authorities":          {CertificateFiles{cert, key, "/nowhere"}, "/nowhere"},
		"not certificates":        {CertificateFiles{cert, key, key}, key},
	} {
		if _, err := ReadCertificates(tc.files); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want it to name %s", name, err, tc.want)
		}
	}
}

func TestKeyWithAccessForOthersIsExposed(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key.pem")
	if err := os.WriteFile(key, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, mode := range []fs.FileMode{0o400, 0o600, 0o640, 0o644, 0o660, 0o601} {
		if err := os.Chmod(key, mode); err != nil {
			t.Fatal(err)
		}
		problem, _ := CertificateFiles{Key: key}.ExposedKey()
		got[mode.String()] = problem != ""
	}
	want := map[string]bool{"-r--------": false, "-rw-------": false, "-rw-r-----": false, "-rw-r--r--": true, "-rw-rw----": true, "-rw------x": true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("modes with a warning (-want +got):\n%s", diff)
	}
	if problem, _ := (CertificateFiles{Key: key + "x"}).ExposedKey(); problem != "" {
		t.Errorf("a missing key: %s", problem)
	}
	if os.Getuid() != 0 {
		return // only root can change the owner
	}
	if err := errors.Join(os.Chmod(key, 0o600), os.Chown(key, 1234, 0)); err != nil {
		t.Fatal(err)
	}
	if problem, remedy := (CertificateFiles{Key: key}).ExposedKey(); !strings.Contains(problem, "owner 1234") || !strings.Contains(remedy, "chown 0 "+key) {
		t.Errorf("a key of another user: %q, %q", problem, remedy)
	}
}

func TestConnectionsWithoutAHandshakeAreBounded(t *testing.T) {
	d := startTLS(t)
	cert, key := d.ca.Issue()
	config := d.config(cert, key)
	var silent []net.Conn
	for range maxHandshakes / 2 { // the limit of one address when no other has any
		raw, err := net.Dial("tcp", d.address)
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		silent = append(silent, raw)
	}
	// Connections are accepted in order: one more is closed at once.
	raw, err := net.Dial("tcp", d.address)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	_ = raw.SetReadDeadline(time.Now().Add(maxWait))
	if _, err := raw.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the connection above the bound reads %v, want its end", err)
	}
	if err := d.awaitRefusal(); !strings.Contains(err.Error(), "the limit is 64") || !strings.Contains(err.Error(), raw.LocalAddr().String()) {
		t.Errorf("refused with %v", err)
	}
	_ = silent[0].Close()
	_ = d.awaitRefusal() // its end frees a place
	for range 3 {
		d.enter(config) // they take no place
	}
}

// Addresses that begin all the handshakes they can leave some to others; what ends is free.
func TestHandshakesAreSharedByAddress(t *testing.T) {
	h := handshakes{of: map[netip.Prefix]int{}}
	var ends []func()
	begin := func(address string) (begun int) {
		for range maxHandshakes {
			end := h.begin(&net.TCPAddr{IP: net.ParseIP(address), Port: 7})
			if end == nil {
				break
			}
			ends = append(ends, end)
			begun++
		}
		return begun
	}
	got := []int{begin("10.0.0.1"), begin("10.0.0.2"), begin("2001:db8::1"), begin("2001:db8::2"), begin("::ffff:10.0.0.1"), begin("10.0.0.3")}
	if diff := cmp.Diff([]int{32, 16, 8, 0, 0, 4}, got); diff != "" {
		t.Errorf("handshakes (-want +got):\n%s", diff)
	}
	for range 2 { // ending twice counts once
		for _, end := range ends {
			end()
		}
	}
	if h.all != 0 || len(h.of) > 0 {
		t.Errorf("%d handshakes of %d addresses are counted after their end", h.all, len(h.of))
	}
}

func TestPrincipalHasAllNames(t *testing.T) {
	for _, other := range []Certificate{{Names: []string{"dns:a"}}, {Names: []string{"dns:b", "dns:a"}}, {Names: []string{`dns:a" "dns:b`}}, {}} {
		if (Certificate{Names: []string{"dns:a", "dns:b"}}).Principal() == other.Principal() {
			t.Errorf("the same principal as %v", other.Names)
		}
	}
	a, b := Certificate{Names: []string{"dns:a"}, Address: "1", Serial: "1"}, Certificate{Names: []string{"dns:a"}, Address: "2", Serial: "2"}
	if a.Principal() != b.Principal() {
		t.Error("a renewed certificate has another principal")
	}
}
