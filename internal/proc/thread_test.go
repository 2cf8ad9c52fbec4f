package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Programs that start each other end after a while, and none of them starts the tests.
func TestRolesDoNotMultiply(t *testing.T) {
	for _, tc := range []struct {
		args       []string
		generation int
	}{
		{nil, 1},
		{[]string{roleTarget}, 0},
		{[]string{roleTarget}, maxGeneration + 1},
	} {
		cmd, in, out := command(t, roleTarget)
		in.Close()
		cmd.Args = append(cmd.Args[:1], tc.args...)
		cmd.Env = append(cmd.Env, fmt.Sprint(generationEnv, "=", tc.generation))
		begin(t, cmd)
		if got := out.next(t); !strings.HasPrefix(got, "refused") {
			t.Errorf("%q in generation %d: it says %q", tc.args, tc.generation, got)
		}
		_ = cmd.Wait() // its error is the exit code
		if got := cmd.ProcessState.ExitCode(); got != 2 {
			t.Errorf("%q in generation %d: exit code %d, want 2", tc.args, tc.generation, got)
		}
	}
}

// threadID returns the OS thread closures run on.
func threadID(tb testing.TB, thread *Tracer) int32 {
	tb.Helper()
	var tid int
	if err := thread.Do(tb.Context(), func() error { tid = unix.Gettid(); return nil }); err != nil {
		tb.Fatal(err)
	}
	return int32(tid)
}

func TestClosuresRunOnTheThreadThatTraces(t *testing.T) {
	x := startTarget(t)
	thread := x.attach()
	defer detach(t, thread)
	want := x.tracer()
	if want == 0 || want == int32(os.Getpid()) {
		t.Fatalf("the target is traced by thread %d of process %d", want, os.Getpid())
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 50 {
				// Each has its own answer.
				answer := errors.New("the answer")
				if err := thread.Do(t.Context(), func() error {
					if got := unix.Gettid(); got != int(want) {
						return fmt.Errorf("runs on thread %d, want %d", got, want)
					}
					return answer
				}); err != answer { //nolint:errorlint // that very one
					t.Errorf("got %v, want %v", err, answer)
				}
			}
		})
	}
	callers.Wait()
}

func TestOnlyTheMainThreadIsTraced(t *testing.T) {
	x := startTarget(t)
	defer detach(t, x.attach())
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", x.pid))
	if err != nil {
		t.Fatal(err)
	}
	others := 0
	for _, path := range paths {
		status, err := Status("/", strings.TrimPrefix(path, "/proc/"))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the thread has ended
		}
		if err != nil {
			t.Fatal(err)
		}
		main := strings.HasSuffix(path, "/task/"+strconv.Itoa(int(x.pid)))
		if (status.Tracer != 0) != main {
			t.Errorf("%s: traced by %d", path, status.Tracer)
		}
		if !main {
			others++
		}
	}
	if others == 0 {
		t.Error("the target has no other thread")
	}
}

