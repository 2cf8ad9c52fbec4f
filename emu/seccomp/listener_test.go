package seccomp

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestChildrenAndTheirProgramsAreServed(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "spawn", "3", "4")
	if got, want := p.finish(), "3 0\n4 0\n3 0\n4 0\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if diff := cmp.Diff(map[int]int{2: 2}, d.echoCounts()); diff != "" {
		t.Errorf("how many calls were seen how often (-want +got):\n%s", diff)
	}
	if len(d.tids) != 2 {
		t.Errorf("calls came from %v, want two threads", d.tids)
	}
}

// A thread that executes a program ends the calls of the others.
func TestExecEndsTheCallsOfOtherThreads(t *testing.T) {
	d := newDevice(t)
	cmd := command(t, "replaced", "8")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, d, cmd)
	<-d.arrived
	if _, err := io.WriteString(in, "x"); err != nil {
		t.Fatal(err)
	}
	if err := <-d.interrupted; !errors.Is(err, ErrGone) {
		t.Errorf("answer: %v, want %v", err, ErrGone)
	}
	if got, want := p.finish(), "8 0\n"; got != want {
		t.Errorf("the new program printed %q, want %q", got, want)
	}
}

func TestCallsFailWithENOSYSOnceTheListenerIsClosed(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "twice")
	c := <-d.arrived
	if err := p.listener.Close(); err != nil {
		t.Error(err)
	}
	if err := <-d.interrupted; !errors.Is(err, ErrNotInterrupted) {
		t.Errorf("ERESTARTSYS for a caller with nothing pending: %v, want %v", err, ErrNotInterrupted)
	}
	if c.Valid() || !c.Interrupted() {
		t.Errorf("valid %t, interrupted %t, want false, true", c.Valid(), c.Interrupted())
	}
	if got, want := p.finish(), fmt.Sprintf("%d %d\n", int(unix.ENOSYS), int(unix.ENOSYS)); got != want {
		t.Errorf("errnos %q, want ENOSYS twice, %q", got, want)
	}
	if err := p.listener.Close(); err != nil {
		t.Errorf("closed again: %v", err)
	}
}

func TestThreadWithAListenerGetsNoSecond(t *testing.T) {
	d := newDevice(t)
	inProcess(t, d, func(*Listener) {
		if _, err := Install(Filter(ioctlType)); !errors.Is(err, ErrAlready) {
			t.Errorf("got %v, want %v", err, ErrAlready)
		}
		if r, errno := call(nrEcho, 5); r != 5 || errno != 0 {
			t.Errorf("the first listener: %d, %v, want 5", r, errno)
		}
	})
}

// Blocking calls do not delay other calls.
func TestBlockedCallsDelayNoOther(t *testing.T) {
	d := newDevice(t)
	cmd := command(t, "pair")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, d, cmd)
	<-d.arrived
	if _, err := io.WriteString(in, "x"); err != nil {
		t.Fatal(err)
	}
	<-d.arrived // made after the result of an echo
	d.release <- 1
	d.release <- 1
	if got, want := p.finish(), "6 1 1\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A signal may end a call after the listener noticed it and before it is received.
func TestCallThatEndedBeforeItWasReceivedIsIgnored(t *testing.T) {
	needSupport(t)
	filter := Filter(ioctlType)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGUSR1)
	defer signal.Stop(signals)
	if err := setRestart(unix.SIGUSR1, false); err != nil {
		t.Fatal(err)
	}
	fd := -1
	OwnThread(func() {
		var err error
		if fd, err = Install(filter); err != nil {
			t.Error(err)
			return
		}
		tid := unix.Gettid()
		go func() {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			for fds[0].Revents&unix.POLLIN == 0 {
				_, _ = unix.Poll(fds, -1)
			}
			if err := unix.Tgkill(os.Getpid(), tid, unix.SIGUSR1); err != nil {
				t.Error(err)
			}
		}()
		if _, errno := call(nrEcho, 1); errno != unix.EINTR {
			t.Errorf("the call: %v, want EINTR", errno)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	d := newDevice(t)
	// The kernel still counts one call to receive.
	if _, err := (&Listener{fd: fd, handle: d.handle}).next(); err != nil {
		t.Error(err)
	}
	if err := NewListener(fd, d.handle).Wait(); err != nil {
		t.Error(err)
	}
	if got := d.echoCounts(); len(got) != 0 {
		t.Errorf("calls seen how often: %v, want none", got)
	}
}

func TestListenerOfAClosedDescriptorFails(t *testing.T) {
	l := NewListener(1<<20, func(*Call) {})
	if err := l.Wait(); err == nil {
		t.Error("no error")
	}
}
