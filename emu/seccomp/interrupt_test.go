package seccomp

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// awaitState polls until a thread is in a state: the kernel does not notify of it.
func awaitState(t testing.TB, tid int32, state byte) {
	t.Helper()
	stat := openStat(tid)
	defer stat.close()
	for stat.state() != state {
		if t.Context().Err() != nil {
			t.Fatalf("thread %d is in state %c, not %c", tid, stat.state(), state)
		}
		runtime.Gosched()
	}
}

func TestSignalRestartsABlockedCall(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "wait", "restart")
	first := <-d.arrived
	p.signal(first, unix.SIGUSR1)
	if err := <-d.interrupted; err != nil {
		t.Error(err)
	}
	again := <-d.arrived
	if first.TID != again.TID || first.Args != again.Args || first.ID == again.ID {
		t.Errorf("call %d of thread %d with %x came again as %d of %d with %x",
			first.ID, first.TID, first.Args, again.ID, again.TID, again.Args)
	}
	d.release <- 7
	if got, want := p.finish(), "7 0\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestSignalEndsABlockedCallWithEINTR(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "wait", "eintr")
	p.signal(<-d.arrived, unix.SIGUSR1)
	if err := <-d.interrupted; err != nil {
		t.Error(err)
	}
	if got, want := p.finish(), fmt.Sprintf("-1 %d\n", int(unix.EINTR)); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A signal that is blocked or ignored interrupts nothing.
func TestIgnoredSignalDoesNotInterrupt(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "wait", "restart")
	c := <-d.arrived
	p.signal(c, unix.SIGWINCH) // Go ignores it
	p.signal(c, unix.SIGCONT)
	d.release <- 7
	if got, want := p.finish(), "7 0\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestBlockedCallerStopsAndContinues(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "wait", "restart")
	<-d.arrived
	if err := p.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var ws unix.WaitStatus
	if _, err := unix.Wait4(p.Process.Pid, &ws, unix.WUNTRACED, nil); err != nil || !ws.Stopped() {
		t.Fatalf("wait for the stop: %#x, %v", ws, err)
	}
	if err := <-d.interrupted; err != nil {
		t.Error(err)
	}
	if err := p.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	<-d.arrived
	d.release <- 7
	if got, want := p.finish(), "7 0\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A stop for a tracer is in no signal mask.
func TestBlockedCallerStopsForItsTracer(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "wait", "restart")
	tid := int((<-d.arrived).TID)
	OwnThread(func() {
		if err := unix.PtraceSeize(tid); err != nil {
			t.Errorf("seize thread %d: %v", tid, err)
			return
		}
		if err := unix.PtraceInterrupt(tid); err != nil {
			t.Error(err)
			return
		}
		var ws unix.WaitStatus
		if _, err := unix.Wait4(tid, &ws, unix.WALL, nil); err != nil || !ws.Stopped() {
			t.Errorf("wait for the stop: %#x, %v", ws, err)
			return
		}
		if err := <-d.interrupted; err != nil {
			t.Error(err)
		}
		if err := unix.PtraceDetach(tid); err != nil {
			t.Error(err)
		}
	})
	<-d.arrived
	d.release <- 7
	if got, want := p.finish(), "7 0\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestKilledCallerIsGone(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "wait", "restart")
	c := <-d.arrived
	if !c.Valid() || c.Interrupted() {
		t.Errorf("before: valid %t, interrupted %t, want true, false", c.Valid(), c.Interrupted())
	}
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-d.interrupted; !errors.Is(err, ErrGone) {
		t.Errorf("answer to a dead caller: %v, want %v", err, ErrGone)
	}
	if c.Valid() {
		t.Error("the call of a dead caller is valid")
	}
	_ = p.Wait()
	if err := p.listener.Wait(); err != nil {
		t.Error(err)
	}
}

// Another thread may have the number of a caller that was killed.
func TestReusedThreadIDIsNotTheDeadCaller(t *testing.T) {
	const last = "/proc/sys/kernel/ns_last_pid"
	if err := os.WriteFile(last, []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		t.Skipf("needs CAP_CHECKPOINT_RESTORE and a writable /proc/sys, to choose process ids: %v", err)
	}
	type seen struct{ valid, interrupted bool }
	d := newDevice(t)
	calls := make(chan *Call)
	next := make(chan struct{})
	result := make(chan seen)
	p := launch(t, blocking{func(c *Call) {
		if !isDevice(c) {
			d.check(c.Continue())
			return
		}
		calls <- c
		<-next
		result <- seen{c.Valid(), c.Interrupted()}
		if err := c.Return(1, 0); !errors.Is(err, ErrGone) {
			t.Errorf("answered another thread: %v", err)
		}
	}}, "wait", "restart")
	c := <-calls
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	// Other processes may get the number, or one before it: retry.
	reused := false
	for range 50 {
		if err := os.WriteFile(last, []byte(strconv.Itoa(int(c.TID)-1)), 0); err != nil {
			t.Fatal(err)
		}
		stranger := command(t, "stranger")
		in, err := stranger.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := stranger.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { in.Close(); _ = stranger.Wait() })
		if reused = openTask(c.TID); reused {
			break
		}
	}
	close(next)
	if got, want := <-result, (seen{valid: false, interrupted: true}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if !reused {
		t.Skipf("number %d went to nobody the test knows", c.TID)
	}
}

