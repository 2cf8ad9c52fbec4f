package engine

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// queue is a Queue that is executed.
type queue struct {
	Queue
	e    *Engine
	bell *atomic.Uint64

	// look: the poller has to look at the queue. waiting: it has seen a packet that cannot
	// start yet. Both are the poller's, as is ready: the packets that were read from the
	// ring and not yet submitted to the machine.
	look, waiting bool
	ready         []*packet

	// buffer is the rest of the indirect buffer that is run, nil on the ring. taken counts the
	// packets that were taken. Both are the poller's.
	buffer *Jump
	taken  uint64

	// fetched is the position up to which the ring has been read: the poller writes it.
	// read is that up to which all packets have ended, and retired counts those. They, completed
	// and removed are written with the machine locked.
	fetched, read, retired, completed atomic.Uint64
	stopped, removed                  atomic.Bool

	// flight are the packets that the machine has, in the order of the ring, guarded by
	// the machine's lock.
	flight []*packet
}

// packet is an AQL packet, or an SDMA or PM4 command, and how the machine sees it.
type packet struct {
	q *queue
	// bytes is its size on the ring, 0 in an indirect buffer, and step by how much it moves
	// the read position.
	bytes uint32
	step  uint64
	// time and share are for compute queues, moves for SDMA.
	time  time.Duration
	share float64
	moves int64
	// overlap: it may run while those before it do.
	overlap bool

	// slot is the address of an AQL packet, mix what its kernel does, nil for nothing, and
	// signal its completion signal.
	slot   uint64
	mix    *Mix
	signal uint64
	// command is the SDMA or PM4 command.
	command Command

	// over: it ended. lost: it never will, because of a fault that was injected into the
	// machine.
	over, lost     bool
	started, ended time.Duration
}

// pump reads the ring and submits packets, as many as possible in one step, and reports
// whether it made progress. look and waiting say what the poller has to do next.
func (q *queue) pump() (progress bool) {
	q.look, q.waiting = false, false
	write, err := readWord(q.Memory, q.Write)
	if err != nil {
		q.fail(err, q.Write)
		return false
	}
	if len(q.ready) == 0 {
		switch {
		case q.AQL:
			q.fetchAQL(write)
		case q.pm4():
			q.fetchPM4(write)
		default:
			q.fetchSDMA(write)
		}
	}
	return q.submit()
}

// submit submits the ready packets to the machine, and reports whether there were any.
func (q *queue) submit() (progress bool) {
	if len(q.ready) == 0 {
		return false
	}
	q.e.rt.Do(func(m *gpumodel.Machine) {
		for i, p := range q.ready {
			if q.over() {
				break
			}
			err := m.Submit(q.Ref.Process, q.Ref.ID, gpumodel.Packet{
				Duration: p.time, Occupancy: p.share, Bytes: p.moves, RingBytes: p.bytes, Nested: p.bytes == 0, Overlap: p.overlap, Done: p.done,
			})
			if errors.Is(err, gpumodel.ErrRingFull) {
				q.ready, q.look, q.waiting = q.ready[i:], false, true
				return
			}
			if err != nil {
				// The machine does not know the queue any more.
				q.stop()
				break
			}
			q.flight = append(q.flight, p)
			progress = true
		}
		q.ready = nil
	})
	return progress
}

// pm4 reports whether it is a compute queue with PM4 packets.
func (q *queue) pm4() bool { return q.Type == gpreempt.QueueCompute && !q.AQL }

// idle reports whether all packets that were read have ended.
func (q *queue) idle() bool { return q.taken == q.retired.Load() }

// take queues a packet for submit and continues behind it on the ring.
func (q *queue) take(p *packet, step uint64) {
	p.q, p.step = q, step
	q.ready = append(q.ready, p)
	q.taken++
	q.fetched.Add(step)
}

// joinNOP makes a NOP a part of the one before it, if that is what is ready: rings are padded
// with them, and a row of them counts as one.
func (q *queue) joinNOP(bytes uint32, step uint64) bool {
	last := len(q.ready) - 1
	if last < 0 {
		return false
	}
	p := q.ready[last]
	if _, same := p.command.(NOP); !same {
		return false
	}
	p.bytes += bytes
	p.step += step
	q.fetched.Add(step)
	return true
}

