package daemon

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// live is a running daemon whose config file changes.
type live struct {
	*testing.T
	h       *fakeHost
	c       *client.Client // an admin
	values  map[string]string
	ca      *testutil.Authority
	address string
	log     string // what it has logged is in this file
}

// liveCase changes keys of a running daemon.
type liveCase struct {
	// keys are separated by spaces, and so are their values.
	keys, from, to string
	// others are the values of other keys.
	others map[string]string
	// start looks at a daemon with the old values, and returns what looks at it with the new
	// ones.
	start func(l *live) (changed func())
}

// nobody and its group have no rights without the config.
const nobody = 65534

var liveCases = []liveCase{
	{keys: "access.online_users", from: "[65534]", to: "[]", start: rights(peer{uid: nobody}, false)},
	{keys: "access.online_groups", from: "[65534]", to: "[]", start: rights(peer{uid: nobody, gid: nobody}, false)},
	{keys: "access.admin_users", from: "[65534]", to: "[]", start: rights(peer{uid: nobody}, true)},
	{keys: "access.admin_groups", from: "[65534]", to: "[]", start: rights(peer{uid: nobody, gid: nobody}, true)},
	{keys: "access.container_admins", from: "true", to: "false", start: rights(peer{nested: true}, true)},
	{keys: "access.online_groups", from: "[]", to: "[65534]", start: groupOfTheSocket},
	{keys: "tcp.online", from: `["dns:peer"]`, to: "[]", start: rights(peer{names: []string{"peer"}}, false)},
	{keys: "tcp.admin", from: `["dns:peer"]`, to: "[]", start: rights(peer{names: []string{"peer"}}, true)},
	{keys: "tcp.certificate tcp.key", start: certificateOfTheDaemon},
	{keys: "tcp.client_ca", start: authorityOfClients},

	{
		keys: "limits.leases_per_client", from: "10", to: "3", others: map[string]string{"limits.leases_per_user": "10"},
		start: leases(gpreempt.ReasonLeasesPerClient, certified, certified, 3),
	},
	{
		keys: "limits.leases_per_user", from: "10", to: "3", start: leases(gpreempt.ReasonLeasesPerUser, peer{uid: nobody}, peer{uid: nobody}, 4),
		others: map[string]string{"limits.leases_per_client": "3", "access.online_users": "[65534]"},
	},
	{
		keys: "limits.leases_total", from: "100", to: "4", others: map[string]string{"limits.leases_per_client": "3"},
		start: leases(gpreempt.ReasonLeasesTotal, certified, peer{names: []string{"other"}}, 4),
	},
	{keys: "limits.streams_per_client", from: "10", to: "1", start: streams},
	{keys: "limits.requests_per_second", from: "1000000", to: "10", others: map[string]string{"limits.burst": "100"}, start: requests(300)},
	{keys: "limits.burst", from: "1000000", to: "20", others: map[string]string{"limits.requests_per_second": "10"}, start: requests(30)},
	{
		keys: "limits.requests_per_user", from: "1000000", to: "10", start: requestsTogether,
		others: map[string]string{"limits.requests_per_second": "10", "limits.burst": "100", "access.online_users": "[65534]"},
	},
	{keys: "limits.connections_per_user", from: "10", to: "1", start: connections(gpreempt.ReasonConnsPerUser)},
	{keys: "limits.connections_total", from: "100", to: "3", start: connections(gpreempt.ReasonConnsTotal)},

	{keys: "policy.preset", from: "strict", to: "share", start: shownPolicy("preset")},
	{keys: "policy.suspend_when", from: "eta", to: "at-once", start: shownPolicy("suspend_when")},
	{keys: "policy.linger", from: "none", to: "fixed", start: shownPolicy("linger")},
	{keys: "policy.linger_max", from: "1ms", to: "2ms", start: shownPolicy("linger_max")},
	{keys: "policy.share_floor", from: "0.25", to: "0.5", start: shownPolicy("share_floor")},
	{keys: "policy.share_window", from: "1s", to: "2s", start: shownPolicy("share_window")},
	{keys: "policy.max_suspend", from: "1s", to: "2s", start: shownPolicy("max_suspend")},
	{keys: "policy.min_run", from: "1ms", to: "2ms", start: shownPolicy("min_run")},
	{keys: "policy.gang", from: "job", to: "process", start: shownPolicy("gang")},
	{keys: "policy.attach_after", from: "1s", to: "2s", start: shownPolicy("attach_after")},
	{keys: "policy.max_wait", from: "1ms", to: "2ms", start: shownPolicy("max_wait")},
	{keys: "policy.shadow", from: "false", to: "true", start: shadow},
	{keys: "policy.default_ttl", from: "10s", to: "11s", start: defaultTTL},
	{keys: "policy.max_ttl", from: "10s", to: "11s", start: longestTTL},

	{keys: "hqd_budget.online hqd_budget.offline hqd_budget.spare", from: "0 0 0", to: "90 1 9", start: parked},
	{keys: "hqd_budget.alarm_free", from: "0", to: "100", start: func(l *live) func() {
		l.h.start("viewer")
		if l.h.warns(l.c, gpreempt.WarnSlotsLow.Warn("").Code) {
			l.Error("a warning without an alarm")
		}
		return func() {
			testutil.Until(l, "the warning", func() bool { return l.h.warns(l.c, gpreempt.WarnSlotsLow.Warn("").Code) })
		}
	}},
	{
		keys: "discovery.interval", from: "50ms", to: "9s", others: map[string]string{"discovery.idle_interval": "10s"},
		start: source("sysfs", func(s *gpreemptv1.Source) bool { return s.GetEvery().AsDuration() >= 9*time.Second }),
	},
	{
		keys: "discovery.idle_interval", from: "10ms", to: "1m", others: map[string]string{"discovery.interval": "10ms"},
		start: source("sysfs", func(s *gpreemptv1.Source) bool { return s.GetEvery().AsDuration() > 10*time.Millisecond }),
	},
	{
		keys: "discovery.mqds_interval", from: "0s", to: "100ms",
		start: source("mqds", func(s *gpreemptv1.Source) bool { return s.GetReadings() > 0 }),
	},
	{
		keys: "rules", from: "[]", to: `[{name: view, match: {comm: "view*"}, class: offline}]`,
		start: targetOf("viewer", func(t *gpreemptv1.Target) bool { return t.GetClass() == gpreemptv1.Class_CLASS_OFFLINE }),
	},
	{
		keys: "jobs", from: "[]", to: `[{name: site, cgroup: "/batch"}]`,
		start: targetOf("viewer", func(t *gpreemptv1.Target) bool { return strings.Contains(t.GetJob().GetWhy(), "site") }),
	},
	{
		keys: "safety.hazards", from: "[]", to: `[{id: ours, gfx: [gfx942], action: deny, why: Ours hangs.}]`, start: denied,
	},
	{keys: "log.level", from: "error", to: "info", start: func(l *live) func() {
		logged := func() bool {
			text, err := os.ReadFile(l.log)
			return err == nil && bytes.Contains(text, []byte("config reloaded"))
		}
		l.reload()
		if logged() {
			l.Error("a line of level info at level error")
		}
		return func() { testutil.Until(l, "a line of level info", logged) }
	}},
}

