package engine

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// sdma makes an SDMA queue with a ring of that many bytes.
func (w *world) sdma(bytes int) *ring {
	w.t.Helper()
	return w.queue(gpreempt.QueueSDMA, bytes)
}

// noise is memory with contents.
func (w *world) noise(n int) (uint64, []byte) {
	rng := rand.New(rand.NewPCG(uint64(n), 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	at := w.alloc(n)
	w.put(at, b)
	return at, b
}

// TestCopyAsTheRuntimeDoesIt: what ROCr puts on the ring for one copy with a
// dependency and profiling.
func TestCopyAsTheRuntimeDoesIt(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.sdma(4096)
		source, want := w.noise(1 << 20)
		target := w.alloc(len(want))
		dependency := w.signal(Signal{Value: 1 << 32})
		mailbox := w.alloc(8)
		done := w.signal(Signal{Value: 1, Mailbox: mailbox, Event: 9})
		value := dependency + SignalValue
		commands := []Command{
			Poll{Memory: true, Func: PollEQ, Address: value + 4, Mask: 0xffff_ffff},
			Poll{Memory: true, Func: PollEQ, Address: value, Mask: 0xffff_ffff},
			Timestamp{Address: done + SignalStart},
			Poll{Func: PollAlways, Mask: 0xffff_ffff, Address: 0x8000_0000}, // HDP flush
			CacheFlush{},
			Copy{Source: source, Target: target, Bytes: uint32(len(want))},
			CacheFlush{},
			Timestamp{Address: done + SignalEnd},
			Atomic{Address: done + SignalValue, Add: ^uint64(0)},
			Fence{Address: mailbox, Value: 9},
			Trap{Event: 9},
		}
		q.command(commands...)
		time.Sleep(5 * ms)
		check(w, "read position while the dependency holds", 0, w.load(q.read))
		w.store(value, 0)
		check(w, "event", 9, <-w.events)
		q.drain()
		if !bytes.Equal(want, w.get(target, len(want))) {
			w.t.Error("what was copied is not what there was")
		}
		s := DecodeSignal(w.get(done, SignalBytes))
		check(w, "signal", 0, s.Value)
		check(w, "mailbox", 9, w.load(mailbox))
		if took := time.Duration(s.End - s.Start); took < 20*us || took > 60*us {
			w.t.Errorf("1 MiB took %v by its signal", took)
		}
		check(w, "completed", uint64(len(commands)), w.Counters()[0].Completed)
	})
}

func TestCommandsThatMoveData(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.sdma(8192)
		source, data := w.noise(600_000)
		target := w.alloc(len(data))
		want := make([]byte, len(data))
		memory := func() []byte { return w.get(target, len(want)) }

		q.command(Copy{Source: source + 3, Target: target + 5, Bytes: 300_001})
		copy(want[5:], data[3:][:300_001])
		q.command(Fill{Target: target + 400_000, Value: 0x1234_5678, Size: 2, Bytes: 100_000})
		for i := 400_000; i < 500_000; i += 4 {
			binary.LittleEndian.PutUint32(want[i:], 0x1234_5678)
		}
		q.command(Fill{Target: target + 500_001, Value: 0xab, Bytes: 7})
		copy(want[500_001:], bytes.Repeat([]byte{0xab}, 7))
		// Longer than what is read of the ring at once.
		q.command(Write{Target: target + 510_000, Data: data[:6000]})
		copy(want[510_000:], data[:6000])
		// 3 by 2 by 2 elements of 4 bytes.
		q.command(CopyRect{
			Source:  Plane{Base: source, X: 1, Y: 2, Z: 1, Pitch: 10, Slice: 100},
			Target:  Plane{Base: target + 520_000, X: 2, Y: 1, Pitch: 7, Slice: 50},
			Element: 2, Width: 3, Height: 2, Depth: 2,
		})
		for z := range 2 {
			for y := range 2 {
				from := ((z+1)*100 + (y+2)*10 + 1) * 4
				to := 520_000 + (z*50+(y+1)*7+2)*4
				copy(want[to:][:12], data[from:])
			}
		}
		q.drain()
		if got := memory(); !bytes.Equal(want, got) {
			i := 0
			for got[i] == want[i] {
				i++
			}
			w.t.Errorf("memory differs from byte %d on (-want +got):\n%s", i, cmp.Diff(want[i:min(i+16, len(want))], got[i:min(i+16, len(got))]))
		}
	})
}

