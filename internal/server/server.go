// Package server hides how the daemon answers its callers: both services of
// gpreempt.v1 over gRPC, who is on the other end of each connection, and what
// ends when that connection, stream or process does.
package server

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/authz"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/doctor"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/mtls"
	"github.com/gpreempt/gpreempt/internal/peercred"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Bounds of a connection that nobody should have to tune.
const (
	// streamsPerConnection is how many calls one connection may have in flight; a
	// client of gRPC has the rest wait. It bounds what one descriptor costs, also
	// under a flood of streams that are reset at once: gRPC takes no more of them
	// than this before their handlers have ended.
	streamsPerConnection = 128
	// callsPerUser is how many calls that are no streams all processes of a user may
	// have in flight. Each may hold a message of the largest size.
	callsPerUser = 1024
	// handshakeTime is how long a new connection may take to say what it wants.
	handshakeTime = 5 * time.Second
	// messageTime is how long the message of a call may take to follow its header.
	messageTime = 5 * time.Second
	// A connection on which nothing comes for idleTime is asked for a sign of life,
	// and closed when none comes for answerTime. It is for frames that were begun and
	// never end, behind which the sign cannot come, and for hosts that vanish.
	idleTime, answerTime = 20 * time.Second, 10 * time.Second
	// maxHeaderBytes bounds the header of a call, unpacked; ours are a few hundred
	// bytes. gRPC's default is 16 MB.
	maxHeaderBytes = 16 << 10
	// windowBytes is what a client may send on a stream before it is read. Fixed,
	// because gRPC would raise it to 16 MB for a client that sends fast, and asks
	// each client how fast it is by a ping for every burst.
	windowBytes = 64 << 10
	// streamWorkers handle calls on stacks that have grown already: a goroutine made for
	// a call grows its own anew, which is a tenth of an announcement. When all are busy,
	// as with streams, calls get goroutines of their own.
	streamWorkers = 16
	// readBytes is how much of a connection is read at once. What has been read is
	// dealt with before a client is made to wait (paced), so it is kept small:
	// gRPC's 32 KB hold a thousand announcements.
	readBytes = 8 << 10
	// stopTime is how long handlers may take to end once their connections are cut.
	stopTime = 2 * time.Second
	// pingInterval is how often a client may ping without being shut out.
	pingInterval = 10 * time.Second
)

// Scheduler is what the server needs of *scheduler.Runner.
type Scheduler interface {
	Announce(req scheduler.LeaseRequested, reply scheduler.Reply) (scheduler.LeaseID, time.Duration, error)
	Complete(client scheduler.ClientID, id scheduler.LeaseID, end scheduler.LeaseEnd) (scheduler.LeaseEnd, time.Duration, error)
	Renew(client scheduler.ClientID, id scheduler.LeaseID, ttl time.Duration) (time.Duration, error)
	Post(ev scheduler.Event)
	View(fn func(c *scheduler.Core))
	Now() scheduler.Time
}

// EventLog is what the server needs of *events.Log.
type EventLog interface {
	AppendAdmin(at time.Time, text string, r scheduler.Record)
	Answered(a scheduler.Answer, s events.Stages)
	Refused(why gpreempt.Reason)
	Read(after uint64, dst []events.Entry) ([]events.Entry, error)
	Revision() uint64
	Wait(ctx context.Context, after uint64) error
	Stats() events.Stats
}

// Inventory is what the server needs of *inventory.Inventory.
type Inventory interface {
	GPUs() []gpreempt.GPU
	Processes() []discovery.Proc
	Process(key gpreempt.ProcessKey) (discovery.Proc, bool)
	Queues() ([]gpreempt.QueueEntry, uint64)
	Revision() uint64
	Read(after uint64, dst []inventory.Change) ([]inventory.Change, error)
	Wait(ctx context.Context, after uint64) error
}

