package workload

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/internal/stat/histogram"
)

// queue is a queue with its memory, used by one goroutine.
type queue interface {
	// reset clears the memory after an earlier queue, create creates the queue.
	reset()
	create() (id uint32, err error)
	// room reports whether the ring has space for another packet.
	room() bool
	// push submits a packet that depends on value, and returns the value that it mixes
	// into the hash when it runs.
	push(value uint64) uint64
	// over reports whether packet n has completed, and checks it. It is called for the
	// oldest one that has not.
	over(n uint64) (bool, error)
	// seal submits the end of the work, sealed reports whether that has completed.
	seal()
	sealed() (bool, error)
	// stopped checks the packets from oldest to before end, of a queue that was
	// destroyed after count of its packets ran.
	stopped(oldest, end, count uint64) error
	// result returns the number of packets that ran and their hash, indexes those of the
	// ring, progress the completed millionths of packet n.
	result() (count, hash uint64)
	indexes() (read, write uint64)
	progress(n uint64) uint64
	free() error
}

// worker feeds one queue, or with churn one after the other.
type worker struct {
	cfg   Config
	d     *device
	gpu   gpu
	kind  string
	index uint64
	depth uint64
	wake  *event // nil to poll memory instead
	// stop is closed to end when the queue is empty, abandon to destroy it at once.
	stop    <-chan struct{}
	abandon chan struct{}
	// ended is closed when the worker has ended.
	ended  chan struct{}
	queue  queue
	random *rand.Rand
	// missed: the last wait ended without the event of a packet that had completed.
	missed bool

	// mu guards what follows, and the queue, for reports of the state. It is not held
	// while the worker waits or calls the driver.
	mu    sync.Mutex
	id    uint32
	alive bool
	proof proof
	// retired counts the packets of the queue found complete; begun has the time from
	// which the latency of each of the others counts.
	retired uint64
	begun   []time.Time
	total   total               // of destroyed queues
	latency histogram.Histogram // nanoseconds
	// last and lastHash are the result of the last destroyed queue.
	last, lastHash uint64
}

// total adds up the work of queues: packets is the sum of count and abandoned.
type total struct {
	made, packets, count, abandoned, hash, want uint64
}

func (t *total) add(packets, count, hash, want uint64) {
	t.made++
	t.packets += packets
	t.count += count
	t.abandoned += packets - min(count, packets)
	t.hash = engine.MixHash(t.hash, hash)
	t.want = engine.MixHash(t.want, want)
}

// prepare creates the event, the memory and the first queue.
func (w *worker) prepare(copies bool) (err error) {
	if !w.cfg.Poll {
		if w.wake, err = w.d.createEvent(); err != nil {
			return err
		}
	}
	if copies {
		q, err := newCopier(w.d, w.gpu, w.wake)
		if err != nil {
			return err
		}
		w.queue = q
	} else {
		q, err := newCompute(w.d, w.gpu, w.wake, w.cfg)
		if err != nil {
			return err
		}
		w.queue = q
	}
	return w.create()
}

// create creates a new, empty queue.
func (w *worker) create() error {
	w.mu.Lock()
	w.queue.reset()
	w.proof, w.retired = newProof(int(w.depth)), 0
	w.mu.Unlock()
	id, err := w.queue.create()
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.id, w.alive = id, true
	return nil
}

// run works until all work is done, and proves each queue. The first queue exists already.
func (w *worker) run() error {
	for start, sent := time.Now(), uint64(0); ; {
		n, last, err := w.feed(start, sent)
		if err != nil {
			err = fmt.Errorf("%s queue %d on GPU %d: %w", w.kind, w.id, w.gpu.ID, err)
		}
		if err != nil || last {
			return err
		}
		if err := w.create(); err != nil {
			return err
		}
		sent += n
	}
}

// feed feeds a queue, destroys it and proves it. The worker sent packets before. It
// returns the packets of the queue, and whether it was the last queue.
func (w *worker) feed(start time.Time, sent uint64) (n uint64, last bool, err error) {
	most, drain := ^uint64(0), true
	if w.cfg.Packets > 0 {
		most = w.cfg.Packets - sent
	}
	if w.cfg.Churn {
		const mostOfOne = 64
		most = min(most, 1+w.random.Uint64N(mostOfOne))
		drain = w.random.IntN(2) == 0
	}
	for n < most && !closed(w.stop) && !closed(w.abandon) {
		now, due := time.Now(), w.due(start, sent+n)
		pushed, flying, err := w.turn(now, true, due)
		if err == nil && !pushed {
			err = w.wait(flying > 0, due.Sub(now))
		}
		if err != nil {
			return n, true, errors.Join(err, w.destroy(false))
		}
		if pushed {
			n++
		}
	}
	last = closed(w.stop) || closed(w.abandon) || sent+n == w.cfg.Packets && w.cfg.Packets > 0
	if last {
		drain = !closed(w.abandon)
	}
	if drain {
		drain, err = w.drain()
	}
	return n, last, errors.Join(err, w.destroy(drain))
}

