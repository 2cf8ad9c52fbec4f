package helper

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/criu"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// callTime is how long a call of a helper may take. The driver takes 9 s for a GPU that does
// not answer; then the helper is killed, and ends when the call returns.
const callTime = 30 * time.Second

// maxHelpers is the most helpers at a time. A user may have any number of processes with queues,
// and the memory of all helpers is limited together with that of the daemon (MemoryMax).
const maxHelpers = 256

var errClosed = errors.New("the helpers have been ended")

// Pool starts helpers and keeps those that have nothing to do. Its methods may be called by
// several goroutines at once.
type Pool struct {
	log      *zap.Logger
	callTime time.Duration
	most     int // maxHelpers
	// ended is called at the end of a helper that had attached to something, and so was a
	// process of the driver; not after Close.
	ended func()
	// calm returns for how long no GPU has been failing, negative while one is. The time of a call
	// begins anew with it: when a GPU resets, the driver lets processes wait with their lock held.
	calm func() time.Duration
	// start starts a helper.
	start   func() (*child, error)
	starter *starter // nil in tests that set start

	mu       sync.Mutex // guards what follows; not held across a call of anything
	closed   bool
	spares   []*child // which hold nothing
	starting bool     // of a spare
	begun    int      // helpers that are being started
	all      map[*child]bool
	// serving are the helpers that make a call for criu, or have a session of dbgtrap.
	serving map[gpreempt.ProcessKey]*child
	// abandoned are the helpers that were killed in a call and have not ended.
	abandoned map[gpreempt.ProcessKey]*child
}

var _ criu.Calls = (*Pool)(nil)

// NewPool returns a pool, which starts helpers when they are needed. ended is called at the end
// of each helper that was a process of the driver, until the pool is closed. calm returns for how
// long no GPU has been failing, negative while one is: until then a call may wait for any time.
// Both may be nil.
func NewPool(logger *zap.Logger, ended func(), calm func() time.Duration) *Pool {
	p := newPool(logger)
	if ended != nil {
		p.ended = ended
	}
	if calm != nil {
		p.calm = calm
	}
	p.starter = newStarter()
	p.start = func() (*child, error) { return p.starter.start(p.log) }
	return p
}

func newPool(logger *zap.Logger) *Pool {
	return &Pool{
		log: logger, callTime: callTime, most: maxHelpers, ended: func() {},
		calm: func() time.Duration { return math.MaxInt64 }, all: map[*child]bool{},
		serving: map[gpreempt.ProcessKey]*child{}, abandoned: map[gpreempt.ProcessKey]*child{},
	}
}

// Close kills every helper, which releases what dbgtrap holds.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	var all []*child
	for c := range p.all {
		all = append(all, c)
	}
	p.mu.Unlock()
	for _, c := range all {
		c.kill()
	}
	if p.starter != nil {
		p.starter.close()
	}
	return nil
}

// take assigns a helper to a target: one that waits, or a new one.
func (p *Pool) take(target gpreempt.ProcessKey) (*child, error) {
	p.mu.Lock()
	if c := p.abandoned[target]; c != nil {
		p.mu.Unlock()
		return nil, fmt.Errorf("process %d: %w: helper process %d, which was killed, waits for it: end the process", target.PID, mechanism.ErrWaiting, c.pid)
	}
	var c *child
	for c == nil && len(p.spares) > 0 {
		last := len(p.spares) - 1
		if spare := p.spares[last]; !spare.hasEnded() { // remove may come later
			c = spare
		}
		p.spares = p.spares[:last]
	}
	p.mu.Unlock()
	if c == nil {
		var err error
		if c, err = p.startOne(); err != nil {
			return nil, err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.serving[target] = c
	return c, nil
}

// leave takes back a helper that holds nothing. spent: it must end.
func (p *Pool) leave(target gpreempt.ProcessKey, c *child, spent bool) {
	p.mu.Lock()
	if p.serving[target] == c {
		delete(p.serving, target)
	}
	p.mu.Unlock()
	if spent {
		c.kill()
		return
	}
	p.put(c)
}

// startOne starts a helper.
func (p *Pool) startOne() (*child, error) {
	p.mu.Lock()
	if n := len(p.all) + p.begun; n >= p.most {
		p.mu.Unlock()
		return nil, fmt.Errorf("%d helper processes are running, the maximum: the process is attached to after one of them ends", n)
	}
	p.begun++
	p.mu.Unlock()
	c, err := p.start()
	p.mu.Lock()
	p.begun--
	if err != nil {
		p.mu.Unlock()
		return nil, err
	}
	p.all[c] = true
	closed := p.closed
	p.mu.Unlock()
	if closed {
		c.kill()
	}
	go func() {
		<-c.ended
		if p.remove(c) {
			p.ended()
		}
	}()
	return c, nil
}

// remove takes a helper off the lists that has ended. It reports whether that was a process of
// the driver, in a pool that is still in use.
func (p *Pool) remove(c *child) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, c)
	p.spares = slices.DeleteFunc(p.spares, func(s *child) bool { return s == c })
	for target, a := range p.abandoned {
		if a == c {
			delete(p.abandoned, target)
		}
	}
	return c.attached.Load() && !p.closed
}