// Directory knows what rules and admins say of the living processes. Its methods
// are safe for concurrent use.
type Directory interface {
	// Facts reports what is known of a process beside its queues; false when it is
	// not known.
	Facts(key gpreempt.ProcessKey) (Facts, bool)
	// Override puts decision above the rules for ttl, or until the process exits
	// when ttl is 0; nil takes an override back. When it returns, the scheduler
	// knows. False when the process is not known.
	Override(key gpreempt.ProcessKey, decision *classify.Decision, ttl time.Duration) bool
	// Explain goes through what could classify a process, in order; nil when it is
	// not known.
	Explain(key gpreempt.ProcessKey) []classify.Step
	// RuleCounts describes how often each rule matched, in their order, the tags last.
	RuleCounts() []RuleCount
}

// RuleCount describes how often a rule matched.
type RuleCount struct {
	// Rule is its name, and Class what it gives; "tag" gives what it says.
	Rule  string
	Class gpreempt.Class
	// Matched and Decided count processes since the rules were loaded, and
	// MatchesNow and DecidesNow those that live.
	Matched, Decided, MatchesNow, DecidesNow uint64
}

// Facts is what a Directory knows of a process.
type Facts struct {
	Decision classify.Decision
	// Container is what the runtime told of the container it is in.
	Container gpreempt.Container
	// Mechanism is the name of the attached one; "" when none is.
	Mechanism string
	// MechanismWhy says why that one, and what stood in the way of better ones.
	MechanismWhy string
	// AttachError says why none could be attached; "" when none failed.
	AttachError string
}

// Observer is what the server needs of *inventory.Observer.
type Observer interface {
	Sources() []inventory.Source
	HQDs(ctx context.Context, notBefore time.Time) (*inventory.HQDs, error)
	MemoryEvictions(gpu gpreempt.GPUID) (uint64, bool)
}

// Limits bounds what a client can ask of the server.
type Limits struct {
	// StreamsPerClient bounds the streams a process has open, of all kinds.
	StreamsPerClient int
	// RequestsPerSecond and Burst are per process; a Session frame counts as a
	// request.
	RequestsPerSecond, Burst int
	// RequestsPerUser is per second for all processes of a user, or all clients with a
	// certificate's names, with a burst in proportion. It counts as RequestsPerSecond
	// when that is more.
	RequestsPerUser int
	// ConnectionsPerUser bounds the connections of the same, and ConnectionsTotal
	// those of all.
	ConnectionsPerUser, ConnectionsTotal int
}

// Config is what a Server needs. Every field must be set but Warnings, Traced and
// Register.
type Config struct {
	Scheduler Scheduler
	Events    EventLog
	Inventory Inventory
	Directory Directory
	Observer  Observer
	// Backlogs reads the work waiting on queues of one process, index by index; nil
	// when it cannot be read.
	Backlogs func(ctx context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) []inventory.Backlog
	// BootID is the boot id of the host.
	BootID string
	// Authz returns the policy in force; it is asked on every call.
	Authz func() authz.Policy
	// Limits returns the limits in force; it is asked on every call.
	Limits func() Limits
	// MaxMessageBytes bounds a request. gRPC itself refuses more, as
	// RESOURCE_EXHAUSTED: that one refusal carries no ErrorInfo, and clients know it
	// by its text (errgrpc.FromStatus does).
	MaxMessageBytes int
	// Epoch tells the leases of this run of the daemon from those of others.
	Epoch uint64
	// Now is the wall clock.
	Now func() time.Time
	Log *zap.Logger
	// Audit takes a line for each call that needs the admin right, and for each
	// refused call of the admin service.
	Audit   *zap.Logger
	Version string
	// Backend is "kfd", or what stands for it: "simulated MACHINE", "emulated MACHINE".
	Backend string
	// Diagnose looks at the host.
	Diagnose func(context.Context) *doctor.Report
	// Warnings returns what GetStatus shows; nil: nothing.
	Warnings func() []gpreempt.Warning
	// Traced takes note of an announcement whose call has ctx, for traces; nil: there
	// are none. It must not block.
	Traced func(ctx context.Context, lease scheduler.LeaseID, arrived, decided scheduler.Time)
	// Register adds more services before serving begins; nil: none.
	Register func(grpc.ServiceRegistrar)
}