// closed reports whether c is closed.
func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// due returns the time to submit packet n, zero for at once.
func (w *worker) due(start time.Time, n uint64) time.Time {
	if w.cfg.Rate == 0 {
		return time.Time{}
	}
	return start.Add(time.Duration(float64(n) / w.cfg.Rate * float64(time.Second)))
}

// turn retires completed packets and submits at most one, if there is more and it is due.
// It returns the number of packets in the queue then.
func (w *worker) turn(now time.Time, more bool, due time.Time) (pushed bool, flying uint64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.retired < w.proof.pushed {
		over, err := w.queue.over(w.retired)
		if err != nil {
			return false, 0, err
		}
		if !over {
			break
		}
		w.latency.Add(uint64(max(now.Sub(w.begun[w.retired%w.depth]), 0)))
		w.retired++
	}
	if more && w.proof.pushed-w.retired < w.depth && !due.After(now) && w.queue.room() {
		n := w.proof.pushed
		w.begun[n%w.depth] = now
		if !due.IsZero() {
			w.begun[n%w.depth] = due
		}
		w.proof.push(w.queue.push(packetValue(w.index, w.total.packets+n)))
		pushed = true
	}
	return pushed, w.proof.pushed - w.retired, nil
}

// drain seals the queue and waits until everything in it has completed. It returns false
// if the queue is abandoned meanwhile.
func (w *worker) drain() (bool, error) {
	w.mu.Lock()
	w.queue.seal()
	w.mu.Unlock()
	for !closed(w.abandon) {
		_, flying, err := w.turn(time.Now(), false, time.Time{})
		if err != nil {
			return false, err
		}
		w.mu.Lock()
		sealed, err := w.queue.sealed()
		w.mu.Unlock()
		if err != nil || flying == 0 && sealed {
			return err == nil, err
		}
		if err := w.wait(true, 0); err != nil {
			return false, err
		}
	}
	return false, nil
}

// destroy destroys the queue and proves its work: all of it if it was drained.
func (w *worker) destroy(drained bool) error {
	var errs []error
	if drained {
		errs = append(errs, w.settle())
	}
	errs = append(errs, w.d.destroyQueue(w.id))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.alive = false
	count, _ := w.queue.result()
	errs = append(errs, w.queue.stopped(w.retired, w.proof.pushed, count))
	count, hash := w.queue.result()
	if drained {
		errs = append(errs, w.proof.checkAll(count, hash))
	} else {
		errs = append(errs, w.proof.check(count, hash))
	}
	w.last, w.lastHash = count, hash
	w.total.add(w.proof.pushed, count, hash, w.proof.after(count))
	return errors.Join(errs...)
}

// settle waits until the read index equals the write index. All packets have completed
// before, but the GPU may still notify of the last.
func (w *worker) settle() error {
	const most = 30 * time.Second
	for end := time.Now().Add(most); ; time.Sleep(time.Millisecond) {
		read, write := w.queue.indexes()
		if read == write {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("every packet has completed, but the read index is %d and the write index %d", read, write)
		}
	}
}

// unchanged checks that nothing ran after the last queue was destroyed.
func (w *worker) unchanged() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if count, hash := w.queue.result(); count != w.last || hash != w.lastHash {
		return fmt.Errorf("%s queue %d on GPU %d had run %d packets when it was destroyed, and %d later", w.kind, w.id, w.gpu.ID, w.last, count)
	}
	return nil
}

// has reports whether id is the worker's queue and is not being abandoned.
func (w *worker) has(id uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.alive && w.id == id && !closed(w.abandon)
}

// sum adds the present queue to the destroyed ones, without its hash. mu is held.
func (w *worker) sum() total {
	t := w.total
	if w.alive {
		count, _ := w.queue.result()
		t.made++
		t.packets += w.proof.pushed
		t.count += count
	}
	return t
}

// state returns the state of the worker's queue.
func (w *worker) state() Queue {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.sum()
	q := Queue{ID: w.id, GPU: uint32(w.gpu.ID), Kind: w.kind, Packets: t.packets, Count: t.count, Abandoned: t.abandoned}
	q.Read, q.Write = w.queue.indexes()
	if !w.alive {
		q.Hash, q.Want = hexadecimal(t.hash), hexadecimal(t.want)
	} else if w.retired < w.proof.pushed {
		q.Progress = w.queue.progress(w.retired)
	}
	return q
}

// free releases the queue, the event and the memory of a worker that does not run.
func (w *worker) free() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.alive {
		if err := w.d.destroyQueue(w.id); err != nil {
			return err // the GPU may still write to the memory
		}
		w.alive = false
	}
	var errs []error
	if w.wake != nil {
		errs = append(errs, w.wake.destroy())
	}
	if w.queue != nil {
		errs = append(errs, w.queue.free())
	}
	return errors.Join(errs...)
}

// hexadecimal formats a hash.
func hexadecimal(hash uint64) string { return fmt.Sprintf("0x%016x", hash) }
