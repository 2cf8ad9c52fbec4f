package engine

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// plan is a life of a process with several queues, producers that race for their
// slots, and a driver that takes queues off the GPU as it likes.
type plan struct {
	Preset string
	Seed   uint64
	Queues []queuePlan
	// Schedules are which queues run, bit by bit, one set after another.
	Schedules []uint8
	// End is how it ends, EndAt when.
	End   ending
	EndAt time.Duration
}

type ending uint8

const (
	endDrain ending = iota
	endRemove
	endCrash
	endClose
)

type queuePlan struct {
	Slots int
	// Producers have their packets each.
	Producers [][]packetPlan
}

type packetPlan struct {
	Kind    kind
	Barrier bool
	Time    time.Duration
	Share   uint32
	// Dep is a packet of a queue before this one.
	Dep int
}

type kind uint8

const (
	kindMix kind = iota
	kindAnd
	kindOr
	kindValue
	kindPM4
	kinds
)

func drawPlan(t *rapid.T) plan {
	packet := rapid.Custom(func(t *rapid.T) packetPlan {
		return packetPlan{
			Kind: kind(rapid.IntRange(0, 2*int(kinds)-1).Draw(t, "kind")), Barrier: rapid.Bool().Draw(t, "barrier"),
			Time: time.Duration(rapid.IntRange(1, 200).Draw(t, "µs")) * us, Share: uint32(rapid.IntRange(1, WholeGPU).Draw(t, "share")),
			Dep: rapid.IntRange(0, 1000).Draw(t, "dep"),
		}
	})
	queue := rapid.Custom(func(t *rapid.T) queuePlan {
		return queuePlan{
			Slots:     16 << rapid.IntRange(0, 2).Draw(t, "slots"),
			Producers: rapid.SliceOfN(rapid.SliceOfN(packet, 0, 30), 1, 3).Draw(t, "producers"),
		}
	})
	return plan{
		Preset: rapid.SampledFrom(presets).Draw(t, "preset"), Seed: rapid.Uint64().Draw(t, "seed"),
		Queues:    rapid.SliceOfN(queue, 1, 4).Draw(t, "queues"),
		Schedules: rapid.SliceOfN(rapid.Uint8(), 0, 8).Draw(t, "schedules"),
		End:       ending(rapid.SampledFrom([]int{0, 0, 0, 1, 2, 3}).Draw(t, "end")),
		EndAt:     time.Duration(rapid.IntRange(0, 4000).Draw(t, "end µs")) * us,
	}
}

// life is a plan that is carried out.
type life struct {
	*world
	plan
	lines  []*line
	wrong  []string
	ending sync.WaitGroup
	over   chan struct{}
}

// line is one queue of it, and what its packets have to come to.
type line struct {
	*ring
	mixes *mixes
	// packets are by index, once they are taken; all by number.
	packets []*sent
	all     []*sent
	// off tells that it is off the GPU, or removed: nothing of it may happen. ram.mu
	// guards it.
	off bool
}

// sent is a packet on a ring.
type sent struct {
	packetPlan
	line   *line
	index  uint64
	value  uint64
	signal uint64
}

func (l *life) fail(format string, args ...any) {
	if len(l.wrong) < 10 {
		l.wrong = append(l.wrong, fmt.Sprintf(format, args...))
	}
}

// signalValue is what the signal of every packet has before it is over: only the GPU
// changes it.
const signalValue = 1

func carryOut(t *testing.T, p plan) []string {
	t.Helper()
	l := &life{world: newWorld(t, p.Preset), plan: p, over: make(chan struct{})}
	signals := map[uint64]*sent{}
	for i, qp := range p.Queues {
		q := &line{ring: l.unmapped(gpreempt.QueueCompute, qp.Slots*PacketBytes), mixes: l.mixes(Kernel{}), off: true}
		for _, producer := range qp.Producers {
			for _, pp := range producer {
				s := &sent{packetPlan: pp, line: q, value: uint64(len(q.all)) + 1, signal: l.signal(Signal{Value: signalValue})}
				if i == 0 && pp.Kind != kindMix {
					s.Kind = kindPM4
				}
				q.all = append(q.all, s)
				signals[s.signal+SignalValue] = s
			}
		}
		l.lines = append(l.lines, q)
	}
	l.wrote = func(addr uint64, _ []byte) { l.watch(addr, signals[addr]) }
	var producers sync.WaitGroup
	for i, qp := range p.Queues {
		next := 0
		for j, producer := range qp.Producers {
			mine := l.lines[i].all[next:][:len(producer)]
			next += len(producer)
			producers.Go(func() { l.produce(i, mine, rand.New(rand.NewPCG(p.Seed, uint64(i*100+j)))) })
		}
	}
	l.ending.Go(l.end)
	l.schedule()
	producers.Wait()
	l.ending.Wait()
	if p.End == endDrain {
		for _, q := range l.lines {
			q.drain()
		}
	} else {
		time.Sleep(20 * ms)
	}
	l.verify()
	return l.wrong
}

// watch looks at each write of the GPU's when it happens. ram.mu is held.
func (l *life) watch(addr uint64, s *sent) {
	for _, q := range l.lines {
		mine := addr >= q.base && addr < q.base+q.bytes || addr == q.read || addr == q.mixes.result || s != nil && s.line == q
		if mine && q.off {
			l.fail("queue %d: the GPU wrote to %#x while it was off", q.ref.ID, addr)
		}
	}
	if s != nil {
		b, err := l.at(s.line.read, 8)
		if err != nil {
			return
		}
		if read := uint64(b[0]) | uint64(b[1])<<8; read <= s.index {
			l.fail("queue %d: packet %d completed with read index %d", s.line.ref.ID, s.index, read)
		}
	}
}

