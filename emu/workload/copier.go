package workload

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// copyBytes is the size of one copy.
const copyBytes = 64 << 10

// maxCopies is the most copies in a copier's ring.
const maxCopies = 8

// copyRing is the size of a copier's ring in bytes. It is not a multiple of the commands
// of a copy, so that different commands meet the end of the ring.
const copyRing = 4096

// Offsets in the memory of a copier.
const (
	offCopyRing = 4096
	offFences   = offCopyRing + copyRing
	offCopies   = offFences + 4096
)

// copier is an SDMA queue. A packet of it is a copy and the fence after it; with an event,
// also the commands that raise that.
type copier struct {
	d    *device
	gpu  gpu
	wake *event // nil to poll memory instead
	// mem has parts: words, the ring, and fences, sources and destinations, one of each
	// for each copy.
	mem      *memory
	doorbell *atomic.Uint64
	written  uint64 // bytes
	pushed   uint64 // copies
	// count is the number of copies found complete, hash their hash.
	count, hash uint64
}

func newCopier(d *device, g gpu, wake *event) (*copier, error) {
	q := &copier{d: d, gpu: g, wake: wake}
	var err error
	q.mem, err = d.allocate(g, offCopyRing, copyRing, offCopies+2*maxCopies*copyBytes-offFences)
	return q, err
}

func (q *copier) free() error { return q.mem.free() }

// reset clears the memory after an earlier queue.
func (q *copier) reset() {
	for _, off := range []int{offWrite, offRead} {
		q.mem.u64(off).Store(0)
	}
	for slot := range uint64(maxCopies) {
		q.fence(slot).Store(0)
	}
	q.written, q.pushed, q.count, q.hash = 0, 0, 0, 0
}

// create creates the queue.
func (q *copier) create() (id uint32, err error) {
	id, q.doorbell, err = q.d.createQueue(&kfdabi.CreateQueueArgs{
		RingBaseAddress:     q.mem.addr(offCopyRing),
		WritePointerAddress: q.mem.addr(offWrite),
		ReadPointerAddress:  q.mem.addr(offRead),
		RingSize:            copyRing,
		GPUID:               uint32(q.gpu.ID),
		QueueType:           kfd.QueueTypeSDMA,
		QueuePercentage:     100,
		QueuePriority:       normalPriority,
	})
	return id, err
}

// fence returns the word that becomes n+1 at the end of copy n.
func (q *copier) fence(n uint64) *atomic.Uint32 { return q.mem.u32(q.fenceAt(n)) }

func (q *copier) fenceAt(n uint64) int { return offFences + int(n%maxCopies)*64 }

// source and destination return the memory of copy n.
func (q *copier) source(n uint64) []byte { return q.mem.mem[q.copyAt(n):][:copyBytes] }

func (q *copier) destination(n uint64) []byte {
	return q.mem.mem[q.copyAt(n)+copyBytes:][:copyBytes]
}

func (q *copier) copyAt(n uint64) int { return offCopies + int(n%maxCopies)*2*copyBytes }

// maxCommands is more than the bytes of a copy's commands and of the NOP before the end of
// the ring.
const maxCommands = 256

// room reports whether the ring has space for another copy.
func (q *copier) room() bool {
	return q.written+maxCommands-q.mem.u64(offRead).Load() <= copyRing && q.pushed-q.count < maxCopies
}

// push submits a copy of bytes that depend on value, and returns the value that it will
// mix into the result.
func (q *copier) push(value uint64) uint64 {
	n := q.pushed
	fillCopy(q.source(n), value)
	clear(q.destination(n))
	q.fence(n).Store(0)
	source := q.mem.addr(q.copyAt(n))
	commands := engine.Copy{Source: source, Target: source + copyBytes, Bytes: copyBytes}.Append(nil)
	commands = engine.Fence{Address: q.mem.addr(q.fenceAt(n)), Value: uint32(n + 1)}.Append(commands)
	if q.wake != nil {
		commands = engine.Fence{Address: q.wake.mailbox, Value: q.wake.id}.Append(commands)
		commands = engine.Trap{Event: q.wake.id}.Append(commands)
	}
	if rest := copyRing - int(q.written%copyRing); rest < len(commands) {
		// No command crosses the end of the ring.
		q.put(engine.NOP{Skip: uint32(rest/4 - 1)}.Append(nil))
	}
	q.put(commands)
	q.pushed++
	q.mem.u64(offWrite).Store(q.written)
	q.doorbell.Store(q.written)
	return copySum(q.source(n))
}

// put adds commands to the ring. The GPU sees them when the write index is set.
func (q *copier) put(commands []byte) {
	copy(q.mem.mem[offCopyRing+int(q.written%copyRing):], commands)
	q.written += uint64(len(commands))
}

// fillCopy fills b with bytes that depend on value.
func fillCopy(b []byte, value uint64) {
	for i := 0; i < len(b); i += 8 {
		value += step64
		binary.LittleEndian.PutUint64(b[i:], mix64(value))
	}
}

// copySum returns the hash of the bytes of a copy.
func copySum(b []byte) uint64 {
	var sum uint64
	for i := 0; i < len(b); i += 8 {
		sum = engine.MixHash(sum, binary.LittleEndian.Uint64(b[i:]))
	}
	return sum
}

// over reports whether copy n has completed, and compares it byte for byte the first time.
// It is called with the oldest one that was not.
func (q *copier) over(n uint64) (bool, error) {
	if n < q.count {
		return true, nil
	}
	switch v := q.fence(n).Load(); v {
	case 0:
		return false, nil
	case uint32(n + 1):
	default:
		return false, fmt.Errorf("the fence of copy %d is %d", n, v)
	}
	if !bytes.Equal(q.source(n), q.destination(n)) {
		return false, fmt.Errorf("copy %d differs from its source", n)
	}
	q.hash = engine.MixHash(q.hash, copySum(q.destination(n)))
	q.count = n + 1
	return true, nil
}

func (q *copier) seal()                 {}
func (q *copier) sealed() (bool, error) { return true, nil }

// stopped checks the copies from oldest to before end, of a queue that was destroyed, and
// counts the complete ones, which must precede the others.
func (q *copier) stopped(oldest, end, _ uint64) error {
	for n := oldest; n < end; n++ {
		over, err := q.over(n)
		if err != nil {
			return err
		}
		if !over && n+1 < end && q.fence(n+1).Load() != 0 {
			return fmt.Errorf("copy %d completed before copy %d", n+1, n)
		}
		if !over {
			return nil
		}
	}
	return nil
}

func (q *copier) result() (count, hash uint64) { return q.count, q.hash }

// progress is 0: only kernels report it.
func (q *copier) progress(uint64) uint64 { return 0 }

func (q *copier) indexes() (read, write uint64) {
	return q.mem.u64(offRead).Load(), q.mem.u64(offWrite).Load()
}
