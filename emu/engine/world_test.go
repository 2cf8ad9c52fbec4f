package engine

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
)

var errGone = errors.New("the process ended")

// ram is the memory of a fake process. Its methods are atomic.
type ram struct {
	base uint64

	mu sync.Mutex
	b  []byte
	// next is where the next allocation goes.
	next uint64
	gone bool
	// wrote is called after each write of the GPU.
	wrote func(addr uint64, p []byte)
}

const ramBase = 0x7f00_0000_0000

func newRAM(bytes int) *ram { return &ram{base: ramBase, b: make([]byte, bytes), next: ramBase} }

// alloc returns memory at a multiple of 64.
func (r *ram) alloc(bytes int) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := r.next
	r.next += uint64(bytes+63) &^ 63
	if r.next > r.base+uint64(len(r.b)) {
		panic("the fake memory is full")
	}
	return at
}

// at needs mu. Memory ends where the last allocation does.
func (r *ram) at(addr uint64, n int) ([]byte, error) {
	if r.gone {
		return nil, errGone
	}
	if addr < r.base || addr+uint64(n) > r.next {
		return nil, syscall.EFAULT
	}
	return r.b[addr-r.base:][:n], nil
}

func (r *ram) ReadAt(p []byte, addr uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	b, err := r.at(addr, len(p))
	copy(p, b)
	return err
}

func (r *ram) WriteAt(p []byte, addr uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	b, err := r.at(addr, len(p))
	if err != nil {
		return err
	}
	copy(b, p)
	if r.wrote != nil {
		r.wrote(addr, p)
	}
	return nil
}

// crash ends the process.
func (r *ram) crash() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone = true
}

// do is what the process does, in one step.
func (r *ram) do(addr uint64, n int, f func(b []byte)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(r.b[addr-r.base:][:n])
}

func (r *ram) load(addr uint64) (v uint64) {
	r.do(addr, 8, func(b []byte) { v = binary.LittleEndian.Uint64(b) })
	return v
}

func (r *ram) store(addr, v uint64) {
	r.do(addr, 8, func(b []byte) { binary.LittleEndian.PutUint64(b, v) })
}

// add is a fetch and add.
func (r *ram) add(addr, n uint64) (before uint64) {
	r.do(addr, 8, func(b []byte) {
		before = binary.LittleEndian.Uint64(b)
		binary.LittleEndian.PutUint64(b, before+n)
	})
	return before
}

func (r *ram) put(addr uint64, p []byte) { r.do(addr, len(p), func(b []byte) { copy(b, p) }) }

func (r *ram) get(addr uint64, n int) []byte {
	p := make([]byte, n)
	r.do(addr, n, func(b []byte) { copy(p, b) })
	return p
}

// signal allocates a signal.
func (r *ram) signal(s Signal) uint64 {
	at := r.alloc(SignalBytes)
	s.Kind = SignalUser
	r.do(at, SignalBytes, s.Put)
	return at
}

func (r *ram) value(signal uint64) int64 { return int64(r.load(signal + SignalValue)) }

// kernel allocates an emulated kernel.
func (r *ram) kernel(k Kernel) uint64 {
	at := r.alloc(KernelBytes)
	r.do(at, KernelBytes, k.Put)
	return at
}

// mix allocates a kernarg.
func (r *ram) mix(m Mix) uint64 {
	at := r.alloc(MixBytes)
	r.do(at, MixBytes, m.Put)
	return at
}

// clock is a gpumodel.Timer of the time of a synctest bubble.
type clock struct {
	fired chan struct{}
	over  chan struct{}

	mu    sync.Mutex
	timer *time.Timer
}

func newClock() *clock { return &clock{fired: make(chan struct{}, 1), over: make(chan struct{})} }

func (c *clock) Set(d time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.over:
		return os.ErrClosed
	default:
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	select {
	case <-c.fired:
	default:
	}
	if d > 0 {
		c.timer = time.AfterFunc(d, func() {
			select {
			case c.fired <- struct{}{}:
			default:
			}
		})
	}
	return nil
}

func (c *clock) Wait() error {
	select {
	case <-c.fired:
		return nil
	case <-c.over:
		return os.ErrClosed
	}
}

func (c *clock) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
	select {
	case <-c.over:
	default:
		close(c.over)
	}
	return nil
}

// world is a machine with one GPU, its engine and one process.
type world struct {
	*Engine
	*ram
	t testing.TB
	// memory is how the GPU sees ram.
	memory Memory
	gpu    gpreempt.GPUID
	mes    bool
	proc   gpreempt.ProcessKey
	queues []*ring
	faults chan fault
	events chan uint32
}

