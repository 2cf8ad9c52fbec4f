package gpumodel

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Packet is one piece of work for a queue.
type Packet struct {
	// Duration is how long a kernel takes alone on the GPU. Compute queues only,
	// where it must be positive.
	Duration time.Duration
	// Occupancy is the share of the GPU a kernel fills: more than 0, at most 1.
	// Compute queues only.
	Occupancy float64
	// Bytes is how much a copy moves. Copy queues only, where it must be positive.
	Bytes int64
	// RingBytes is how much of the ring the packet takes up; 0: 64. Nested: it takes up
	// nothing, because it is in a buffer that a packet behind it on the ring stands for.
	RingBytes uint32
	Nested    bool
	// Jitter spreads Duration evenly over 1-Jitter to 1+Jitter of its value, drawn
	// from the machine's seed: 0 to 0.9.
	Jitter float64
	// Overlap lets the packet start before those ahead of it have ended: the
	// barrier bit is clear. HIP never does that.
	Overlap bool
	// Done, when set, is called when the completion signal is decremented: the
	// first time the packet ends. It may be called within any method of the
	// machine, never after the process ended, and never for a lost packet.
	Done func(started, ended time.Duration)
}

// packetBytes is the size of a packet on its ring, unless it says something else.
const packetBytes = 64

// Limits of a queue, as the kernel has them.
const (
	minRingPackets = 16
	// maxQueuesPerGPU bounds the queues of one process on one GPU: 255 on gfx942, and 127
	// on others, which the driver refuses (pqm_create_queue).
	maxQueuesPerGPU = 255
	// maxQueues bounds the queues of one process.
	maxQueues = 1024
	// maxComputeQueues bounds the compute queues on one GPU.
	maxComputeQueues = 4096
)

// packet is a Packet on a ring.
type packet struct {
	q      *queue
	demand int64
	// alone is how long it takes when nothing else runs, jitter included.
	alone time.Duration
	// remaining is the part of alone that is left, in nanoseconds.
	remaining float64
	overlap   bool
	bytes     uint64
	started   time.Duration
	done      func(started, ended time.Duration)
	// executions counts how often it ran to the end: the proof that it ran once.
	executions int
	// again makes it run once more: an injected fault.
	again bool
	// over: the packet processor has finished it.
	over bool
}

// queue is a user queue.
type queue struct {
	proc *process
	gpu  *gpu
	pool *pool
	id   uint32
	typ  gpreempt.QueueType
	// birth orders the queues of a process.
	birth uint64
	// ring holds packet i at i modulo its size. Packets from read to launch have
	// been started, those from launch to write wait. readBytes and writeBytes are read and
	// write in bytes, which do not wrap.
	ring                  []*packet
	read, launch, write   uint64
	readBytes, writeBytes uint64
	// inflight are those started and not over.
	inflight []*packet
	// memory is its MQD.
	memory *memory
	// mapped: in a hardware slot, so that it makes progress. slot is that one.
	mapped bool
	slot   *slot
	// suspended: not to be mapped.
	suspended bool
	// dead: destroyed.
	dead bool
}

// newQueue makes a queue and finds its places, without adding it to any list.
func (p *process) newQueue(g *gpu, spec QueueSpec) *queue {
	p.m.births++
	q := &queue{
		proc: p, gpu: g, pool: &g.compute, id: spec.ID, typ: spec.Type, birth: p.m.births,
		ring: make([]*packet, minRingPackets),
	}
	if q.typ != gpreempt.QueueCompute {
		q.pool = &g.copies
	}
	q.setUp(spec)
	return q
}

// join makes the queue one of its process and GPU.
func (q *queue) join() {
	p := q.proc
	i, _ := p.search(q.id)
	p.queues = slices.Insert(p.queues, i, q)
	q.gpu.list(q)
	p.m.moves++
}

