package engine

import (
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// presets are one machine of each kind of firmware.
var presets = []string{"mi300x", "rx7900xtx"}

// inWorld runs a test on each, in virtual time.
func inWorld(t *testing.T, f func(w *world)) {
	t.Helper()
	for _, preset := range presets {
		t.Run(preset, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(newWorld(t, preset)) })
		})
	}
}

func check[T any](w *world, what string, want, got T) {
	w.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		w.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestEveryPacketTakesEffectOnceInOrderAroundTheRing(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: 3 * us, Occupancy: 250_000})
		const n = 100
		signal := w.signal(Signal{Value: n})
		for range n {
			q.send(x.packet(true, signal))
		}
		q.drain()
		check(w, "result", x.want(), x.got())
		check(w, "read index", n, w.load(q.read))
		check(w, "signal", 0, w.value(signal))
		check(w, "progress", 1_000_000, w.load(x.progress))
		check(w, "counters", []Counters{{Serial: 100, Ref: q.ref, Fetched: n, Read: n, Completed: n}}, w.Counters())
	})
}

func TestEffectsOfAPacketFollowOneAnother(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: 5 * us})
		mailbox := w.alloc(8)
		signal := w.signal(Signal{Value: 1, Mailbox: mailbox, Event: 77})
		names := map[uint64]string{
			x.result: "effect", x.progress: "progress", q.base: "header", q.read: "read index",
			signal + SignalStart: "timestamps", signal + SignalValue: "signal", mailbox: "mailbox",
		}
		var order []string
		w.wrote = func(addr uint64, _ []byte) { order = append(order, names[addr]) }
		q.send(x.packet(true, signal))
		event := <-w.events
		q.drain()
		check(w, "order", []string{"effect", "progress", "header", "read index", "timestamps", "signal", "mailbox"}, order)
		check(w, "header", PacketInvalid, HeaderOf(w.get(q.base, 2)).Type())
		check(w, "event", 77, event)
		check(w, "mailbox", 77, w.load(mailbox))
		s := DecodeSignal(w.get(signal, SignalBytes))
		check(w, "how long it took by its signal", 5*us, time.Duration(s.End-s.Start))
	})
}

// TestTheFirstDoorbellIsSeenThoughItSaysZero: the page is all zeros, and so is the
// first index.
func TestTheFirstDoorbellIsSeenThoughItSaysZero(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		time.Sleep(50 * ms) // the poller has long gone lazy
		x := w.mixes(Kernel{Duration: us})
		q.send(x.packet(true, 0))
		q.drain()
		check(w, "result", x.want(), x.got())
	})
}

func TestADoorbellRungBeforeAddIsNotLost(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		w.Remove(q.serial)
		x := w.mixes(Kernel{Duration: us})
		q.send(x.packet(true, 0))
		q.bell.Store(silent) // the poller had just taken note of it
		if err := w.Add(w.spec(q, gpreempt.QueueCompute)); err != nil {
			w.t.Fatal(err)
		}
		q.drain()
		check(w, "result", x.want(), x.got())
	})
}

// TestOneDoorbellForAWholeRing: as HIP does for a graph.
func TestOneDoorbellForAWholeRing(t *testing.T) {
	inWorld(t, func(w *world) {
		q, other := w.aql(1024), w.aql(16)
		x, y := w.mixes(Kernel{Duration: us}), w.mixes(Kernel{Duration: us})
		for range 1000 {
			q.publish(q.reserve(), x.packet(true, 0))
		}
		q.ring(999)
		other.send(y.packet(true, 0))
		q.drain()
		other.drain()
		check(w, "results", []outcome{x.want(), y.want()}, []outcome{x.got(), y.got()})
	})
}

func TestDoorbellsMayGoBackAndRepeat(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: us})
		for range 3 {
			q.publish(q.reserve(), x.packet(true, 0))
			q.ring(7)
			q.drain()
			q.publish(q.reserve(), x.packet(true, 0))
			q.ring(2)
			q.drain()
		}
		check(w, "result", x.want(), x.got())
	})
}

// TestAHoleIsWaitedFor: a later producer is faster, whose doorbell comes first.
func TestAHoleIsWaitedFor(t *testing.T) {
	inWorld(t, func(w *world) {
		for _, hole := range []PacketType{PacketInvalid, PacketVendor} {
			q := w.aql(16)
			x := w.mixes(Kernel{Duration: us})
			slow, fast := q.reserve(), q.reserve()
			w.put(q.base+slow*PacketBytes, binary.LittleEndian.AppendUint32(nil, uint32(hole)))
			first, second := x.packet(true, 0), x.packet(true, 0)
			q.publish(fast, second)
			q.ring(fast)
			time.Sleep(5 * ms)
			check(w, "read index before the hole is filled", 0, w.load(q.read))
			// Its producer need not ring for what was rung already.
			q.publish(slow, first)
			q.drain()
			check(w, "result", x.want(), x.got())
		}
	})
}

