package workload

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// AQL packets (hsa.h), and offsets in them.
const (
	packetBytes      = 64
	packetInvalid    = 1
	packetDispatch   = 2
	packetBarrierAnd = 3
	// inOrder waits for the packets before, with fences for the whole system.
	inOrder       = 1<<8 | 2<<9 | 2<<11
	offKernel     = 32
	offKernarg    = 40
	offCompletion = 56
)

// Offsets in the first page of a queue's memory: amd_queue_t (amd_hsa_queue.h), which the
// packet processor finds from the read index, and a signal (amd_hsa_signal.h).
const (
	offWrite      = 56
	offApertures  = 64
	offRead       = 128
	offReadOffset = 136
	offProperties = 180
	offInactive   = 192
	offSignal     = 1024
	signalValue   = 8
	// offStopped is the signal by which the packet processor says that it has stopped the queue.
	offStopped = offSignal + 2*packetBytes
)

// slots is the length of the ring, depth the most packets in it.
const (
	slots = 64
	depth = 32
)

// start is the first value of the signal that every packet decrements: the number of
// completed packets is the difference.
const start = 1 << 40

// queue is an AQL queue.
type queue struct {
	id       uint32
	words    memory
	ring     memory
	doorbell doorbell
	written  uint64
}

// newQueue creates a compute queue, whose kernels have some bytes of scratch for each lane.
func (d *device) newQueue(private uint32) (*queue, error) {
	q := &queue{}
	size := kfdabi.SaveAreaOf(d.node)
	if size.Bytes == 0 {
		return nil, fmt.Errorf("the size of a queue's save area is not known for gfx_target_version %d on this kernel", d.node["gfx_target_version"])
	}
	var eop, area memory
	for _, part := range []struct {
		to    *memory
		bytes uint64
	}{{&q.words, pageBytes}, {&q.ring, slots * packetBytes}, {&eop, pageBytes}, {&area, (size.Bytes + size.Debug) * d.xccs()}} {
		var err error
		if *part.to, err = d.allocate(int(part.bytes)); err != nil {
			return nil, err
		}
	}
	for i := range slots {
		q.ring.u32(i * packetBytes).Store(packetInvalid)
	}
	le := binary.LittleEndian
	le.PutUint32(q.words.mem[offApertures:], uint32(d.apertures.LDSBase>>32))
	le.PutUint32(q.words.mem[offApertures+4:], uint32(d.apertures.ScratchBase>>32))
	le.PutUint32(q.words.mem[offReadOffset:], offRead)
	le.PutUint32(q.words.mem[offProperties:], 2) // AMD_QUEUE_PROPERTIES_IS_PTR64
	for _, signal := range []int{offSignal, offStopped} {
		le.PutUint64(q.words.mem[signal:], 1) // AMD_SIGNAL_KIND_USER
	}
	le.PutUint64(q.words.mem[offInactive:], q.words.addr(offStopped))
	q.words.u64(offSignal + signalValue).Store(start)
	if private > 0 {
		if err := d.newScratch(q.words.mem, private); err != nil {
			return nil, err
		}
	}
	// struct kfd_context_save_area_header of each XCC: where a debugger's part is, and the
	// word for exceptions of the queue.
	for i := range d.xccs() {
		header := area.mem[i*size.Bytes:]
		le.PutUint32(header[16:], uint32((d.xccs()-i)*size.Bytes))
		le.PutUint32(header[20:], uint32(size.Debug*d.xccs()))
		le.PutUint64(header[24:], q.words.addr(offSignal+packetBytes))
	}
	args := kfdabi.CreateQueueArgs{
		QueueType: kfd.QueueTypeComputeAQL, RingBaseAddress: q.ring.base, RingSize: slots * packetBytes,
		WritePointerAddress: q.words.addr(offWrite), ReadPointerAddress: q.words.addr(offRead),
		EOPBufferAddress: eop.base, EOPBufferSize: pageBytes,
		CtxSaveRestoreAddress: area.base, CtxSaveRestoreSize: uint32(size.Bytes), CtlStackSize: uint32(size.Stack),
	}
	var err error
	q.doorbell, err = d.createQueue(&args)
	q.id = args.QueueID
	return q, err
}

// spareQueue returns the queue of commands with some bytes of scratch for each lane: a save area
// is hundreds of MiB on a large GPU.
func (d *device) spareQueue(private uint32) (*queue, error) {
	if q := d.spare[private]; q != nil {
		return q, nil
	}
	q, err := d.newQueue(private)
	if err == nil {
		d.spare[private] = q
	}
	return q, err
}

// wait waits until the queue has completed everything.
func (q *queue) wait(ctx context.Context) error {
	for q.pending() > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if code := q.words.u64(offStopped + signalValue).Load(); code != 0 {
			return fmt.Errorf("the packet processor has stopped queue %d with error %#x", q.id, code)
		}
		runtime.Gosched()
	}
	return nil
}

// beats is the number of packets that have completed.
func (q *queue) beats() uint64 { return start - q.words.u64(offSignal+signalValue).Load() }

func (q *queue) pending() uint64 { return q.written - q.beats() }

// fill keeps the ring full of packets that do nothing but complete.
func (q *queue) fill() error {
	for q.pending() < depth {
		q.submit(packetBarrierAnd|inOrder, func([]byte) {})
	}
	return nil
}

// submit adds a packet. put writes what only its type has, and not the first four bytes.
func (q *queue) submit(first uint32, put func(packet []byte)) {
	at := int(q.written%slots) * packetBytes
	packet := q.ring.mem[at:][:packetBytes]
	clear(packet[4:])
	put(packet)
	binary.LittleEndian.PutUint64(packet[offCompletion:], q.words.addr(offSignal))
	q.ring.u32(at).Store(first) // the header last: until then the GPU waits there
	q.written++
	q.words.u64(offWrite).Store(q.written)
	q.doorbell.ring(q.written - 1)
}
