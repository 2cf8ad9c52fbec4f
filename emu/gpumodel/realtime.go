package gpumodel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ErrClosed is what waiting on a closed Realtime gives.
var ErrClosed = errors.New("the simulated machine has been closed")

// Timer is a one-shot timer with one sleeper, such as an hrtimer.Timer. Set may be
// called while another goroutine is in Wait; Close ends Wait with os.ErrClosed.
type Timer interface {
	Set(d time.Duration) error
	Wait() error
	Close() error
}

// Realtime runs a Machine along the wall clock. Its methods are those of Machine,
// may be called by any goroutine, and do not block, except Suspend and Resume.
// When there is more to simulate than the CPU manages, virtual time falls behind
// the wall clock.
//
// Functions given to it are called with the machine locked, by any goroutine: they
// must not block, and must use the Machine, never the Realtime.
type Realtime struct {
	origin  time.Time
	timer   Timer
	stopped chan struct{}

	// mu guards what follows.
	mu sync.Mutex
	m  *Machine
	// wake is when the timer is set to fire, in virtual time; 0: it is not set.
	wake   time.Duration
	closed chan struct{}
	over   bool
}

// Start lets the machine's virtual time go on with the wall clock, from where it
// is. The caller must not use m or timer directly any more, and must Close what it
// gets, which closes the timer.
func Start(m *Machine, timer Timer) *Realtime {
	r := &Realtime{
		origin:  time.Now().Add(-m.Now()),
		timer:   timer,
		stopped: make(chan struct{}),
		m:       m,
		closed:  make(chan struct{}),
	}
	go r.run()
	r.Do(func(*Machine) {})
	return r
}

// Close stops virtual time. Whoever waits in Suspend or Resume gets ErrClosed.
// It is idempotent.
func (r *Realtime) Close() error {
	r.mu.Lock()
	over := r.over
	r.over = true
	r.mu.Unlock()
	if over {
		return nil
	}
	close(r.closed)
	err := r.timer.Close()
	<-r.stopped
	return err
}

// run wakes up whenever something is due.
func (r *Realtime) run() {
	defer close(r.stopped)
	for {
		if err := r.timer.Wait(); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				// The descriptor is ours alone, so this cannot happen unless
				// somebody closed it under us.
				panic("gpusim: " + err.Error())
			}
			return
		}
		r.mu.Lock()
		r.wake = 0
		r.follow()
		r.mu.Unlock()
	}
}

// batch is how many events are simulated before others get the lock.
const batch = 4096

// follow brings the machine up to the wall clock and sets the timer for what
// comes next. It needs mu.
func (r *Realtime) follow() {
	if r.over {
		return
	}
	r.m.advance(time.Since(r.origin), batch)
	next, ok := r.m.Next()
	// A timer that fires too early does no harm, so it is set only for what is
	// due before: setting it is a system call.
	if !ok || r.wake != 0 && r.wake <= next {
		return
	}
	if err := r.timer.Set(max(next-time.Since(r.origin), 1)); err == nil {
		r.wake = max(next, 1)
	}
}

// Do calls fn with the machine at the present time. fn must not block, must not
// call AdvanceTo, and must not keep the machine except in functions it gives to
// it.
func (r *Realtime) Do(fn func(m *Machine)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.follow()
	fn(r.m)
	r.follow()
}

// Spec is Machine.Spec.
func (r *Realtime) Spec() Spec { return r.m.Spec() }

// GPUs is Machine.GPUs.
func (r *Realtime) GPUs() []gpreempt.GPU { return r.m.GPUs() }

// Now is Machine.Now.
func (r *Realtime) Now() (now time.Duration) {
	r.Do(func(m *Machine) { now = m.Now() })
	return now
}

// StartProcess is Machine.StartProcess.
func (r *Realtime) StartProcess(spec ProcSpec) (key gpreempt.ProcessKey, err error) {
	r.Do(func(m *Machine) { key, err = m.StartProcess(spec) })
	return key, err
}

// EndProcess is Machine.EndProcess.
func (r *Realtime) EndProcess(key gpreempt.ProcessKey) (err error) {
	r.Do(func(m *Machine) { err = m.EndProcess(key) })
	return err
}

// Alive is Machine.Alive.
func (r *Realtime) Alive(key gpreempt.ProcessKey) (alive bool) {
	r.Do(func(m *Machine) { alive = m.Alive(key) })
	return alive
}

