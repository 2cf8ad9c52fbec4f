package targets

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var third = gpreempt.ProcessKey{PID: 300, Start: 3}

// batching is a machine that suspends and resumes several targets at once.
type batching struct {
	*machine
	fail   map[gpreempt.ProcessKey]error
	gate   chan struct{} // if not nil, it holds the calls up
	panics bool
	// closing, if not nil, holds Close up.
	closing chan struct{}

	mu    sync.Mutex // guards calls
	calls []string
}

// batched is a session with a target of a batching machine.
type batched struct {
	*watched
	b      *batching
	target gpreempt.ProcessKey
}

func (b *batching) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if _, err := b.machine.Attach(ctx, target); err != nil {
		return nil, err
	}
	return &batched{&watched{session{b.machine}}, b, target}, nil
}

func (b *batched) Suspend(ctx context.Context, done func()) error {
	err := b.b.all(ctx, "suspend", []mechanism.Session{b})[0]
	if err == nil && done != nil {
		done()
	}
	return err
}

func (b *batched) Resume(ctx context.Context) error {
	return b.b.all(ctx, "resume", []mechanism.Session{b})[0]
}

func (b *batched) Close() error {
	if b.b.closing != nil {
		<-b.b.closing
	}
	return b.watched.Close()
}

func (b *batching) SuspendEach(ctx context.Context, sessions []mechanism.Session, done func(int, error)) {
	b.each(ctx, "suspend all", sessions, done)
}

func (b *batching) ResumeEach(ctx context.Context, sessions []mechanism.Session, done func(int, error)) {
	b.each(ctx, "resume all", sessions, done)
}

func (b *batching) each(ctx context.Context, what string, sessions []mechanism.Session, done func(int, error)) {
	for i, err := range b.all(ctx, what, sessions) {
		done(i, err)
	}
}

func (b *batching) all(ctx context.Context, what string, sessions []mechanism.Session) []error {
	if b.gate != nil {
		<-b.gate
	}
	time.Sleep(b.cost)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.panics {
		panic("broken mechanism")
	}
	var pids []string
	errs := make([]error, len(sessions))
	for i, s := range sessions {
		target := s.(*batched).target
		pids = append(pids, fmt.Sprint(target.PID))
		if errs[i] = b.fail[target]; errs[i] == nil {
			errs[i] = context.Cause(ctx)
		}
	}
	slices.Sort(pids) // the actors come in any order
	b.calls = append(b.calls, what+" "+strings.Join(pids, " "))
	return errs
}

func (b *batching) wantBatches(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if diff := cmp.Diff(want, b.calls); diff != "" {
		t.Errorf("calls of the batching mechanism (-want +got):\n%s", diff)
	}
	b.calls = nil
}

// newBatchingRig has three targets attached to a batching mechanism.
func newBatchingRig(t *testing.T) (*rig, *batching) {
	t.Helper()
	b := &batching{machine: &machine{name: "batching", watched: true, cost: time.Millisecond}, fail: map[gpreempt.ProcessKey]error{}}
	r := newRig(t, nil)
	r.cfg.Mechanisms = []mechanism.Mechanism{b}
	for _, target := range []gpreempt.ProcessKey{job, other, third} {
		r.attach(target)
	}
	return r, b
}

// wantInAnyOrder is want for results of one batch that different goroutines post.
func (r *rig) wantInAnyOrder(want ...scheduler.Event) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	byTarget := func(a, b scheduler.Event) int { return strings.Compare(fmt.Sprintf("%+v", a), fmt.Sprintf("%+v", b)) }
	slices.SortFunc(r.posted, byTarget)
	slices.SortFunc(want, byTarget)
	r.mu.Unlock()
	r.want(want...)
}

func TestOrdersOfOneStepAreOneCallOfABatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, b := newBatchingRig(t)
		r.Suspend(job, 1)
		r.Suspend(other, 2)
		r.Suspend(third, 3)
		b.wantBatches(t) // the step goes on
		r.Flush()
		time.Sleep(b.cost)
		r.wantInAnyOrder(
			scheduler.Suspended{Target: job, Seq: 1, Took: b.cost},
			scheduler.Suspended{Target: other, Seq: 2, Took: b.cost},
			scheduler.Suspended{Target: third, Seq: 3, Took: b.cost},
		)
		b.wantBatches(t, "suspend all 100 200 300")
		r.Resume(job, 4)
		r.Suspend(other, 5)
		r.Resume(third, 6)
		r.Flush()
		r.Flush() // of a step without orders
		time.Sleep(2 * b.cost)
		r.forgetPosted()
		slices.Sort(b.calls)
		b.wantBatches(t, "resume all 100 300", "suspend 200")
		r.detachAll(job, other, third)
	})
}

