package engine

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/hrtimer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config has what the packets do not define.
type Config struct {
	// KernelTime is the duration of a kernel that does not define its own; 0: a
	// millisecond.
	KernelTime time.Duration
	// Ticks returns the GPU's clock at a time of the machine, for signals;
	// GET_CLOCK_COUNTERS must return the same clock. Nil counts nanoseconds. It is called
	// with the machine locked.
	Ticks func(at time.Duration) uint64
	// OnFault, if not nil, is called when a queue makes its GPU fault at an address: of
	// unmapped memory, or of an invalid packet or command. The queue makes no progress any
	// more. It is called without any lock, and must not Close the engine.
	OnFault func(serial, address uint64)
}

// Queue is a queue as its process made it.
type Queue struct {
	// Serial identifies it, and never another queue.
	Serial uint64
	// Ref is the machine's name for it.
	Ref  gpumodel.QueueRef
	Type gpreempt.QueueType
	// AQL: it is a compute queue with AQL packets. Other compute queues have PM4 packets.
	AQL bool
	// Ring is the address of the ring, of RingBytes, a power of two.
	Ring      uint64
	RingBytes uint32
	// Read and Write are the addresses of the two positions, u64 that only grow. Those
	// of AQL count packets, those of SDMA bytes, those of PM4 dwords. The read position of
	// PM4 is a u32 that wraps with the ring.
	Read, Write uint64
	// Doorbell is the eight bytes in mapped memory that the process writes to. They stay
	// mapped until Remove has returned. The engine writes all ones there after each write
	// that it has seen.
	Doorbell []byte
	Memory   Memory
	// Interrupt signals an event of the process; 0 is an interrupt without an event ID
	// (Trap). It is called without any lock, and must not Close the engine.
	Interrupt func(event uint32)
}

// Engine executes the packets on queues. Its methods may be called by several goroutines at
// once, but not by functions given to the machine.
type Engine struct {
	cfg   Config
	rt    *gpumodel.Realtime
	timer gpumodel.Timer
	tasks sync.WaitGroup
	notes notes

	// ended counts packets that ended. waiting: a queue may continue when a packet ends.
	// lazy: the poller sleeps long. kicked: the poller must look again before it sleeps.
	ended                 atomic.Uint64
	waiting, lazy, kicked atomic.Bool

	// copying is a buffer, guarded by the machine's lock.
	copying []byte

	// mu guards what follows. The machine is never locked while it is held.
	mu     sync.Mutex
	queues []*queue
	closed bool
}

// New starts an engine for the machine that rt runs. The caller must Close it,
// before rt.
func New(rt *gpumodel.Realtime, cfg Config) (*Engine, error) {
	timer, err := hrtimer.New()
	if err != nil {
		return nil, fmt.Errorf("start the emulated GPUs' packet processors: %w", err)
	}
	return start(rt, cfg, timer), nil
}

func start(rt *gpumodel.Realtime, cfg Config, timer gpumodel.Timer) *Engine {
	if cfg.KernelTime <= 0 {
		cfg.KernelTime = time.Millisecond
	}
	if cfg.Ticks == nil {
		cfg.Ticks = func(at time.Duration) uint64 { return uint64(at) }
	}
	e := &Engine{cfg: cfg, rt: rt, timer: timer, notes: notes{wake: make(chan struct{}, 1)}}
	rt.Do(func(m *gpumodel.Machine) {
		m.OnUnmap(func(ref gpumodel.QueueRef) { e.unmapped(m, ref) })
	})
	e.tasks.Go(e.poll)
	e.tasks.Go(e.notes.run)
	return e
}

// Close stops the engine; after it has returned, it writes no memory. It is
// idempotent.
func (e *Engine) Close() error {
	e.mu.Lock()
	closed := e.closed
	queues := e.queues
	e.closed, e.queues = true, nil
	e.mu.Unlock()
	if closed {
		return nil
	}
	e.rt.Do(func(m *gpumodel.Machine) {
		m.OnUnmap(nil)
		for _, q := range queues {
			q.removed.Store(true)
		}
	})
	err := e.timer.Close()
	e.notes.close()
	e.tasks.Wait()
	return err
}

// Add begins to execute the packets on a queue, which the machine knows already.
func (e *Engine) Add(spec Queue) error {
	q := &queue{Queue: spec, e: e}
	var err error
	switch q.bell, err = bell(spec.Doorbell); {
	case err != nil:
	case spec.RingBytes < PacketBytes || bits.OnesCount32(spec.RingBytes) != 1:
		err = fmt.Errorf("invalid ring size %d: want a power of two", spec.RingBytes)
	}
	if err != nil {
		return fmt.Errorf("execute queue %d of %v: %w", spec.Ref.ID, spec.Ref.Process, err)
	}
	// Its doorbell may have been written before: read the indexes in memory.
	q.look = true

	e.mu.Lock()
	if i, taken := e.find(spec.Serial); taken || e.closed {
		err = fmt.Errorf("execute queue %d of %v: serial %d is taken, or the engine closed", spec.Ref.ID, spec.Ref.Process, spec.Serial)
	} else {
		e.queues = slices.Insert(e.queues, i, q)
	}
	e.mu.Unlock()
	e.kick()
	return err
}

// Remove forgets a queue: after it has returned, no packet of it takes effect. It does not
// detach the queue from the machine. Unknown serials are ignored.
func (e *Engine) Remove(serial uint64) {
	e.mu.Lock()
	i, known := e.find(serial)
	var q *queue
	if known {
		q = e.queues[i]
		e.queues = slices.Delete(e.queues, i, i+1)
	}
	e.mu.Unlock()
	if known {
		e.rt.Do(func(*gpumodel.Machine) { q.removed.Store(true) })
	}
}

// find needs mu.
func (e *Engine) find(serial uint64) (int, bool) {
	return slices.BinarySearchFunc(e.queues, serial, func(q *queue, serial uint64) int { return cmp.Compare(q.Serial, serial) })
}

// notes are the calls to make without any lock, in order.
type notes struct {
	wake chan struct{}

	mu     sync.Mutex
	queued []func()
	closed bool
}

// add never waits.
func (n *notes) add(f func()) {
	n.mu.Lock()
	n.queued = append(n.queued, f)
	n.mu.Unlock()
	n.ring()
}

func (n *notes) ring() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

func (n *notes) close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.ring()
}

// run makes the calls until close.
func (n *notes) run() {
	for range n.wake {
		n.mu.Lock()
		queued, closed := n.queued, n.closed
		n.queued = nil
		n.mu.Unlock()
		if closed {
			return
		}
		for _, f := range queued {
			f()
		}
	}
}
