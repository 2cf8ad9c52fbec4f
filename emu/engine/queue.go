package engine

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
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

	// fetched is the position up to which the ring has been read: the poller writes it.
	// read is that up to which all packets have ended. It, completed and removed are written with
	// the machine locked.
	fetched, read, completed atomic.Uint64
	stopped, removed         atomic.Bool

	// flight are the packets that the machine has, in the order of the ring, guarded by
	// the machine's lock.
	flight []*packet
}

// packet is an AQL packet or an SDMA command, and how the machine sees it.
type packet struct {
	q *queue
	// bytes is its size on the ring.
	bytes uint32
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
	// command is the SDMA command.
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
		if q.AQL {
			q.fetchAQL(write)
		} else {
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
				Duration: p.time, Occupancy: p.share, Bytes: p.moves, RingBytes: p.bytes, Overlap: p.overlap, Done: p.done,
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

// idle reports whether all packets that were read have ended.
func (q *queue) idle() bool { return len(q.ready) == 0 && q.fetched.Load() == q.read.Load() }

// take queues a packet for submit and continues behind it on the ring.
func (q *queue) take(p *packet, step uint64) {
	p.q = q
	q.ready = append(q.ready, p)
	q.fetched.Add(step)
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
	if q.AQL {
		return q.retireAQL(p)
	}
	return q.retireSDMA(p)
}

// advance moves the read index that the process sees.
func (q *queue) advance(step uint64) bool {
	at := q.read.Load() + step
	if !q.write64(q.Read, at) {
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