// roomFor reports why a queue cannot be made, if so.
func (m *Machine) roomFor(p *process, g *gpu, typ gpreempt.QueueType) error {
	var room int
	switch typ {
	case gpreempt.QueueCompute:
		room = maxComputeQueues
	case gpreempt.QueueSDMA:
		room = m.spec.SDMAEngines * m.spec.SDMAQueuesPerEngine
	case gpreempt.QueueSDMAXGMI:
		room = m.spec.XGMIEngines * m.spec.SDMAQueuesPerEngine
	default:
		return fmt.Errorf("%v is not compute, sdma or sdma-xgmi", typ)
	}
	own := 0
	for _, q := range g.queues {
		if q.typ == typ {
			room--
		}
		if q.proc == p {
			own++
		}
	}
	switch {
	case room <= 0:
		return fmt.Errorf("all %v queues of the GPU are taken", typ)
	case own >= maxQueuesPerGPU:
		return fmt.Errorf("the process has %d queues on the GPU, the most it can have", own)
	case len(p.queues) >= maxQueues:
		return fmt.Errorf("the process has %d queues, the most it can have", len(p.queues))
	}
	return nil
}

// Submit puts a packet on a queue's ring. A suspended queue takes packets, too.
func (m *Machine) Submit(key gpreempt.ProcessKey, id uint32, k Packet) error {
	q, err := m.queue(key, id)
	if err != nil {
		return err
	}
	bytes := uint64(k.RingBytes)
	if bytes == 0 && !k.Nested {
		bytes = packetBytes
	}
	if taken := q.writeBytes - q.readBytes; taken+bytes > q.memory.ring.bytes {
		return fmt.Errorf("%w: queue %d of %v has %d packets in %d of %d bytes", ErrRingFull, id, key, q.write-q.read, taken, q.memory.ring.bytes)
	}
	if err := k.check(q.typ); err != nil {
		return fmt.Errorf("queue %d of %v: %w", id, key, err)
	}
	own := &packet{q: q, overlap: k.Overlap, bytes: bytes, done: k.Done}
	if q.typ == gpreempt.QueueCompute {
		own.demand = max(int64(math.Round(k.Occupancy*full)), 1)
		own.alone = max(m.spread(k.Duration, k.Jitter), 1)
	} else {
		own.demand = int64(float64(m.spec.CopyRate) / float64(m.spec.LinkRate) * full)
		own.alone = max(overRate(k.Bytes, float64(m.spec.CopyRate)), 1)
	}
	own.remaining = float64(own.alone)
	q.push(own)
	q.proc.counters.Submitted++
	if q.mapped {
		q.dispatch()
		q.pool.schedule()
	}
	q.gpu.armTurn()
	m.callBack()
	return nil
}

func (k Packet) check(typ gpreempt.QueueType) error {
	if typ != gpreempt.QueueCompute {
		if k.Bytes <= 0 || k.Duration != 0 || k.Occupancy != 0 || k.Jitter != 0 {
			return fmt.Errorf("a packet of a %v queue has a positive number of bytes and nothing else", typ)
		}
		return nil
	}
	switch {
	case k.Bytes != 0:
		return fmt.Errorf("a packet of a compute queue has no bytes to move, this one %d", k.Bytes)
	case k.Duration <= 0:
		return fmt.Errorf("the duration of a kernel must be positive, not %v", k.Duration)
	case !(k.Occupancy > 0 && k.Occupancy <= 1):
		return fmt.Errorf("the occupancy of a kernel must be more than 0 and at most 1, not %v", k.Occupancy)
	case !(k.Jitter >= 0 && k.Jitter <= 0.9):
		return fmt.Errorf("the jitter of a kernel must be 0 to 0.9, not %v", k.Jitter)
	}
	return nil
}

// push puts k on the ring. Packets can be smaller than 64 bytes, so that a ring of the
// size the queue's has may be too small.
func (q *queue) push(k *packet) {
	if n := uint64(len(q.ring)); q.write-q.read == n {
		ring := make([]*packet, 2*n)
		for i := q.read; i < q.write; i++ {
			ring[i&(2*n-1)] = q.at(i)
		}
		q.ring = ring
	}
	q.ring[q.write&uint64(len(q.ring)-1)] = k
	q.write++
	q.writeBytes += k.bytes
}