// Each live key is changed in the file of a running daemon, and a client sees the new value after
// the reload, not before.
func TestEachLiveKeyIsInForceAfterAReload(t *testing.T) {
	var tested []string
	for _, tc := range liveCases {
		keys, from, to := strings.Fields(tc.keys), strings.Fields(tc.from), strings.Fields(tc.to)
		if len(keys) == 1 {
			from, to = []string{tc.from}, []string{tc.to}
		}
		tested = append(tested, keys...)
		t.Run(tc.keys, func(t *testing.T) {
			l := newLive(t)
			maps.Copy(l.values, tc.others)
			set := func(values []string) {
				for i, key := range keys {
					if tc.from != "" {
						l.values[key] = values[i]
					}
				}
			}
			set(from)
			l.serve()
			changed := tc.start(l)
			set(to)
			l.reload()
			changed()
		})
	}
	slices.Sort(tested)
	want := config.LiveKeys()
	slices.Sort(want)
	if diff := cmp.Diff(want, slices.Compact(tested)); diff != "" {
		t.Errorf("keys with a case in liveCases (-want +got):\n%s", diff)
	}
}

func newLive(t *testing.T) *live {
	t.Helper()
	l := &live{T: t, ca: testutil.NewAuthority(t, "clients"), address: testutil.FreeAddress(t), log: filepath.Join(t.TempDir(), "log")}
	l.h = newFakeHost(t, "6.12", "")
	l.h.put("sys/kernel/debug/kfd/mqds", "")
	l.h.opts.Host.Backlogs = func(_ context.Context, _ gpreempt.ProcessKey, queues []gpreempt.QueueEntry) ([]inventory.Backlog, error) {
		return slices.Repeat([]inventory.Backlog{{Known: true, Unit: inventory.Packets}}, len(queues)), nil // idle
	}
	certificate, key := l.ca.Issue(testutil.ForServer)
	l.values = map[string]string{
		"access.online_groups": "[]", "access.admin_groups": "[]",
		"tcp.address": `"` + l.address + `"`, "tcp.certificate": certificate, "tcp.key": key, "tcp.client_ca": l.ca.File,
		"tcp.online": `["dns:client", "dns:other"]`, "discovery.interval": "50ms",
		"policy.preset": "strict", "policy.linger": "none", "policy.attach_after": "0s",
		"rules": `[{name: training, match: {comm: "train*"}, class: offline}]`,
	}
	return l
}

