package server

import (
	"context"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/internal/testutil"
	goclient "github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// TestMain runs the tests or, with childEnv set, a client process of a test's server.
func TestMain(m *testing.M) {
	if socket := os.Getenv(childEnv); socket != "" {
		os.Exit(childMain(socket, os.Stdin, os.Stdout))
	}
	os.Exit(testutil.VerifyMain(m))
}

// monotonic is a scheduler clock.
type monotonic struct{ start time.Time }

func (m monotonic) Now() scheduler.Time { return time.Since(m.start) }

// machine suspends and resumes targets, one after another, and posts the results. While
// frozen it keeps them.
type machine struct {
	post   func(scheduler.Event)
	todo   chan scheduler.Event
	quit   chan struct{}
	mu     sync.Mutex // guards all below
	kept   []scheduler.Event
	frozen bool
}

func newMachine() *machine {
	return &machine{todo: make(chan scheduler.Event, 64), quit: make(chan struct{})}
}

// Attach does nothing: directory.tell posts the result.
func (m *machine) Attach(gpreempt.ProcessKey) {}

func (m *machine) Kill(gpreempt.ProcessKey) {}

func (m *machine) Flush() {}

func (m *machine) Inspect(target gpreempt.ProcessKey, seq uint64) {
	m.enqueue(scheduler.Inspected{Target: target, Seq: seq})
}

func (m *machine) Detach(target gpreempt.ProcessKey) { m.enqueue(scheduler.Detached{Target: target}) }

func (m *machine) Suspend(target gpreempt.ProcessKey, seq uint64) {
	m.enqueue(scheduler.Suspended{Target: target, Seq: seq, Took: time.Millisecond})
}

func (m *machine) Resume(target gpreempt.ProcessKey, seq uint64) {
	m.enqueue(scheduler.Resumed{Target: target, Seq: seq, Took: time.Millisecond})
}

func (m *machine) enqueue(result scheduler.Event) {
	select {
	case m.todo <- result:
	case <-m.quit:
	}
}

func (m *machine) run() {
	for {
		var ev scheduler.Event
		select {
		case ev = <-m.todo:
		case <-m.quit:
			return
		}
		m.mu.Lock()
		frozen := m.frozen
		if frozen {
			m.kept = append(m.kept, ev)
		}
		m.mu.Unlock()
		if !frozen {
			m.post(ev)
		}
	}
}

func (m *machine) freeze() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = true
}

func (m *machine) thaw() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = false
	for _, ev := range m.kept {
		m.enqueue(ev)
	}
	m.kept = nil
}

// directory is the Directory of a test.
type directory struct {
	inv  *inventory.Inventory
	post func(scheduler.Event)
	mu   sync.Mutex // guards all below
	of   map[gpreempt.ProcessKey]targets.Facts
	// steps and counts are the results of Explain and RuleCounts.
	steps  []classify.Step
	counts []targets.RuleCount
	// unknown are the unknown processes of Override.
	unknown []gpreempt.ProcessKey
}

func (d *directory) Explain(gpreempt.ProcessKey) []classify.Step {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.steps
}

func (d *directory) Announces(gpreempt.ProcessKey, func([]string) (gpreempt.Process, bool)) {}
func (d *directory) Departed(gpreempt.ProcessKey)                                           {}

func (d *directory) RuleCounts() []targets.RuleCount {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

func (d *directory) Facts(key gpreempt.ProcessKey) (targets.Facts, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f, ok := d.of[key]
	return f, ok
}

func (d *directory) Override(key gpreempt.ProcessKey, decision *classify.Decision, _ time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	f, ok := d.of[key]
	if !ok {
		d.unknown = append(d.unknown, key)
		return false
	}
	f.Decision = classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: classify.ByDefault}
	if decision != nil {
		f.Decision = *decision
	}
	d.set(key, f)
	return true
}

// set stores facts and posts them to the scheduler.
func (d *directory) set(key gpreempt.ProcessKey, f targets.Facts) {
	d.of[key] = f
	proc, _ := d.inv.Process(key)
	gpus := proc.GPUs()
	slices.Sort(gpus)
	d.post(scheduler.TargetSeen{
		Target: key, Class: f.Decision.Class, Priority: f.Decision.Priority, GPUs: gpus, Queues: d.inv.QueuesBorn(key),
	})
	d.post(scheduler.Attached{Target: key})
}

// readings is an Observer with fixed readings.
type readings struct {
	sources   []inventory.Source
	hqds      *inventory.HQDs
	hqdsErr   error
	evictions map[gpreempt.GPUID]uint64
	// notBefore is the argument of the last call of HQDs.
	notBefore time.Time
}

func (s *readings) Sources() []inventory.Source { return s.sources }
func (s *readings) HQDs(_ context.Context, notBefore time.Time) (*inventory.HQDs, error) {
	s.notBefore = notBefore
	return s.hqds, s.hqdsErr
}

func (s *readings) MemoryEvictions(gpu gpreempt.GPUID) (n uint64, ok bool) {
	n, ok = s.evictions[gpu]
	return n, ok
}

