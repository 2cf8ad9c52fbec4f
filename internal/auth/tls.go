package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// maxHandshakes bounds the connections whose handshake is not complete, so that
	// clients without a certificate cannot take all of the daemon's descriptors. An
	// address has at most as many of them as it leaves free, so that it cannot take all.
	maxHandshakes = 64
	// deadHostTime is how soon the connections of a host that has vanished are closed:
	// they hold leases.
	deadHostTime = 20 * time.Second
	// receiveBytes bounds what the kernel keeps of a connection that the daemon does not read
	// because its client sends too much. Without it, that is up to tcp_rmem, 6 MiB.
	receiveBytes = 64 << 10
	// alertTime is how long a refused client may take to read the reason.
	alertTime = 500 * time.Millisecond
)

// Certificate is the owner of a certificate that connected over TCP. Everything
// except Address is from the certificate.
type Certificate struct {
	// Names are the names of the owner: "uri:URI" and "dns:NAME" for each of the
	// alternative names of these kinds, then "cn:NAME".
	Names []string
	// Subject is the distinguished name, and Serial the serial number, in hex.
	Subject, Serial string
	// Address is the remote address, "IP:PORT".
	Address string
}

func certificateOf(c *x509.Certificate, address net.Addr) Certificate {
	p := Certificate{Subject: c.Subject.String(), Serial: fmt.Sprintf("%x", c.SerialNumber), Address: address.String()}
	for _, u := range c.URIs {
		p.Names = append(p.Names, "uri:"+u.String())
	}
	for _, name := range c.DNSNames {
		p.Names = append(p.Names, "dns:"+name)
	}
	if c.Subject.CommonName != "" {
		p.Names = append(p.Names, "cn:"+c.Subject.CommonName)
	}
	return p
}

// Name returns the first of Names, "" without any.
func (p Certificate) Name() string {
	if len(p.Names) == 0 {
		return ""
	}
	return p.Names[0]
}

// Key returns the zero key, because the client is not a process of this host.
func (Certificate) Key() gpreempt.ProcessKey { return gpreempt.ProcessKey{} }

// Principal returns all names as one text: two certificates with the same names are
// the same client.
func (p Certificate) Principal() string { return fmt.Sprintf("certificate %q", p.Names) }

// String returns the first name for a person to read.
func (p Certificate) String() string { return fmt.Sprintf("certificate %.128q", p.Name()) }

// ListenTLS returns a listener on a TCP address whose connections are all Conns of a
// Certificate, to be served with Credentials. Accept makes no call that a client can
// block: the handshake comes later. Above a bound of connections without a handshake,
// Accept closes new ones and calls refused, which must not block.
func ListenTLS(ctx context.Context, address string, certs *CertificateStore, refused func(error)) (net.Listener, error) {
	config := net.ListenConfig{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: deadHostTime / 2, Interval: deadHostTime / 5, Count: 2},
		Control: func(_, _ string, socket syscall.RawConn) error {
			var failure error
			err := socket.Control(func(fd uintptr) {
				// For bytes that are never acknowledged; accepted sockets inherit it.
				failure = errors.Join(unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(deadHostTime.Milliseconds())),
					unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBytes))
			})
			return errors.Join(err, failure)
		},
	}
	l, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return &tlsListener{Listener: l, certs: certs, refused: refused, handshakes: handshakes{of: map[netip.Prefix]int{}}}, nil
}

// handshakes are the connections whose handshake is not complete.
type handshakes struct {
	mu  sync.Mutex // guards all below
	all int
	of  map[netip.Prefix]int // by network of the client
}

// begin counts a handshake and returns the function that counts it out; nil if the client
// is at its limit.
func (h *handshakes) begin(address net.Addr) (end func()) {
	from := Network(address)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.of[from] >= maxHandshakes-h.all {
		return nil
	}
	h.all++
	h.of[from]++
	return sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.all--
		if h.of[from]--; h.of[from] == 0 {
			delete(h.of, from)
		}
	})
}

// Network returns the address of a TCP client, or the /64 that a host has by IPv6.
func Network(address net.Addr) netip.Prefix {
	from, err := netip.ParseAddrPort(address.String())
	if err != nil {
		return netip.Prefix{} // not TCP
	}
	ip := from.Addr().Unmap().WithZone("")
	return netip.PrefixFrom(ip, min(64, ip.BitLen())).Masked()
}

type tlsListener struct {
	net.Listener
	certs      *CertificateStore
	refused    func(error)
	handshakes handshakes
}

func (l *tlsListener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if end := l.handshakes.begin(raw.RemoteAddr()); end != nil {
			return &tlsConn{
				Conn: tls.Server(raw, l.certs.config()), raw: raw, certs: l.certs, done: make(chan struct{}), handshakeOver: end,
			}, nil
		}
		_ = raw.Close()
		l.refused(fmt.Errorf("connection from %v refused: too many handshakes are incomplete; the limit is %d for all clients, and for one address as many as it leaves free",
			raw.RemoteAddr(), maxHandshakes))
	}
}

// tlsConn is a connection of a Certificate.
type tlsConn struct {
	net.Conn      // TLS
	raw           net.Conn
	certs         *CertificateStore
	handshakeOver func() // frees the connection's place among the handshakes

	// These are written by handshake.
	certificates []*x509.Certificate
	peer         Certificate

	once     sync.Once
	done     chan struct{}
	closeErr error // written before done is closed
}

func (c *tlsConn) Peer() Peer {
	if c.certificates == nil {
		return nil
	}
	return c.peer
}

func (c *tlsConn) Done() <-chan struct{} { return c.done }

// Died returns false: the death of a process on another host is not known.
func (*tlsConn) Died() bool { return false }

func (*tlsConn) Exiting() bool { return false }

func (c *tlsConn) Left() bool { return left(c.raw) }

// Close closes the connection, once. It waits for nothing.
func (c *tlsConn) Close() error {
	c.once.Do(func() {
		c.closeErr = c.raw.Close() // without close_notify, which might block
		c.handshakeOver()
		c.certs.remove(c)
		close(c.done)
	})
	return c.closeErr
}

func (c *tlsConn) handshake() error {
	defer c.handshakeOver()
	secure := c.Conn.(*tls.Conn)
	if err := secure.HandshakeContext(context.Background()); err != nil { //nolint:forbidigo // gRPC sets a deadline on the socket, and passes no context
		c.flushAlert()
		return fmt.Errorf("connection from %v refused: %w", c.RemoteAddr(), err)
	}
	c.certificates = secure.ConnectionState().PeerCertificates
	c.peer = certificateOf(c.certificates[0], c.RemoteAddr())
	until, err := c.certs.admit(c)
	if err != nil {
		return fmt.Errorf("connection from %v refused: %w", c.RemoteAddr(), err)
	}
	go c.expire(until)
	return nil
}

// expire closes the connection when the client's certificate expires.
func (c *tlsConn) expire(until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-c.done:
	case <-timer.C:
		_ = c.Close() // its reader gets the error
	}
}

// flushAlert waits until the client can read the TLS alert: closing a socket that has
// unread bytes discards what was sent last.
func (c *tlsConn) flushAlert() {
	tcp, ok := c.raw.(*net.TCPConn)
	if !ok || tcp.CloseWrite() != nil || tcp.SetReadDeadline(time.Now().Add(alertTime)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, tcp, 64<<10)
}
