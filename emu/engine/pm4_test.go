package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// pm4 is a packet of type 3.
func pm4(op uint32, body ...uint32) []byte {
	return dwords(dwords(nil, 3<<30|uint32(len(body)-1)<<16|op<<8|2), body...)
}

// The packets as AMD's kfdtest makes them for gfx9 (PM4Packet.cpp, IndirectBuffer.cpp).
var pm4Filler = dwords(nil, 0xffff1002)

func pm4Write(target uint64, data ...uint32) []byte {
	return pm4(pm4WriteData, append([]uint32{5<<8 | 1<<20 | 2<<25, low(target), high(target)}, data...)...)
}

// pm4Release has an interrupt, unless polled.
func pm4Release(polled bool, target, value uint64, data ReleaseData) []byte {
	interrupt := interruptConfirmed
	switch {
	case polled && target != 0:
		interrupt = interruptNoneSent
	case polled:
		interrupt = interruptNone
	case target == 0:
		interrupt = interruptOnly
	}
	return pm4(pm4ReleaseMem, 0x14|5<<8|1<<15|1<<17, uint32(data)<<29|uint32(interrupt)<<24, low(target), high(target), low(value), high(value), low(value))
}

func pm4Buffer(at uint64, size int) []byte {
	return pm4(pm4IndirectBuffer, low(at), high(at), uint32(size/4)|1<<23|2<<28)
}

func pm4Wait(at uint64, value uint32) []byte {
	return pm4(pm4WaitRegMem, uint32(PollEQ)|1<<4, low(at), high(at), value, 0xffff_ffff, 4|1<<31)
}

func pm4Launch() []byte { return pm4(pm4DispatchDirect, 1, 1, 1, 0x21) }

// pm4Ring is the ring of a PM4 queue: its pointers count dwords, and the write pointer does not wrap.
type pm4Ring struct {
	*ring
	at uint64
}

func (w *world) pm4(bytes int) *pm4Ring {
	w.t.Helper()
	q := w.make(gpreempt.QueueCompute, bytes, false)
	w.run(w.queues...)
	return &pm4Ring{ring: q}
}

// place puts bytes on the ring without ringing.
func (q *pm4Ring) place(b []byte) {
	for q.free() < len(b) {
		time.Sleep(10 * us) // virtual
	}
	first := 4 * q.at % q.bytes
	straight := min(uint64(len(b)), q.bytes-first)
	q.w.put(q.base+first, b[:straight])
	q.w.put(q.base, b[straight:])
	q.at += uint64(len(b) / 4)
}

// free returns how many bytes may be written: a dword less than what is read, as a full ring
// would look empty.
func (q *pm4Ring) free() int {
	read := uint64(binary.LittleEndian.Uint32(q.w.get(q.read, 4)))
	return int(4 * ((read - 1 - q.at) & (q.bytes/4 - 1)))
}

func (q *pm4Ring) submit(packets ...[]byte) {
	for _, p := range packets {
		q.place(p)
	}
	q.w.store(q.write, q.at)
	q.bell.Store(q.at)
}

// consumed waits until the read pointer is at the write pointer.
func (q *pm4Ring) consumed() {
	q.w.t.Helper()
	want := uint32(q.at) & uint32(q.bytes/4-1)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * us) { // virtual
		got := binary.LittleEndian.Uint32(q.w.get(q.read, 4))
		if got == want {
			break
		}
		if time.Now().After(deadline) {
			q.w.t.Fatalf("the read pointer is %d, and not %d", got, want)
		}
	}
	synctest.Wait()
}

