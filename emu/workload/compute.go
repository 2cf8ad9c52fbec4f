package workload

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The priorities of the queues of ROCm's runtime for low, normal and high streams of HIP.
const (
	lowPriority    = 0
	normalPriority = 7
	highPriority   = 11
)

// minSlots is the smallest ring, one page of packets. Small rings wrap often.
const minSlots = 64

// Offsets in the memory of a compute queue. Words that only one side writes have their own
// cache line.
const (
	offWrite  = 0
	offRead   = 128
	offResult = 256 // the count, then the hash
	offKernel = 320 // the engine.Kernel
	offEOP    = 4096
	eopBytes  = 4096
	offRing   = 8192
)

// compute is an AQL queue whose kernels count themselves.
type compute struct {
	d    *device
	gpu  gpu
	wake *event // nil to poll memory instead
	// mem has parts: words and the kernel, end-of-pipe events, the ring, and the rest.
	mem  *memory
	save *memory
	// slots is the length of the ring, and of the arrays with an entry for each of its
	// packets.
	slots                            uint64
	offSignals, offArgs, offProgress int
	doorbell                         *atomic.Uint64
	written                          uint64 // packets
	priority                         uint32
}

// newCompute returns a queue, not yet created, with the depth and the kernels of cfg.
func newCompute(d *device, g gpu, wake *event, cfg Config) (*compute, error) {
	q := &compute{d: d, gpu: g, wake: wake, slots: minSlots, priority: uint32(cfg.priority())}
	for q.slots < 2*uint64(cfg.Depth) {
		q.slots *= 2
	}
	slots := int(q.slots)
	q.offSignals = offRing + slots*engine.PacketBytes
	q.offArgs = q.offSignals + slots*engine.SignalBytes
	q.offProgress = q.offArgs + slots*engine.MixBytes
	var err error
	if q.mem, err = d.allocate(g, offEOP, eopBytes, q.offSignals-offRing, q.offProgress+slots*8-q.offSignals); err != nil {
		return nil, err
	}
	if q.save, err = d.allocate(g, g.saveBytes()); err != nil {
		return nil, errors.Join(err, q.mem.free())
	}
	engine.Kernel{Op: engine.OpMix, Occupancy: cfg.Occupancy, Duration: cfg.Kernel}.Put(q.mem.mem[offKernel:])
	return q, nil
}

func (q *compute) free() error { return errors.Join(q.mem.free(), q.save.free()) }

// reset clears the memory after an earlier queue.
func (q *compute) reset() {
	for _, off := range []int{offWrite, offRead, offResult, offResult + 8} {
		q.mem.u64(off).Store(0)
	}
	for slot := range q.slots {
		q.mem.u32(offRing + int(slot)*engine.PacketBytes).Store(uint32(engine.PacketInvalid))
		q.signal(slot).Store(0)
	}
	q.written = 0
}

// create creates the queue.
func (q *compute) create() (id uint32, err error) {
	id, q.doorbell, err = q.d.createQueue(&kfdabi.CreateQueueArgs{
		RingBaseAddress:       q.mem.addr(offRing),
		WritePointerAddress:   q.mem.addr(offWrite),
		ReadPointerAddress:    q.mem.addr(offRead),
		RingSize:              uint32(q.slots * engine.PacketBytes),
		GPUID:                 uint32(q.gpu.ID),
		QueueType:             kfd.QueueTypeComputeAQL,
		QueuePercentage:       100,
		QueuePriority:         q.priority,
		EOPBufferAddress:      q.mem.addr(offEOP),
		EOPBufferSize:         eopBytes,
		CtxSaveRestoreAddress: q.save.addr(0),
		CtxSaveRestoreSize:    q.gpu.SaveArea,
		CtlStackSize:          q.gpu.ControlStack,
	})
	return id, err
}

// signal returns the value of the completion signal of packet n.
func (q *compute) signal(n uint64) *atomic.Uint64 {
	return q.mem.u64(q.signalAt(n) + engine.SignalValue)
}

func (q *compute) signalAt(n uint64) int { return q.offSignals + int(n%q.slots)*engine.SignalBytes }

// room reports whether the ring has space for another packet besides the last one.
func (q *compute) room() bool { return q.written+1-q.mem.u64(offRead).Load() < q.slots }