// Server is the gRPC server of the daemon. Its methods are safe for concurrent use.
type Server struct {
	cfg     Config
	grpc    *grpc.Server
	health  *health.Server
	clients *clients
	// byHand holds the leases that belong to no connection.
	byHand  *client
	started time.Time
	// leasePrefix begins every lease id of this run.
	leasePrefix string

	// simulated is the header of a simulated or emulated backend; nil with hardware.
	simulated metadata.MD

	// closing ends when Shutdown is called.
	closing context.Context
	close   context.CancelCauseFunc

	door door

	policyMu sync.Mutex // held through SetPolicy: it reads, changes and writes
}

// New returns a server that is not yet serving, and reports itself NOT_SERVING.
func New(cfg Config) *Server {
	if cfg.Warnings == nil {
		cfg.Warnings = func() []gpreempt.Warning { return nil }
	}
	s := &Server{
		cfg:         cfg,
		health:      health.NewServer(),
		byHand:      newClient(scheduler.ClientID(0), nil, nil),
		started:     cfg.Now(),
		leasePrefix: leasePrefix(cfg.Epoch),
	}
	if cfg.Backend != "kfd" {
		s.simulated = metadata.Pairs(api.SimulatedHeader, cfg.Backend)
	}
	s.clients = newClients(s)
	s.closing, s.close = context.WithCancelCause(context.Background()) //nolint:forbidigo // a server has no caller whose context it could be; Shutdown ends it
	s.grpc = grpc.NewServer(
		grpc.Creds(&doorkeeper{TransportCredentials: peercred.Credentials(), certified: mtls.Credentials(), clients: s.clients}),
		grpc.UnaryInterceptor(s.interceptUnary), // behind guard
		grpc.StreamInterceptor(s.interceptStream),
		grpc.MaxRecvMsgSize(cfg.MaxMessageBytes),
		grpc.MaxConcurrentStreams(streamsPerConnection),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.StaticStreamWindowSize(windowBytes),
		grpc.ReadBufferSize(readBytes),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: idleTime, Timeout: answerTime}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingInterval, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
		grpc.NumStreamWorkers(streamWorkers),
	)
	guarded := &guard{s: s}
	gpreemptv1.RegisterOnlineServiceServer(guarded, onlineService{s: s})
	gpreemptv1.RegisterAdminServiceServer(guarded, adminService{s: s})
	if cfg.Register != nil {
		cfg.Register(guarded)
	}
	grpc_health_v1.RegisterHealthServer(guarded, s.health)
	reflection.Register(guarded)
	s.SetServing(false)
	return s
}

// Serve answers callers on lis, a listener of peercred or mtls, until Shutdown, and
// closes lis. Connections of any other listener are closed unheard. After Shutdown it returns nil. It may be called for several
// listeners at once.
func (s *Server) Serve(lis net.Listener) error {
	if err := s.grpc.Serve(s.door.listen(lis)); err != nil && s.closing.Err() == nil {
		return fmt.Errorf("serve the API on %v: %w", lis.Addr(), err)
	}
	return nil
}

// SetServing says what the health service answers, for the server as a whole
// and for each service. After Shutdown it is NOT_SERVING for good.
func (s *Server) SetServing(serving bool) {
	status := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if serving {
		status = grpc_health_v1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", status)
	for name := range s.grpc.GetServiceInfo() {
		s.health.SetServingStatus(name, status)
	}
}

// Shutdown refuses new announcements, ends every stream, lets calls in flight
// finish, and returns when no handler and no connection is left. When ctx is
// done first, it cuts the connections and waits a moment longer: a handler that
// hangs in the kernel must not keep the daemon. It may be called before Serve.
func (s *Server) Shutdown(ctx context.Context) {
	s.close(errShuttingDown)
	s.health.Shutdown()
	s.door.close(ctx)
	stopped := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-ctx.Done():
		go s.grpc.Stop()
		select {
		case <-stopped:
		case <-time.After(stopTime):
			s.cfg.Log.Warn("a call hangs and is left behind")
			return
		}
	}
	s.clients.wait()
}

// Clients returns the clients that are connected now, in ascending order.
func (s *Server) Clients() []scheduler.ClientID {
	ids := s.clients.ids()
	slices.Sort(ids)
	return ids
}

var errShuttingDown error = &gpreempt.Error{
	Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonShuttingDown,
	Message: "the daemon is shutting down",
	Next:    "go on without a lease, and announce again when it is back",
}
