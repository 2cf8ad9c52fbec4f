// Package simserver hides the simulated machine behind gRPC: what stands in for
// GPU processes in `gpreemptd serve --sim`.
package simserver

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	simv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/sim/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Identify tells who calls: the pid, its start time in clock ticks and its user in
// the daemon's namespaces, and a channel that is closed when the connection ends.
// The channel is the same for every call on one connection. Errors are passed on
// to the caller as they are.
type Identify func(ctx context.Context) (pid int32, start uint64, uid uint32, done <-chan struct{}, err error)

// Server implements simv1.SimServiceServer. Callers are told apart by process:
// what a process has made goes when its last connection ends.
type Server struct {
	simv1.UnimplementedSimServiceServer

	rt       *gpumodel.Realtime
	identify Identify
	stop     chan struct{}
	watchers sync.WaitGroup

	// mu guards what follows, and everything in clients. The machine's lock is
	// taken inside it, never the other way round.
	mu      sync.Mutex
	clients map[gpreempt.ProcessKey]*client
	closed  bool
}

var _ simv1.SimServiceServer = (*Server)(nil)

// client is a process that has called.
type client struct {
	key gpreempt.ProcessKey
	uid uint32
	// connections are those that have not ended.
	connections map[<-chan struct{}]bool
	// registered tells that it is a process of the simulated machine.
	registered bool
	// jobs are the processes it has started, by pid, those stopped included, and
	// running is how many live.
	jobs    map[int32]gpreempt.ProcessKey
	running int
}

// Limits of what a caller may ask for.
const (
	maxKernels = 4096
	// maxJobs is the jobs of a caller at once, maxStarted in all.
	maxJobs    = 256
	maxStarted = 2048
	maxDepth   = 64
	// defaultDepth is for a job that names none.
	defaultDepth = 2
	// maxQueues is the compute queues of a job on one GPU.
	maxQueues = 64
	// minKernel keeps the number of events per second simulable.
	minKernel = 10 * time.Microsecond
	maxKernel = time.Minute
	maxComm   = 15

	// ringPackets is the ring of a caller's queue.
	ringPackets = maxKernels
	// jobJitter spreads the durations of a job's kernels.
	jobJitter = 0.05
)

// New serves the machine. The caller must Close it, before it closes rt.
func New(rt *gpumodel.Realtime, identify Identify) *Server {
	return &Server{rt: rt, identify: identify, stop: make(chan struct{}), clients: map[gpreempt.ProcessKey]*client{}}
}

// Close ends every process and job, and refuses all later calls. It is idempotent.
func (s *Server) Close() {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return
	}
	close(s.stop)
	s.watchers.Wait()
}

// caller finds who calls, and sees to it that what it makes ends with it. It
// returns with mu held when err is nil.
func (s *Server) caller(ctx context.Context) (c *client, done <-chan struct{}, err error) {
	pid, start, uid, done, err := s.identify(ctx)
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, nil, errShuttingDown
	}
	key := gpreempt.ProcessKey{PID: pid, Start: start}
	c = s.clients[key]
	if c == nil {
		c = &client{key: key, uid: uid, connections: map[<-chan struct{}]bool{}, jobs: map[int32]gpreempt.ProcessKey{}}
		s.clients[key] = c
	}
	if !c.connections[done] {
		c.connections[done] = true
		s.watchers.Go(func() { s.watch(c, done) })
	}
	return c, done, nil
}

var errShuttingDown = &gpreempt.Error{
	Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonShuttingDown,
	Message: "the simulated machine is shutting down", Next: "start gpreemptd again",
}