func TestSlotsTakenAheadOfTheReadIndexAreNotReadTwice(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: 100 * us})
		for range 16 {
			q.publish(q.reserve(), x.packet(true, 0))
		}
		// Others have rung already, and wait for slots.
		w.store(q.write, 20)
		q.ring(19)
		time.Sleep(10 * ms)
		check(w, "result", x.want(), x.got())
		check(w, "read index", 16, w.load(q.read))
		for index := range uint64(4) {
			q.publish(16+index, x.packet(true, 0))
		}
		q.drain()
		check(w, "result in the end", x.want(), x.got())
	})
}

func TestBarriersWaitForTheirSignals(t *testing.T) {
	header := func(typ PacketType) Header { return MakeHeader(typ, true) }
	tests := map[string]struct {
		// barrier waits for two signals that are 1.
		barrier func(a, b uint64) putter
		// closed are changes after which it still waits, open is one that ends the wait.
		closed []func(w *world, a, b uint64)
		open   func(w *world, a, b uint64)
	}{
		"and": {
			barrier: func(a, b uint64) putter {
				return Barrier{Header: header(PacketBarrierAnd), Deps: [5]uint64{0, a, 0, 0, b}}
			},
			closed: []func(w *world, a, b uint64){
				func(w *world, a, _ uint64) { w.store(a+SignalValue, 0) },
				func(w *world, _, b uint64) { w.store(b+SignalValue, ^uint64(0)) },
			},
			open: func(w *world, _, b uint64) { w.store(b+SignalValue, 0) },
		},
		"or": {
			barrier: func(a, b uint64) putter {
				return Barrier{Header: header(PacketBarrierOr), Deps: [5]uint64{0, a, 0, 0, b}}
			},
			closed: []func(w *world, a, b uint64){func(w *world, a, _ uint64) { w.store(a+SignalValue, 5) }},
			open:   func(w *world, _, b uint64) { w.store(b+SignalValue, 0) },
		},
		"value": {
			barrier: func(a, _ uint64) putter {
				return BarrierValue{Header: header(PacketVendor), Signal: a, Value: 0x20, Mask: 0xf0, Condition: ConditionGTE}
			},
			closed: []func(w *world, a, b uint64){func(w *world, a, _ uint64) { w.store(a+SignalValue, 0xf1f) }},
			open:   func(w *world, a, _ uint64) { w.store(a+SignalValue, 0xf2f) },
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				q := w.aql(16)
				a, b := w.signal(Signal{Value: 1}), w.signal(Signal{Value: 1})
				x := w.mixes(Kernel{Duration: us})
				q.send(x.packet(true, 0), test.barrier(a, b), x.packet(false, 0))
				time.Sleep(5 * ms)
				check(w, "read index at first", 1, w.load(q.read))
				for _, change := range test.closed {
					change(w, a, b)
					time.Sleep(5 * ms)
					check(w, "read index before", 1, w.load(q.read))
				}
				test.open(w, a, b)
				q.drain()
				check(w, "result", x.want(), x.got())
			})
		})
	}
}

func TestBarriersWithoutSignals(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		done := w.signal(Signal{Value: 3})
		q.send(
			Barrier{Header: MakeHeader(PacketBarrierAnd, true), Completion: done},
			BarrierValue{Header: MakeHeader(PacketVendor, true), Completion: done},
			PM4{Header: MakeHeader(PacketVendor, true), Buffer: 0x1000, Dwords: 8, Completion: done},
		)
		q.drain()
		check(w, "signal", 0, w.value(done))
		q.send(Barrier{Header: MakeHeader(PacketBarrierOr, true), Completion: done})
		time.Sleep(20 * ms)
		check(w, "read index: no signal satisfies a barrier-OR", 3, w.load(q.read))
	})
}

// TestABarrierLooksOnceThoseBeforeItAreOver: a signal that is 0 and used again.
func TestABarrierLooksOnceThoseBeforeItAreOver(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: ms})
		again := w.signal(Signal{Value: 0})
		q.send(x.packet(true, 0), Barrier{Header: MakeHeader(PacketBarrierAnd, true), Deps: [5]uint64{again}})
		time.Sleep(ms / 2)
		w.store(again+SignalValue, 1)
		time.Sleep(20 * ms)
		check(w, "read index", 1, w.load(q.read))
		w.store(again+SignalValue, 0)
		q.drain()
	})
}

