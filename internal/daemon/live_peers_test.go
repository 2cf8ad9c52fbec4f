package daemon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// peer is a client: a process with a uid and a gid, in a pid namespace of its own if nested; or one
// with a certificate that has names, or is issued by ca.
type peer struct {
	uid, gid uint32
	nested   bool
	names    []string
	ca       *testutil.Authority // nil is the daemon's
}

// certified is a client with the right to announce.
var certified = peer{names: []string{"client"}}

// dial returns a connection, which is made by the first call. The server's certificate is stored in
// seen if that is not nil.
func (l *live) dial(p peer, seen *x509.Certificate) *grpc.ClientConn {
	l.Helper()
	secret, address := insecure.NewCredentials(), "passthrough:peer"
	dial := func(context.Context, string) (net.Conn, error) { return l.relay(p) } //nolint:contextcheck // the process outlives the call
	if p.names != nil {
		ca := p.ca
		if ca == nil {
			ca = l.ca
		}
		pair, err := tls.LoadX509KeyPair(ca.Issue(testutil.Named(p.names...)))
		if err != nil {
			l.Fatal(err)
		}
		roots := x509.NewCertPool()
		pem, err := os.ReadFile(l.ca.File)
		if err != nil || !roots.AppendCertsFromPEM(pem) {
			l.Fatalf("the authority: %v", err)
		}
		secret = credentials.NewTLS(&tls.Config{
			Certificates: []tls.Certificate{pair}, RootCAs: roots, ServerName: "localhost", MinVersion: tls.VersionTLS13,
			VerifyConnection: func(s tls.ConnectionState) error {
				if seen != nil {
					*seen = *s.PeerCertificates[0]
				}
				return nil
			},
		})
		address = "passthrough:" + l.address
		dial = func(ctx context.Context, address string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", address)
		}
	}
	conn, err := grpc.NewClient(address, grpc.WithContextDialer(dial), grpc.WithTransportCredentials(secret))
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = conn.Close() })
	return conn
}

// relay starts a process that is the peer, which connects and passes on what both sides send.
func (l *live) relay(p peer) (net.Conn, error) {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	own, theirs := os.NewFile(uintptr(pair[0]), "own"), os.NewFile(uintptr(pair[1]), "theirs")
	defer own.Close()
	defer theirs.Close()
	cmd := exec.CommandContext(l.Context(), "/proc/self/exe", l.h.opts.Socket)
	cmd.Env, cmd.ExtraFiles = []string{roleEnv + "=" + roleRelay}, []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: p.uid, Gid: p.gid}}
	if p.nested {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	l.Cleanup(func() { _ = cmd.Wait() }) // it ends with its connections
	return net.FileConn(own)
}

const roleRelay = "relay"

// relayMain is the process that relay starts.
func relayMain(socket string) int {
	file := os.NewFile(3, "relay")
	test, err := net.FileConn(file)
	if err != nil {
		return 1
	}
	_ = file.Close()
	daemon, err := net.Dial("unix", socket)
	if err != nil {
		return 1
	}
	ended := make(chan error, 2)
	for _, c := range [][2]net.Conn{{test, daemon}, {daemon, test}} {
		go func() {
			_, err := io.Copy(c[0], c[1])
			ended <- err
		}()
	}
	<-ended
	return 0
}

func why(err error) gpreempt.Reason { return gpreempt.ReasonOf(client.FromStatus(err)) }

// session opens a session, in which nothing was sent.
func (l *live) session(conn *grpc.ClientConn) (gpreemptv1.OnlineService_SessionClient, error) {
	return gpreemptv1.NewOnlineServiceClient(conn).Session(testutil.Context(l))
}

// announce announces work in a session that ends with the test, and returns what the daemon grants.
func (l *live) announce(conn *grpc.ClientConn, ttl time.Duration) (gpreemptv1.OnlineService_SessionClient, *gpreemptv1.NotifyOnlineResponse) {
	l.Helper()
	s, err := l.session(conn)
	if err != nil {
		l.Fatal(err)
	}
	request := &gpreemptv1.NotifyOnlineRequest{MaxWait: durationpb.New(0)}
	if ttl > 0 {
		request.Ttl = durationpb.New(ttl)
	}
	if err := s.Send(&gpreemptv1.SessionRequest{Tag: 1, Frame: &gpreemptv1.SessionRequest_Announce{Announce: request}}); err != nil {
		l.Fatal(err)
	}
	answer, err := s.Recv()
	if err != nil || answer.GetAnnounced() == nil {
		l.Fatalf("an announcement: %v, %v", answer, err)
	}
	return s, answer.GetAnnounced()
}