// openTask reports whether a thread has the number.
func openTask(tid int32) bool {
	stat := openStat(tid)
	defer stat.close()
	return stat.state() != 0
}

// blocking is a handler whose calls all block.
type blocking struct{ f func(*Call) }

func (b blocking) handle(c *Call) { b.f(c) }

// With many signals, no call is lost or executed twice, and no internal errno of the
// kernel reaches the program.
func TestSignalStorm(t *testing.T) {
	calls := 3000
	if testing.Short() {
		calls = 300
	}
	for _, mode := range []string{"restart", "eintr"} {
		t.Run(mode, func(t *testing.T) {
			d := newDevice(t)
			p := launch(t, d, "storm", mode, strconv.Itoa(calls), "echo")
			got := stormOf(t, p)
			t.Logf("%+v", got)
			if diff := cmp.Diff(map[int]int{1: calls}, d.echoCounts()); diff != "" {
				t.Errorf("how many calls were executed how often (-want +got):\n%s", diff)
			}
			// Before it is received a call may be interrupted; the handler decides
			// whether the program sees it.
			if mode == "restart" && got.Interrupted != 0 || got.Bad != 0 || got.Restart != 0 || got.Signals == 0 {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestSignalStormOnBlockedCalls(t *testing.T) {
	const calls = 100
	for _, mode := range []string{"restart", "eintr"} {
		t.Run(mode, func(t *testing.T) {
			d := newDevice(t)
			var mu sync.Mutex
			interrupted := 0
			// Each call waits for a signal three times. The fourth time the test's answer
			// races with the next signal.
			counted := make(map[uint64]int)
			p := launch(t, blocking{func(c *Call) {
				if !isDevice(c) {
					d.check(c.Continue())
					return
				}
				woken := make(chan struct{})
				c.Watch(func() { close(woken) })
				mu.Lock()
				counted[c.Args[2]]++
				last := counted[c.Args[2]] > 3
				if !last {
					interrupted++
				}
				mu.Unlock()
				if last {
					d.check(c.Return(0, 0))
					return
				}
				<-woken
				d.check(c.Return(0, ERESTARTSYS))
			}}, "storm", mode, strconv.Itoa(calls), "wait")
			got := stormOf(t, p)
			t.Logf("%+v, %d interrupted", got, interrupted)
			if got.Bad != 0 || got.Restart != 0 || mode == "restart" && got.Interrupted != 0 || mode == "eintr" && got.Interrupted < 3*calls {
				t.Errorf("got %+v", got)
			}
			if interrupted != 3*calls {
				t.Errorf("%d calls were interrupted, want %d", interrupted, 3*calls)
			}
		})
	}
}

func stormOf(t *testing.T, p *program) stormResult {
	t.Helper()
	var got stormResult
	if err := json.Unmarshal([]byte(p.finish()), &got); err != nil {
		t.Fatal(err)
	}
	return got
}

// A signal of Go's runtime before the answer wakes it rightly, so one attempt of several decides.
func TestAnsweredCallIsNotWoken(t *testing.T) {
	for range 20 {
		woken := make(chan struct{}, 1)
		inProcess(t, handler(func(c *Call) {
			c.Watch(func() { woken <- struct{}{} })
			_ = c.Return(0, 0)
		}), func(*Listener) { call(nrEcho, 1) }) // the listener ends when no call is watched
		if len(woken) == 0 {
			return
		}
	}
	t.Error("woken after the answer, in 20 of 20 attempts")
}

func TestStateIsFoundBehindAnyName(t *testing.T) {
	for line, want := range map[string]byte{
		"12 (bash) S 1 12":          'S',
		"12 (a) D (b) R 1":          'R',
		"12 (x) y)) D 4":            'D',
		"12 (cut off":               0,
		"12 (cut off)":              0,
		"12 (cut off) ":             0,
		"":                          0,
		"12 (kworker/u4:1-ev) I 2 ": 'I',
	} {
		if got := stateOf([]byte(line)); got != want {
			t.Errorf("state of %q: got %q, want %q", line, got, want)
		}
	}
}