// TestQueuesOfOneProcessWaitForEachOther as HIP's streams do, through signals the GPU
// decrements.
func TestQueuesOfOneProcessWaitForEachOther(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.aql(16), w.aql(16)
		x := w.mixes(Kernel{Duration: 50 * us})
		const rounds = 40
		began := time.Now()
		turn := w.signal(Signal{Value: 0})
		for i := range rounds {
			q := []*ring{a, b}[i%2]
			next := w.signal(Signal{Value: 1})
			q.send(Barrier{Header: MakeHeader(PacketBarrierAnd, true), Deps: [5]uint64{turn}}, x.packet(true, next))
			turn = next
		}
		a.drain()
		b.drain()
		check(w, "result", x.want(), x.got())
		// Nobody waits for the poller's next round, but for a first one.
		if took := time.Since(began); took > rounds*52*us+100*us {
			w.t.Errorf("%d rounds of 50µs took %v", rounds, took)
		}
	})
}

// TestAProcessThatAnswersIsAnswered: it puts its next packet on the ring as soon as a
// long one is over, when the poller has slept long for a while.
func TestAProcessThatAnswersIsAnswered(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: 20 * ms})
		const rounds = 20
		began := time.Now()
		for i := range uint64(rounds) {
			q.send(x.packet(true, 0))
			for w.load(q.read) <= i {
				time.Sleep(5 * us)
			}
		}
		check(w, "result", x.want(), x.got())
		if took := time.Since(began) - rounds*20*ms; took > rounds*40*us+ms {
			w.t.Errorf("%d rounds took %v longer than their kernels", rounds, took)
		}
	})
}

func TestPacketsWithoutBarrierBitRunTogetherAndCompleteInOrder(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		slow, fast := w.mixes(Kernel{Duration: ms, Occupancy: 500_000}), w.mixes(Kernel{Duration: 100 * us, Occupancy: 500_000})
		first, second := w.signal(Signal{Value: 1}), w.signal(Signal{Value: 1})
		q.send(slow.packet(true, first), fast.packet(false, second))
		time.Sleep(ms / 2)
		check(w, "effect of the fast one while the slow one runs", fast.want(), fast.got())
		check(w, "completions while the slow one runs", []int64{1, 1, 0}, []int64{w.value(first), w.value(second), int64(w.load(q.read))})
		q.drain()
		check(w, "completions", []int64{0, 0, 2}, []int64{w.value(first), w.value(second), int64(w.load(q.read))})
	})
}

func TestRealKernelsTakeTheConfiguredTime(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		code := w.alloc(256)
		signal := w.signal(Signal{Value: 2})
		began := time.Now()
		for _, kernel := range []uint64{code, 0xdead_0000_0000} { // the GPU's own memory
			q.send(Dispatch{Header: MakeHeader(PacketDispatch, true), Kernel: kernel, Completion: signal})
		}
		q.drain()
		check(w, "signal", 0, w.value(signal))
		if took := time.Since(began); took < 200*us || took > 400*us {
			w.t.Errorf("two kernels of 100µs took %v", took)
		}
	})
}

func TestAQueueThatIsTakenOffStopsAndGoesOnWhereItWas(t *testing.T) {
	inWorld(t, func(w *world) {
		q, other := w.aql(16), w.aql(16)
		x, y := w.mixes(Kernel{Duration: 10 * ms, Occupancy: 400_000}), w.mixes(Kernel{Duration: ms, Occupancy: 400_000})
		signal := w.signal(Signal{Value: 1})
		began := time.Now()
		q.send(x.packet(true, signal))
		time.Sleep(4 * ms)
		w.run(other)
		part := w.load(x.progress)
		if part < 350_000 || part > 410_000 {
			w.t.Errorf("progress after 4 of 10 ms: %d millionths", part)
		}
		other.send(y.packet(true, 0))
		time.Sleep(100 * ms)
		check(w, "while suspended", []uint64{0, 0, 1, part}, []uint64{x.got().Count, w.load(q.read), uint64(w.value(signal)), w.load(x.progress)})
		check(w, "the other queue", y.want(), y.got())
		// A suspended queue takes packets.
		q.send(x.packet(true, 0))
		w.run(q, other)
		q.drain()
		check(w, "result", x.want(), x.got())
		if took := time.Since(began); took < 120*ms || took > 125*ms {
			w.t.Errorf("20 ms of work and 100 ms of suspension took %v", took)
		}
	})
}
