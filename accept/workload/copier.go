package workload

import (
	"encoding/binary"
	"fmt"
	"hash/crc64"
	"math/rand/v2"
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// copyBytes is the size of one copy, copyRing that of the ring.
const (
	copyBytes = 1 << 20
	copyRing  = 4096
)

// offArrived is the word by which a copy waits for the one before.
const offArrived = offSignal + 64

// SDMA commands of gfx9 (sdma_registers.h of ROCr).
const (
	sdmaCopy  = 1
	sdmaFence = 5
	// sdmaWait waits until a word of memory equals a value, sdmaRetry without an end.
	sdmaWait  = 8 | 3<<28 | 1<<31
	sdmaRetry = 0xfff<<16 | 4
)

// copier is an SDMA queue that copies random bytes to the GPU's memory, to that of its peer
// if it has one, and back, over and over. The destination is compared by a checksum.
type copier struct {
	id                   uint32
	words, ring          memory
	source, back         memory
	vram                 []uint64 // of each GPU on the way
	doorbell             doorbell
	written, round, done uint64
	random               *rand.ChaCha8
	want                 uint64
	// corrupt changes a byte of the next destination: the checksum must notice.
	corrupt bool
	wrong   uint64
}

var table = crc64.MakeTable(crc64.ECMA)

func (d *device) newCopier(seed uint64, peer uint32) (*copier, error) {
	c := &copier{random: rand.NewChaCha8([32]byte(binary.LittleEndian.AppendUint64(make([]byte, 24), seed)))}
	for _, part := range []struct {
		to    *memory
		bytes int
	}{{&c.words, pageBytes}, {&c.ring, copyRing}, {&c.source, copyBytes}, {&c.back, copyBytes}} {
		var err error
		if *part.to, err = d.allocate(part.bytes); err != nil {
			return nil, err
		}
	}
	var err error
	gpus := []uint32{d.gpu}
	if peer != 0 {
		gpus = append(gpus, peer)
	}
	for _, gpu := range gpus {
		at, err := d.allocateVRAM(gpu, gpus, copyBytes)
		if err != nil {
			return nil, err
		}
		c.vram = append(c.vram, at)
	}
	args := kfdabi.CreateQueueArgs{
		QueueType: kfd.QueueTypeSDMA, RingBaseAddress: c.ring.base, RingSize: copyRing,
		WritePointerAddress: c.words.addr(offWrite), ReadPointerAddress: c.words.addr(offRead),
	}
	c.doorbell, err = d.createQueue(&args)
	c.id = args.QueueID
	return c, err
}

// beats is the number of rounds that have completed.
func (c *copier) beats() uint64 { return uint64(c.words.u32(offSignal).Load()) }

func (c *copier) pending() uint64 { return c.round - c.beats() }

// fill checks the last round and starts the next.
func (c *copier) fill() error {
	if c.pending() > 0 {
		return nil
	}
	if c.round > c.done {
		if c.corrupt {
			c.back.mem[c.want%copyBytes] ^= 1
			c.corrupt = false
		}
		if crc64.Checksum(c.back.mem, table) != c.want {
			c.wrong++
		}
		c.done = c.round
	}
	if _, err := c.random.Read(c.source.mem); err != nil {
		return fmt.Errorf("random bytes: %w", err)
	}
	clear(c.back.mem)
	c.want = crc64.Checksum(c.source.mem, table)
	c.round++
	var commands []byte
	le := binary.LittleEndian
	fence := func(at uint64, value uint32) {
		commands = le.AppendUint32(commands, sdmaFence)
		commands = le.AppendUint64(commands, at)
		commands = le.AppendUint32(commands, value)
	}
	from := c.source.base
	for i, to := range append(slices.Clone(c.vram), c.back.base) {
		if i > 0 { // the engine may read ahead of its writes: wait for them
			arrived := uint32(c.round)<<2 | uint32(i)
			fence(c.words.addr(offArrived), arrived)
			commands = le.AppendUint32(commands, sdmaWait)
			commands = le.AppendUint64(commands, c.words.addr(offArrived))
			for _, word := range []uint32{arrived, ^uint32(0), sdmaRetry} {
				commands = le.AppendUint32(commands, word)
			}
		}
		for _, word := range []uint32{sdmaCopy, copyBytes - 1, 0} {
			commands = le.AppendUint32(commands, word)
		}
		commands = le.AppendUint64(commands, from)
		commands = le.AppendUint64(commands, to)
		from = to
	}
	fence(c.words.addr(offSignal), uint32(c.round))
	if rest := copyRing - int(c.written%copyRing); rest < len(commands) {
		clear(c.ring.mem[copyRing-rest:]) // NOPs: no command crosses the end
		c.written += uint64(rest)
	}
	copy(c.ring.mem[c.written%copyRing:], commands)
	c.written += uint64(len(commands))
	c.words.u64(offWrite).Store(c.written)
	c.doorbell.ring(c.written)
	return nil
}
