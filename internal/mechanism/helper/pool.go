package helper

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/child"
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

// Pool starts helpers and keeps those that have nothing to do. Its methods may be called by
// several goroutines at once.
type Pool struct {
	log      *zap.Logger
	callTime time.Duration
	most     int // maxHelpers
	// ended is called at the end of a helper that had attached to something, and so was a
	// process of the driver; not after Close.
	ended func()
	// sinceFailure returns for how long no GPU has been failing, negative while one is. The time of a call
	// begins anew with it: when a GPU resets, the driver lets processes wait with their lock held.
	sinceFailure func() time.Duration
	// start starts a helper, on the thread of starter: the kernel kills a helper when the thread ends
	// that started it.
	start   func() (*helper, error)
	starter chan func()
	stop    chan struct{} // ends starter

	mu       sync.Mutex // guards what follows; not held across a call of anything
	closed   bool
	spares   []*helper // which hold nothing
	starting bool      // of a spare
	begun    int       // helpers that are being started
	all      map[*helper]bool
	// serving are the helpers that make a call for criu, or have a session of dbgtrap.
	serving map[gpreempt.ProcessKey]*helper
	// abandoned are the helpers that were killed in a call and have not ended.
	abandoned map[gpreempt.ProcessKey]*helper
}

var _ criu.Calls = (*Pool)(nil)

// NewPool returns a pool, which starts helpers when they are needed. ended is called at the end
// of each helper that was a process of the driver, until the pool is closed. sinceFailure returns for how
// long no GPU has been failing, negative while one is: until then a call may wait for any time.
// Both may be nil.
func NewPool(logger *zap.Logger, ended func(), sinceFailure func() time.Duration) *Pool {
	p := &Pool{
		log: logger, callTime: callTime, most: maxHelpers, ended: func() {},
		sinceFailure: func() time.Duration { return math.MaxInt64 }, all: map[*helper]bool{}, starter: make(chan func()), stop: make(chan struct{}),
		serving: map[gpreempt.ProcessKey]*helper{}, abandoned: map[gpreempt.ProcessKey]*helper{},
	}
	p.start = p.startProgram
	if ended != nil {
		p.ended = ended
	}
	if sinceFailure != nil {
		p.sinceFailure = sinceFailure
	}
	go func() {
		runtime.LockOSThread()
		for {
			select {
			case f := <-p.starter:
				f()
			case <-p.stop:
				return
			}
		}
	}()
	return p
}

// startProgram starts this program as a helper. It does little, and there may be one for each job of
// the host. The limits of its cgroup are not followed.
func (p *Pool) startProgram() (h *helper, err error) {
	done := make(chan struct{})
	start := func() {
		defer close(done)
		socket, cmd, failed := child.Start(Argument, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}, "GOGC=20", "GODEBUG=containermaxprocs=0,updatemaxprocs=0")
		if err = failed; err == nil {
			h = &helper{log: p.log}
			h.Process = child.Started[request](socket, cmd, h.take, p.log)
		}
	}
	select {
	case p.starter <- start:
		<-done
	case <-p.stop:
		err = errors.New("the helpers have been ended")
	}
	if err != nil {
		return nil, fmt.Errorf("start a helper process: %w", err)
	}
	return h, nil
}

// Close kills every helper, which releases what dbgtrap holds.
func (p *Pool) Close() error {
	p.mu.Lock()
	if !p.closed {
		close(p.stop)
	}
	p.closed = true
	var all []*helper
	for c := range p.all {
		all = append(all, c)
	}
	p.mu.Unlock()
	for _, c := range all {
		c.Kill()
	}
	return nil
}