func TestPM4PacketsTakeEffect(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.pm4(4096)
		memory := w.alloc(64)
		q.submit(
			pm4Filler, dwords(nil, 2<<30), pm4(pm4NOP, 7, 8), pm4(pm4AcquireMem, 0, 0, 0, 0, 0, 0), pm4(pm4SetShReg, 0x240, 1, 2),
			pm4Write(memory, 0x12345678, 0x87654321),
			pm4(pm4WriteData, 5<<8|pm4OneAddress, low(memory+8), high(memory+8), 1, 2, 3),
			pm4Release(true, memory+16, 0x1_0000_0007, ReleaseLow),
			pm4Release(true, memory+24, 0x1_0000_0007, ReleaseValue),
			pm4Release(true, memory+32, 0, ReleaseClock),
			pm4Launch(),
			pm4Release(true, memory+40, 0, ReleaseClock),
			pm4Release(false, memory+48, 9, ReleaseLow),
			pm4Release(false, 0, 0, ReleaseNothing), // the driver ignores an interrupt without an ID
			pm4Release(false, 0, 11, ReleaseNothing),
		)
		check(w, "events", []uint32{9, 11}, []uint32{<-w.events, <-w.events})
		q.consumed()
		clocks := []uint64{w.load(memory + 32), w.load(memory + 40)}
		check(w, "memory", []uint64{
			0x8765432112345678, 3, 7, 0x1_0000_0007, clocks[0], clocks[1], 9,
		}, []uint64{
			w.load(memory), w.load(memory + 8), w.load(memory + 16), w.load(memory + 24), w.load(memory + 32), w.load(memory + 40), w.load(memory + 48),
		})
		if took := time.Duration(clocks[1] - clocks[0]); took < 100*us || took > 110*us {
			t.Errorf("a kernel of 100µs took %v by the clock", took)
		}
	})
}

// The read pointer wraps with the ring, the write pointer does not; packets may lie across
// the end of the ring. A write pointer that wraps, too, means the same.
func TestPM4PointersWrapWithTheRing(t *testing.T) {
	for name, wraps := range map[string]bool{"64 bits": false, "wraps": true} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				q := w.pm4(1024)
				memory := w.alloc(4000)
				for i := range 1000 {
					q.place(pm4Write(memory+uint64(4*i), uint32(i+1)))
					if wraps {
						q.at %= q.bytes / 4
					}
					q.submit()
				}
				q.consumed()
				var want []byte
				for i := range 1000 {
					want = dwords(want, uint32(i+1))
				}
				if !bytes.Equal(want, w.get(memory, len(want))) {
					t.Error("1000 writes did not all take effect")
				}
			})
		})
	}
}

// A packet whose end is not written yet waits for the doorbell.
func TestPM4PacketIsNotTakenBeforeItsEndIsWritten(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.pm4(4096)
		memory := w.alloc(8)
		packet := pm4Write(memory, 7)
		q.submit(pm4Filler, packet[:12])
		time.Sleep(5 * ms)
		check(w, "read pointer", 1, w.load(q.read))
		q.submit(packet[12:])
		q.consumed()
		check(w, "memory", 7, w.load(memory))
	})
}

// A dispatch as kfdtest submits it (Dispatch::BuildIb): from an indirect buffer, which waits
// for a fence in itself.
func TestPM4IndirectBufferRunsBeforeWhatIsBehindIt(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.pm4(4096)
		memory := w.alloc(16)
		fence := w.alloc(4096)
		var b []byte
		add := func(p []byte) { b = append(b, p...) }
		add(pm4Write(memory, 1))
		add(pm4Launch())
		nop := fence + uint64(len(b)) + 4
		add(pm4(pm4NOP, 0))
		add(pm4Release(true, nop, 0xdeadbeef, ReleaseLow))
		add(pm4Wait(nop, 0xdeadbeef))
		add(pm4Write(memory+4, 2))
		w.put(fence, b)
		q.submit(pm4Buffer(fence, len(b)), pm4Release(false, memory+8, 3, ReleaseLow))
		time.Sleep(90 * us)
		check(w, "read pointer in the buffer", 0, w.load(q.read))
		check(w, "memory in the buffer", 1, w.load(memory))
		check(w, "event", 3, <-w.events)
		q.consumed()
		check(w, "memory", []uint64{2<<32 | 1, 3}, []uint64{w.load(memory), w.load(memory + 8)})
	})
}