// watch waits for a connection to end.
func (s *Server) watch(c *client, done <-chan struct{}) {
	select {
	case <-done:
	case <-s.stop:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(c.connections, done)
	if len(c.connections) > 0 {
		return
	}
	delete(s.clients, c.key)
	for _, key := range c.jobs {
		s.end(key)
	}
	if c.registered {
		s.end(c.key)
	}
}

// end ends a process; harmless when it has ended before, which is the only error
// there is.
func (s *Server) end(key gpreempt.ProcessKey) { _ = s.rt.EndProcess(key) }

func rejected(next, format string, args ...any) error {
	return &gpreempt.Error{
		Code: gpreempt.CodeInvalidArgument, Reason: gpreempt.ReasonSimulationRejected,
		Message: fmt.Sprintf(format, args...), Next: next,
	}
}

// gpus finds out which GPUs are meant, and refuses those there are not.
func (s *Server) gpus(ids []uint32) ([]gpreempt.GPUID, error) {
	all := s.rt.GPUs()
	if len(ids) == 0 {
		return []gpreempt.GPUID{all[0].ID}, nil
	}
	var wanted []gpreempt.GPUID
	for _, id := range ids {
		gpu := gpreempt.GPUID(id)
		if !slices.ContainsFunc(all, func(g gpreempt.GPU) bool { return g.ID == gpu }) {
			var known []gpreempt.GPUID
			for _, g := range all {
				known = append(known, g.ID)
			}
			return nil, rejected(fmt.Sprintf("use one of %v", known), "the simulated machine has no GPU %d", id)
		}
		if slices.Contains(wanted, gpu) {
			return nil, rejected("name each GPU once", "GPU %d is named twice", id)
		}
		wanted = append(wanted, gpu)
	}
	return wanted, nil
}

// packet checks a kernel.
func packet(k *simv1.Kernel) (gpumodel.Packet, error) {
	if err := k.GetDuration().CheckValid(); err != nil {
		return gpumodel.Packet{}, rejected("give each kernel a duration", "the duration of a kernel is no duration: %v", err)
	}
	d := k.GetDuration().AsDuration()
	if d < minKernel || d > maxKernel {
		return gpumodel.Packet{}, rejected(fmt.Sprintf("use %v to %v", minKernel, maxKernel), "a kernel cannot take %v", d)
	}
	if o := k.GetOccupancy(); math.IsNaN(o) || o <= 0 || o > 1 {
		return gpumodel.Packet{}, rejected("use more than 0, at most 1", "a kernel cannot fill %v of a GPU", o)
	}
	return gpumodel.Packet{Duration: d, Occupancy: k.GetOccupancy()}, nil
}

// CreateQueue implements simv1.SimServiceServer.
func (s *Server) CreateQueue(ctx context.Context, req *simv1.CreateQueueRequest) (*simv1.CreateQueueResponse, error) {
	var ids []uint32
	if req.GetGpuId() != 0 {
		ids = []uint32{req.GetGpuId()}
	}
	gpus, err := s.gpus(ids)
	if err != nil {
		return nil, err
	}
	c, _, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	if !c.registered {
		spec := gpumodel.ProcSpec{PID: c.key.PID, Start: c.key.Start, Comm: "online", UID: c.uid}
		if _, err := s.rt.StartProcess(spec); err != nil {
			return nil, rejected("try again from a new process", "process %v cannot join the simulated machine: %v", c.key, err)
		}
		c.registered = true
	}
	id, err := s.rt.CreateQueue(c.key, gpus[0], gpreempt.QueueCompute, ringPackets)
	if err != nil {
		return nil, rejected("use the queues there are", "%v", err)
	}
	return &simv1.CreateQueueResponse{QueueId: id, GpuId: uint32(gpus[0])}, nil
}

// Submit implements simv1.SimServiceServer.
func (s *Server) Submit(ctx context.Context, req *simv1.SubmitRequest) (*simv1.SubmitResponse, error) {
	n := len(req.GetKernels())
	if n == 0 || n > maxKernels {
		return nil, rejected(fmt.Sprintf("submit 1 to %d", maxKernels), "%d kernels cannot be submitted at once", n)
	}
	packets := make([]gpumodel.Packet, 0, n)
	for _, k := range req.GetKernels() {
		p, err := packet(k)
		if err != nil {
			return nil, err
		}
		packets = append(packets, p)
	}
	c, done, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	key, registered := c.key, c.registered
	s.mu.Unlock()
	if !registered {
		return nil, noQueue(req.GetQueueId())
	}

	var submitted, started, ended time.Duration
	left := n
	over := make(chan struct{})
	each := func(at, until time.Duration) {
		if left == n {
			started = at
		}
		if left--; left == 0 {
			ended = until
			close(over)
		}
	}
	for i := range packets {
		packets[i].Done = each
	}
	s.rt.Do(func(m *gpumodel.Machine) {
		submitted = m.Now()
		err = submitAll(m, key, req.GetQueueId(), packets)
	})
	if err != nil {
		return nil, err
	}
	select {
	case <-over:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-done:
		return nil, context.Canceled
	case <-s.stop:
		return nil, errShuttingDown
	}
	return &simv1.SubmitResponse{Waited: durationpb.New(started - submitted), Total: durationpb.New(ended - submitted)}, nil
}

func noQueue(id uint32) error {
	return rejected("create one with CreateQueue", "the calling process has no simulated queue %d", id)
}

// submitAll puts all packets on the ring, or none.
func submitAll(m *gpumodel.Machine, key gpreempt.ProcessKey, queue uint32, packets []gpumodel.Packet) error {
	b, err := m.Backlog(key)
	if err != nil {
		return rejected("connect again", "the calling process has left the simulated machine")
	}
	i, ok := slices.BinarySearchFunc(b.Queues, queue, func(q gpumodel.QueueIndexes, id uint32) int { return cmp.Compare(q.ID, id) })
	if !ok {
		return noQueue(queue)
	}
	if room := ringPackets - (b.Queues[i].Write - b.Queues[i].Read); uint64(len(packets)) > room {
		return rejected("wait for what has been submitted", "%d kernels do not fit the ring of queue %d, which has room for %d", len(packets), queue, room)
	}
	for _, p := range packets {
		if err := m.Submit(key, queue, p); err != nil {
			return rejected("check the kernels", "%v", err)
		}
	}
	return nil
}
