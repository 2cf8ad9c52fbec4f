package gpumodel

import (
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// QueueSpec describes a queue that a driver made. Addresses are those in its process.
type QueueSpec struct {
	// ID is the queue's, unique in its process.
	ID   uint32
	GPU  gpreempt.GPUID
	Type gpreempt.QueueType
	// PM4: it is a compute queue without AQL.
	PM4 bool
	// Ring is the address of the ring, of RingBytes: a power of two, at least 1024.
	Ring, RingBytes uint64
	// Read and Write are the addresses of its two positions, EOP that of its end-of-pipe
	// events; 0: none.
	Read, Write, EOP uint64
	// Save is the address of the first XCC's save area, of SaveBytes for each XCC; 0: none.
	Save      uint64
	SaveBytes uint32
	// Doorbell is the offset of its doorbell in the process's page on the GPU, in bytes.
	Doorbell uint32
	Priority gpreempt.Priority
}

// QueueRef names a queue.
type QueueRef struct {
	Process gpreempt.ProcessKey
	ID      uint32
}

// AttachQueue adds a queue that a driver made to a process. It runs once Map or AddQueue
// includes it.
func (m *Machine) AttachQueue(key gpreempt.ProcessKey, spec QueueSpec) error {
	p, err := m.process(key)
	if err != nil {
		return err
	}
	g, err := m.gpu(spec.GPU)
	if err != nil {
		return err
	}
	_, taken := p.queue(spec.ID)
	switch {
	case taken:
		return fmt.Errorf("attach a queue: %v has a queue %d", key, spec.ID)
	case spec.RingBytes < minRingPackets*packetBytes || bits.OnesCount64(spec.RingBytes) != 1:
		return fmt.Errorf("attach queue %d of %v: invalid ring size %d: want a power of two of at least %d bytes", spec.ID, key, spec.RingBytes, minRingPackets*packetBytes)
	case spec.Priority > gpreempt.MaxPriority:
		return fmt.Errorf("attach queue %d of %v: invalid priority %d: want 0 to %d", spec.ID, key, spec.Priority, gpreempt.MaxPriority)
	}
	if err := m.roomFor(p, g, spec.Type); err != nil {
		return fmt.Errorf("attach queue %d of %v to GPU %v: %w", spec.ID, key, spec.GPU, err)
	}
	q := p.newQueue(g, spec)
	q.suspended = true
	q.join()
	return nil
}

// DetachQueue removes a queue at once; the packets on it are abandoned.
func (m *Machine) DetachQueue(key gpreempt.ProcessKey, id uint32) error {
	q, err := m.queue(key, id)
	if err != nil {
		return err
	}
	q.destroy()
	m.callBack()
	return nil
}

// scheduler returns a GPU, whose firmware must be MES if mes, and HWS otherwise.
func (m *Machine) scheduler(id gpreempt.GPUID, mes bool) (*gpu, error) {
	switch {
	case m.spec.MES == mes:
		return m.gpu(id)
	case mes:
		return nil, fmt.Errorf("%w: GPU %v takes runlists, with Unmap and Map", ErrScheduler, id)
	default:
		return nil, fmt.Errorf("%w: GPU %v takes queue by queue, with AddQueue and RemoveQueue", ErrScheduler, id)
	}
}

// Unmap takes every queue off a GPU that takes runlists (HWS): the first half of a runlist
// cycle. Nothing on the GPU progresses from now on, or from the end of the change under
// way there, until Map; only kernels that run may end before, within the time of grace. done,
// which may be nil, is called after the time it takes.
func (m *Machine) Unmap(id gpreempt.GPUID, grace time.Duration, done func()) error {
	g, err := m.scheduler(id, false)
	if err != nil {
		return err
	}
	g.enqueue(&op{kind: opSuspend, grace: grace, queues: slices.Clone(g.queues), done: done})
	m.callBack()
	return nil
}

// Map has a GPU that takes runlists run these queues from now on and no others: the
// second half of the cycle. Those that do not fit take turns. Queues that are still mapped
// are unmapped first.
func (m *Machine) Map(id gpreempt.GPUID, runlist []QueueRef, done func()) error {
	g, err := m.scheduler(id, false)
	if err != nil {
		return err
	}
	var queues []*queue
	for _, ref := range runlist {
		q, err := m.queue(ref.Process, ref.ID)
		if err != nil {
			return fmt.Errorf("map the runlist of GPU %v: %w", id, err)
		}
		if q.gpu != g {
			return fmt.Errorf("map the runlist of GPU %v: %w: queue %d of %v is on another GPU", id, ErrNoQueue, ref.ID, ref.Process)
		}
		queues = append(queues, q)
	}
	g.enqueue(&op{kind: opSuspend, queues: slices.Clone(g.queues)})
	g.enqueue(&op{kind: opResume, queues: queues, done: done})
	m.callBack()
	return nil
}

// AddQueue maps a queue of a GPU with MES. When that has taken its time, the queue runs and
// done is called, which may be nil. If the queue does not fit, it takes turns with the
// others.
func (m *Machine) AddQueue(ref QueueRef, done func()) error { return m.move(opResume, ref, done) }

// RemoveQueue unmaps a queue at once, and calls done after the time it takes. The others
// run on.
func (m *Machine) RemoveQueue(ref QueueRef, done func()) error { return m.move(opSuspend, ref, done) }

func (m *Machine) move(kind opKind, ref QueueRef, done func()) error {
	q, err := m.queue(ref.Process, ref.ID)
	if err != nil {
		return err
	}
	g, err := m.scheduler(m.facts[q.gpu.index].ID, true)
	if err != nil {
		return err
	}
	g.enqueue(&op{kind: kind, queues: []*queue{q}, done: done})
	m.callBack()
	return nil
}

// ClearGPU unmaps every queue of a GPU at once, as a reset does, except that no progress is
// lost. Changes of the schedule under way there end without an effect: their done is
// called.
func (m *Machine) ClearGPU(id gpreempt.GPUID) error {
	g, err := m.gpu(id)
	if err != nil {
		return err
	}
	over := g.ops
	if g.op != nil {
		over = slices.Insert(over, 0, g.op)
	}
	g.op, g.ops, g.half, g.crowded, g.draining = nil, nil, false, false, false
	m.timers.stop(&g.timer)
	g.armTurn()
	for _, q := range g.queues {
		q.unmap()
		q.suspended = true
	}
	g.reschedule()
	m.moves++
	for _, o := range over {
		m.notify(o.done)
	}
	m.callBack()
	return nil
}

// notify has done called, which may be nil, once the current event has been handled.
func (m *Machine) notify(done func()) {
	if done != nil {
		m.calls = append(m.calls, done)
	}
}

// OnUnmap has f called for each queue that is unmapped with a packet in flight, also when a
// turn does that, unless the queue is destroyed. There is one f; nil removes it.
func (m *Machine) OnUnmap(f func(QueueRef)) { m.onUnmap = f }

// Progress returns the part of a queue's oldest packet in flight that is done, 0 to 1;
// false when no packet is in flight.
func (m *Machine) Progress(ref QueueRef) (done float64, ok bool) {
	q, err := m.queue(ref.Process, ref.ID)
	if err != nil || len(q.inflight) == 0 {
		return 0, false
	}
	alone := float64(q.inflight[0].alone)
	return (alone - q.inflight[0].left()) / alone, true
}

// Moves returns a number that grows with each change of sysfs and /proc, of mqds in debugfs,
// and of the assignment of queues to slots in hqds. The positions of queues in
// slots change without it.
func (m *Machine) Moves() uint64 { return m.moves }
