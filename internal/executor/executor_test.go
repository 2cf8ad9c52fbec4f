package executor

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

var job = gpreempt.ProcessKey{PID: 100, Start: 1}

// machine is a mechanism whose sessions take time and fail on demand.
type machine struct {
	cost   time.Duration
	attach error
	fail   error
	panics bool
	stuck  int      // how often Close fails
	calls  []string // written by the one worker under test
}

func (m *machine) Name() string { return "fake" }

func (m *machine) Attach(context.Context, gpreempt.ProcessKey) (mechanism.Session, error) {
	m.calls = append(m.calls, "attach")
	if m.attach != nil {
		return nil, m.attach
	}
	return &session{m}, nil
}

type session struct{ m *machine }

func (s *session) do(name string) error {
	s.m.calls = append(s.m.calls, name)
	time.Sleep(s.m.cost) // virtual: every test here runs in a bubble
	if s.m.panics {
		panic("broken mechanism")
	}
	return s.m.fail
}

func (s *session) Suspend(context.Context) error { return s.do("suspend") }
func (s *session) Resume(context.Context) error  { return s.do("resume") }

func (s *session) Close() error {
	s.m.calls = append(s.m.calls, "close")
	if s.m.stuck > 0 {
		s.m.stuck--
		return errors.New("a debugger is in the way")
	}
	return nil
}

type rig struct {
	*Executor
	mu       sync.Mutex // guards posted: a refusal is posted from its own goroutine
	posted   []scheduler.Event
	attached []error
}

func newRig(m *machine) *rig {
	r := &rig{}
	start := time.Now()
	r.Executor = New(Config{
		Mechanism: m,
		Post: func(ev scheduler.Event) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.posted = append(r.posted, ev)
		},
		Attached: func(_ gpreempt.ProcessKey, err error) { r.attached = append(r.attached, err) },
		Now:      func() time.Duration { return time.Since(start) },
		Log:      zap.NewNop(),
	})
	return r
}

func TestActionsRunInOrderAndAreTimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{cost: 400 * time.Microsecond}
		r := newRig(m)
		r.Attach(job)
		r.Attach(job)
		synctest.Wait()
		r.Suspend(job, 1)
		time.Sleep(time.Millisecond)
		r.Resume(job, 2)
		time.Sleep(time.Millisecond)
		if err := r.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := []scheduler.Event{
			scheduler.Suspended{Target: job, Seq: 1, Took: m.cost},
			scheduler.Resumed{Target: job, Seq: 2, Took: m.cost},
		}
		if diff := cmp.Diff(want, r.posted); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]string{"attach", "suspend", "resume", "close"}, m.calls); diff != "" {
			t.Error(diff)
		}
		if len(r.attached) != 1 || r.attached[0] != nil {
			t.Errorf("attached %v, want one success", r.attached)
		}
	})
}

func TestFailuresBecomeOutcomes(t *testing.T) {
	for name, tc := range map[string]struct {
		machine machine
		want    scheduler.Suspended
	}{
		"gone":     {machine{fail: mechanism.ErrGone}, scheduler.Suspended{Result: scheduler.OutcomeGone}},
		"hardware": {machine{fail: &mechanism.HardwareError{GPUs: []gpreempt.GPUID{7}, Err: errors.New("unmap timed out")}}, scheduler.Suspended{Result: scheduler.OutcomeHardware, FailedGPUs: []gpreempt.GPUID{7}}},
		"other":    {machine{fail: errors.New("partial")}, scheduler.Suspended{Result: scheduler.OutcomeFailed}},
		"panic":    {machine{panics: true}, scheduler.Suspended{Result: scheduler.OutcomeFailed}},
		"attach":   {machine{attach: errors.New("no permission")}, scheduler.Suspended{Result: scheduler.OutcomeFailed}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(&tc.machine)
				r.Attach(job)
				r.Suspend(job, 1)
				synctest.Wait()
				if err := r.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
				tc.want.Target, tc.want.Seq = job, 1
				if diff := cmp.Diff([]scheduler.Event{tc.want}, r.posted); diff != "" {
					t.Error(diff)
				}
				if len(r.attached) != 1 || !errors.Is(r.attached[0], tc.machine.attach) {
					t.Errorf("attached %v, want %v", r.attached, tc.machine.attach)
				}
			})
		})
	}
}

func TestDetachFinishesTheActionInFlightAndThenReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{cost: time.Millisecond}
		r := newRig(m)
		r.Attach(job)
		synctest.Wait()
		r.Suspend(job, 1)
		r.Detach(job)
		r.Detach(job)
		synctest.Wait()
		time.Sleep(2 * time.Millisecond)
		r.Resume(job, 2) // unknown by now: it runs
		synctest.Wait()
		want := []scheduler.Event{
			scheduler.Suspended{Target: job, Seq: 1, Took: m.cost},
			scheduler.Resumed{Target: job, Seq: 2},
		}
		if diff := cmp.Diff(want, r.posted); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]string{"attach", "suspend", "close"}, m.calls); diff != "" {
			t.Error(diff)
		}
		r.Suspend(job, 3)
		synctest.Wait()
		if diff := cmp.Diff(scheduler.Suspended{Target: job, Seq: 3, Result: scheduler.OutcomeFailed}, r.posted[2]); diff != "" {
			t.Error(diff)
		}
		if err := r.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestCloseGivesUpOnAStuckMechanismButNotBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{cost: 9 * time.Second}
		r := newRig(m)
		r.Attach(job)
		synctest.Wait()
		r.Suspend(job, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		begin := time.Now()
		if err := r.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Close gave %v, want the deadline", err)
		}
		if waited := time.Since(begin); waited != 5*time.Second {
			t.Errorf("Close waited %v, want 5s", waited)
		}
		r.Attach(gpreempt.ProcessKey{PID: 2}) // closed: nothing attaches any more
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if len(r.attached) != 1 {
			t.Errorf("%d attaches, want 1", len(r.attached))
		}
	})
}

// What is suspended and cannot be released stays so: nobody may be told otherwise,
// and it is tried until it works.
func TestTargetThatCannotBeReleasedIsTriedAgainUntilItRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{stuck: 3}
		r := newRig(m)
		r.Attach(job)
		synctest.Wait()
		r.Suspend(job, 1)
		synctest.Wait()
		r.Detach(job)
		synctest.Wait()
		r.Resume(job, 2)
		r.Attach(job) // has to wait
		synctest.Wait()
		r.mu.Lock()
		if len(r.posted) != 1 {
			t.Errorf("posted %v before it was let go of", r.posted[1:])
		}
		r.mu.Unlock()
		time.Sleep(time.Second)
		synctest.Wait()
		r.Detach(job)
		synctest.Wait()
		r.Resume(job, 3)
		synctest.Wait()
		if err := r.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"attach", "suspend", "close", "close", "close", "close", "attach", "close"}, m.calls); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
		want := []scheduler.Event{
			scheduler.Suspended{Target: job, Seq: 1},
			scheduler.Resumed{Target: job, Seq: 2},
			scheduler.Resumed{Target: job, Seq: 3},
		}
		if diff := cmp.Diff(want, r.posted); diff != "" {
			t.Errorf("posted (-want +got):\n%s", diff)
		}
	})
}

func TestCloseGivesUpOnATargetThatCannotBeReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{stuck: 1 << 30}
		r := newRig(m)
		r.Attach(job)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("close gives %v", err)
		}
	})
}
