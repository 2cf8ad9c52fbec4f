package mtls

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// maxUnproved bounds the connections whose handshake is not done: strangers
	// must not use up the daemon's descriptors.
	maxUnproved = 64
	// silence is how soon a host that is gone without a word is found out: its
	// connections hold leases.
	silence = 20 * time.Second
	// farewell is how long a refused client may take to read why.
	farewell = 500 * time.Millisecond
	// protocol is the name gRPC shows for these credentials.
	protocol = "mtls"
)

// Peer is who connected. Everything but Address is from its certificate.
type Peer struct {
	// Names are what the certificate says of its holder: "uri:URI" and "dns:NAME" for
	// each of its alternative names of these kinds, then "cn:NAME".
	Names []string
	// Subject is the distinguished name, and Serial the number its authority gave it.
	Subject, Serial string
	// Address is where the connection came from, "IP:PORT".
	Address string
}

func peerOf(c *x509.Certificate, address net.Addr) Peer {
	p := Peer{Subject: c.Subject.String(), Serial: fmt.Sprintf("%x", c.SerialNumber), Address: address.String()}
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

// Name is the first of Names, "" when there is none.
func (p Peer) Name() string {
	if len(p.Names) == 0 {
		return ""
	}
	return p.Names[0]
}

// Process is the zero key: what runs on another host is no process of this one.
func (Peer) Process() gpreempt.ProcessKey { return gpreempt.ProcessKey{} }

// Principal is all names together: two certificates with the same are the same
// client.
func (p Peer) Principal() string { return fmt.Sprintf("certificate %q", p.Names) }

// String names the peer for people.
func (p Peer) String() string { return fmt.Sprintf("certificate %.128q", p.Name()) }

// Listen returns a listener on a TCP address whose connections are all *Conn, to be
// served with Credentials. Accept makes no call that a client can keep waiting: the
// handshake comes later. Beyond a bound of connections without one, more are closed
// and refused, which must not block, is told.
func Listen(ctx context.Context, address string, k *Keeper, refused func(error)) (net.Listener, error) {
	config := net.ListenConfig{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: silence / 2, Interval: silence / 5, Count: 2},
		Control: func(_, _ string, socket syscall.RawConn) error {
			var failure error
			err := socket.Control(func(fd uintptr) {
				// For what was sent and never acknowledged; accepted sockets inherit it.
				failure = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
			})
			return errors.Join(err, failure)
		},
	}
	l, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return &listener{Listener: l, keeper: k, refused: refused, unproved: make(chan struct{}, maxUnproved)}, nil
}

type listener struct {
	net.Listener
	keeper   *Keeper
	refused  func(error)
	unproved chan struct{} // a place for each connection without a handshake
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case l.unproved <- struct{}{}:
			return &Conn{
				Conn: tls.Server(raw, l.keeper.inForce()), raw: raw, keeper: l.keeper, done: make(chan struct{}),
				leave: sync.OnceFunc(func() { <-l.unproved }),
			}, nil
		default:
			_ = raw.Close()
			l.refused(fmt.Errorf("connection from %v refused: %d others have not shaken hands yet", raw.RemoteAddr(), maxUnproved))
		}
	}
}

// Conn is a connection; who is at the other end is known once Credentials have
// shaken hands. Its methods may be called from any goroutine.
type Conn struct {
	net.Conn // TLS
	raw      net.Conn
	keeper   *Keeper
	leave    func() // gives back the place among the unproved

	// These are written by prove.
	certificates []*x509.Certificate
	peer         Peer

	once     sync.Once
	done     chan struct{}
	closeErr error // written before done is closed
}

// Peer tells who is at the other end. The caller must not change Names.
func (c *Conn) Peer() Peer { return c.peer }

// Done is closed when the connection is over.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Died is false: nothing tells that a process on another host died, but the end of
// its connection.
func (*Conn) Died() bool { return false }

// Exiting is false, likewise.
func (*Conn) Exiting() bool { return false }

// Close closes the connection, once. It waits for nothing.
func (c *Conn) Close() error {
	c.once.Do(func() {
		c.closeErr = c.raw.Close() // a word of goodbye might have to wait for the other end
		c.leave()
		c.keeper.forget(c)
		close(c.done)
	})
	return c.closeErr
}

// prove shakes hands. gRPC bounds the time it takes.
func (c *Conn) prove() error {
	defer c.leave()
	secure := c.Conn.(*tls.Conn)
	if err := secure.HandshakeContext(context.Background()); err != nil { //nolint:forbidigo // gRPC gives a deadline on the socket, and no context
		c.farewell()
		return fmt.Errorf("connection from %v refused: %w", c.RemoteAddr(), err)
	}
	c.certificates = secure.ConnectionState().PeerCertificates
	c.peer = peerOf(c.certificates[0], c.RemoteAddr())
	until, err := c.keeper.admit(c)
	if err != nil {
		return fmt.Errorf("connection from %v refused: %w", c.RemoteAddr(), err)
	}
	go c.expire(until)
	return nil
}

// expire cuts the connection when its client is no longer proved.
func (c *Conn) expire(until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-c.done:
	case <-timer.C:
		_ = c.Close() // its end is told to whoever reads from it
	}
}

// farewell lets the client read why: closing a socket with something unread in it
// would take back what was sent last.
func (c *Conn) farewell() {
	tcp, ok := c.raw.(*net.TCPConn)
	if !ok || tcp.CloseWrite() != nil || tcp.SetReadDeadline(time.Now().Add(farewell)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, tcp, 64<<10) // whatever it says
}

// AuthInfo is what gRPC knows of a connection of this package.
type AuthInfo struct {
	credentials.CommonAuthInfo
	// Conn is never nil.
	Conn *Conn
}

// AuthType names the protocol.
func (AuthInfo) AuthType() string { return protocol }

// Credentials returns server credentials for connections of Listen; any other
// connection fails the handshake.
func Credentials() credentials.TransportCredentials { return transport{} }

type transport struct{}

func (transport) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := raw.(*Conn)
	if !ok {
		return nil, nil, fmt.Errorf("mtls: %T is no connection of mtls.Listen", raw)
	}
	if err := c.prove(); err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c, AuthInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, Conn: c}, nil
}

func (transport) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("mtls: these credentials are for servers")
}

func (transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: protocol}
}

func (t transport) Clone() credentials.TransportCredentials { return t }

func (transport) OverrideServerName(string) error { return nil }