func TestFailureOfOneTargetHarmsNoOtherOfItsBatch(t *testing.T) {
	hardware := &mechanism.HardwareError{GPUs: []gpreempt.GPUID{7}, Err: errors.New("unmap timed out")}
	for name, tc := range map[string]struct {
		fail error
		want scheduler.Cause
		gpus []gpreempt.GPUID
	}{
		"gone":     {fail: mechanism.ErrGone, want: scheduler.CauseGone},
		"replaced": {fail: mechanism.ErrReplaced, want: scheduler.CauseReplaced},
		"hardware": {fail: hardware, want: scheduler.CauseHardware, gpus: hardware.GPUs},
		"deadline": {fail: context.DeadlineExceeded, want: scheduler.CauseFailed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, b := newBatchingRig(t)
				b.fail[other] = tc.fail
				for _, resume := range []bool{false, true} {
					want := []scheduler.Event{
						scheduler.Suspended{Target: job, Seq: 1, Took: b.cost},
						scheduler.Suspended{Target: other, Seq: 2, Result: tc.want, FailedGPUs: tc.gpus, Took: b.cost},
						scheduler.Suspended{Target: third, Seq: 3, Took: b.cost},
					}
					act := r.Suspend
					if resume {
						act = r.Resume
						want = []scheduler.Event{
							scheduler.Resumed{Target: job, Seq: 1, Took: b.cost},
							scheduler.Resumed{Target: other, Seq: 2, Result: tc.want, FailedGPUs: tc.gpus, Took: b.cost},
							scheduler.Resumed{Target: third, Seq: 3, Took: b.cost},
						}
					}
					for i, target := range []gpreempt.ProcessKey{job, other, third} {
						act(target, uint64(i)+1)
					}
					r.Flush()
					time.Sleep(b.cost)
					r.wantInAnyOrder(want...)
				}
				r.wantState(job, State{Choice: Choice{Mechanism: "batching", Why: "weather: fair"}})
				r.detachAll(job, other, third)
			})
		})
	}
}

func TestPanicInABatchFailsItsTargets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, b := newBatchingRig(t)
		b.panics = true
		r.Suspend(job, 1)
		r.Suspend(other, 2)
		r.Flush()
		time.Sleep(b.cost)
		r.wantInAnyOrder(
			scheduler.Suspended{Target: job, Seq: 1, Result: scheduler.CauseFailed, Took: b.cost},
			scheduler.Suspended{Target: other, Seq: 2, Result: scheduler.CauseFailed, Took: b.cost},
		)
		r.detachAll(job, other, third)
	})
}

// A Detach follows the Suspend before it, also one that waits for Flush.
func TestDetachFollowsABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, b := newBatchingRig(t)
		r.Suspend(job, 1)
		r.Suspend(other, 2)
		r.Detach(job)
		r.Flush()
		time.Sleep(b.cost)
		r.wantInAnyOrder(
			scheduler.Suspended{Target: job, Seq: 1, Took: b.cost}, scheduler.Detached{Target: job},
			scheduler.Suspended{Target: other, Seq: 2, Took: b.cost},
		)
		b.wantBatches(t, "suspend all 100 200")
		r.Suspend(job, 3) // it has no actor any more
		r.Suspend(other, 4)
		r.Flush()
		time.Sleep(b.cost)
		r.wantInAnyOrder(
			scheduler.Suspended{Target: job, Seq: 3, Result: scheduler.CauseFailed},
			scheduler.Suspended{Target: other, Seq: 4, Took: b.cost},
		)
		b.wantBatches(t, "suspend 200")
		r.detachAll(other, third)
	})
}

func TestBatchDoesNotWaitForATargetThatGetsABetterMechanism(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best := &machine{name: "best", blocked: "fog"}
		r, b := newBatchingRig(t)
		r.cfg.Mechanisms = []mechanism.Mechanism{best, b}
		r.Detach(job)
		synctest.Wait()
		r.attach(job)
		time.Sleep(scheduler.SearchInterval)
		best.set(func(m *machine) { m.blocked = "" })
		b.closing = make(chan struct{})
		r.Resume(job, 1)
		r.Flush()
		time.Sleep(b.cost)
		r.forgetPosted() // the session is being closed
		r.Suspend(job, 2)
		r.Suspend(other, 3)
		r.Suspend(third, 4)
		r.Flush()
		time.Sleep(joinTime + b.cost)
		r.wantInAnyOrder(
			scheduler.Suspended{Target: other, Seq: 3, Took: b.cost},
			scheduler.Suspended{Target: third, Seq: 4, Took: b.cost},
		)
		close(b.closing)
		r.want(scheduler.Attached{Target: job}, scheduler.Suspended{Target: job, Seq: 2})
		b.wantBatches(t, "resume 100", "suspend all 200 300")
		best.wantCalls(t, "attach", "suspend")
		r.detachAll(job, other, third)
	})
}

func TestCloseEndsTheWaitForABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, b := newBatchingRig(t)
		b.gate = make(chan struct{})
		r.Suspend(third, 1) // it holds the mechanism up
		r.Flush()
		synctest.Wait()
		r.Suspend(job, 2)
		r.Suspend(third, 3)
		r.Suspend(other, 4)
		r.Flush()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Close returns %v, want the deadline", err)
		}
		close(b.gate)
		time.Sleep(time.Second)
		synctest.Wait()
		if open, _ := b.state(); open != 0 {
			t.Errorf("%d sessions are open", open)
		}
	})
}

// What an actor does with a command of a batch.
const (
	joins    = 'j'
	switched = 's' // it uses another mechanism by now
	ended    = 'e'
)

// Every order in which the actors of a step can act while their commands are handed out and
// afterwards, and joinTime may end at any moment.
func TestBatchInEveryOrderOfItsMembers(t *testing.T) {
	const conducts = string(joins) + string(switched) + string(ended)
	tried := 0
	for _, first := range conducts {
		for _, second := range conducts {
			for _, last := range conducts {
				for _, steps := range interleavings("", 0, "012", false) {
					synctest.Test(t, func(t *testing.T) { tryBatch(t, [3]rune{first, second, last}, steps) })
					tried++
				}
			}
		}
	}
	if tried != 27*(15+15*6) {
		t.Errorf("%d orders were tried", tried)
	}
}

// interleavings returns each way to go on after steps. A digit is an actor that acts on its
// command, those in left have yet to; H hands out the next command after the first, of which
// there were handed; W waits for the end of joinTime.
func interleavings(steps string, handed int, left string, waited bool) (all []string) {
	if left == "" {
		all = append(all, steps)
	}
	if handed < 2 {
		all = append(all, interleavings(steps+"H", handed+1, left, waited)...)
	}
	if !waited {
		all = append(all, interleavings(steps+"W", handed, left, true)...)
	}
	for _, c := range left {
		if int(c-'0') <= handed {
			all = append(all, interleavings(steps+string(c), handed, strings.ReplaceAll(left, string(c), ""), waited)...)
		}
	}
	return all
}

// tryBatch compares one order with what it must lead to.
func tryBatch(t *testing.T, does [3]rune, steps string) {
	t.Helper()
	b := &batching{machine: &machine{name: "batching", watched: true}}
	r := newRig(t, nil)
	// The actor of between takes its commands, which hold Flush up, when the test says so.
	between := gpreempt.ProcessKey{PID: 400, Start: 4}
	gate := newActor(r.Sessions, between)
	gate.orders = make(chan order)
	r.actors[between] = gate
	targets := []gpreempt.ProcessKey{job, other, third}
	var acts [3]chan struct{}
	for i, target := range targets {
		a := newActor(r.Sessions, target)
		a.batcher = b
		w := &batched{&watched{session{b.machine}}, b, target}
		a.held = &holding{session: w, batcher: b, name: b.name}
		if does[i] == switched {
			a.held.batcher = nil
		}
		r.actors[target] = a
		if i > 0 {
			r.orders = append(r.orders, order{target: between})
		}
		r.Suspend(target, uint64(i))
		acts[i] = make(chan struct{})
		go func() {
			<-acts[i]
			if c := <-a.orders; does[i] != ended {
				a.do(c)
			}
		}()
	}
	var joined, calls []string
	var posted []scheduler.Event
	begun := false
	begin := func() {
		if !begun && len(joined) > 0 {
			slices.Sort(joined)
			calls, begun = append(calls, "suspend all "+strings.Join(joined, " ")), true
		}
	}
	go r.Flush()
	for _, step := range steps {
		synctest.Wait()
		switch step {
		case 'H':
			<-gate.orders
			continue
		case 'W':
			time.Sleep(joinTime)
			begin()
			continue
		}
		i := int(step - '0')
		close(acts[i])
		if does[i] == ended {
			continue
		}
		posted = append(posted, scheduler.Suspended{Target: targets[i], Seq: uint64(i)})
		if pid := fmt.Sprint(targets[i].PID); begun || does[i] == switched {
			calls = append(calls, "suspend "+pid)
		} else if joined = append(joined, pid); len(joined) == 3 {
			begin()
		}
	}
	time.Sleep(joinTime)
	begin()
	slices.Sort(calls)
	synctest.Wait()
	slices.Sort(b.calls)
	b.wantBatches(t, calls...)
	r.wantInAnyOrder(posted...)
	if t.Failed() {
		t.Fatalf("the order is %s, of actors that do %c", steps, does)
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
