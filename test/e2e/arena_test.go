package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	_ "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// arena is a daemon with honest and hostile clients.
type arena struct {
	*daemon
	tcp        *tcp
	transports []string
	names      []protoreflect.MethodDescriptor
	hints      map[protoreflect.Name]any
	// limit is the memory of the daemon, in KiB.
	limit    int
	quietFDs int

	honest  map[string]*actor // by transport
	hostile map[string][]*actor
	orders  map[string]order // by transport, of an honest client
	users   []certificate    // of hostile clients over TCP
	next    int              // user
	admins  []func() error   // each makes a connection and a call
}

// actor is a process that carries out orders.
type actor struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Reader
}

const hostileUsers = 2 * abusers

// When times are judged, hostile clients have the last processor, and the daemon and the others
// have the first: what is measured is the daemon, and not who gets the processors.
const servingCPU, attackingCPU = "0", "1"

// pinned begins a command on a processor, if times are judged.
func pinned(judged bool, processor string) []string {
	if !judged {
		return nil
	}
	return []string{"taskset", "--cpu-list", processor}
}

// newArena starts a daemon with its default limits, and clients.
func newArena(t *testing.T, judged bool) *arena {
	t.Helper()
	w := overTCP(t)
	s := &arena{
		tcp: w, honest: map[string]*actor{}, hostile: map[string][]*actor{}, orders: map[string]order{},
		hints: map[protoreflect.Name]any{"from_start": true, "backlog": true, "all": true, "file_containing_symbol": "gpreempt.v1.AdminService", "announce": hostileAnnouncement},
	}
	config := strings.Replace(w.config, "online_groups: []", `online_groups: ["65534"]`, 1)
	names := []string{"dns:web.example"}
	for i := range hostileUsers {
		names = append(names, fmt.Sprintf("dns:web%d.example", i))
		cert, key := w.ca.Issue(testutil.Named(fmt.Sprintf("web%d.example", i)))
		s.users = append(s.users, certificate{cert, key})
	}
	config = strings.Replace(config, "[dns:web.example]", "["+strings.Join(names, ", ")+"]", 1)
	dir := testutil.TempSocketDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	d := prepare(t, dir, config)
	if judged {
		d.process.Args = append(pinned(judged, servingCPU), d.process.Args...)
		d.process.Path = "/usr/bin/taskset"
	}
	unit := limitsOfTheUnit(t)
	d.process.Env = append(d.process.Env, fmt.Sprintf("GOMEMLIMIT=%d", unit.soft))
	s.limit = int(unit.soft >> 10)
	if racing() {
		s.limit = int(unit.hard >> 10) // the detector's memory is not the daemon's
	}
	d.run()
	d.awaitServing()
	d.events = watchEvents(t, d.admin)
	s.daemon = d
	for range 24 {
		pid := d.mustAsk("start batch:8:1m").PID
		s.hints["target_id"] = strconv.Itoa(int(pid))
	}
	s.names = servedMethods(t)

	cert, key := w.ca.Issue(webHolder)
	s.orders["tcp"] = order{Address: w.address, Certificates: []certificate{{cert, key}}, CA: w.ca.File}
	s.honest["tcp"], s.hostile["tcp"] = s.player(nil, pinned(judged, servingCPU)...), []*actor{s.player(nil, pinned(judged, attackingCPU)...)}
	if os.Getuid() == 0 {
		s.transports = append(s.transports, "unix")
		s.orders["unix"] = order{Address: d.socket}
		s.honest["unix"] = s.player(user(99_999), pinned(judged, servingCPU)...)
		for i := range hostileUsers {
			s.hostile["unix"] = append(s.hostile["unix"], s.player(user(100_000+uint32(i)), pinned(judged, attackingCPU)...))
		}
		s.admins = append(s.admins, func() error { return getStatusOnce(t, func() (*grpc.ClientConn, error) { return connect(d.socket) }) })
	} else {
		t.Log("SKIP the unix socket: needs root, to connect as other users")
	}
	s.transports = append(s.transports, "tcp")
	cert, key = w.ca.Issue(opsHolder)
	ops, err := clientConfig(certificate{cert, key}, w.ca.File)
	if err != nil {
		t.Fatal(err)
	}
	s.admins = append(s.admins, func() error {
		return getStatusOnce(t, func() (*grpc.ClientConn, error) {
			return grpc.NewClient(w.address, grpc.WithTransportCredentials(credentials.NewTLS(ops)))
		})
	})
	s.slice(100*time.Millisecond, nil) // they connect
	s.quietFDs = s.fds()
	return s
}

func user(uid uint32) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: stranger}}
}

