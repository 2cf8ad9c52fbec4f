// Package server implements the gRPC API of the daemon: both services of
// gpreempt.v1, the limits of each client, and the end of leases with their
// connection, stream or process.
package server

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Bounds of a connection that need no configuration.
const (
	// streamsPerConnection is how many calls of one connection may be in flight; a
	// gRPC client lets the others wait. It bounds the cost of one descriptor, some
	// 10 KB for each call, also under a flood of streams that are reset at once: gRPC
	// counts a stream until its handler has ended.
	streamsPerConnection = 32
	// callsPerUser is how many calls of all processes of a user may be in flight,
	// without streams. Each may have a message of the maximum size.
	callsPerUser = 1024
	// streamsPerClient is how many streams a process may have open, of all kinds: it needs a
	// session, and perhaps a watch.
	streamsPerClient = 16
	// handshakeTime bounds the HTTP/2 handshake of a new connection.
	handshakeTime = 5 * time.Second
	// messageTime is how long the message of a call may take to follow its header.
	messageTime = 5 * time.Second
	// A connection on which nothing is received for idleTime is pinged, and closed
	// when no answer is received for answerTime. This ends frames that were begun and
	// never end, because the answer cannot be sent inside them, and the connections
	// of hosts that have vanished.
	idleTime, answerTime = 20 * time.Second, 10 * time.Second
	// maxHeaderBytes bounds the header of a call, unpacked; those of the API have a
	// few hundred bytes. gRPC's default is 16 MB.
	maxHeaderBytes = 16 << 10
	// windowBytes is what a client may send on a stream before it is read. It is
	// fixed, because gRPC would raise it to 16 MB for a client that sends fast, and
	// would measure each client by a ping for every burst.
	windowBytes = 64 << 10
	// streamWorkers is the number of goroutines that handle calls on stacks that have
	// grown already: a goroutine for each call grows a new stack, which is a tenth of
	// the cost of an announcement. When all are busy, as with streams, calls get
	// goroutines of their own.
	streamWorkers = 16
	// readBytes is how much of a connection is read at once. Bytes that have been read
	// are handled before a client has to wait (throttledConn), so it is small: gRPC's
	// 32 KB have room for a thousand announcements.
	readBytes = 8 << 10
	// stopTime is how long handlers may take to end once their connections are closed.
	stopTime = 2 * time.Second
	// pingInterval is how often a client may ping before it is disconnected.
	pingInterval = 10 * time.Second
)

// Scheduler is the part of *scheduler.Runner that the server uses.
type Scheduler interface {
	Announce(req scheduler.LeaseRequested, reply scheduler.Reply) (scheduler.LeaseID, time.Duration, error)
	Complete(client scheduler.ClientID, id scheduler.LeaseID, end scheduler.LeaseEnd) (scheduler.LeaseEnd, time.Duration, error)
	Renew(client scheduler.ClientID, id scheduler.LeaseID, ttl time.Duration) (time.Duration, error)
	Post(ev scheduler.Event)
	View(fn func(c *scheduler.Core))
	Now() scheduler.Time
}

// Directory has the classes of the living processes. Its methods are safe for
// concurrent use.
type Directory interface {
	// Facts returns what is known of a process apart from its queues; false for an
	// unknown process.
	Facts(key gpreempt.ProcessKey) (targets.Facts, bool)
	// Override sets an override for ttl, or until the process exits when ttl is 0;
	// nil removes it. When it returns, the scheduler has received it. False for an
	// unknown process.
	Override(key gpreempt.ProcessKey, decision *classify.Decision, ttl time.Duration) bool
	// Explain returns what could classify a process, in order of precedence; nil for
	// an unknown process.
	Explain(key gpreempt.ProcessKey) []classify.Step
	// Announces is called before the first announcement of a process, and Departed when its last
	// connection has ended. facts, when set, has its facts with the variables env, or false when
	// they are not known. When Announces returns, the scheduler knows what the work of the
	// process is.
	Announces(owner gpreempt.ProcessKey, facts func(env []string) (gpreempt.Process, bool))
	Departed(owner gpreempt.ProcessKey)
	// RuleCounts returns how often each rule matched, in their order, the tags last.
	RuleCounts() []targets.RuleCount
}

// Observer is the part of *inventory.Observer that the server uses.
type Observer interface {
	Sources() []inventory.Source
	HQDs(ctx context.Context, notBefore time.Time) (*inventory.HQDs, error)
	MemoryEvictions(gpu gpreempt.GPUID) (uint64, bool)
}

// Limits bounds what a client can ask of the server.
type Limits struct {
	// RequestsPerSecond and Burst are per process; a Session frame counts as a
	// request.
	RequestsPerSecond, Burst int
	// RequestsPerUser is per second for all processes of a user, or all clients with a
	// certificate's names, with a burst in proportion. It counts as RequestsPerSecond
	// when that is more.
	RequestsPerUser int `yaml:"requests_per_user" range:"0 1000000"`
	// ConnectionsPerUser bounds the connections of the same, and ConnectionsTotal
	// those of all.
	ConnectionsPerUser, ConnectionsTotal int
}