func TestTwoTargetsAtOnce(t *testing.T) {
	a, b := startTarget(t), startTarget(t)
	threadA, threadB := a.attach(), b.attach()
	defer detach(t, threadB)
	if threadID(t, threadA) == threadID(t, threadB) {
		t.Error("they share a thread")
	}
	// A closure for one target does not delay the signals of the other.
	err := threadA.Do(t.Context(), func() error {
		b.ask("catch %d", unix.SIGUSR1)
		b.signal(unix.SIGUSR1)
		b.out.next(t)
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	a.signal(unix.SIGKILL)
	await(t, threadA)
	if got := []string{a.events.next(t), b.ask("ping")}; !cmp.Equal(got, []string{"killed 9", "pong"}) {
		t.Errorf("after the end of one: %q", got)
	}
	if threadB.Gone() {
		t.Error("both are gone")
	}
}

func TestDetachedProgramIsNoLongerTraced(t *testing.T) {
	x := startTarget(t)
	for range 200 {
		thread := x.attach()
		detach(t, thread)
		detach(t, thread) // returns nil again
		if tracer := x.tracer(); tracer != 0 {
			t.Fatalf("detached, and traced by %d", tracer)
		}
		if err := thread.Do(t.Context(), func() error { return nil }); !errors.Is(err, ErrDetached) {
			t.Fatalf("Do after Detach: %v, want ErrDetached", err)
		}
		if thread.Gone() {
			t.Fatal("the target counts as gone")
		}
	}
	if got := x.ask("ping"); got != "pong" {
		t.Errorf("the target says %q", got)
	}
}

func TestDetachDeliversAPendingSignal(t *testing.T) {
	x := startTarget(t)
	x.ask("catch %d", unix.SIGUSR1)
	thread := x.attach()
	err := thread.Do(t.Context(), func() error {
		x.signal(unix.SIGUSR1) // it waits for the closure to end
		thread.once.Do(func() { close(thread.detach) })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	detach(t, thread)
	if got := x.out.next(t); got != "caught 10" {
		t.Errorf("the target says %q", got)
	}
}

func TestDetachDoesNotWaitForTheTarget(t *testing.T) {
	x := startTarget(t)
	thread := x.attach()
	if got := x.ask("sleep-in-kernel"); got != "asleep" {
		t.Fatalf("the target says %q", got)
	}
	detach(t, thread)
	if tracer := x.tracer(); tracer != 0 {
		t.Errorf("detached, and traced by %d", tracer)
	}
	if thread.Gone() {
		t.Error("the target counts as gone")
	}
	x.tell("wake up")
	if got := x.out.next(t); got != "slept" {
		t.Errorf("the target says %q", got)
	}
}

func TestOwnChildIsLeftForWait(t *testing.T) {
	requirePtrace(t)
	cmd, in, out := command(t, roleTarget)
	begin(t, cmd)
	if got := out.next(t); got != "ready" {
		t.Fatalf("the target says %q", got)
	}
	pid := int32(cmd.Process.Pid)
	thread, err := Trace(t.Context(), pid, startOf(t, pid))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, "exit 7\n"); err != nil {
		t.Fatal(err)
	}
	await(t, thread)
	if !thread.Gone() {
		t.Error("the target is not gone")
	}
	_ = cmd.Wait() // its error is the exit code
	if got := cmd.ProcessState.ExitCode(); got != 7 {
		t.Errorf("exit code %d, want 7", got)
	}
}

func TestEndedTargetIsLeftToItsParent(t *testing.T) {
	for range 5 {
		x := startTarget(t)
		thread := x.attach()
		x.tell("exit 7")
		<-thread.Done()
		if status, err := Status("/", strconv.Itoa(int(x.pid))); err == nil && status.Tracer != 0 {
			t.Errorf("it still waits for thread %d", status.Tracer)
		}
		if got := x.events.next(t); got != "exited 7" {
			t.Errorf("the parent sees %q", got)
		}
		if err := thread.Do(t.Context(), func() error { return nil }); !errors.Is(err, ErrGone) {
			t.Errorf("Do: %v, want ErrGone", err)
		}
	}
}

func TestPanicBecomesAnErrorAndTheThreadContinues(t *testing.T) {
	x := startTarget(t)
	thread := x.attach()
	defer detach(t, thread)
	err := thread.Do(t.Context(), func() error { panic("a test panics") })
	if err == nil || !strings.Contains(err.Error(), "a test panics") || !strings.Contains(err.Error(), "thread_test.go") {
		t.Errorf("the error lacks the message or the stack: %v", err)
	}
	if got, want := threadID(t, thread), x.tracer(); got != want {
		t.Errorf("closures run on thread %d, and %d traces", got, want)
	}
}

func TestTargetContinuesWhenTheThreadEnds(t *testing.T) {
	x := startTarget(t)
	x.ask("catch %d", unix.SIGUSR1)
	thread := x.attach()
	err := thread.Do(t.Context(), func() error { runtime.Goexit(); return nil })
	if err == nil || !strings.Contains(err.Error(), "Goexit") {
		t.Errorf("the error is %v", err)
	}
	await(t, thread)
	if err := thread.Do(t.Context(), func() error { return nil }); !errors.Is(err, ErrDetached) {
		t.Errorf("Do: %v, want ErrDetached", err)
	}
	x.signal(unix.SIGUSR1)
	if got := x.out.next(t); got != "caught 10" {
		t.Errorf("the target says %q", got)
	}
}

// noticed is a context that closes waiting when its Done is called first.
type noticed struct {
	context.Context
	once    sync.Once
	waiting chan struct{}
}

func (c *noticed) Done() <-chan struct{} {
	c.once.Do(func() { close(c.waiting) })
	return c.Context.Done()
}

func TestClosureDoesNotBeginAfterItsContextEnds(t *testing.T) {
	x := startTarget(t)
	thread := x.attach()
	defer detach(t, thread)
	began, release := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	go func() {
		first <- thread.Do(t.Context(), func() error { close(began); <-release; return nil })
	}()
	<-began
	inner, cancel := context.WithCancelCause(t.Context())
	ctx := &noticed{Context: inner, waiting: make(chan struct{})}
	late := errors.New("too late")
	second := make(chan error, 1)
	go func() { second <- thread.Do(ctx, func() error { t.Error("it ran"); return nil }) }()
	<-ctx.waiting
	cancel(late)
	if err := <-second; !errors.Is(err, late) {
		t.Errorf("Do: %v, want the cause", err)
	}
	close(release)
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := thread.Do(ctx, func() error { t.Error("it ran"); return nil }); !errors.Is(err, late) {
		t.Errorf("Do: %v, want the cause", err)
	}
}

func TestAttachWithAnEndedContextTracesNothing(t *testing.T) {
	x := startTarget(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Trace(ctx, x.pid, x.start); !errors.Is(err, context.Canceled) {
		t.Errorf("Attach: %v, want context.Canceled", err)
	}
	if tracer := x.tracer(); tracer != 0 {
		t.Errorf("traced by %d", tracer)
	}
}

func TestAttachThatTheCallerAbandonedDetaches(t *testing.T) {
	x := startTarget(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	thread := &Tracer{target: gpreempt.ProcessKey{PID: x.pid, Start: x.start}}
	onNewThread(func() { thread.run(ctx, make(chan error)) })
	if tracer := x.tracer(); tracer != 0 {
		t.Errorf("traced by %d", tracer)
	}
}

func TestAttachLeavesAnotherProcessWithThePIDAlone(t *testing.T) {
	x := startTarget(t)
	for range 50 {
		if _, err := Trace(t.Context(), x.pid, x.start+1); !errors.Is(err, ErrGone) {
			t.Fatalf("Attach: %v, want ErrGone", err)
		}
		if tracer := x.tracer(); tracer != 0 {
			t.Fatalf("traced by %d", tracer)
		}
	}
}

func TestAttachToAnEndedProcessReturnsErrGone(t *testing.T) {
	requirePtrace(t)
	cmd, in, out := command(t, roleTarget)
	begin(t, cmd)
	out.next(t)
	pid := int32(cmd.Process.Pid)
	start := startOf(t, pid)
	in.Close()
	// Wait for the end without reaping: it stays a zombie.
	var info childInfo
	for errors.Is(waitForExit(pid, &info), unix.EINTR) {
		continue
	}
	if _, err := Trace(t.Context(), pid, start); !errors.Is(err, ErrGone) {
		t.Errorf("Trace to a zombie: %v, want ErrGone", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := Trace(t.Context(), pid, start); !errors.Is(err, ErrGone) {
		t.Errorf("Trace after the reaping: %v, want ErrGone", err)
	}
}

// startTracer starts a second tracing program, which says how its Trace went.
func startTracer(t *testing.T, how string, x *target) (process *os.Process, wait func() error, said string, in *os.File) {
	t.Helper()
	cmd, in, out := command(t, roleTracer)
	begin(t, cmd)
	if _, err := fmt.Fprintln(in, how, x.pid, x.start); err != nil {
		t.Fatal(err)
	}
	return cmd.Process, cmd.Wait, out.next(t), in
}

func TestErrorOfTheSecondTracerNamesTheFirst(t *testing.T) {
	x := startTarget(t)
	first, wait, said, in := startTracer(t, "plain", x)
	if said != "attached" {
		t.Fatalf("the first tracer says %q", said)
	}
	_, err := Trace(t.Context(), x.pid, x.start)
	denied, ok := errors.AsType[*DeniedError](err)
	if !ok || !errors.Is(err, unix.EPERM) {
		t.Fatalf("Attach: %v, want a DeniedError", err)
	}
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", first.Pid))
	if err != nil {
		t.Fatal(err)
	}
	want := &DeniedError{
		PID: x.pid, Tracer: int32(first.Pid),
		Why:  fmt.Sprintf("process %d (%s) traces it", first.Pid, strings.TrimSpace(string(comm))),
		Next: "end that debugger or tracer; a process has one at a time",
	}
	if diff := cmp.Diff(want, denied); diff != "" {
		t.Errorf("the refusal (-want +got):\n%s", diff)
	}
	in.Close()
	if err := wait(); err != nil {
		t.Errorf("the first tracer: %v", err)
	}
	detach(t, x.attach())
}

func TestTargetContinuesWhenTheTracingProgramIsKilled(t *testing.T) {
	x := startTarget(t)
	x.ask("catch %d", unix.SIGUSR1)
	tracer, wait, said, _ := startTracer(t, "plain", x)
	if said != "attached" {
		t.Fatalf("the tracer says %q", said)
	}
	if err := tracer.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = wait() // its error is that it was killed
	if got := x.tracer(); got != 0 {
		t.Errorf("still traced, by %d", got)
	}
	x.signal(unix.SIGUSR1)
	if got := x.out.next(t); got != "caught 10" {
		t.Errorf("the target says %q", got)
	}
}

func TestErrorNamesTheMissingCapability(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to drop its rights")
	}
	x := startTarget(t)
	_, wait, said, in := startTracer(t, "nobody", x)
	in.Close()
	if err := wait(); err != nil {
		t.Error(err)
	}
	if want := explain(x.pid, discovery.ProcStat{}, discovery.ProcStatus{}).Error(); said != want {
		t.Errorf("the tracer says %q\nwant %q", said, want)
	}
}

// The main thread never exits, and what it traces stays traced.
func TestMainThreadDoesNotTrace(t *testing.T) {
	x := startTarget(t)
	for range 5 {
		_, wait, said, in := startTracer(t, "one", x)
		in.Close()
		if err := wait(); err != nil {
			t.Error(err)
		}
		if said != "attached" {
			t.Errorf("the tracer says %q", said)
		}
	}
}