// getStatusOnce makes a connection and a call, as gpctl status does. It fails at the end of the
// timeout only, or when the daemon refuses.
func getStatusOnce(t *testing.T, dial func() (*grpc.ClientConn, error)) error {
	conn, err := dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	_, err = gpreemptv1.NewAdminServiceClient(conn).GetStatus(ctx, &gpreemptv1.GetStatusRequest{}, grpc.WaitForReady(true))
	return err
}

// limitsOfTheUnit returns GOMEMLIMIT and MemoryMax of the unit, in bytes.
func limitsOfTheUnit(t *testing.T) (l struct{ soft, hard int64 }) {
	t.Helper()
	unit, err := os.ReadFile("../../deploy/systemd/gpreemptd.service")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(unit)) {
		if _, err := fmt.Sscanf(line, "MemoryMax=%dG\n", &l.hard); err == nil {
			l.hard <<= 30
		}
		if _, err := fmt.Sscanf(line, "Environment=GOMEMLIMIT=%dMiB\n", &l.soft); err == nil {
			l.soft <<= 20
		}
	}
	if l.soft == 0 || l.hard == 0 {
		t.Fatalf("the unit has no limits of memory that can be read: %+v", l)
	}
	return l
}

// servedMethods returns every method of every service that the daemon serves (TestNothingButTheServicesIsServed).
func servedMethods(t *testing.T) (all []protoreflect.MethodDescriptor) {
	t.Helper()
	for _, service := range []protoreflect.FullName{"gpreempt.v1.OnlineService", "gpreempt.v1.AdminService", "grpc.health.v1.Health"} {
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(service)
		if err != nil {
			t.Fatal(err)
		}
		methods := found.(protoreflect.ServiceDescriptor).Methods()
		for i := range methods.Len() {
			all = append(all, methods.Get(i))
		}
	}
	return all
}

// methods returns the orders for a transport, without the abuse.
func (s *arena) methods(transport string) (all []order) {
	for _, m := range s.names {
		o := order{
			Address: s.orders[transport].Address, CA: s.orders[transport].CA,
			Method:        fmt.Sprintf("/%s/%s", m.Parent().FullName(), m.Name()),
			Request:       message(s.request(m.Input())),
			ClientStreams: m.IsStreamingClient(), ServerStreams: m.IsStreamingServer(),
		}
		all = append(all, o)
	}
	return all
}

// request returns a message with the fields of hints: it asks for as much as it can.
func (s *arena) request(of protoreflect.MessageDescriptor) proto.Message {
	if of.FullName() == hostileAnnouncement.ProtoReflect().Descriptor().FullName() {
		return hostileAnnouncement
	}
	m := dynamicpb.NewMessage(of)
	for i := range of.Fields().Len() {
		field := of.Fields().Get(i)
		hint, known := s.hints[field.Name()]
		switch value := hint.(type) {
		case proto.Message:
			m.Set(field, protoreflect.ValueOfMessage(value.ProtoReflect()))
		case string, bool:
			if known && !field.IsList() {
				m.Set(field, protoreflect.ValueOf(value))
			}
		}
	}
	return m
}

// player starts a process that carries out orders.
func (s *arena) player(as *syscall.SysProcAttr, command ...string) *actor {
	command = append(command, strangersBinary)
	t := s.t
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env, cmd.Stderr, cmd.SysProcAttr = environment(hostileEnv+`={"Play":true}`), os.Stderr, as
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	return &actor{t, in, bufio.NewReader(out)}
}

func (p *actor) say(what any) {
	p.t.Helper()
	if err := json.NewEncoder(p.in).Encode(what); err != nil {
		p.t.Fatal(err)
	}
}

// begin returns when the order is being carried out.
func (p *actor) begin(o order) {
	p.t.Helper()
	p.say(o)
	if line, err := p.out.ReadString('\n'); line != "began\n" {
		p.t.Fatalf("the client for %+v prints %q: %v", o, line, err)
	}
}

func (p *actor) end() (is played) {
	p.t.Helper()
	p.say(struct{}{})
	line, err := p.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &is)
	}
	if err != nil {
		p.t.Fatalf("the client prints %q: %v", line, err)
	}
	return is
}

// cast has the processes for an abuse, each with its order. Users take turns, because one that
// is deep in debt is not even read.
func (s *arena) cast(transport string, a methodAbuse, o order) (all []*actor, orders []order) {
	n := 1
	if a.users {
		n = abusers
	}
	o.Abuse = a.name
	for range n {
		if s.next++; transport == "unix" {
			all, orders = append(all, s.hostile[transport][s.next%hostileUsers]), append(orders, o)
		} else {
			o.Certificates = append(o.Certificates, s.users[s.next%hostileUsers])
		}
	}
	if transport != "unix" {
		all, orders = s.hostile[transport], []order{o}
	}
	return all, orders
}