// Config is what a Server needs. Every field must be set except Warnings.
type Config struct {
	Scheduler Scheduler
	Events    *events.Log
	Inventory *inventory.Inventory
	Directory Directory
	Observer  Observer
	// Backlogs returns the backlog of each of queues, which belong to one process; nil
	// when it cannot be read.
	Backlogs func(ctx context.Context, key gpreempt.ProcessKey, queues []gpreempt.QueueEntry) []inventory.Backlog
	// BootID is the boot ID of the host.
	BootID string
	// Authz returns the policy in force; it is called for every call.
	Authz func() auth.Policy
	// Limits returns the limits in force; it is called for every call.
	Limits func() Limits
	// MaxMessageBytes bounds a request. gRPC itself refuses more, as
	// RESOURCE_EXHAUSTED without an ErrorInfo; client.FromStatus recognizes the text.
	MaxMessageBytes int
	// Epoch distinguishes the leases of this run of the daemon from those of others.
	Epoch uint64
	// Processors is how many processors the daemon has; 0 is 1.
	Processors int
	// Now is the wall clock.
	Now func() time.Time
	Log *zap.Logger
	// Audit receives a line for each call that needs the admin right, and for each
	// refused call of the admin service.
	Audit   *zap.Logger
	Version string
	// Backend is "kfd", "simulated MACHINE" or "emulated MACHINE".
	Backend string
	// Mechanisms are the names of those that can be used, best first.
	Mechanisms []string
	// Diagnose checks the host.
	Diagnose func(context.Context) *gpreemptv1.DiagnoseResponse
	// Warnings returns the warnings that GetStatus shows; nil: none.
	Warnings func() []gpreempt.Warning
}

// Server is the gRPC server of the daemon. Its methods are safe for concurrent use.
type Server struct {
	cfg     Config
	grpc    *grpc.Server
	health  *health.Server
	clients *clients
	// admins has the leases that admins create: they do not end with a connection.
	admins *client
	// unidentified limits the lines of the audit log about callers without an identity.
	unidentified *logLimiter

	started time.Time
	// leasePrefix begins every lease ID of this run.
	leasePrefix string

	// simulated is the header of a simulated or emulated backend; nil with hardware.
	simulated metadata.MD

	// closing ends when Shutdown is called.
	closing context.Context
	close   context.CancelCauseFunc

	drainer drainer

	allTaken atomic.Pointer[allTaken] // the last

	statistics *shared[*gpreemptv1.GetStatisticsResponse]
	diagnosis  *shared[*gpreemptv1.DiagnoseResponse]

	// seats has an element for each call that reads the state, while it does, and handshakes for
	// each handshake of TLS.
	seats, handshakes chan struct{}

	parting auth.Parting

	explaining places         // refused connections that are open
	explainers sync.WaitGroup // their goroutines

	policyMu sync.Mutex // held in SetPolicy, which reads, changes and writes
}

// New returns a server that is not yet serving, and reports itself NOT_SERVING.
func New(cfg Config) *Server {
	if cfg.Warnings == nil {
		cfg.Warnings = func() []gpreempt.Warning { return nil }
	}
	s := &Server{
		cfg:          cfg,
		health:       health.NewServer(),
		admins:       newClient(scheduler.ClientID{}, nil, nil),
		unidentified: newLogLimiter(),
		started:      cfg.Now(),
		leasePrefix:  leasePrefix(cfg.Epoch),
		seats:        newSeats(cfg.Processors),
		handshakes:   newSeats(cfg.Processors),
		explaining:   make(places, explaining),
		statistics:   newShared[*gpreemptv1.GetStatisticsResponse](),
		diagnosis:    newShared[*gpreemptv1.DiagnoseResponse](),
	}
	if cfg.Backend != "kfd" {
		s.simulated = metadata.Pairs(api.SimulatedHeader, cfg.Backend)
	}
	s.clients = newClients(s)
	s.closing, s.close = context.WithCancelCause(context.Background()) //nolint:forbidigo // it lives as long as the server; Shutdown ends it
	s.grpc = grpc.NewServer(
		grpc.Creds(&serverCredentials{auth.Credentials(), s}),
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
		grpc.ForceServerCodecV2(newCodec()),
	)
	services := registrar{s}
	gpreemptv1.RegisterOnlineServiceServer(services, onlineService{s: s})
	gpreemptv1.RegisterAdminServiceServer(services, adminService{s: s})
	grpc_health_v1.RegisterHealthServer(services, s.health)
	s.SetServing(false)
	return s
}

// Serve serves the API on lis, a listener of package auth, until Shutdown, and
// closes lis. Connections of any other listener are refused. After Shutdown it
// returns nil. It may be called for several listeners at once.
func (s *Server) Serve(lis net.Listener) error {
	if err := s.grpc.Serve(s.drainer.listen(lis)); err != nil && s.closing.Err() == nil {
		return fmt.Errorf("serve the API on %v: %w", lis.Addr(), err)
	}
	return nil
}

// SetServing sets the status that the health service reports, for the server and
// for each service. After Shutdown it stays NOT_SERVING.
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

// Shutdown refuses new announcements, ends every stream, waits for the calls in
// flight, and returns when no handler and no connection remains. When ctx is done
// first, it closes the connections and waits for stopTime only: a handler that
// hangs in the kernel must not keep the daemon from ending. It may be called before
// Serve.
func (s *Server) Shutdown(ctx context.Context) {
	s.close(errShuttingDown)
	s.health.Shutdown()
	s.drainer.close(ctx)
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
			s.cfg.Log.Warn("shutdown timed out: a call still runs")
			return
		}
	}
	s.clients.wait()
	s.explainers.Wait()
}

var errShuttingDown error = &gpreempt.Error{
	Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonShuttingDown,
	Message: "the daemon is shutting down",
	Next:    "continue without a lease, and announce again when the daemon is back",
}