// refill starts a helper ahead if no spare is left. It does not block.
func (p *Pool) refill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.starting || len(p.spares) > 0 {
		return
	}
	p.starting = true
	go func() {
		c, err := p.startOne()
		p.mu.Lock()
		p.starting = false
		p.mu.Unlock()
		if err == nil { // else the next take returns it
			p.put(c)
		}
	}()
}

// maxSpares is how many helpers are kept for the next targets: as many as one job has
// processes on a host with eight GPUs. The end of a process of the driver costs every GPU with
// a runlist a cycle (process_termination_cpsch).
const maxSpares = 8

// put keeps a helper that holds nothing, or ends it.
func (p *Pool) put(c *child) {
	p.mu.Lock()
	keep := !p.closed && len(p.spares) < maxSpares && p.all[c]
	if keep {
		p.spares = append(p.spares, c)
	}
	p.mu.Unlock()
	if !keep {
		c.kill()
	}
}

// call makes one request about a target and returns its result. After an error, which the
// request itself did not cause, the helper has ended, or is killed and ends when its call returns.
func (p *Pool) call(target gpreempt.ProcessKey, c *child, req request) (result, error) {
	if req.Op == opAttach {
		c.attached.Store(true)
	}
	if err := c.Encode(req); err != nil {
		c.kill()
		return result{}, fmt.Errorf("process %d: its helper process %d has ended: %w", target.PID, c.pid, err)
	}
	timer := time.NewTimer(p.callTime)
	defer timer.Stop()
	for {
		select {
		case r := <-c.results:
			return r, nil
		case <-c.ended:
			select {
			case r := <-c.results: // it ended after that
				return r, nil
			default:
			}
			return result{}, fmt.Errorf("process %d: its helper process %d has ended", target.PID, c.pid)
		case <-timer.C:
			if calm := p.calm(); calm < p.callTime {
				timer.Reset(p.callTime - calm)
				continue
			}
			return result{}, p.abandon(target, c)
		}
	}
}

// abandon kills a helper that has not come back from a call, and returns the error of the call.
func (p *Pool) abandon(target gpreempt.ProcessKey, c *child) error {
	p.mu.Lock()
	if p.all[c] {
		p.abandoned[target] = c
	}
	p.mu.Unlock()
	c.kill()
	return fmt.Errorf("process %d: helper process %d has not come back from the driver for %v and is killed: it ends when the call returns", target.PID, c.pid, p.callTime)
}

// Pause implements criu.Calls. The kernel does not undo what a helper has done that is lost:
// another one does.
func (p *Pool) Pause(ctx context.Context, target gpreempt.ProcessKey, seen []int, doubtful bool) (numbers []int, paused bool, err error) {
	r, lost, err := p.once(ctx, target, request{Op: opPause, Attach: attachment{Target: target}, Seen: seen, Doubtful: doubtful})
	if !lost {
		return r.Numbers, r.Paused, err
	}
	if undone := p.Unpause(context.WithoutCancel(ctx), target); undone != nil {
		return nil, true, errors.Join(err, fmt.Errorf("process %v may still be paused: %w", target, undone))
	}
	return nil, false, err
}

// Unpause implements criu.Calls.
func (p *Pool) Unpause(ctx context.Context, target gpreempt.ProcessKey) error {
	_, _, err := p.once(ctx, target, request{Op: opUnpause, Attach: attachment{Target: target}})
	return err
}

// once has a helper make one call. lost: the helper has been lost in it.
func (p *Pool) once(ctx context.Context, target gpreempt.ProcessKey, req request) (r result, lost bool, err error) {
	r.Paused = req.Doubtful
	if ctx.Err() != nil {
		return r, false, context.Cause(ctx)
	}
	c, err := p.take(target)
	if err != nil {
		return r, false, err
	}
	answer, err := p.call(target, c, req)
	p.leave(target, c, err != nil || answer.Spent)
	if err != nil {
		p.log.Warn("the helper of a target is lost", log.Target(target), log.Err(err))
		return r, true, err
	}
	return answer, false, answer.Err.error()
}

// Owns reports whether pid is that of a helper.
func (p *Pool) Owns(pid int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.all {
		if c.pid == int(pid) {
			return true
		}
	}
	return false
}

// WaitsForTarget implements mechanism.Inspector and criu.Calls. A helper has one target, so
// that each of its threads is asked.
func (p *Pool) WaitsForTarget(target gpreempt.ProcessKey) bool {
	p.mu.Lock()
	c := p.serving[target]
	p.mu.Unlock()
	if c == nil {
		return false
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", c.pid))
	if err != nil {
		return false
	}
	for _, thread := range threads {
		tid, err := strconv.Atoi(thread.Name())
		function, _, _ := strings.Cut(proc.WaitsIn(c.pid, tid), ".") // the compiler's suffix of a copy
		if err == nil && (function == dbgtrap.TargetLock || slices.Contains(criu.TargetLocks, function)) {
			return true
		}
	}
	return false
}