func TestSDMAOrderOfEffects(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.sdma(4096)
		source, target, fence, counter := w.alloc(64), w.alloc(64), w.alloc(8), w.alloc(8)
		names := map[uint64]string{target: "copy", fence: "fence", counter: "atomic", q.read: "position"}
		var order []string
		w.wrote = func(addr uint64, _ []byte) { order = append(order, names[addr]) }
		q.command(Copy{Source: source, Target: target, Bytes: 64}, Fence{Address: fence, Value: 1}, Atomic{Address: counter, Add: 1})
		q.drain()
		check(w, "order", []string{"copy", "position", "position", "fence", "position", "atomic"}, order)
	})
}

// TestSDMARingsWrap, in commands that are padded as by ROCr, and in ones that go
// around the end.
func TestSDMARingsWrap(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.sdma(1024)
		counter := w.alloc(8)
		sent := uint64(0)
		for range 300 {
			q.command(Atomic{Address: counter, Add: 1}, NOP{Skip: 3}, Atomic{Address: counter, Add: 1})
			var around []byte
			for _, c := range []Command{NOP{}, Atomic{Address: counter, Add: 1}} {
				around = appendCommand(around, c)
			}
			q.raw(around)
			sent += 3
		}
		q.drain()
		check(w, "counter", sent, w.load(counter))
		check(w, "read position", w.load(q.write), w.load(q.read))
	})
}

func TestACommandThatIsNotAllThereIsWaitedFor(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.sdma(1024)
		counter := w.alloc(8)
		b := Atomic{Address: counter, Add: 1}.Append(NOP{}.Append(nil))
		q.raw(b[:20])
		time.Sleep(5 * ms)
		check(w, "before", []uint64{4, 0}, []uint64{w.load(q.read), w.load(counter)})
		q.raw(b[20:])
		q.drain()
		check(w, "after", []uint64{36, 1}, []uint64{w.load(q.read), w.load(counter)})
	})
}

func TestPollsCompareMaskedDwords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "mi300x")
		q := w.sdma(4096)
		word := w.alloc(8)
		w.store(word, 0xff_05)
		q.command(Poll{Memory: true, Func: PollGT, Address: word, Value: 6, Mask: 0xff})
		time.Sleep(5 * ms)
		check(w, "read position before", 0, w.load(q.read))
		w.store(word, 0x07)
		q.drain()
	})
}

func TestAPollLooksOnceThoseBeforeItAreOver(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.sdma(4096)
		word := w.alloc(8)
		w.store(word, 7)
		q.command(
			Write{Target: word, Data: make([]byte, 4)},
			Poll{Memory: true, Func: PollEQ, Address: word, Value: 7, Mask: 0xff},
			Fence{Address: word, Value: 1},
		)
		time.Sleep(5 * ms)
		check(w, "word", 0, w.load(word))
		w.store(word, 7)
		q.drain()
		check(w, "word", 1, w.load(word))
	})
}

func TestSDMAFaults(t *testing.T) {
	const nowhere = 0x1000
	tests := map[string]struct {
		commands []byte
		// address is that of the fault, behind the ring's base if it is small.
		address uint64
	}{
		"illegal":     {[]byte{0x7f, 0, 0, 0}, 4},
		"unknown sub": {[]byte{1, 99, 0, 0}, 4},
		"copy":        {Copy{Source: nowhere, Target: ramBase, Bytes: 4}.Append(nil), nowhere},
		"fence":       {Fence{Address: nowhere}.Append(nil), nowhere},
		"poll":        {Poll{Memory: true, Func: PollEQ, Address: nowhere}.Append(nil), nowhere},
		// A NOP of 64 KiB does not fit a ring of 1 KiB.
		"too long": {NOP{Skip: 0x3fff}.Append(nil)[:8], 4},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				q := w.sdma(1024)
				counter := w.alloc(8)
				q.raw(append(NOP{}.Append(nil), test.commands...))
				q.raw(Atomic{Address: counter, Add: 1}.Append(nil))
				got := <-w.faults
				time.Sleep(20 * ms)
				want := fault{q.serial, test.address}
				if want.Address < PacketBytes {
					want.Address += q.base
				}
				check(w, "fault", want, got)
				check(w, "behind the fault", 0, w.load(counter))
			})
		})
	}
}

func TestASuspendedCopyHasNoEffect(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.unmapped(gpreempt.QueueSDMA, 4096)
		source, want := w.noise(100)
		target := w.alloc(len(want))
		q.command(Copy{Source: source, Target: target, Bytes: 100})
		time.Sleep(20 * ms)
		check(w, "while it is not mapped", make([]byte, 100), w.get(target, 100))
		w.run(q)
		q.drain()
		check(w, "when it is", want, w.get(target, 100))
	})
}