// A buffer continues in another by a chain, also longer ones than are read at once, and an
// empty one is passed.
func TestPM4ChainsOfBuffers(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.pm4(4096)
		memory, data := w.noise(40_000)
		target := w.alloc(len(data))
		last := pm4(pm4WriteData, append([]uint32{5 << 8, low(target), high(target)}, make([]uint32, 10_000)...)...)
		copy(last[16:], data)
		second := w.alloc(len(last))
		w.put(second, last)
		first := append(bytes.Repeat(pm4Filler, 2000), pm4(pm4IndirectBuffer, low(second), high(second), uint32(len(last)/4)|pm4Chain)...)
		first = append(first, pm4Write(memory, 1)...) // is not run
		at := w.alloc(len(first))
		w.put(at, first)
		q.submit(pm4Buffer(at, 0), pm4Buffer(at, len(first)))
		q.consumed()
		if !bytes.Equal(data, w.get(target, len(data))) {
			t.Error("the chained buffer did not run")
		}
		check(w, "behind the chain", data[:4], w.get(memory, 4))
	})
}

func TestPM4PacketsThatStopTheQueue(t *testing.T) {
	const nowhere = 0x1000
	for name, test := range map[string]struct {
		packet []byte
		// buffered: it is in an indirect buffer. address is that of the fault, 0 for the packet's.
		buffered bool
		address  uint64
	}{
		"unknown opcode":        {packet: pm4(0x15+1, 0, 0)},
		"type 0":                {packet: dwords(nil, 0)},
		"short write":           {packet: pm4(pm4WriteData, 5<<8, 0)},
		"write of a register":   {packet: pm4(pm4WriteData, 0, 0, 0, 1)},
		"release to a register": {packet: pm4(pm4ReleaseMem, 0, 2<<16|1<<29, 0, 0, 0, 0, 0)},
		"conditional interrupt": {packet: pm4(pm4ReleaseMem, 0, 5<<24, 0, 0, 0, 0, 0)},
		"performance counter":   {packet: pm4(pm4ReleaseMem, 0, 4<<29, 0, 0, 0, 0, 0)},
		"unmapped target":       {packet: pm4Write(nowhere, 1), address: nowhere},
		"unmapped buffer":       {packet: pm4Buffer(nowhere, 4), address: nowhere},
		"unmapped wait":         {packet: pm4Wait(nowhere, 1), address: nowhere},
		"buffer in a buffer":    {packet: pm4Buffer(ramBase, 4), buffered: true},
		"beyond the buffer":     {packet: pm4Write(ramBase, 1)[:8], buffered: true},
		"unknown in a buffer":   {packet: pm4(0xff, 0), buffered: true},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				q := w.pm4(1024)
				memory := w.alloc(8)
				want := fault{q.serial, q.base + 4}
				if test.buffered {
					want.Address = w.alloc(len(test.packet))
					w.put(want.Address, test.packet)
					test.packet = pm4Buffer(want.Address, len(test.packet))
				}
				if test.address != 0 {
					want.Address = test.address
				}
				q.submit(pm4Filler, test.packet, pm4Write(memory, 1))
				check(w, "fault", want, <-w.faults)
				time.Sleep(20 * ms)
				check(w, "behind it", 0, w.load(memory))
				check(w, "read pointer", 1, w.load(q.read))
			})
		})
	}
}

// An endless chain of buffers takes time, and no memory: the others go on, and the queue can
// be unmapped.
func TestPM4EndlessChainHarmsNobody(t *testing.T) {
	inWorld(t, func(w *world) {
		q, other := w.pm4(1024), w.pm4(1024)
		loop, memory := w.alloc(16), w.alloc(8)
		w.put(loop, pm4(pm4IndirectBuffer, low(loop), high(loop), 4|pm4Chain))
		q.submit(pm4Buffer(loop, 16))
		time.Sleep(time.Millisecond)
		other.submit(pm4Write(memory, 1))
		other.consumed()
		check(w, "the other queue", 1, w.load(memory))
		check(w, "read pointer", 0, w.load(q.read))
		w.run(other.ring)
		w.put(loop, pm4(pm4NOP, 0, 0, 0)) // the loop ends
		w.run(q.ring, other.ring)
		q.consumed()
	})
}

