package gpumodel

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// Truth is what debugfs shows, before it becomes text: a test compares it with the values
// that it reads from the text.
type Truth struct {
	// Processes are in the order of mqds.
	Processes []ProcessTruth
	// GPUs are in node order.
	GPUs []GPUTruth
}

// ProcessTruth is a process of mqds.
type ProcessTruth struct {
	Process gpreempt.ProcessKey
	PASID   uint32
	// Queues are newest first.
	Queues []QueueTruth
}

// QueueTruth is a queue as its driver has set it up.
type QueueTruth struct {
	gpreempt.Queue
	// Info is what the driver's debug interface tells and what the MQD has. Source is
	// empty.
	Info gpreempt.QueueInfo
	// MQDs and SaveAreas are the addresses by XCC: one MQD and no area for SDMA.
	MQDs, SaveAreas []uint64
	// SaveBytes is the size of each save area, StackBytes that of the control stack in it.
	SaveBytes, StackBytes uint32
	// Doorbell counts in dwords from the beginning of the GPU's doorbells.
	Doorbell uint32
	// Engine and EngineQueue are what the driver gave an SDMA queue.
	Engine, EngineQueue int
	// Saved is where the queue was when it was last taken off its GPU; nil for never.
	Saved *Position
	// Mapped tells that it is in a hardware slot.
	Mapped bool
	// Suspended tells that it is not to be.
	Suspended bool
}

// Position is how far a queue is, and in which address space.
type Position struct {
	VMID int
	// Read and Write count packets of 64 bytes since the queue was made.
	Read, Write uint64
}

// GPUTruth is a GPU's hardware slots.
type GPUTruth struct {
	gpreempt.GPU
	// Slots are those for compute, pipe by pipe, and then those for SDMA, engine by
	// engine. All XCCs have the same.
	Slots []SlotTruth
}

// SlotTruth is a hardware slot.
type SlotTruth struct {
	// SDMA reports what kind of slot it is.
	SDMA bool
	// Pipe and Queue are where it is: for SDMA the engine and its queue.
	Pipe, Queue int
	// Used tells that there is or was a queue in it, Live that there is. What follows
	// is of that one.
	Used, Live bool
	// Owner and ID name the queue in it; those of one that was are not known.
	Owner gpreempt.ProcessKey
	ID    uint32
	// MQDs are the addresses by XCC; RingBase, Priority and At are as the slot has them.
	MQDs     []uint64
	RingBase uint64
	Priority gpreempt.Priority
	At       Position
}

// Truth reports what debugfs shows now.
func (m *Machine) Truth() Truth {
	var t Truth
	for _, p := range m.hashed() {
		all := ProcessTruth{Process: p.key, PASID: p.pasid()}
		for _, q := range p.newestFirst() {
			all.Queues = append(all.Queues, q.truth())
		}
		t.Processes = append(t.Processes, all)
	}
	for i, g := range m.gpus {
		all := GPUTruth{GPU: m.facts[i]}
		pipes := m.spec.pipes()
		for pipe := range pipes {
			for at := pipe; at < len(g.slots); at += pipes {
				s := g.slots[at].truth(m)
				s.Pipe, s.Queue = pipe, firstQueue+at/pipes
				all.Slots = append(all.Slots, s)
			}
		}
		for at := range g.sdma {
			s := g.sdma[at].truth(m)
			s.SDMA, s.Pipe, s.Queue = true, at/m.spec.SDMAQueuesPerEngine, at%m.spec.SDMAQueuesPerEngine
			all.Slots = append(all.Slots, s)
		}
		t.GPUs = append(t.GPUs, all)
	}
	return t
}

func (q *queue) truth() QueueTruth {
	m, s := q.proc.m, q.memory
	t := QueueTruth{
		Queue: gpreempt.Queue{
			Process: q.proc.key, ID: q.id, GPU: m.facts[q.gpu.index].ID, Type: q.typ, RingBytes: s.ring.bytes,
		},
		Info: gpreempt.QueueInfo{
			RingBase: s.ring.base, AQL: q.typ == gpreempt.QueueCompute && !s.pm4, ReadPointer: s.read, WritePointer: s.write,
			SaveArea: s.save, MQD: s.mqd, Doorbell: s.doorbell, Priority: s.priority, PriorityKnown: q.typ == gpreempt.QueueCompute, PriorityExact: true,
		},
		MQDs:      s.mqds(m),
		SaveBytes: s.saveBytes, StackBytes: s.stackBytes, Doorbell: s.doorbell, Engine: s.engine, EngineQueue: s.rlc,
		Mapped: q.mapped, Suspended: q.suspended,
	}
	if q.typ == gpreempt.QueueCompute {
		for xcc := range t.MQDs {
			t.SaveAreas = append(t.SaveAreas, s.save+uint64(xcc)*uint64(s.saveBytes))
		}
	}
	if s.saved.known {
		at := s.saved.position()
		t.Saved = &at
	}
	return t
}

// mqds returns the addresses of the MQDs by XCC.
func (s *setup) mqds(m *Machine) []uint64 {
	all := []uint64{s.mqd}
	if s.typ == gpreempt.QueueCompute {
		for xcc := 1; xcc < m.kernel.xccs(&m.spec); xcc++ {
			all = append(all, s.mqd+uint64(xcc)*s.mqdStride)
		}
	}
	return all
}

func (p place) position() Position {
	return Position{VMID: int(p.vmid), Read: p.read / packetBytes, Write: p.write / packetBytes}
}

func (s *slot) truth(m *Machine) SlotTruth {
	if s.was == nil {
		return SlotTruth{}
	}
	t := SlotTruth{Used: true, MQDs: s.was.mqds(m), RingBase: s.was.ring.base, Priority: s.priority, At: s.at.position()}
	if q := s.q; q != nil {
		t.Live, t.Owner, t.ID, t.At = true, q.proc.key, q.id, q.now().position()
	}
	return t
}
