package workload

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/internal/stat/histogram"
)

// load is the work of one process: its queues and their workers. Several goroutines may
// call its methods at once.
type load struct {
	cfg  Config
	d    *device
	gpus []gpu
	// report is called at once with an error of a worker.
	report func(error)
	// stop is closed to end all workers. change gets a value when a worker has ended.
	stop   chan struct{}
	change chan struct{}
	failed atomic.Bool

	// mu guards what follows.
	mu      sync.Mutex
	workers []*worker
	next    uint64 // index of the next worker
	begun   bool
	stopped bool
	runtime bool // is on
}

// newLoad opens the driver and creates the queues of cfg; they have no work yet. report is
// called with later errors, by any goroutine.
func newLoad(sys Sys, cfg Config, report func(error)) (*load, error) {
	d, err := openDevice(sys)
	if err != nil {
		return nil, err
	}
	l := &load{cfg: cfg, d: d, stop: make(chan struct{}), change: make(chan struct{}, 1), report: report}
	if err := l.setUp(); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

func (l *load) setUp() (err error) {
	if l.cfg.Runtime {
		if err := l.setRuntime(true); err != nil {
			return err
		}
	}
	// On all, as ROCm's runtime does.
	for i := range l.d.gpus {
		if err := l.d.acquireVM(&l.d.gpus[i]); err != nil {
			return err
		}
	}
	if l.gpus, err = l.cfg.pick(l.d.gpus); err != nil {
		return err
	}
	for _, g := range l.gpus {
		for range l.cfg.Queues {
			if _, err := l.add(g, false); err != nil {
				return err
			}
		}
		if l.cfg.SDMA {
			if _, err := l.add(g, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// add creates a worker with its queue. The worker starts at once if the others have.
func (l *load) add(g gpu, copies bool) (*worker, error) {
	l.mu.Lock()
	index := l.next
	l.next++
	l.mu.Unlock()
	w, err := l.newWorker(g, copies, index)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.workers = append(l.workers, w)
	slices.SortFunc(l.workers, func(a, b *worker) int { return cmp.Compare(a.index, b.index) })
	if l.begun {
		l.begin(w)
	}
	return w, nil
}

func (l *load) newWorker(g gpu, copies bool, index uint64) (*worker, error) {
	w := &worker{
		cfg: l.cfg, d: l.d, gpu: g, kind: "compute", index: index, depth: uint64(l.cfg.Depth),
		stop: l.stop, abandon: make(chan struct{}), ended: make(chan struct{}),
		random: rand.New(rand.NewPCG(index, 0)), //nolint:gosec // it decides when to destroy a queue, reproducibly
	}
	if copies {
		w.kind, w.depth = "sdma", min(w.depth, maxCopies)
	}
	w.begun = make([]time.Time, w.depth)
	if err := w.prepare(copies); err != nil {
		return nil, errors.Join(err, w.free())
	}
	return w, nil
}

// start starts all workers.
func (l *load) start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun = true
	for _, w := range l.workers {
		l.begin(w)
	}
}

func (l *load) begin(w *worker) {
	go func() {
		if err := w.run(); err != nil {
			l.failed.Store(true)
			l.report(err)
		}
		close(w.ended)
		select {
		case l.change <- struct{}{}:
		default:
		}
	}()
}

// create creates another compute queue, on the next GPU.
func (l *load) create() (Queue, error) {
	l.mu.Lock()
	stopped, g := l.stopped, l.gpus[int(l.next)%len(l.gpus)]
	l.mu.Unlock()
	if stopped {
		return Queue{}, errors.New("cannot create a queue: the work is being stopped")
	}
	w, err := l.add(g, false)
	if err != nil {
		return Queue{}, err
	}
	return w.state(), nil
}

// destroy destroys a queue with the packets in it, and reports its work. It waits as long
// as the driver does: forever if the queue is suspended and not resumed.
func (l *load) destroy(id uint32) (Queue, error) {
	l.mu.Lock()
	at := slices.IndexFunc(l.workers, func(w *worker) bool { return w.has(id) })
	if at < 0 {
		l.mu.Unlock()
		return Queue{}, fmt.Errorf("unknown queue %d", id)
	}
	w := l.workers[at]
	close(w.abandon)
	l.mu.Unlock()
	if w.wake != nil {
		if err := w.wake.raise(); err != nil {
			return Queue{}, err
		}
	}
	<-w.ended
	return w.state(), nil
}

// setRuntime is RUNTIME_ENABLE. It waits for the debugger, if any.
func (l *load) setRuntime(on bool) error {
	if err := l.d.setRuntime(on); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runtime = on
	return nil
}

// halt makes the workers end when their queues are empty.
func (l *load) halt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stopped {
		l.stopped = true
		close(l.stop)
	}
}

// over reports whether all workers have ended and none will be added.
func (l *load) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.workers {
		if !closed(w.ended) {
			return false
		}
	}
	return l.stopped || l.cfg.Packets > 0 && len(l.workers) > 0
}

// queues returns the state of each queue.
func (l *load) queues() []Queue {
	l.mu.Lock()
	defer l.mu.Unlock()
	queues := make([]Queue, len(l.workers))
	for i, w := range l.workers {
		queues[i] = w.state()
	}
	return queues
}

// prove checks that nothing ran after the last worker ended.
func (l *load) prove() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.workers {
		if err := w.unchanged(); err != nil {
			l.failed.Store(true)
			l.report(err)
		}
	}
}

// tally adds up the work of all queues.
func (l *load) tally() *Tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	var sum Tally
	var hash uint64
	var all histogram.Histogram
	for _, w := range l.workers {
		w.mu.Lock()
		t := w.sum()
		all.Merge(&w.latency)
		w.mu.Unlock()
		sum.Packets += t.packets
		sum.Count += t.count
		sum.Abandoned += t.abandoned
		sum.Made += t.made
		hash = engine.MixHash(hash, t.hash)
	}
	sum.Hash, sum.OK = hexadecimal(hash), !l.failed.Load()
	sum.P50US, sum.P99US = float64(all.Quantile(0.50))/1000, float64(all.Quantile(0.99))/1000
	sum.Interrupted = l.d.interrupted.Load()
	return &sum
}

// leaveRuntime ends the runtime if it is on.
func (l *load) leaveRuntime() error {
	l.mu.Lock()
	on := l.runtime
	l.mu.Unlock()
	if !on {
		return nil
	}
	return l.setRuntime(false)
}

// close releases everything. No worker may run.
func (l *load) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, w := range l.workers {
		errs = append(errs, w.free())
	}
	return errors.Join(append(errs, l.d.close())...)
}