// produce is one producer.
func (l *life) produce(i int, mine []*sent, rng *rand.Rand) {
	q := l.lines[i]
	wait := func() { time.Sleep(time.Duration(rng.IntN(60)) * us) }
	for _, s := range mine {
		s.index = l.add(q.write, 1)
		for s.index-l.load(q.read) >= q.bytes/PacketBytes {
			select {
			case <-l.over:
				return
			default:
			}
			time.Sleep(10 * us) // virtual
		}
		l.do(q.read, 8, func([]byte) {
			for uint64(len(q.packets)) <= s.index {
				q.packets = append(q.packets, nil)
			}
			q.packets[s.index] = s
		})
		wait()
		q.publish(s.index, l.packet(i, s))
		wait()
		q.ring.ring(s.index)
	}
}

// packet makes what a plan says.
func (l *life) packet(i int, s *sent) putter {
	dep := uint64(0)
	if i > 0 {
		if others := l.lines[s.Dep%i].all; len(others) > 0 {
			dep = others[s.Dep%len(others)].signal
		}
	}
	header := func(t PacketType) Header { return MakeHeader(t, s.Barrier) }
	switch s.Kind {
	case kindAnd:
		return Barrier{Header: header(PacketBarrierAnd), Deps: [5]uint64{dep}, Completion: s.signal}
	case kindOr:
		if dep != 0 {
			return Barrier{Header: header(PacketBarrierOr), Deps: [5]uint64{3: dep}, Completion: s.signal}
		}
	case kindValue:
		return BarrierValue{
			Header: header(PacketVendor), Signal: dep, Mask: 3, Value: signalValue - 1, Condition: ConditionEQ, Completion: s.signal,
		}
	case kindPM4, kinds:
	default:
		s.Kind = kindMix
		return Dispatch{
			Header:  header(PacketDispatch),
			Kernel:  l.kernel(Kernel{Op: OpMix, Duration: s.Time, Occupancy: s.Share}),
			Kernarg: l.mix(Mix{Result: s.line.mixes.result, Value: s.value, Progress: s.line.mixes.progress}), Completion: s.signal,
		}
	}
	return PM4{Header: header(PacketVendor), Completion: s.signal}
}

// schedule is the driver.
func (l *life) schedule() {
	set := func(mask uint8) {
		var on []*ring
		for i, q := range l.lines {
			if mask>>i&1 != 0 {
				on = append(on, q.ring)
			}
		}
		l.mark(func(i int, q *line) { q.off = q.off && mask>>i&1 == 0 })
		l.run(on...)
		l.mark(func(i int, q *line) { q.off = q.off || mask>>i&1 == 0 })
	}
	for _, mask := range l.Schedules {
		set(mask)
		time.Sleep(400 * us)
	}
	set(0xff)
}

// mark changes what is off.
func (l *life) mark(f func(i int, q *line)) {
	l.do(ramBase, 0, func([]byte) {
		for i, q := range l.lines {
			f(i, q)
		}
	})
}

// end ends it before its time, if it is to be.
func (l *life) end() {
	if l.End == endDrain {
		return
	}
	defer close(l.over)
	time.Sleep(l.EndAt)
	switch l.End {
	case endRemove:
		for _, q := range l.lines {
			l.Remove(q.serial)
		}
	case endCrash:
		l.crash()
	case endClose:
		if err := l.Close(); err != nil {
			l.fail("close: %v", err)
		}
	case endDrain:
	}
	// Whatever the driver does to it, nothing happens any more.
	l.do(ramBase, 0, func([]byte) {
		l.ram.wrote = func(addr uint64, _ []byte) { l.fail("the GPU wrote to %#x after the end", addr) }
	})
}

// verify compares what the process sees with what it must.
func (l *life) verify() {
	if n := len(l.faults); n > 0 {
		l.fail("%d faults, the first %v", n, <-l.faults)
	}
	for _, q := range l.lines {
		read := l.load(q.read)
		if l.End == endDrain && read != uint64(len(q.all)) {
			l.fail("queue %d: read index %d of %d", q.ref.ID, read, len(q.all))
		}
		inOrder := true
		var hash, over, begun uint64
		for i, s := range q.packets {
			if s == nil {
				continue
			}
			completed := signalValue - l.value(s.signal)
			// A process can end between the read index and the signal.
			between := l.End == endCrash && uint64(i)+1 == read
			switch done := uint64(i) < read; {
			case completed != 0 && completed != 1, completed == 1 && !done, completed == 0 && done && !between:
				l.fail("queue %d: packet %d completed %d times, read index %d", q.ref.ID, i, completed, read)
			}
			if s.Kind != kindMix {
				continue
			}
			inOrder = inOrder && s.Barrier
			begun++
			if uint64(i) < read {
				over++
				hash = MixHash(hash, s.value)
			}
		}
		got := q.mixes.got()
		if got.Count < over || got.Count > begun || l.End == endDrain && got.Count != begun {
			l.fail("queue %d: %d kernels had an effect, of %d of which %d are over", q.ref.ID, got.Count, begun, over)
		}
		if inOrder && got.Count == over && got.Hash != hash {
			l.fail("queue %d: the hash of %d kernels is %#x, want %#x", q.ref.ID, over, got.Hash, hash)
		}
	}
}

// TestWhateverHappensEveryPacketTakesEffectOnce is the promise of this package.
func TestWhateverHappensEveryPacketTakesEffectOnce(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		p := drawPlan(r)
		var wrong []string
		synctest.Test(t, func(t *testing.T) { wrong = carryOut(t, p) })
		for _, w := range wrong {
			r.Error(w)
		}
	})
}