// host is a server on a socket, with everything behind it.
type host struct {
	server    *Server
	runner    *scheduler.Runner
	events    *events.Log
	inventory *inventory.Inventory
	directory *directory
	machine   *machine
	socket    string
	// listener is that of startInMemory, whose connections have the peer.
	listener *memoryListener
	peer     auth.Conn

	mu     sync.Mutex // guards limits, rights, procs
	limits Limits
	rights func() auth.Policy
	procs  []discovery.Proc
}

// The host has two GPUs. The offline process has a queue on each, the other process
// has one on the second.
const (
	gpuA gpreempt.GPUID = 100
	gpuB gpreempt.GPUID = 200
)

// defaultTTL is that of the policy: no lease expires because the host is busy.
const defaultTTL = 30 * time.Second

var (
	gpus = []gpreempt.GPU{
		{ID: gpuA, Node: 2, Name: "simulated", BDF: "0000:0a:00.0", RenderMinor: 128, QueueSlots: 24},
		{ID: gpuB, Node: 3, Name: "simulated", BDF: "0001:80:00.0", RenderMinor: 129, QueueSlots: 24},
	}
	offline = gpreempt.ProcessKey{PID: 4_000_001, Start: 11}
	other   = gpreempt.ProcessKey{PID: 4_000_002, Start: 22}
	epoch   = uint64(0xfeed)
	seen    = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
)

type option func(*Config, *scheduler.Limits)

// startHost returns a host with a server on a socket, until the end of the test.
func startHost(tb testing.TB, opts ...option) *host {
	tb.Helper()
	socket := filepath.Join(testutil.TempSocketDir(tb), "gpreemptd.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		tb.Fatal(err)
	}
	h := startOn(tb, auth.NewUnixListener(l, auth.UnixOptions{}), opts...)
	h.socket = socket
	return h
}

// startOn is startHost for a listener.
func startOn(tb testing.TB, l net.Listener, opts ...option) *host {
	tb.Helper()
	h := &host{
		events: events.NewLog(1024), inventory: inventory.New(1024), machine: newMachine(),
		limits: Limits{
			RequestsPerSecond: 1_000_000, Burst: 1_000_000, RequestsPerUser: 1_000_000,
			ConnectionsPerUser: 4096, ConnectionsTotal: 4096,
		},
		rights: func() auth.Policy { return auth.Policy{OwnerUID: uint32(os.Getuid())} },
	}
	cfg := Config{
		Events: h.events, Inventory: h.inventory, MaxMessageBytes: 64 << 10, Epoch: epoch, Now: time.Now,
		Log: zap.NewNop(), Audit: zap.NewNop(), Version: "v1.2.3", Backend: "simulated mi300x", Observer: &readings{}, BootID: "b007",
		Mechanisms: []string{"dbgtrap", "freezer"},
		Backlogs:   func(context.Context, gpreempt.ProcessKey, []gpreempt.QueueEntry) []inventory.Backlog { return nil },
		Diagnose: func(context.Context) *gpreemptv1.DiagnoseResponse {
			return &gpreemptv1.DiagnoseResponse{
				Verdict: gpreemptv1.Verdict_VERDICT_LIMITED, Summary: "it can work", ByDaemon: true, Backend: "simulated mi300x", Version: "v1.2.3",
				Checks: []*gpreemptv1.Check{{Id: "yama", Title: "Yama", Status: gpreemptv1.CheckStatus_CHECK_STATUS_WARN, Found: "3", Remedy: "lower it"}},
			}
		},
		Limits: func() Limits { h.mu.Lock(); defer h.mu.Unlock(); return h.limits },
		Authz:  func() auth.Policy { h.mu.Lock(); defer h.mu.Unlock(); return h.rights() },
	}
	leases := scheduler.Limits{LeasesPerClient: 64, LeasesPerUser: 4096, LeasesTotal: 4096}
	for _, opt := range opts {
		opt(&cfg, &leases)
	}
	policy := scheduler.DefaultPolicy()
	policy.ShareFloor, policy.MaxWait, policy.AttachAfter = 0, 10*time.Second, 0
	policy.DefaultTTL = defaultTTL
	h.runner = scheduler.NewRunner(scheduler.New(policy.Normalize(), leases), monotonic{time.Now()}, testutil.NewTimer(), h.machine,
		func(r scheduler.Record) { h.events.Append(time.Now(), r, "") })
	h.machine.post = h.runner.Post
	if cfg.Scheduler == nil {
		cfg.Scheduler = h.runner
	}
	h.directory = &directory{inv: h.inventory, post: h.runner.Post, of: map[gpreempt.ProcessKey]targets.Facts{}}
	cfg.Directory = h.directory

	h.inventory.SetGPUs(gpus)
	for _, g := range gpus {
		h.runner.Post(scheduler.GPUAdded{GPU: g.ID})
	}
	h.setProcs(
		discovery.Proc{
			Process: gpreempt.Process{Key: offline, Comm: "train", Cmdline: "python train.py", UID: 1001, Cgroup: gpreempt.Cgroup{Path: "/batch"}},
			Queues: []gpreempt.Queue{
				{Process: offline, ID: 0, GPU: gpuA, Type: gpreempt.QueueCompute, RingBytes: 4096},
				{Process: offline, ID: 1, GPU: gpuB, Type: gpreempt.QueueSDMA, RingBytes: 8192},
			},
		},
		discovery.Proc{
			Process: gpreempt.Process{Key: other, Comm: "serve", UID: 1002},
			Queues:  []gpreempt.Queue{{Process: other, ID: 0, GPU: gpuB, Type: gpreempt.QueueCompute, RingBytes: 4096}},
		},
	)
	h.directory.mu.Lock()
	h.directory.set(offline, targets.Facts{Decision: classify.Decision{Class: gpreempt.Offline, Priority: 0, By: "rule batch"}, Mechanism: "sim"})
	h.directory.set(other, targets.Facts{Decision: classify.Decision{Class: gpreempt.Unmanaged, Priority: 7, By: "default"}})
	h.directory.mu.Unlock()

	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(h.machine.run)
	wg.Go(func() { _ = h.runner.Run(ctx, time.Minute, func() {}) })
	h.server = New(cfg)
	wg.Go(func() {
		if err := h.server.Serve(l); err != nil {
			tb.Errorf("Serve: %v", err)
		}
	})
	tb.Cleanup(func() {
		stop, over := context.WithTimeout(context.Background(), time.Minute)
		defer over()
		h.server.Shutdown(stop)
		if stop.Err() != nil {
			tb.Error("Shutdown exceeded its time")
		}
		if ids := h.clients(); len(ids) > 0 {
			tb.Errorf("clients remain after Shutdown: %v", ids)
		}
		cancel()
		close(h.machine.quit)
		wg.Wait()
	})
	return h
}

