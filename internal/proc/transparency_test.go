package proc

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// countedSignal is a realtime signal: sent 10 times it comes 10 times.
const countedSignal = unix.Signal(40)

// script acts on a target and returns what the target, its parent and the test saw.
type script struct {
	name string
	run  func(x *target) []string
	// orphaned: the target's process group has no parent that could continue it.
	orphaned bool
	// ends: the target is dead afterwards.
	ends bool
	// loses: the trace may end although the target is alive: so does KFD's view of it.
	loses bool
}

var scripts = []script{
	{
		name: "thousands of queued signals",
		run: func(x *target) []string {
			x.count(countedSignal)
			for i := range int32(3000) {
				x.queue(countedSignal, i)
			}
			return []string{fmt.Sprint(x.counted(countedSignal))}
		},
	},
	{
		name: "a program that raises signals in a loop",
		run: func(x *target) []string {
			x.count(countedSignal)
			return []string{x.ask("raise 1000"), fmt.Sprint(x.counted(countedSignal))}
		},
	},
	{
		name: "signals one after another",
		run: func(x *target) []string {
			seen := []string{x.ask("catch %d", unix.SIGUSR1)}
			for range 200 {
				x.signal(unix.SIGUSR1)
				seen = append(seen, x.out.next(x.tb))
			}
			return seen
		},
	},
	{
		name: "ignored signals",
		run: func(x *target) []string {
			for range 100 {
				x.signal(unix.SIGWINCH)
			}
			return []string{x.ask("ping")}
		},
	},
	{
		name: "stop and continue",
		run: func(x *target) []string {
			var seen []string
			for _, stop := range []unix.Signal{unix.SIGSTOP, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU, unix.SIGSTOP} {
				x.signal(stop)
				seen = append(seen, x.events.next(x.tb))
				x.tell("ping")
				seen = append(seen, x.stateWhileStopped())
				x.signal(unix.SIGCONT)
				seen = append(seen, x.events.next(x.tb), x.out.next(x.tb))
			}
			return seen
		},
	},
	{
		name: "a program that stops itself",
		run: func(x *target) []string {
			var seen []string
			for range 5 {
				x.tell("stop")
				seen = append(seen, x.events.next(x.tb), x.stateWhileStopped())
				x.signal(unix.SIGCONT)
				seen = append(seen, x.events.next(x.tb), x.out.next(x.tb))
			}
			return seen
		},
	},
	{
		name:     "stop signals to an orphaned process group",
		orphaned: true,
		run: func(x *target) []string {
			var seen []string
			for _, stop := range []unix.Signal{unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU} {
				x.signal(stop)
				seen = append(seen, x.ask("ping"))
			}
			x.signal(unix.SIGSTOP)
			seen = append(seen, x.events.next(x.tb))
			x.signal(unix.SIGCONT)
			return append(seen, x.events.next(x.tb), x.ask("ping"))
		},
	},
	{
		name: "killed while stopped",
		run: func(x *target) []string {
			x.signal(unix.SIGSTOP)
			seen := []string{x.events.next(x.tb)}
			x.signal(unix.SIGKILL)
			return append(seen, x.events.next(x.tb))
		},
		ends: true,
	},
	{
		name: "killed while many signals are pending",
		run: func(x *target) []string {
			x.count(countedSignal)
			for range 500 {
				x.queue(countedSignal, 1)
			}
			x.signal(unix.SIGKILL)
			return []string{x.events.next(x.tb)}
		},
		ends: true,
	},
	{
		name: "terminated by a signal it does not catch",
		run: func(x *target) []string {
			x.signal(unix.SIGTERM)
			return []string{x.events.next(x.tb)}
		},
		ends: true,
	},
	{
		name: "exits with a code",
		run: func(x *target) []string {
			x.tell("exit 7")
			return []string{x.events.next(x.tb)}
		},
		ends: true,
	},
	{
		name: "exits after its main thread",
		run: func(x *target) []string {
			seen := []string{x.ask("end-main-thread"), x.ask("ping")}
			x.tell("exit 7")
			return append(seen, x.events.next(x.tb))
		},
		ends: true,
	},
	{
		name: "execve by the main thread",
		run: func(x *target) []string {
			var seen []string
			for range 5 {
				seen = append(seen, x.ask("exec"), x.ask("ping"))
			}
			return seen
		},
	},
	{
		name: "execve by another thread",
		run: func(x *target) []string {
			return []string{x.ask("exec-in-thread"), x.ask("ping")}
		},
		loses: true,
	},
	{
		name: "fork",
		run: func(x *target) []string {
			return []string{x.ask("fork"), x.ask("ping")}
		},
	},
}

