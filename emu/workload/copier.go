package workload

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/gpreempt/gpreempt/emu/abi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// copyBytes is what one packet of a copier copies.
const copyBytes = 64 << 10

// maxCopies is the most copies a copier has in its ring.
const maxCopies = 8

// copyRing is the length of a copier's ring in bytes. It is no multiple of what a copy
// takes, so that the end of the ring is met in different places.
const copyRing = 4096

// Where things are in the memory of a copier.
const (
	offCopyRing = 4096
	offFences   = offCopyRing + copyRing
	offCopies   = offFences + 4096
)

// copier is an SDMA queue. A packet of it is a copy and the fence that tells that it is
// over; with an event, also what raises that.
type copier struct {
	d        *device
	gpu      gpu
	wake     *event // nil to look at memory instead
	mem      region // sources and destinations last, one of each for each copy
	doorbell *atomic.Uint64
	written  uint64 // bytes
	pushed   uint64 // copies
	// count is how many copies were seen to be over, hash what they came to.
	count, hash uint64
}

func newCopier(d *device, g gpu, wake *event) (*copier, error) {
	q := &copier{d: d, gpu: g, wake: wake}
	var err error
	q.mem, err = newRegion(offCopies + 2*maxCopies*copyBytes)
	return q, err
}

func (q *copier) free() error { return q.mem.free() }

// reset clears what an earlier queue left.
func (q *copier) reset() {
	for _, off := range []int{offWrite, offRead} {
		q.mem.u64(off).Store(0)
	}
	for slot := range uint64(maxCopies) {
		q.fence(slot).Store(0)
	}
	q.written, q.pushed, q.count, q.hash = 0, 0, 0, 0
}

// create makes the queue.
func (q *copier) create() (id uint32, err error) {
	id, q.doorbell, err = q.d.createQueue(&kfd.CreateQueueArgs{
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

// fence is where the end of copy n is told: a word that holds n+1 then.
func (q *copier) fence(n uint64) *atomic.Uint32 { return q.mem.u32(q.fenceAt(n)) }

func (q *copier) fenceAt(n uint64) int { return offFences + int(n%maxCopies)*64 }

// source and destination are the memory of copy n.
func (q *copier) source(n uint64) []byte { return q.mem.mem[q.copyAt(n):][:copyBytes] }

func (q *copier) destination(n uint64) []byte {
	return q.mem.mem[q.copyAt(n)+copyBytes:][:copyBytes]
}

func (q *copier) copyAt(n uint64) int { return offCopies + int(n%maxCopies)*2*copyBytes }

// maxCommands is more than the commands of a copy take, and the rest of the ring before
// its beginning.
const maxCommands = 256

// room reports whether the ring takes another copy.
func (q *copier) room() bool {
	return q.written+maxCommands-q.mem.u64(offRead).Load() <= copyRing && q.pushed-q.count < maxCopies
}

// push submits a copy of bytes that only value stands for, and returns what it will mix
// into the result.
func (q *copier) push(value uint64) uint64 {
	n := q.pushed
	fillCopy(q.source(n), value)
	clear(q.destination(n))
	q.fence(n).Store(0)
	source := q.mem.addr(q.copyAt(n))
	commands := abi.Copy{Source: source, Target: source + copyBytes, Bytes: copyBytes}.Append(nil)
	commands = abi.Fence{Address: q.mem.addr(q.fenceAt(n)), Value: uint32(n + 1)}.Append(commands)
	if q.wake != nil {
		commands = abi.Fence{Address: q.wake.mailbox, Value: q.wake.id}.Append(commands)
		commands = abi.Trap{Event: q.wake.id}.Append(commands)
	}
	if rest := copyRing - int(q.written%copyRing); rest < len(commands) {
		// No command stands across the end of the ring.
		q.put(abi.NOP{Skip: uint32(rest/4 - 1)}.Append(nil))
	}
	q.put(commands)
	q.pushed++
	q.mem.u64(offWrite).Store(q.written)
	q.doorbell.Store(q.written)
	return copySum(q.source(n))
}

// put adds commands to the ring; the GPU does not see them before the write index says so.
func (q *copier) put(commands []byte) {
	copy(q.mem.mem[offCopyRing+int(q.written%copyRing):], commands)
	q.written += uint64(len(commands))
}

// fillCopy fills b with what stands for value.
func fillCopy(b []byte, value uint64) {
	for i := 0; i < len(b); i += 8 {
		value += step64
		binary.LittleEndian.PutUint64(b[i:], mix64(value))
	}
}

// copySum is what the bytes of a copy come to.
func copySum(b []byte) uint64 {
	var sum uint64
	for i := 0; i < len(b); i += 8 {
		sum = abi.MixHash(sum, binary.LittleEndian.Uint64(b[i:]))
	}
	return sum
}

// over reports whether copy n is over, and compares it byte for byte when it first is. It
// is called with the oldest that was not over.
func (q *copier) over(n uint64) (bool, error) {
	if n < q.count {
		return true, nil
	}
	switch v := q.fence(n).Load(); v {
	case 0:
		return false, nil
	case uint32(n + 1):
	default:
		return false, fmt.Errorf("the fence of copy %d holds %d", n, v)
	}
	if !bytes.Equal(q.source(n), q.destination(n)) {
		return false, fmt.Errorf("copy %d differs from what was copied", n)
	}
	q.hash = abi.MixHash(q.hash, copySum(q.destination(n)))
	q.count = n + 1
	return true, nil
}

func (q *copier) seal()                 {}
func (q *copier) sealed() (bool, error) { return true, nil }

// stopped looks at the copies from oldest to before end, of a queue that was destroyed,
// and counts those that are over: none is after one that is not.
func (q *copier) stopped(oldest, end, _ uint64) error {
	for n := oldest; n < end; n++ {
		over, err := q.over(n)
		if err != nil {
			return err
		}
		if !over && n+1 < end && q.fence(n+1).Load() != 0 {
			return fmt.Errorf("copy %d is over before copy %d", n+1, n)
		}
		if !over {
			return nil
		}
	}
	return nil
}

func (q *copier) result() (count, hash uint64) { return q.count, q.hash }

// progress is that of kernels.
func (q *copier) progress(uint64) uint64 { return 0 }

func (q *copier) indexes() (read, write uint64) {
	return q.mem.u64(offRead).Load(), q.mem.u64(offWrite).Load()
}