// setProcs replaces the living processes.
func (h *host) setProcs(procs ...discovery.Proc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.procs = procs
	h.inventory.Apply(seen, discovery.Snapshot{Processes: procs})
}

// setRights sets the policy of rights.
func (h *host) setRights(p auth.Policy) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rights = func() auth.Policy { return p }
}

func (h *host) setLimits(change func(*Limits)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.limits)
}

// dial returns a new connection.
func (h *host) dial(tb testing.TB) *grpc.ClientConn {
	tb.Helper()
	address := "unix:" + h.socket
	options := []grpc.DialOption{
		grpc.EmptyDialOption{}, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(16 << 20)),
	}
	if h.listener != nil {
		address = "passthrough:memory"
		options[0] = grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return h.listener.dial(h.peer), nil })
	}
	conn, err := grpc.NewClient(address, options...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (h *host) online(tb testing.TB) gpreemptv1.OnlineServiceClient {
	tb.Helper()
	return gpreemptv1.NewOnlineServiceClient(h.dial(tb))
}

func (h *host) admin(tb testing.TB) gpreemptv1.AdminServiceClient {
	tb.Helper()
	return gpreemptv1.NewAdminServiceClient(h.dial(tb))
}

// anyConnection returns a connection of the server.
func (h *host) anyConnection() *connection {
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for c := range cs.conns {
		return c
	}
	return nil
}

// clients returns the connected clients, in ascending order.
func (h *host) clients() []scheduler.ClientID {
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return slices.SortedFunc(maps.Keys(cs.byID), func(a, b scheduler.ClientID) int { return gpreempt.ProcessKey(a).Compare(gpreempt.ProcessKey(b)) })
}

// leases returns the live leases.
func (h *host) leases() (infos []scheduler.LeaseInfo) {
	h.runner.View(func(c *scheduler.Core) { infos = c.Leases() })
	return infos
}

// until waits until a condition holds; it checks it after each event.
func (h *host) until(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		revision := h.events.Revision()
		if is() {
			return
		}
		if err := h.events.Wait(ctx, revision); err != nil {
			tb.Fatalf("waiting for %s: %v", what, err)
		}
	}
}

// ended waits for the end of a lease and returns it.
func (h *host) ended(tb testing.TB, lease string) (end scheduler.LeaseEnd) {
	tb.Helper()
	id, err := parseLeaseID(h.server.leasePrefix, lease)
	if err != nil {
		tb.Fatal(err)
	}
	h.until(tb, "the end of lease "+lease, func() (over bool) {
		h.runner.View(func(c *scheduler.Core) { end, _, over = c.Ended(id) })
		return over
	})
	return end
}

// reason returns the reason of an error of gRPC.
func reason(err error) gpreempt.Reason { return gpreempt.ReasonOf(goclient.FromStatus(err)) }

// want fails the test unless err has code and reason.
func want(tb testing.TB, err error, code gpreempt.Code, r gpreempt.Reason) {
	tb.Helper()
	got, ok := goclient.FromStatus(err).(*gpreempt.Error) //nolint:errorlint // FromStatus does not wrap it
	switch {
	case !ok:
		tb.Errorf("error %v, want code %d and reason %s", err, code, r)
	case got.Code != code || got.Reason != r:
		tb.Errorf("code %d, reason %s (%v); want code %d, reason %s", got.Code, got.Reason, got, code, r)
	case got.Message == "" || got.Next == "":
		tb.Errorf("reason %s has message %q, next %q: want both", got.Reason, got.Message, got.Next)
	}
}