type fault struct{ Serial, Address uint64 }

// ramBytes is how much memory the process has.
const ramBytes = 4 << 20

// newWorld runs in a synctest bubble.
func newWorld(t testing.TB, preset string) *world {
	t.Helper()
	return makeWorld(t, preset, newClock(), newClock())
}

// realWorld runs along the wall clock.
func realWorld(t testing.TB, preset string) *world {
	t.Helper()
	var timers [2]*hrtimer.Timer
	for i := range timers {
		var err error
		if timers[i], err = hrtimer.New(); err != nil {
			t.Fatal(err)
		}
	}
	return makeWorld(t, preset, timers[0], timers[1])
}

func makeWorld(t testing.TB, preset string, timers ...gpumodel.Timer) *world {
	t.Helper()
	spec, err := gpumodel.PresetByName(preset)
	if err != nil {
		t.Fatal(err)
	}
	m := gpumodel.New(spec, 1, 1)
	w := &world{
		t: t, gpu: m.GPUs()[0].ID, mes: spec.MES, ram: newRAM(ramBytes),
		faults: make(chan fault, 16), events: make(chan uint32, 1024),
	}
	if w.proc, err = m.StartProcess(gpumodel.ProcSpec{Comm: "client"}); err != nil {
		t.Fatal(err)
	}
	rt := gpumodel.Start(m, timers[0])
	w.memory = w.ram
	w.Engine = start(rt, Config{KernelTime: 100 * us, OnFault: func(serial, address uint64) {
		// It may ask the machine and the engine anything.
		rt.Now()
		w.Counters()
		w.faults <- fault{serial, address}
	}}, timers[1])
	t.Cleanup(func() {
		if err := errors.Join(w.Close(), rt.Close()); err != nil {
			t.Error(err)
		}
	})
	return w
}

// ring is a queue as its process sees it.
type ring struct {
	w                 *world
	ref               gpumodel.QueueRef
	serial            uint64
	base, read, write uint64
	bytes             uint64
	doorbell          []byte
	bell              *atomic.Uint64
}

// queue makes a queue with a ring of that many bytes, and has it run.
func (w *world) queue(typ gpreempt.QueueType, bytes int) *ring {
	w.t.Helper()
	q := w.unmapped(typ, bytes)
	w.run(w.queues...)
	return q
}

// unmapped makes a queue that does not run.
func (w *world) unmapped(typ gpreempt.QueueType, bytes int) *ring {
	w.t.Helper()
	return w.make(typ, bytes, typ == gpreempt.QueueCompute)
}

// make is unmapped for a queue that is of AQL or not.
func (w *world) make(typ gpreempt.QueueType, bytes int, aql bool) *ring {
	w.t.Helper()
	id := uint32(len(w.queues))
	q := &ring{
		w: w, ref: gpumodel.QueueRef{Process: w.proc, ID: id}, serial: uint64(100 + id),
		base: w.alloc(bytes), read: w.alloc(8), write: w.alloc(8), bytes: uint64(bytes), doorbell: make([]byte, 8),
	}
	var err error
	if q.bell, err = bell(q.doorbell); err != nil {
		w.t.Fatal(err)
	}
	w.rt.Do(func(m *gpumodel.Machine) {
		err = m.AttachQueue(w.proc, gpumodel.QueueSpec{
			ID: id, GPU: w.gpu, Type: typ, PM4: typ == gpreempt.QueueCompute && !aql, Ring: q.base, RingBytes: q.bytes, Read: q.read, Write: q.write, Priority: gpreempt.PriorityNormal,
		})
	})
	if err != nil {
		w.t.Fatal(err)
	}
	spec := w.spec(q, typ)
	spec.AQL = aql
	if err := w.Add(spec); err != nil {
		w.t.Fatal(err)
	}
	w.queues = append(w.queues, q)
	return q
}

func (w *world) spec(q *ring, typ gpreempt.QueueType) Queue {
	return Queue{
		Serial: q.serial, Ref: q.ref, Type: typ, AQL: typ == gpreempt.QueueCompute,
		Ring: q.base, RingBytes: uint32(q.bytes), Read: q.read, Write: q.write, Doorbell: q.doorbell, Memory: w.memory,
		Interrupt: func(event uint32) {
			w.rt.Now()
			w.events <- event
		},
	}
}

// aql makes a compute queue with that many slots.
func (w *world) aql(slots int) *ring {
	w.t.Helper()
	return w.queue(gpreempt.QueueCompute, slots*PacketBytes)
}

