package gpumodel

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// QueueSpec is a queue a driver made. Addresses are those in its process.
type QueueSpec struct {
	// ID is one the process has no queue with.
	ID   uint32
	GPU  gpreempt.GPUID
	Type gpreempt.QueueType
	// PM4 tells that a compute queue is not of AQL.
	PM4 bool
	// Ring is where its ring is, of RingBytes: a power of two, at least 1024.
	Ring, RingBytes uint64
	// Read and Write are where its positions are, EOP is where its end-of-pipe events
	// go; 0: nowhere.
	Read, Write, EOP uint64
	// Save is where the save area of the first XCC is, of SaveBytes for each; 0: nowhere.
	Save      uint64
	SaveBytes uint32
	// Doorbell is where its doorbell is among those its process has on the GPU, in bytes.
	Doorbell uint32
	Priority gpreempt.Priority
}

// QueueRef names a queue.
type QueueRef struct {
	Process gpreempt.ProcessKey
	ID      uint32
}

// AttachQueue gives a process a queue that a driver made. It runs once Map or AddQueue
// says so.
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
		return fmt.Errorf("attach queue %d of %v: a ring has a power of two of bytes, at least %d, not %d", spec.ID, key, minRingPackets*packetBytes, spec.RingBytes)
	case spec.Priority > gpreempt.MaxPriority:
		return fmt.Errorf("attach queue %d of %v: a priority is 0 to %d, not %d", spec.ID, key, gpreempt.MaxPriority, spec.Priority)
	}
	if err := m.roomFor(p, g, spec.Type); err != nil {
		return fmt.Errorf("attach queue %d of %v to GPU %v: %w", spec.ID, key, spec.GPU, err)
	}
	q := p.newQueue(g, spec)
	q.suspended = true
	q.join()
	return nil
}

// DetachQueue takes a queue away at once; what is on it is abandoned.
func (m *Machine) DetachQueue(key gpreempt.ProcessKey, id uint32) error {
	q, err := m.queue(key, id)
	if err != nil {
		return err
	}
	q.destroy()
	m.callBack()
	return nil
}

// scheduler finds a GPU a driver decides on, which must be one of MES or must not.
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
// cycle. Nothing on the GPU progresses from now on, or from
// the end of what is under way there, until Map. by is for whose sake, and need not live:
// the others' CollateralCycles count it. done, which may be nil, is called after the time
// it takes.
func (m *Machine) Unmap(id gpreempt.GPUID, by gpreempt.ProcessKey, done func()) error {
	g, err := m.scheduler(id, false)
	if err != nil {
		return err
	}
	g.enqueue(&op{kind: opSuspend, proc: m.byKey[by], queues: slices.Clone(g.queues), done: done})
	m.callBack()
	return nil
}

// Map has a GPU that takes runlists run these queues from now on and no others: the
// second half of the cycle. Those that do not fit take turns. What Unmap has not taken
// off is taken off first.
func (m *Machine) Map(id gpreempt.GPUID, by gpreempt.ProcessKey, runlist []QueueRef, done func()) error {
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
			return fmt.Errorf("map the runlist of GPU %v: %w: queue %d of %v is on another", id, ErrNoQueue, ref.ID, ref.Process)
		}
		queues = append(queues, q)
	}
	g.enqueue(&op{kind: opSuspend, proc: m.byKey[by], queues: slices.Clone(g.queues)})
	g.enqueue(&op{kind: opResume, proc: m.byKey[by], queues: queues, done: done})
	m.callBack()
	return nil
}

// AddQueue has a GPU that takes queue by queue (MES) run a queue from the end of the time
// it takes, when done is called, which may be nil. If it does not fit, it takes turns with
// the others.
func (m *Machine) AddQueue(ref QueueRef, done func()) error { return m.move(opResume, ref, done) }

// RemoveQueue takes a queue off at once, and calls done after the time it takes. The
// others run on.
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
	g.enqueue(&op{kind: kind, proc: q.proc, queues: []*queue{q}, done: done})
	m.callBack()
	return nil
}

// ClearGPU takes every queue off a GPU at once, as a reset does, but nothing of what
// they were doing is lost. Changes of the schedule under way there are over, and what
// they would have mapped is not: their done is called.
func (m *Machine) ClearGPU(id gpreempt.GPUID) error {
	g, err := m.gpu(id)
	if err != nil {
		return err
	}
	over := g.ops
	if g.op != nil {
		over = slices.Insert(over, 0, g.op)
	}
	g.op, g.ops, g.half, g.crowded = nil, nil, false, false
	m.timers.stop(&g.timer)
	g.armTurn()
	for _, q := range g.queues {
		q.unmap()
		q.suspended = true
	}
	g.reschedule()
	g.makeRunlist()
	for _, o := range over {
		m.notify(o.done)
	}
	m.callBack()
	return nil
}

// notify has done called, which may be nil, once the machine has come to rest.
func (m *Machine) notify(done func()) {
	if done != nil {
		m.calls = append(m.calls, call{notify: done})
	}
}

// OnUnmap has f called for each queue that was taken off its GPU with a packet in
// flight, be it for a while only, unless it is gone. There is one f; nil is none.
func (m *Machine) OnUnmap(f func(QueueRef)) { m.onUnmap = f }

// Progress describes how much of the oldest packet a queue has in flight is done, 0 to 1;
// false when it has none.
func (m *Machine) Progress(ref QueueRef) (done float64, ok bool) {
	q, err := m.queue(ref.Process, ref.ID)
	if err != nil || len(q.inflight) == 0 {
		return 0, false
	}
	alone := float64(q.inflight[0].alone)
	return (alone - q.inflight[0].left()) / alone, true
}

// Moves grows with each change of what mqds and rls of debugfs show, and of which queue is
// in which slot in hqds. How far the queues in slots are changes without.
func (m *Machine) Moves() uint64 { return m.moves }