func (q *queue) at(i uint64) *packet { return q.ring[i&uint64(len(q.ring)-1)] }

// dispatch starts the packets that can start. The caller calls the pool's schedule.
func (q *queue) dispatch() {
	for q.mapped && !q.gpu.draining && q.launch < q.write {
		k := q.at(q.launch)
		if !k.overlap && len(q.inflight) > 0 {
			return
		}
		q.launch++
		k.started = q.proc.m.now
		q.inflight = append(q.inflight, k)
		q.pool.add(k)
	}
}

// ran handles a packet that has run to its end.
func (q *queue) ran(k *packet) {
	m := q.proc.m
	k.executions++
	if k.executions == 1 {
		if q.typ == gpreempt.QueueCompute {
			q.proc.counters.Work += times(k.alone, k.demand)
		}
		if k.done != nil {
			ended := m.now
			m.calls = append(m.calls, func() { k.done(k.started, ended) })
		}
	}
	if k.again {
		k.again = false
		k.remaining = float64(k.alone)
		q.pool.add(k)
		return
	}
	q.retire(k)
	q.dispatch()
	q.gpu.drained()
}

// retire finishes k, and moves the read index past all packets that are finished.
func (q *queue) retire(k *packet) {
	k.over = true
	i := slices.Index(q.inflight, k)
	q.inflight = slices.Delete(q.inflight, i, i+1)
	for q.read < q.launch && q.at(q.read).over {
		k := q.at(q.read)
		q.ring[q.read&uint64(len(q.ring)-1)] = nil
		q.read++
		q.readBytes += k.bytes
		q.proc.counters.account(k, &q.proc.counters.Lost)
	}
}

// account counts a packet that left its ring, by how often it ran.
func (c *ProcessCounters) account(k *packet, never *uint64) {
	switch k.executions {
	case 0:
		*never++
	case 1:
		c.Executed++
	default:
		c.Executed++
		c.Repeated++
	}
}

// workDone returns how much of the first execution of a packet in flight is done now.
func (k *packet) workDone() time.Duration {
	if k.executions > 0 || k.q.typ != gpreempt.QueueCompute {
		return 0
	}
	return times(k.alone-time.Duration(k.left()), k.demand)
}

// left returns how much of alone is left now, in nanoseconds.
func (k *packet) left() float64 {
	remaining := k.remaining
	if k.q.mapped {
		pool := k.q.pool
		remaining -= float64(pool.m.now-pool.settled) * pool.speed()
	}
	return max(remaining, 0)
}

func times(d time.Duration, millionths int64) time.Duration {
	return time.Duration(float64(d) * float64(millionths) / full)
}

// unmap takes the queue out of its slot; its packets keep their progress. The caller
// calls the pool's schedule.
func (q *queue) unmap() {
	if !q.mapped {
		return
	}
	for _, k := range q.inflight {
		q.pool.remove(k)
	}
	q.mapped = false
	q.gpu.freeSlot(q)
}

// demand returns how much of the GPU the packets in flight fill; copies fill nothing.
func (q *queue) demand() int64 {
	var sum int64
	if q.typ == gpreempt.QueueCompute {
		for _, k := range q.inflight {
			sum += k.demand
		}
	}
	return sum
}

// destroy removes the queue from its process.
func (q *queue) destroy() {
	q.drop()
	p := q.proc
	p.queues = slices.DeleteFunc(p.queues, func(o *queue) bool { return o == q })
	p.m.moves++
}

// drop ends the queue and counts the packets on it.
func (q *queue) drop() {
	q.unmap()
	q.pool.schedule()
	q.gpu.drained()
	q.gpu.unlist(q)
	for i := q.read; i < q.write; i++ {
		q.proc.counters.account(q.at(i), &q.proc.counters.Abandoned)
	}
	q.tearDown()
	q.dead = true
	q.ring, q.inflight = nil, nil
	q.read, q.launch, q.write = 0, 0, 0
	q.readBytes, q.writeBytes = 0, 0
}
