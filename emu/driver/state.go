package driver

import (
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// QueueState is the state of a queue.
type QueueState struct {
	ID uint32
	// Serial differs between any two queues of a Driver.
	Serial uint64
	GPU    gpreempt.GPUID
	Type   uint32
	// Suspended, Evicted, Active and Destroying are the driver's flags, Held that of the
	// extension at kfdabi.KmapPath.
	Suspended, Evicted, Active, Destroying, Held bool
	// Reset: the driver has marked it as reset.
	Reset bool
	// Running: the queue is on the GPU. It follows Active when the hardware has changed.
	Running bool
	// Exceptions are pending, Sent were sent to the runtime.
	Exceptions, Sent kfd.ExceptionMask
	// Size is the size of the ring in bytes.
	Size, Percent, Priority uint32
	// Ring, Read and Write are the addresses of the ring and of its read and write
	// pointers in the process, as CREATE_QUEUE had them.
	Ring, Read, Write uint64
	// Ctx and CtxSize are the address and the bytes of the area for saved waves.
	Ctx     uint64
	CtxSize uint32
	// Doorbell is the offset of the queue's doorbell in the process's doorbells on the
	// GPU, in bytes.
	Doorbell uint32
}

// MappedQueue is a queue with what the hardware needs of its process.
type MappedQueue struct {
	// PID is the pid of the process. MM is its address space, nil if that has ended.
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

// ProcessState is the state of a process.
type ProcessState struct {
	PID int32
	// MM is its address space, nil after the end of that. Secondary: it is a context made
	// by CREATE_PROCESS, of which an address space may have several.
	MM        MM
	Secondary bool
	// Alive: the address space has not ended.
	Alive bool
	// Enabled: debugging is enabled. Debugger is the process the driver has recorded for
	// that, 0 if the process debugs itself. Debugged counts the processes this one debugs.
	Enabled  bool
	Debugger int32
	Debugged int
	Runtime  kfd.RuntimeState
	// Mask is the exceptions that the debugger enabled. Exceptions are those of the
	// process that are pending.
	Mask, Exceptions kfd.ExceptionMask
	// Acks is the number of future waits in RUNTIME_ENABLE that return at once.
	Acks int
	// Paused: CRIU_OP has paused the process.
	Paused bool
	// VMs are the GPUs on which it has acquired a VM, in the driver's order.
	VMs []gpreempt.GPUID
	// Evicted counts the evictions, for each GPU in the driver's order.
	Evicted []int
	// Queues are the newest first.
	Queues []QueueState
}

// GPUState is the state of a GPU.
type GPUState struct {
	ID gpreempt.GPUID
	// Unmaps and Maps count the unmaps and maps of the runlist. Grace has the grace
	// period of each unmap as written to the register, DefaultGrace if none was written,
	// and GraceNow is the register.
	Unmaps, Maps int
	Grace        []uint32
	GraceNow     uint32
	// Adds and Removes count steps about one queue (MES).
	Adds, Removes int
	// Cycled counts, by process, the unmaps that removed queues of it.
	Cycled map[int32]int
	// DebugOwner is the process that has the only debug VMID, 0 if no process has it.
	DebugOwner int32
	// Resetting: a reset is in progress. Hung: an unmap was not answered.
	Resetting, Hung bool
}

// DefaultGrace is USE_DEFAULT_GRACE_PERIOD: the register keeps the firmware's value.
const DefaultGrace = kfdabi.GraceDefault

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

// Process returns the state of the process that has an address space, false if the
// driver knows none.
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
		if x.vm {
			s.VMs = append(s.VMs, x.gpu.ID)
		}
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

// GPU returns the state of a GPU, false if there is no such GPU.
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