// take assigns a helper to a target: one that waits, or a new one.
func (p *Pool) take(target gpreempt.ProcessKey) (*helper, error) {
	p.mu.Lock()
	if c := p.abandoned[target]; c != nil {
		p.mu.Unlock()
		return nil, fmt.Errorf("process %d: %w: helper process %d, which was killed, waits for it: end the process", target.PID, mechanism.ErrWaiting, c.PID)
	}
	var c *helper
	for c == nil && len(p.spares) > 0 {
		last := len(p.spares) - 1
		if spare := p.spares[last]; !spare.HasEnded() { // remove may come later
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
func (p *Pool) leave(target gpreempt.ProcessKey, c *helper, spent bool) {
	p.mu.Lock()
	if p.serving[target] == c {
		delete(p.serving, target)
	}
	p.mu.Unlock()
	if spent {
		c.Kill()
		return
	}
	p.put(c)
}

// startOne starts a helper.
func (p *Pool) startOne() (*helper, error) {
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
		c.Kill()
	}
	go func() {
		<-c.Closed
		if s := c.session.Load(); s != nil {
			s.Notify()
		}
		<-c.Ended
		if p.remove(c) {
			p.ended()
		}
	}()
	return c, nil
}

// remove takes a helper off the lists that has ended. It reports whether that was a process of
// the driver, in a pool that is still in use.
func (p *Pool) remove(c *helper) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, c)
	p.spares = slices.DeleteFunc(p.spares, func(s *helper) bool { return s == c })
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
func (p *Pool) put(c *helper) {
	p.mu.Lock()
	keep := !p.closed && len(p.spares) < maxSpares && p.all[c]
	if keep {
		p.spares = append(p.spares, c)
	}
	p.mu.Unlock()
	if !keep {
		c.Kill()
	}
}

// call makes one request about a target and returns the answer. After an error, which the
// request itself did not cause, the helper has ended, or is killed and ends when its call returns.
func (p *Pool) call(target gpreempt.ProcessKey, h *helper, req request) (*message, error) {
	req.Target = target
	if req.Op == opAttach {
		h.attached.Store(true)
	}
	asked := false
	m, err := h.Call(req, func() time.Duration {
		if !asked {
			asked = true
			return p.callTime
		}
		return p.callTime - p.sinceFailure()
	})
	if errors.Is(err, child.ErrLate) {
		p.mu.Lock()
		if p.all[h] {
			p.abandoned[target] = h
		}
		p.mu.Unlock()
		err = fmt.Errorf("it has not come back from the driver for %v and is killed: it ends when the call returns", p.callTime)
	}
	if err != nil {
		err = fmt.Errorf("process %d: %w (%d): %w", target.PID, errLost, h.PID, err)
		p.log.Warn("the helper of a target is lost", log.Target(target), log.Err(err))
		return nil, err
	}
	return m, nil
}

// Pause implements criu.Calls. The kernel does not undo what a helper has done that is lost:
// another one does.
func (p *Pool) Pause(ctx context.Context, target gpreempt.ProcessKey, seen []int, doubtful bool) (numbers []int, paused bool, err error) {
	m, err := p.once(ctx, target, request{Op: opPause, Seen: seen, Doubtful: doubtful})
	switch {
	case m != nil:
		return m.Numbers, m.Paused, m.err()
	case !errors.Is(err, errLost):
		return nil, doubtful, err
	}
	if undone := p.Unpause(context.WithoutCancel(ctx), target); undone != nil {
		return nil, true, errors.Join(err, fmt.Errorf("process %v may still be paused: %w", target, undone))
	}
	return nil, false, err
}

// Unpause implements criu.Calls.
func (p *Pool) Unpause(ctx context.Context, target gpreempt.ProcessKey) error {
	m, err := p.once(ctx, target, request{Op: opUnpause})
	if err == nil {
		err = m.err()
	}
	return err
}

// errLost: the helper ended, or was killed, in the call.
var errLost = errors.New("its helper process is lost")

// once has a helper make one call. The errors are of the helper alone.
func (p *Pool) once(ctx context.Context, target gpreempt.ProcessKey, req request) (*message, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	c, err := p.take(target)
	if err != nil {
		return nil, err
	}
	m, err := p.call(target, c, req)
	p.leave(target, c, err != nil || m.Spent)
	return m, err
}

// Owns reports whether pid is that of a helper.
func (p *Pool) Owns(pid int32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.all {
		if c.PID == int(pid) {
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
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", c.PID))
	if err != nil {
		return false
	}
	for _, thread := range threads {
		tid, err := strconv.Atoi(thread.Name())
		function, _, _ := strings.Cut(proc.WaitsIn(c.PID, tid), ".") // the compiler's suffix of a copy
		if err == nil && (function == dbgtrap.TargetLock || slices.Contains(criu.TargetLocks, function)) {
			return true
		}
	}
	return false
}