// push submits a kernel that mixes value into the result, and returns value.
func (q *compute) push(value uint64) uint64 {
	slot := int(q.written % q.slots)
	args, progress := q.offArgs+slot*engine.MixBytes, q.offProgress+slot*8
	q.mem.u64(progress).Store(0)
	engine.Mix{Result: q.mem.addr(offResult), Value: value, Progress: q.mem.addr(progress)}.Put(q.mem.mem[args:])
	q.submit(engine.Dispatch{
		Header: engine.MakeHeader(engine.PacketDispatch, true), Dimensions: 1, Workgroup: [3]uint16{1, 1, 1}, Grid: [3]uint32{1, 1, 1},
		Kernel: q.mem.addr(offKernel), Kernarg: q.mem.addr(args), Completion: q.mem.addr(q.signalAt(q.written)),
	})
	return value
}

// seal submits the last packet: a barrier that depends on the one before it.
func (q *compute) seal() {
	b := engine.Barrier{Header: engine.MakeHeader(engine.PacketBarrierAnd, true), Completion: q.mem.addr(q.signalAt(q.written))}
	if q.written > 0 {
		b.Deps[0] = q.mem.addr(q.signalAt(q.written - 1))
	}
	q.submit(b)
}

// submit arms the signal of the next packet and submits the packet.
func (q *compute) submit(packet interface{ Put(slot []byte) uint32 }) {
	signal := engine.Signal{Kind: engine.SignalUser, Value: 1}
	if q.wake != nil {
		signal.Mailbox, signal.Event = q.wake.mailbox, q.wake.id
	}
	signal.Put(q.mem.mem[q.signalAt(q.written):])
	slot := offRing + int(q.written%q.slots)*engine.PacketBytes
	first := packet.Put(q.mem.mem[slot:][:engine.PacketBytes])
	// The header comes last: until then the GPU waits there.
	q.mem.u32(slot).Store(first)
	q.written++
	q.mem.u64(offWrite).Store(q.written)
	q.doorbell.Store(q.written - 1)
}

// done reports whether packet n has completed.
func (q *compute) done(n uint64) (bool, error) {
	switch v := q.signal(n).Load(); v {
	case 1:
		return false, nil
	case 0:
	default:
		return false, fmt.Errorf("the completion signal of packet %d is %d, want 1 before and 0 after the packet", n, int64(v))
	}
	if kind := engine.Header(q.mem.u32(offRing + int(n%q.slots)*engine.PacketBytes).Load()).Type(); kind != engine.PacketInvalid {
		return false, fmt.Errorf("packet %d has completed, but its slot still has a packet of type %d", n, kind)
	}
	return true, nil
}

// over is done for a kernel, and checks the kernel's results.
func (q *compute) over(n uint64) (bool, error) {
	over, err := q.done(n)
	if !over || err != nil {
		return false, err
	}
	if p := q.progress(n); p != engine.WholeGPU {
		return false, fmt.Errorf("packet %d has completed, but its progress is %d millionths", n, p)
	}
	if count, _ := q.result(); count <= n {
		return false, fmt.Errorf("packet %d has completed, but only %d packets have run", n, count)
	}
	return true, nil
}

// sealed reports whether the last packet and all before it have completed.
func (q *compute) sealed() (bool, error) { return q.done(q.written - 1) }

// stopped checks the signals of the kernels from oldest to before end, of a queue that was
// destroyed after count of its kernels ran: those are 0, and the others 1.
func (q *compute) stopped(oldest, end, count uint64) error {
	for n := oldest; n < end; n++ {
		over, err := q.done(n)
		if err == nil && over != (n < count) {
			err = fmt.Errorf("%d packets ran before the queue was destroyed, but the completion signal of packet %d is %d", count, n, q.signal(n).Load())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// result returns the number of kernels that ran, and their hash.
func (q *compute) result() (count, hash uint64) {
	return q.mem.u64(offResult).Load(), q.mem.u64(offResult + 8).Load()
}

// progress returns the completed part of kernel n, in millionths, when it last was
// unmapped or ended.
func (q *compute) progress(n uint64) uint64 {
	return q.mem.u64(q.offProgress + int(n%q.slots)*8).Load()
}

// indexes returns those of the ring.
func (q *compute) indexes() (read, write uint64) {
	return q.mem.u64(offRead).Load(), q.mem.u64(offWrite).Load()
}