// drain is a call that only admins may make. It changes nothing.
func (l *live) drain(conn *grpc.ClientConn) error {
	_, err := gpreemptv1.NewAdminServiceClient(conn).SetDrain(testutil.Context(l), &gpreemptv1.SetDrainRequest{})
	return err
}

// rights has a peer with a right lose it: its stream and its lease end, and it is refused.
func rights(p peer, admin bool) func(*live) func() {
	return func(l *live) func() {
		conn := l.client(p)
		stream, lease := l.announce(conn, time.Minute)
		if err := l.drain(conn); (err == nil) != admin {
			l.Errorf("a call of an admin: %v", err)
		}
		return func() {
			if _, err := stream.Recv(); err == nil || status.Code(err) == codes.DeadlineExceeded {
				l.Errorf("the stream: %v, want its end", err)
			}
			testutil.Until(l, "the end of the lease", func() bool { return !l.lives(lease.GetLeaseId()) })
			want := gpreempt.ReasonNotOnline
			call := func() error {
				_, err := gpreemptv1.NewOnlineServiceClient(l.dial(p, nil)).NotifyOnline(testutil.Context(l), &gpreemptv1.NotifyOnlineRequest{})
				return err
			}
			if admin {
				want, call = gpreempt.ReasonNotAdmin, func() error { return l.drain(l.dial(p, nil)) }
			}
			if err := call(); why(err) != want {
				l.Errorf("afterwards: %v, want %s", err, want)
			}
		}
	}
}

// lives reports whether a lease has not ended.
func (l *live) lives(id string) bool {
	l.Helper()
	list, err := l.c.Admin().ListLeases(testutil.Context(l), &gpreemptv1.ListLeasesRequest{})
	if err != nil {
		l.Fatal(err)
	}
	return slices.ContainsFunc(list.GetLeases(), func(lease *gpreemptv1.Lease) bool {
		return lease.GetLeaseId() == id && lease.GetEnd() == gpreemptv1.LeaseEnd_LEASE_END_UNSPECIFIED
	})
}

// groupOfTheSocket is about a group that gets the right: its members can connect.
func groupOfTheSocket(l *live) func() {
	if os.Getuid() != 0 {
		l.Skip("needs root, to connect as another user")
	}
	member := peer{uid: nobody, gid: nobody}
	if _, err := l.session(l.dial(member, nil)); status.Code(err) != codes.Unavailable {
		l.Errorf("before it may connect: %v", err)
	}
	return func() { l.announce(l.dial(member, nil), time.Minute) }
}

func certificateOfTheDaemon(l *live) func() {
	serial := func() string {
		var seen x509.Certificate
		l.announce(l.dial(certified, &seen), time.Minute)
		return seen.SerialNumber.String()
	}
	before := serial()
	l.values["tcp.certificate"], l.values["tcp.key"] = l.ca.Issue(testutil.ForServer)
	return func() {
		if after := serial(); after == before {
			l.Errorf("the certificate has the number %s, as before", after)
		}
	}
}

func authorityOfClients(l *live) func() {
	ca := testutil.NewAuthority(l, "others")
	others := peer{names: certified.names, ca: ca}
	ping := func() error {
		_, err := gpreemptv1.NewOnlineServiceClient(l.dial(others, nil)).Complete(testutil.Context(l), &gpreemptv1.CompleteRequest{LeaseId: "x"})
		return err
	}
	if err := ping(); status.Code(err) != codes.Unavailable {
		l.Errorf("a client of an authority that is not in the file: %v", err)
	}
	l.values["tcp.client_ca"] = ca.File
	return func() {
		if err := ping(); why(err) == "" {
			l.Errorf("a client of the authority: %v, want the answer of the daemon", err)
		}
	}
}

// client returns a connection of a peer with the right to announce.
func (l *live) client(p peer) *grpc.ClientConn {
	l.Helper()
	if p.names != nil {
		return l.dial(p, nil)
	}
	if os.Getuid() != 0 {
		l.Skip("needs root, to connect as another user")
	}
	if err := os.Chmod(l.h.opts.Socket, 0o666); err != nil {
		l.Fatal(err)
	}
	return l.dial(p, nil)
}
