package driver

import (
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// QueueState is one queue.
type QueueState struct {
	ID uint32
	// Serial is never the same for two queues of a Driver.
	Serial uint64
	GPU    gpreempt.GPUID
	Type   uint32
	// Suspended, Evicted, Active and Destroying are the driver's flags.
	Suspended, Evicted, Active, Destroying bool
	// Running reports whether the queue is on the GPU: the driver's Active once the
	// hardware has followed.
	Running bool
	// Exceptions are pending, Sent went to the runtime.
	Exceptions, Sent kfd.ExceptionMask
	// Size is that of the ring in bytes.
	Size, Percent, Priority uint32
	// Ring, Read and Write are the addresses of the ring and of its read and write
	// indexes in the process, as it gave them.
	Ring, Read, Write uint64
	// Ctx and CtxSize are where waves are saved, and the bytes there.
	Ctx     uint64
	CtxSize uint32
	// Doorbell is where the queue's is among the process's doorbells on the GPU, in
	// bytes.
	Doorbell uint32
}

// MappedQueue is a queue as the hardware learns of it.
type MappedQueue struct {
	// PID is the process's, MM its address space, nil if that has gone.
	PID int32
	MM  MM
	QueueState
}

func mappedQueues(queues []*queue) []MappedQueue {
	mapped := make([]MappedQueue, len(queues))
	for i, q := range queues {
		mapped[i] = MappedQueue{PID: q.pdd.p.PID, MM: q.pdd.p.MM, QueueState: q.state()}
	}
	return mapped
}

// ProcessState is one process of the driver's.
type ProcessState struct {
	PID int32
	// MM is its address space, nil once that has gone. Secondary: it is a context made
	// by CREATE_PROCESS, of which an address space may have several.
	MM        MM
	Secondary bool
	// Alive: its address space is.
	Alive bool
	// Enabled: debugging is enabled, by Debugger as far as the driver knows, 0 if the
	// process does it itself. Debugged counts the processes this one debugs.
	Enabled  bool
	Debugger int32
	Debugged int
	Runtime  kfd.RuntimeState
	// Mask is what the debugger is told of; Exceptions are those of the process that
	// are pending.
	Mask, Exceptions kfd.ExceptionMask
	// Acks is how often the next waits in RUNTIME_ENABLE do not wait.
	Acks int
	// Paused is what CRIU_OP has done.
	Paused bool
	// Evicted counts the evictions, for each GPU in the driver's order.
	Evicted []int
	// Queues are the newest first.
	Queues []QueueState
}

// GPUState is one GPU.
type GPUState struct {
	ID gpreempt.GPUID
	// Unmaps and Maps count how often the runlist was taken off and put on, Grace has
	// the grace period of each unmap as written to the register, DefaultGrace where
	// none was, and GraceNow is what is left in it.
	Unmaps, Maps int
	Grace        []uint32
	GraceNow     uint32
	// Adds and Removes count steps about one queue (MES).
	Adds, Removes int
	// Cycled counts, by process, the unmaps that took queues of it off.
	Cycled map[int32]int
	// DebugOwner is the process that has the only debug VMID, 0 if none has.
	DebugOwner int32
	// Resetting: a reset is under way. Hung: an unmap was not answered.
	Resetting, Hung bool
}

// DefaultGrace is USE_DEFAULT_GRACE_PERIOD: the register as the firmware set it.
const DefaultGrace = ^uint32(0)

// Processes returns the state of every process, the oldest first.
func (d *Driver) Processes() []ProcessState {
	d.mu.Lock()
	defer d.leave()
	states := make([]ProcessState, 0, len(d.procs))
	for _, p := range d.procs {
		states = append(states, p.state())
	}
	return states
}

// Process returns the state of the process with an address space, false if there is
// none.
func (d *Driver) Process(mm MM) (ProcessState, bool) {
	d.mu.Lock()
	defer d.leave()
	if p := d.byMM(mm); p != nil {
		return p.state(), true
	}
	return ProcessState{}, false
}

func (p *process) state() ProcessState {
	s := p.ProcessState
	s.Alive = p.MM != nil
	if p.debugger != nil {
		s.Debugger = p.debugger.PID
	}
	for _, x := range p.pdds {
		s.Evicted = append(s.Evicted, x.evicted)
	}
	for _, q := range p.queues {
		s.Queues = append(s.Queues, q.state())
	}
	return s
}

func (q *queue) state() QueueState {
	s := q.QueueState
	s.Running = q.pdd.gpu.mapped[q]
	return s
}

// GPU returns the state of a GPU, false if there is none.
func (d *Driver) GPU(id gpreempt.GPUID) (GPUState, bool) {
	d.mu.Lock()
	defer d.leave()
	g := d.gpu(id)
	if g == nil {
		return GPUState{}, false
	}
	s := g.GPUState
	s.Grace, s.Cycled = slices.Clone(g.Grace), maps.Clone(g.Cycled)
	if g.owner != nil {
		s.DebugOwner = g.owner.PID
	}
	return s, true
}