// Each packet, on the ring and in buffers, takes effect once and in order, however often the
// queue is unmapped.
func TestPM4PacketsRunOnceWhileTheQueueIsUnmapped(t *testing.T) {
	inWorld(t, func(w *world) {
		rng := rand.New(rand.NewPCG(1, 2))
		q := w.pm4(1024)
		memory, fence, buffers := w.alloc(8), w.alloc(8), w.alloc(1024)
		var want, got []uint32
		w.do(memory, 8, func([]byte) {
			w.wrote = func(addr uint64, p []byte) {
				if addr == memory {
					got = append(got, binary.LittleEndian.Uint32(p))
				}
			}
		})
		next := func() []byte {
			want = append(want, uint32(len(want)+1))
			if rng.IntN(2) == 0 {
				return pm4Write(memory, uint32(len(want)))
			}
			return pm4Release(false, memory, uint64(len(want)), ReleaseLow)
		}
		for range 300 {
			var b []byte
			for range 1 + rng.IntN(6) {
				b = append(b, next()...)
				if rng.IntN(3) == 0 {
					b = append(b, pm4Launch()...)
				}
			}
			b = append(append(b, pm4Release(true, fence, 1, ReleaseLow)...), pm4Wait(fence, 1)...)
			w.put(buffers, b)
			q.submit(pm4Buffer(buffers, len(b)), next())
			for range rng.IntN(4) {
				time.Sleep(time.Duration(rng.IntN(300)) * us) // virtual
				w.run()
				n := 0
				w.do(memory, 8, func([]byte) { n = len(got) })
				time.Sleep(time.Millisecond)
				w.do(memory, 8, func([]byte) {
					if len(got) != n {
						t.Errorf("%d packets took effect while the queue was unmapped", len(got)-n)
					}
				})
				w.run(q.ring)
			}
			q.consumed()
			w.store(fence, 0)
		}
		if !slices.Equal(want, got) {
			t.Errorf("%d packets had %d effects, or another order", len(want), len(got))
		}
	})
}

func FuzzDecodePM4(f *testing.F) {
	for _, b := range [][]byte{
		pm4Filler, dwords(nil, 2<<30), pm4(pm4NOP, 1), pm4Write(1<<40, 1, 2), pm4Release(false, 64, 7, ReleaseValue), pm4Buffer(4096, 64),
		pm4Wait(64, 1), pm4Launch(), pm4(pm4SetShReg, 1, 2), pm4(pm4EventWrite, 1), dwords(nil, 0),
		{1},
	} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, n, err := DecodePM4(b)
		if err != nil {
			if c != nil || n != 0 || !errors.Is(err, ErrShort) && !errors.Is(err, ErrIllegal) {
				t.Fatalf("%v of %d bytes with error %v", c, n, err)
			}
			return
		}
		if n < 4 || n%4 != 0 || n > len(b) {
			t.Fatalf("%T has %d of %d bytes", c, n, len(b))
		}
		again, m, err := DecodePM4(b[:n])
		if diff := cmp.Diff(c, again); diff != "" || m != n || err != nil {
			t.Fatalf("%T depends on what is behind it: %d of %d bytes, %v (-want +got):\n%s", c, m, n, err, diff)
		}
		switch c := c.(type) {
		case Write:
			if len(c.Data) == 0 || len(c.Data)%4 != 0 || len(c.Data) > n {
				t.Fatalf("a write of %d bytes in %d", len(c.Data), n)
			}
		case Jump:
			if c.Address%4 != 0 || c.Dwords >= 1<<20 {
				t.Fatalf("a jump to %#x, %d dwords", c.Address, c.Dwords)
			}
		case NOP, Poll, Release, Launch:
		default:
			t.Fatalf("a %T", c)
		}
	})
}