// CreateQueue is Machine.CreateQueue.
func (r *Realtime) CreateQueue(key gpreempt.ProcessKey, gpu gpreempt.GPUID, typ gpreempt.QueueType, ringPackets int) (id uint32, err error) {
	r.Do(func(m *Machine) { id, err = m.CreateQueue(key, gpu, typ, ringPackets) })
	return id, err
}

// DestroyQueue is Machine.DestroyQueue.
func (r *Realtime) DestroyQueue(key gpreempt.ProcessKey, id uint32) (err error) {
	r.Do(func(m *Machine) { err = m.DestroyQueue(key, id) })
	return err
}

// Submit is Machine.Submit.
func (r *Realtime) Submit(key gpreempt.ProcessKey, id uint32, k Packet) (err error) {
	r.Do(func(m *Machine) { err = m.Submit(key, id, k) })
	return err
}

// SetQueuePriority is Machine.SetQueuePriority.
func (r *Realtime) SetQueuePriority(key gpreempt.ProcessKey, id uint32, priority gpreempt.Priority) (err error) {
	r.Do(func(m *Machine) { err = m.SetQueuePriority(key, id, priority) })
	return err
}

// SetFault is Machine.SetFault.
func (r *Realtime) SetFault(f Fault) (err error) {
	r.Do(func(m *Machine) { err = m.SetFault(f) })
	return err
}

// Counters is Machine.Counters.
func (r *Realtime) Counters() (all []ProcessCounters) {
	r.Do(func(m *Machine) { all = m.Counters() })
	return all
}

// ProcessCounters is Machine.ProcessCounters.
func (r *Realtime) ProcessCounters(key gpreempt.ProcessKey) (c ProcessCounters, ok bool) {
	r.Do(func(m *Machine) { c, ok = m.ProcessCounters(key) })
	return c, ok
}

// GPUCounters is Machine.GPUCounters.
func (r *Realtime) GPUCounters() (all []GPUCounters) {
	r.Do(func(m *Machine) { all = m.GPUCounters() })
	return all
}

// Backlog is Machine.Backlog.
func (r *Realtime) Backlog(key gpreempt.ProcessKey) (b Backlog, err error) {
	r.Do(func(m *Machine) { b, err = m.Backlog(key) })
	return b, err
}

// Snapshot is Machine.Snapshot.
func (r *Realtime) Snapshot(key gpreempt.ProcessKey) (infos map[uint32]gpreempt.QueueInfo) {
	r.Do(func(m *Machine) { infos = m.Snapshot(key) })
	return infos
}

// QueueBacklog is Machine.QueueBacklog.
func (r *Realtime) QueueBacklog(key gpreempt.ProcessKey, id uint32) (packets uint64, err error) {
	r.Do(func(m *Machine) { packets, err = m.QueueBacklog(key, id) })
	return packets, err
}

// FS is the machine's file tree; each call sees one moment. It may be used by any
// goroutine, also after Close.
func (r *Realtime) FS() fs.FS { return &FS{with: r.Do} }

// Suspend is Machine.Suspend, and waits until it is done. When ctx ends first, it
// returns the cause of that, and the suspend goes on: a Resume issued afterwards
// is carried out after it. When the process left, the error is ErrNoProcess.
func (r *Realtime) Suspend(ctx context.Context, key gpreempt.ProcessKey, ids []uint32) ([]QueueResult, error) {
	return r.control(ctx, opSuspend, key, ids)
}

// Resume is Machine.Resume, and waits until it is done, as Suspend does.
func (r *Realtime) Resume(ctx context.Context, key gpreempt.ProcessKey, ids []uint32) ([]QueueResult, error) {
	return r.control(ctx, opResume, key, ids)
}

func (r *Realtime) control(ctx context.Context, kind opKind, key gpreempt.ProcessKey, ids []uint32) ([]QueueResult, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	var (
		err     error
		results []QueueResult
		left    bool
		done    bool
		wait    chan struct{}
	)
	r.Do(func(m *Machine) {
		err = m.control(kind, key, ids, func(all []QueueResult) {
			results, done = all, true
			left = !m.Alive(key)
			if wait != nil {
				close(wait)
			}
		})
		// What takes no time is done by now, and needs no channel.
		if err == nil && !done {
			wait = make(chan struct{})
		}
	})
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-r.closed:
			return nil, ErrClosed
		}
	}
	if err == nil && left {
		err = fmt.Errorf("%w: %v", ErrNoProcess, key)
	}
	if err != nil {
		return nil, err
	}
	return results, nil
}