// done is called once by the machine, which is locked, when the packet ended.
func (p *packet) done(started, ended time.Duration) {
	q := p.q
	if q.over() {
		return
	}
	p.over, p.started, p.ended = true, started, ended
	if !p.overlap {
		// It began when nothing before it was running.
		for _, o := range q.flight {
			if o == p {
				break
			}
			o.lost = o.lost || !o.over
			o.over = true
		}
	}
	if q.AQL && !q.mix(p) {
		return
	}
	for len(q.flight) > 0 && q.flight[0].over {
		o := q.flight[0]
		q.flight[0] = nil
		q.flight = q.flight[1:]
		if !q.retire(o) {
			return
		}
	}
	q.e.moved()
}

// retire finishes the oldest packet; false if that stopped the queue.
func (q *queue) retire(p *packet) bool {
	if !p.lost {
		q.completed.Add(1)
	}
	retire := q.retireCommand
	if q.AQL {
		retire = q.retireAQL
	}
	done := retire(p)
	q.retired.Add(1)
	return done
}

// advance moves the read position that the process sees. That of PM4 has 32 bits and wraps
// with the ring.
func (q *queue) advance(step uint64) bool {
	if step == 0 {
		return true
	}
	at := q.read.Load() + step
	if q.pm4() {
		if !q.writeAt(binary.LittleEndian.AppendUint32(nil, uint32(at)&(q.RingBytes/4-1)), q.Read) {
			return false
		}
	} else if !q.write64(q.Read, at) {
		return false
	}
	q.read.Store(at)
	return true
}

// unmapped is called by the machine, which is locked, when a queue is unmapped in the
// middle of a packet.
func (e *Engine) unmapped(m *gpumodel.Machine, ref gpumodel.QueueRef) {
	q := e.byRef(ref)
	if q == nil || q.over() || len(q.flight) == 0 {
		return
	}
	if mix := q.flight[0].mix; mix != nil && mix.Progress != 0 {
		if done, ok := m.Progress(ref); ok {
			q.write64(mix.Progress, uint64(done*allDone))
		}
	}
}

func (e *Engine) byRef(ref gpumodel.QueueRef) *queue {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, q := range e.queues {
		if q.Ref == ref {
			return q
		}
	}
	return nil
}

// over reports whether the packets of the queue have no effect any more.
func (q *queue) over() bool { return q.stopped.Load() || q.removed.Load() }

// stop ends the queue: its packets have no effect any more.
func (q *queue) stop() { q.stopped.Store(true) }

// fail stops the queue after an error of the memory at an address.
func (q *queue) fail(err error, addr uint64) {
	if isFault(err) {
		q.fault(addr)
		return
	}
	q.stop()
}

// fault stops the queue and reports it. A queue that was removed cannot fault: its
// process may have unmapped its memory since.
func (q *queue) fault(addr uint64) {
	if q.stopped.Swap(true) || q.removed.Load() || q.e.cfg.OnFault == nil {
		return
	}
	q.e.notes.add(func() { q.e.cfg.OnFault(q.Serial, addr) })
}

// readAt, writeAt and write64 return false when they stopped the queue.
func (q *queue) readAt(p []byte, addr uint64) bool {
	err := q.Memory.ReadAt(p, addr)
	if err != nil {
		q.fail(err, addr)
	}
	return err == nil
}

func (q *queue) writeAt(p []byte, addr uint64) bool {
	err := q.Memory.WriteAt(p, addr)
	if err != nil {
		q.fail(err, addr)
	}
	return err == nil
}

func (q *queue) write64(addr, v uint64) bool {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	return q.writeAt(b[:], addr)
}

// interrupt signals an event.
func (q *queue) interrupt(event uint32) {
	if q.Interrupt != nil {
		q.e.notes.add(func() { q.Interrupt(event) })
	}
}