// serve starts the daemon.
func (l *live) serve() {
	l.Helper()
	l.write()
	log, err := os.Create(l.log)
	if err != nil {
		l.Fatal(err)
	}
	stderr := os.Stderr
	l.Cleanup(func() { // after the daemon
		os.Stderr = stderr
		_ = log.Close()
	})
	os.Stderr, l.h.opts.Log = log, nil
	l.c, _ = l.h.serve()
	l.Cleanup(func() {
		if text, err := os.ReadFile(l.log); err == nil && l.Failed() {
			l.Logf("the daemon's log:\n%s", text)
		}
	})
	l.h.warns(l.c, "") // it is connected from now on
	if err := os.Chmod(filepath.Dir(l.h.opts.Socket), 0o755); err != nil {
		l.Fatal(err)
	}
}

// write writes the values to the config file, in its order of sections.
func (l *live) write() {
	l.Helper()
	sections := map[string][]string{}
	text := ""
	for key, value := range l.values {
		if section, name, nested := strings.Cut(key, "."); nested {
			sections[section] = append(sections[section], fmt.Sprintf("  %s: %s\n", name, value))
		} else {
			text += fmt.Sprintf("%s: %s\n", key, value)
		}
	}
	for name, lines := range sections {
		text += name + ":\n" + strings.Join(lines, "")
	}
	write(l, l.h.opts.ConfigPath, text)
}

// reload writes the file and has the daemon read it.
func (l *live) reload() {
	l.Helper()
	l.write()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		l.Fatal(err)
	}
	testutil.Receive(l, l.h.ready, "the end of the reload")
	for _, code := range []string{"CONFIG_REJECTED", "CERTIFICATE_REJECTED", "RESTART_NEEDED"} {
		if l.h.warns(l.c, code) {
			l.Fatalf("the reload ends with the warning %s", code)
		}
	}
}

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
	dial := func(context.Context, string) (net.Conn, error) { return l.relay(p) }
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

func why(err error) gpreempt.Reason { return gpreempt.ReasonOf(api.FromStatus(err)) }

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

