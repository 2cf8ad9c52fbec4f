package gpumodel

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// slot is a hardware queue descriptor. When its queue leaves, its registers stay, until
// the next queue takes it.
type slot struct {
	// q is the queue in it; nil: none.
	q *queue
	// was is the last one's MQD; nil for a slot that was never used.
	was      *setup
	priority gpreempt.Priority
	// at is how far the last one was when it left, or in a copy how far the one in it is.
	at place
}

// firstQueue is the first queue of a pipe that is not the kernel's own.
const firstQueue = 2

// pipes is how many pipes the first MEC has.
func (s *Spec) pipes() int {
	if s.major() == 12 {
		return 2
	}
	return 4
}

// major is the GPU's generation: 9 for gfx90a and gfx942, 11 for gfx1100.
func (s *Spec) major() int { return int(s.GFX / 10000) }

// firstVMID is the first VMID compute processes get.
func (s *Spec) firstVMID() int {
	if s.major() == 9 {
		return 3
	}
	return 8
}

// tenant is a process that has a VMID, and how many queues it has in slots.
type tenant struct {
	proc   *process
	queues int
}

// seat assigns q a slot and its process a VMID: the lowest free ones.
func (g *gpu) seat(q *queue) {
	slots := g.slots
	if q.typ != gpreempt.QueueCompute {
		n := g.m.spec.SDMAQueuesPerEngine
		slots = g.sdma[q.memory.engine*n:][:n]
	}
	free := 0
	for slots[free].q != nil {
		free++
	}
	vmid := g.vmid(q.proc)
	if vmid < 0 {
		vmid = g.vmid(nil)
		g.tenants[vmid].proc = q.proc
	}
	g.tenants[vmid].queues++
	q.slot = &slots[free]
	g.m.moves++
	*q.slot = slot{
		q: q, was: q.memory.setup, priority: q.memory.priority,
		at: place{known: true, vmid: uint8(g.m.spec.firstVMID()+vmid) & 0xf},
	}
}

// freeSlot takes q out of its slot. Its position is written to its MQD, and stays in the
// slot.
func (g *gpu) freeSlot(q *queue) {
	g.m.moves++
	if g.m.onUnmap != nil && len(q.inflight) > 0 {
		g.m.calls = append(g.m.calls, func() {
			if !q.dead && g.m.onUnmap != nil {
				g.m.onUnmap(QueueRef{q.proc.key, q.id})
			}
		})
	}
	q.memory.saved = q.now()
	q.slot.at = q.memory.saved
	q.slot.q, q.slot = nil, nil
	t := &g.tenants[g.vmid(q.proc)]
	if t.queues--; t.queues == 0 {
		t.proc = nil
	}
}

// vmid returns the index of the VMID of p, or of the lowest free one for nil; -1 when
// it does not exist.
func (g *gpu) vmid(p *process) int {
	for i := range g.tenants {
		if g.tenants[i].proc == p {
			return i
		}
	}
	return -1
}

// now returns the position of a queue that is in a slot.
func (q *queue) now() place {
	at := q.slot.at
	at.read, at.write = q.readBytes, q.writeBytes
	return at
}
