package engine

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestNothingHappensAfterRemove(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: ms})
		q.send(x.packet(true, 0), x.packet(true, 0), x.packet(true, 0))
		time.Sleep(3 * ms / 2)
		w.Remove(q.serial)
		w.wrote = func(addr uint64, _ []byte) { w.t.Errorf("the GPU wrote to %#x after Remove", addr) }
		time.Sleep(20 * ms)
		check(w, "read index", 1, w.load(q.read))
		check(w, "counters", []Counters{}, w.Counters())
		w.Remove(q.serial)
	})
}

func TestAProcessThatEndedIsNoFault(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: ms})
		q.send(x.packet(true, 0), x.packet(true, 0))
		time.Sleep(ms / 2)
		w.crash()
		time.Sleep(20 * ms)
		check(w, "faults", 0, len(w.faults))
		check(w, "counters", []Counters{{Serial: 100, Ref: q.ref, Fetched: 2, Stopped: true}}, w.Counters())
	})
}

func TestFaultsStopTheirQueueOnceThoseBeforeAreOver(t *testing.T) {
	const nowhere = 0x1000
	mix := Kernel{Op: OpMix, Duration: us}
	dispatch := MakeHeader(PacketDispatch, true)
	tests := map[string]func(w *world, q *ring) (bad putter, address uint64){
		"kernarg": func(w *world, _ *ring) (putter, uint64) {
			return Dispatch{Header: dispatch, Kernel: w.kernel(mix), Kernarg: nowhere}, nowhere
		},
		"result": func(w *world, _ *ring) (putter, uint64) {
			return Dispatch{Header: dispatch, Kernel: w.kernel(mix), Kernarg: w.mix(Mix{Result: nowhere})}, nowhere
		},
		"operation": func(w *world, _ *ring) (putter, uint64) {
			at := w.kernel(Kernel{Op: 9})
			return Dispatch{Header: dispatch, Kernel: at}, at
		},
		"completion signal": func(*world, *ring) (putter, uint64) {
			return PM4{Header: MakeHeader(PacketVendor, true), Completion: nowhere}, nowhere
		},
		"barrier": func(*world, *ring) (putter, uint64) {
			return Barrier{Header: MakeHeader(PacketBarrierAnd, true), Deps: [5]uint64{nowhere}}, nowhere + SignalValue
		},
		"type": func(_ *world, q *ring) (putter, uint64) {
			return Barrier{Header: MakeHeader(PacketAgentDispatch, true)}, q.base + PacketBytes
		},
		"vendor format": func(_ *world, q *ring) (putter, uint64) {
			return vendor{3}, q.base + PacketBytes
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				q := w.aql(16)
				x := w.mixes(Kernel{Duration: 100 * us})
				bad, address := test(w, q)
				signal := w.signal(Signal{Value: 2})
				q.send(x.packet(true, signal), bad, PM4{Header: MakeHeader(PacketVendor, true), Completion: signal})
				got := <-w.faults
				time.Sleep(20 * ms)
				check(w, "fault", fault{q.serial, address}, got)
				check(w, "result", x.want(), x.got())
				check(w, "signal", 1, w.value(signal))
				check(w, "faults", 0, len(w.faults))
			})
		})
	}
}

// vendor is a vendor packet of some format.
type vendor struct{ format uint32 }

func (v vendor) Put([]byte) uint32 {
	return uint32(MakeHeader(PacketVendor, true)) | v.format<<16
}

// TestALostPacketDoesNotHoldUpTheOthers: the machine can lose one as an injected fault.
func TestALostPacketDoesNotHoldUpTheOthers(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: ms})
		first, second := w.signal(Signal{Value: 1}), w.signal(Signal{Value: 1})
		q.send(x.packet(true, first), x.packet(true, second))
		time.Sleep(ms / 2)
		w.run()
		w.rt.Do(func(m *gpumodel.Machine) {
			if err := m.SetFault(w.gpu, gpumodel.FaultLosePacket); err != nil {
				w.t.Error(err)
			}
		})
		w.run(q)
		q.drain()
		check(w, "read index and signals", []int64{2, 1, 0}, []int64{int64(w.load(q.read)), w.value(first), w.value(second)})
		check(w, "count", 1, x.got().Count)
		check(w, "completed", 1, w.Counters()[0].Completed)
	})
}

func TestSeveralProducers(t *testing.T) {
	inWorld(t, func(w *world) {
		q := w.aql(16)
		x := w.mixes(Kernel{Duration: us, Occupancy: 1000})
		const producers, each = 5, 50
		signal := w.signal(Signal{Value: producers * each})
		var packets [producers][]putter
		for i := range packets {
			for range each {
				packets[i] = append(packets[i], x.packet(i%2 == 0, signal))
			}
		}
		var all sync.WaitGroup
		for i := range packets {
			all.Go(func() {
				for j, p := range packets[i] {
					index := q.reserve()
					time.Sleep(time.Duration((i*7+j*13)%40) * us)
					q.publish(index, p)
					time.Sleep(time.Duration((i*11+j*3)%40) * us)
					q.ring(index)
				}
			})
		}
		all.Wait()
		q.drain()
		check(w, "count", x.sent, x.got().Count)
		check(w, "read index", x.sent, w.load(q.read))
		check(w, "signal", 0, w.value(signal))
	})
}

func TestQueuesThatCannotBeExecutedAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "mi300x")
		q := w.aql(16)
		for name, change := range map[string]func(*Queue){
			"serial taken": func(*Queue) {},
			"ring":         func(s *Queue) { s.Serial, s.RingBytes = 1, 1000 },
			"no doorbell":  func(s *Queue) { s.Serial, s.Doorbell = 1, nil },
			"doorbell":     func(s *Queue) { s.Serial, s.Doorbell = 1, make([]byte, 16)[4:12] },
		} {
			spec := w.spec(q, gpreempt.QueueCompute)
			change(&spec)
			if err := w.Add(spec); err == nil {
				t.Errorf("%s: the queue was accepted", name)
			}
		}
	})
}