// leases has two clients take leases in turn, and expects a reason for another one.
func leases(want gpreempt.Reason, first, second peer, n int) func(*live) func() {
	return func(l *live) func() {
		clients := []*grpc.ClientConn{l.client(first), l.client(second)}
		for i := range n {
			l.announce(clients[i%2], time.Minute)
		}
		return func() {
			_, err := gpreemptv1.NewOnlineServiceClient(clients[n%2]).NotifyOnline(testutil.Context(l), &gpreemptv1.NotifyOnlineRequest{})
			if why(err) != want {
				l.Errorf("another lease: %v, want %s", err, want)
			}
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

func streams(l *live) func() {
	conn := l.dial(certified, nil)
	l.announce(conn, time.Minute)
	l.announce(conn, time.Minute)
	return func() {
		s, err := l.session(conn)
		if err == nil {
			_, err = s.Recv()
		}
		if why(err) != gpreempt.ReasonStreamsPerClient {
			l.Errorf("a third stream: %v", err)
		}
	}
}

// requests makes a number of calls, and expects that one of many is refused later.
func requests(n int) func(*live) func() {
	return func(l *live) func() {
		online := gpreemptv1.NewOnlineServiceClient(l.dial(certified, nil))
		call := func() gpreempt.Reason {
			_, err := online.Complete(testutil.Context(l), &gpreemptv1.CompleteRequest{LeaseId: "x"})
			return why(err)
		}
		for range n {
			if got := call(); got == gpreempt.ReasonRateLimited {
				l.Fatal("a call is refused before the rate is low")
			}
		}
		return func() {
			testutil.Until(l, "a refusal", func() bool { return call() == gpreempt.ReasonRateLimited })
		}
	}
}

// requestsTogether has two clients of one user who call in turn, and expects that they are refused
// for what they send together.
func requestsTogether(l *live) func() {
	var clients []gpreemptv1.OnlineServiceClient
	for range 2 {
		clients = append(clients, gpreemptv1.NewOnlineServiceClient(l.client(peer{uid: nobody})))
	}
	refused := func() (together bool) {
		for _, c := range clients {
			_, err := c.Complete(testutil.Context(l), &gpreemptv1.CompleteRequest{LeaseId: "x"})
			together = together || why(err) == gpreempt.ReasonRateLimited && strings.Contains(err.Error(), "together")
		}
		return together
	}
	for range 150 {
		if refused() {
			l.Fatal("the clients are refused before the rate is low")
		}
	}
	return func() { testutil.Until(l, "a refusal", refused) }
}

// connections has two connections beside that of the admin, and expects a reason for a third.
func connections(want gpreempt.Reason) func(*live) func() {
	return func(l *live) func() {
		for range 2 {
			l.announce(l.dial(certified, nil), time.Minute)
		}
		return func() {
			_, err := gpreemptv1.NewOnlineServiceClient(l.dial(certified, nil)).NotifyOnline(testutil.Context(l), &gpreemptv1.NotifyOnlineRequest{})
			if why(err) != want {
				l.Errorf("another connection: %v, want %s", err, want)
			}
		}
	}
}

// shownPolicy compares a knob of the policy in force with the file.
func shownPolicy(name string) func(*live) func() {
	return func(l *live) func() {
		check := func() {
			l.Helper()
			answer, err := l.c.Admin().GetPolicy(testutil.Context(l), &gpreemptv1.GetPolicyRequest{})
			if err != nil {
				l.Fatal(err)
			}
			want := l.values["policy."+name]
			if got := knob(answer.GetPolicy(), name); got != want && !(name == "preset" && got == "custom") {
				l.Errorf("%s is %s, want %s", name, got, want)
			}
		}
		if name == "preset" { // else it is custom
			delete(l.values, "policy.linger")
			delete(l.values, "policy.attach_after")
			l.reload()
		}
		check()
		return check
	}
}

// knob returns a value of a policy in the form of the file.
func knob(p *gpreemptv1.Policy, name string) string {
	field := p.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
	switch v := p.ProtoReflect().Get(field).Interface().(type) {
	case protoreflect.EnumNumber:
		return api.EnumNumberName(field.Enum(), v)
	case protoreflect.Message:
		return v.Interface().(*durationpb.Duration).AsDuration().String()
	default:
		return fmt.Sprint(v)
	}
}

// shadow has an announcement suspend a job with the old value only.
func shadow(l *live) func() {
	job := l.h.start("trainer")
	l.h.target(l.c, job, "a mechanism is attached", held)
	suspended := func() int {
		lease, err := l.c.Acquire(testutil.Context(l), client.Request{TTL: time.Minute, MaxWait: 10 * time.Second})
		if err != nil {
			l.Fatal(err)
		}
		defer func() {
			if err := release(l.Context(), lease); err != nil {
				l.Error(err)
			}
		}()
		return len(job.Suspended())
	}
	if suspended() == 0 {
		l.Error("nothing is suspended before")
	}
	return func() {
		l.h.await("all run", func() bool { return len(job.Suspended()) == 0 })
		if n := suspended(); n > 0 {
			l.Errorf("%d queues are suspended", n)
		}
	}
}

func defaultTTL(l *live) func() {
	check := func(want time.Duration) {
		l.Helper()
		if _, answer := l.announce(l.dial(certified, nil), 0); answer.GetTtl().AsDuration() != want {
			l.Errorf("%v are granted, want %v", answer.GetTtl().AsDuration(), want)
		}
	}
	check(10 * time.Second)
	return func() { check(11 * time.Second) }
}

func longestTTL(l *live) func() {
	ask := func() gpreempt.Reason {
		_, err := gpreemptv1.NewOnlineServiceClient(l.dial(certified, nil)).NotifyOnline(testutil.Context(l),
			&gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(11 * time.Second)})
		return why(err)
	}
	if got := ask(); got != gpreempt.ReasonTTLRange {
		l.Errorf("11 s are refused with %q", got)
	}
	return func() {
		if got := ask(); got != "" {
			l.Errorf("11 s are refused with %q", got)
		}
	}
}

// parked has an idle job that the budget suspends without an announcement.
func parked(l *live) func() {
	job := l.h.start("trainer")
	l.h.target(l.c, job, "a mechanism is attached", held)
	if got := job.Suspended(); got != nil {
		l.Errorf("queues %v are suspended without a budget", got)
	}
	return func() { l.h.await("it is suspended", func() bool { return len(job.Suspended()) > 0 }) }
}

// source expects something of a source of queues.
func source(name string, want func(*gpreemptv1.Source) bool) func(*live) func() {
	return func(l *live) func() {
		is := func() bool {
			answer, err := l.c.Admin().GetStatus(testutil.Context(l), &gpreemptv1.GetStatusRequest{})
			if err != nil {
				l.Fatal(err)
			}
			return slices.ContainsFunc(answer.GetSources(), func(s *gpreemptv1.Source) bool { return s.GetName() == name && want(s) })
		}
		if is() {
			l.Errorf("%s is so with the old value", name)
		}
		return func() { testutil.Until(l, "what the new value means for "+name, is) }
	}
}

// targetOf expects something of a process.
func targetOf(comm string, want func(*gpreemptv1.Target) bool) func(*live) func() {
	return func(l *live) func() {
		job := l.h.start(comm)
		l.h.target(l.c, job, "it is not so with the old value", func(t *gpreemptv1.Target) bool { return !want(t) })
		return func() { l.h.target(l.c, job, "what the new value means for it", want) }
	}
}

// denied has a mechanism attached to a job when a row forbids it.
func denied(l *live) func() {
	job := l.h.start("trainer")
	l.h.target(l.c, job, "a mechanism is attached", held)
	return func() {
		l.h.target(l.c, job, "the row is in force", func(t *gpreemptv1.Target) bool {
			return strings.Contains(t.GetAttachError(), "hazard ours: Ours hangs.")
		})
		l.h.await("it is detached", func() bool { state, _ := job.KFD(); return !state.Enabled })
	}
}