func TestTracedProgramBehavesAsIfAlone(t *testing.T) {
	for _, s := range scripts {
		t.Run(s.name, func(t *testing.T) {
			parent := roleParent
			if s.orphaned {
				parent = roleOrphaner
			}
			alone := s.run(startTargetUnder(t, parent))

			t.Run("traced", func(t *testing.T) {
				x := startTargetUnder(t, parent)
				thread := x.attach()
				defer detach(t, thread)
				if diff := cmp.Diff(alone, s.run(x)); diff != "" {
					t.Errorf("what is seen changes with tracing (-alone +traced):\n%s", diff)
				}
				if s.ends || s.loses {
					await(t, thread)
				}
				select {
				case <-thread.Done():
					if !s.ends && !s.loses {
						t.Error("the trace has ended")
					}
				default:
				}
				if thread.Gone() != s.ends {
					t.Errorf("Gone is %v, want %v", thread.Gone(), s.ends)
				}
			})

			t.Run("attached to and detached from again and again", func(t *testing.T) {
				x := startTargetUnder(t, parent)
				ctx, stop := context.WithCancel(t.Context())
				attached, ended := make(chan struct{}), make(chan error, 1)
				go func() { ended <- attachAgainAndAgain(ctx, x, attached) }()
				<-attached
				seen := s.run(x)
				stop()
				if err := <-ended; err != nil {
					t.Error(err)
				}
				if diff := cmp.Diff(alone, seen); diff != "" {
					t.Errorf("what is seen changes with attaching and detaching (-alone +traced):\n%s", diff)
				}
			})
		})
	}
}

// stateWhileStopped reads the state of the main thread of a stopped program, often
// enough to find it waiting for input if it is not stopped.
func (x *target) stateWhileStopped() string {
	for range 300 {
		if statOf(x.tb, gpreempt.ProcessKey{PID: x.pid, Start: x.start}).State == 'S' {
			return "continues although it is stopped"
		}
	}
	return "stays stopped"
}

// attachAgainAndAgain attaches to the target and detaches until ctx or the target ends.
// It closes once after the first time.
func attachAgainAndAgain(ctx context.Context, x *target, once chan<- struct{}) error {
	background := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		thread, err := Trace(background, x.pid, x.start)
		if denied, ok := errors.AsType[*DeniedError](err); ok && denied.Tracer == 0 {
			err = ErrGone // no longer a main thread to trace
		}
		if err == nil {
			err = thread.Detach(background)
		}
		if once != nil {
			close(once)
			once = nil
		}
		if errors.Is(err, ErrGone) {
			return nil
		}
		if err != nil {
			return err
		}
		runtime.Gosched()
	}
	return nil
}

func TestStoppedProgramStaysStopped(t *testing.T) {
	x := startTarget(t)
	x.signal(unix.SIGSTOP)
	seen := []string{x.events.next(t)}
	for range 20 {
		detach(t, x.attach())
	}
	x.tell("ping")
	x.signal(unix.SIGCONT)
	seen = append(seen, x.events.next(t), x.out.next(t))
	x.signal(unix.SIGKILL)
	seen = append(seen, x.events.next(t))
	if diff := cmp.Diff([]string{"stopped 19", "continued", "pong", "killed 9"}, seen); diff != "" {
		t.Errorf("what the parent sees (-want +got):\n%s", diff)
	}
}