// run has exactly these queues run, and returns when they do.
func (w *world) run(queues ...*ring) {
	w.t.Helper()
	running := map[*ring]bool{}
	var refs []gpumodel.QueueRef
	for _, q := range queues {
		running[q] = true
		refs = append(refs, q.ref)
	}
	var done sync.WaitGroup
	must := func(err error) {
		if err != nil {
			w.t.Error(err)
			done.Done()
		}
	}
	w.rt.Do(func(m *gpumodel.Machine) {
		if !w.mes {
			done.Add(2)
			must(m.Unmap(w.gpu, 0, done.Done))
			must(m.Map(w.gpu, refs, done.Done))
			return
		}
		for _, q := range w.queues {
			done.Add(1)
			if running[q] {
				must(m.AddQueue(q.ref, done.Done))
			} else {
				must(m.RemoveQueue(q.ref, done.Done))
			}
		}
	})
	done.Wait()
}

// putter is an AQL packet.
type putter interface{ Put(slot []byte) uint32 }

// reserve takes the next slot, once it is free.
func (q *ring) reserve() (index uint64) {
	index = q.w.add(q.write, 1)
	for index-q.w.load(q.read) >= q.bytes/PacketBytes {
		time.Sleep(10 * us) // virtual
	}
	return index
}

// publish writes a packet as several producers have to.
func (q *ring) publish(index uint64, p putter) {
	slot := q.base + index*PacketBytes%q.bytes
	var body [PacketBytes]byte
	first := p.Put(body[:])
	q.w.put(slot+4, body[4:])
	q.w.put(slot, binary.LittleEndian.AppendUint32(nil, first))
}

func (q *ring) ring(index uint64) { q.bell.Store(index) }

// send puts packets on the ring and rings.
func (q *ring) send(packets ...putter) {
	for _, p := range packets {
		index := q.reserve()
		q.publish(index, p)
		q.ring(index)
	}
}

// command puts SDMA commands on the ring in one piece, padding to its end if need be,
// as ROCr does, and rings.
func (q *ring) command(commands ...Command) {
	var b []byte
	for _, c := range commands {
		b = appendCommand(b, c)
	}
	at := q.w.load(q.write)
	if left := q.bytes - at%q.bytes; left < uint64(len(b)) {
		b = append(make([]byte, left), b...)
	}
	q.raw(b)
}

// raw puts bytes on the ring, around its end, and rings.
func (q *ring) raw(b []byte) {
	at := q.w.load(q.write)
	for at+uint64(len(b))-q.w.load(q.read) > q.bytes {
		time.Sleep(10 * us) // virtual
	}
	first := at % q.bytes
	straight := min(uint64(len(b)), q.bytes-first)
	q.w.put(q.base+first, b[:straight])
	q.w.put(q.base, b[straight:])
	q.w.store(q.write, at+uint64(len(b)))
	q.bell.Store(at + uint64(len(b)))
}

// drain returns when everything that was put on the ring is over, or could have been.
func (q *ring) drain() {
	q.w.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); q.w.load(q.read) < q.w.load(q.write); {
		if time.Now().After(deadline) {
			q.w.t.Errorf("queue %d is at %d of %d", q.ref.ID, q.w.load(q.read), q.w.load(q.write))
			break
		}
		time.Sleep(10 * us) // virtual
	}
	synctest.Wait()
}

// mixes is a kernel that counts, and where.
type mixes struct {
	w                        *world
	kernel, result, progress uint64
	hash                     uint64
	sent                     uint64
}

func (w *world) mixes(k Kernel) *mixes {
	k.Op = OpMix
	return &mixes{w: w, kernel: w.kernel(k), result: w.alloc(ResultBytes), progress: w.alloc(8)}
}

// packet returns one more packet that runs the kernel.
func (x *mixes) packet(barrier bool, completion uint64) Dispatch {
	x.sent++
	x.hash = MixHash(x.hash, x.sent)
	return Dispatch{
		Header: MakeHeader(PacketDispatch, barrier), Dimensions: 1, Kernel: x.kernel,
		Kernarg:    x.w.mix(Mix{Result: x.result, Value: x.sent, Progress: x.progress}),
		Completion: completion,
	}
}

// outcome is a result in memory, or as it has to be.
type outcome struct{ Count, Hash uint64 }

func (x *mixes) want() outcome { return outcome{x.sent, x.hash} }

func (x *mixes) got() outcome { return outcome{x.w.load(x.result), x.w.load(x.result + 8)} }
