package seccomp

import (
	"errors"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

func TestCallsAreAnswered(t *testing.T) {
	d := newDevice(t)
	inProcess(t, d, func(*Listener) {
		if r, errno := call(nrEcho, 42); r != 42 || errno != 0 {
			t.Errorf("echo: %d, %v", r, errno)
		}
		for _, want := range []syscall.Errno{unix.EPERM, unix.EINVAL, unix.EHWPOISON} {
			if _, errno := call(nrErrno, uintptr(want)); errno != want {
				t.Errorf("got errno %d, want %d", int(errno), int(want))
			}
		}
		if _, errno := call(nrPass, 0); errno != unix.EBADF {
			t.Errorf("continued: %v, want the kernel's EBADF", errno)
		}
		if _, errno := call(nrSilence, 0); errno != unix.ENOSYS {
			t.Errorf("no answer: %v, want ENOSYS", errno)
		}
	})
	if diff := cmp.Diff(map[int]int{1: 1}, d.echoCounts()); diff != "" {
		t.Errorf("how many calls were seen how often (-want +got):\n%s", diff)
	}
}

func TestCallsHaveCallerNumberAndArguments(t *testing.T) {
	type what struct {
		TID  int32
		NR   int
		Args [3]uint64
	}
	var got what
	var want what
	inProcess(t, handler(func(c *Call) {
		got = what{c.TID, c.NR, [3]uint64(c.Args[:3])}
		_ = c.Return(0, 0)
	}), func(*Listener) {
		call(nrEcho, 0xfedcba9876543210)
		want = what{int32(unix.Gettid()), unix.SYS_IOCTL, [3]uint64{1<<64 - 1, uint64(request(nrEcho)), 0xfedcba9876543210}}
	})
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestOtherThreadsAreNotFiltered(t *testing.T) {
	d := newDevice(t)
	inProcess(t, d, func(*Listener) {
		const threads = 20
		results := make(chan syscall.Errno)
		hold := make(chan struct{})
		for range threads {
			go func() {
				runtime.LockOSThread() // all at once, so there must be as many threads
				defer runtime.UnlockOSThread()
				_, errno := call(nrEcho, 1)
				results <- errno
				<-hold
			}()
		}
		for range threads {
			if errno := <-results; errno != unix.EBADF {
				t.Errorf("got %v on another thread, want the kernel's EBADF", errno)
			}
		}
		close(hold)
	})
}

func TestInvalidAnswersAreRejected(t *testing.T) {
	var got []error
	inProcess(t, handler(func(c *Call) {
		for _, errno := range []syscall.Errno{ERESTARTSYS, 513, 514, 516, 4096} {
			got = append(got, c.Return(0, errno))
		}
		got = append(got, c.Return(7, 0), c.Return(8, 0), c.Continue())
		_, err := c.AddFD(0, true)
		got = append(got, err)
	}), func(*Listener) {
		if r, errno := call(nrEcho, 1); r != 7 || errno != 0 {
			t.Errorf("got %d, %v, want the first answer that was none of the kernel's own", r, errno)
		}
	})
	want := []error{
		ErrNotInterrupted, cmpopts.AnyError, cmpopts.AnyError, cmpopts.AnyError, cmpopts.AnyError,
		nil, ErrAnswered, ErrAnswered, ErrAnswered,
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateErrors()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCallIsValidUntilItIsAnswered(t *testing.T) {
	var got []bool
	inProcess(t, handler(func(c *Call) {
		got = append(got, c.Valid(), c.Interrupted())
		_ = c.Return(0, 0)
		got = append(got, c.Valid())
	}), func(*Listener) { call(nrEcho, 1) })
	if diff := cmp.Diff([]bool{true, false, false}, got); diff != "" {
		t.Errorf("valid before, interrupted, valid after (-want +got):\n%s", diff)
	}
}

func TestDescriptorsAreReturned(t *testing.T) {
	d := newDevice(t)
	var want unix.Stat_t
	if err := unix.Fstat(d.file, &want); err != nil {
		t.Fatal(err)
	}
	inProcess(t, d, func(*Listener) {
		for _, cloexec := range []uintptr{0, 1} {
			r, errno := call(nrFile, cloexec)
			if errno != 0 {
				t.Error(errno)
				return
			}
			var got unix.Stat_t
			if err := unix.Fstat(int(r), &got); err != nil {
				t.Error(err)
			}
			if got.Dev != want.Dev || got.Ino != want.Ino {
				t.Errorf("descriptor %d is of file %d on %d, want %d on %d", r, got.Ino, got.Dev, want.Ino, want.Dev)
			}
			flags, err := unix.FcntlInt(r, unix.F_GETFD, 0)
			if err != nil || uintptr(flags) != cloexec*unix.FD_CLOEXEC {
				t.Errorf("descriptor flags %#x, %v, want close-on-exec %d", flags, err, cloexec)
			}
			unix.Close(int(r))
		}
	})
}

func TestFullDescriptorTableIsAnErrorAndTheCallStillWaits(t *testing.T) {
	d := newDevice(t)
	p := launch(t, d, "full")
	if got, want := p.finish(), "EMFILE\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestAddedDescriptorLeavesTheCallWaiting(t *testing.T) {
	d := newDevice(t)
	added := make(chan int, 1)
	var interrupted bool
	inProcess(t, handler(func(c *Call) {
		if !isDevice(c) {
			_ = c.Continue()
			return
		}
		n, err := c.AddFD(d.file, true)
		if err != nil {
			t.Error(err)
		}
		added <- n
		// The caller now sleeps killably, but not because of a signal.
		awaitState(t, c.TID, 'D')
		interrupted = c.Interrupted()
		if err := c.Return(0, ERESTARTSYS); !errors.Is(err, ErrNotInterrupted) {
			t.Errorf("ERESTARTSYS after AddFD: %v, want %v", err, ErrNotInterrupted)
		}
		_ = c.Return(-1, 0)
	}), func(*Listener) {
		if r, _ := call(nrEcho, 1); int(r) != -1 {
			t.Errorf("got %d, want -1", int(r))
		}
		if err := unix.Close(<-added); err != nil {
			t.Error(err)
		}
	})
	if interrupted {
		t.Error("the call counts as interrupted because a descriptor was added")
	}
}

// The kernel waits until the caller has the descriptor, and signals to the supervisor end
// that wait.
func TestSignalsToTheSupervisorLoseNoDescriptor(t *testing.T) {
	d := newDevice(t)
	// One file for each call: a descriptor that was closed again would be noticed.
	var handler atomic.Int32
	d.onFile = func() { handler.Store(int32(unix.Gettid())) }
	stop := make(chan struct{})
	stopped := make(chan int)
	go func() {
		sent := 0
		for {
			select {
			case <-stop:
				stopped <- sent
				return
			default:
				if tid := handler.Load(); tid != 0 && unix.Tgkill(os.Getpid(), int(tid), unix.SIGURG) == nil {
					sent++
				}
			}
		}
	}()
	var want unix.Stat_t
	if err := unix.Fstat(d.file, &want); err != nil {
		t.Fatal(err)
	}
	inProcess(t, d, func(*Listener) {
		for i := range 3000 {
			r, errno := call(nrFile, 1)
			var got unix.Stat_t
			if errno == 0 {
				_ = unix.Fstat(int(r), &got)
			}
			if errno != 0 || got.Ino != want.Ino || got.Dev != want.Dev {
				t.Errorf("call %d: descriptor %d, %v: not the device's file", i, int(r), errno)
				return
			}
			unix.Close(int(r))
		}
	})
	close(stop)
	if <-stopped == 0 {
		t.Error("no signal reached the supervisor")
	}
}

// The supervisor answers when a program opens a file for reading and writing.
func TestDeviceIsOpened(t *testing.T) {
	const path = "/dev/emulated"
	d := newDevice(t)
	mem, err := os.Open("/proc/self/mem")
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	asked := make(chan string, 2)
	inProcess(t, handler(func(c *Call) {
		if c.NR != unix.SYS_OPENAT {
			d.check(c.Continue())
			return
		}
		name := make([]byte, len(path)+1)
		if _, err := mem.ReadAt(name, int64(c.Args[1])); err != nil {
			t.Error(err)
		}
		asked <- string(name)
		d.check(c.ReturnFD(d.file, c.Args[2]&unix.O_CLOEXEC != 0))
	}), func(*Listener) {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		unix.Close(fd)
		if _, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0); !errors.Is(err, unix.ENOENT) {
			t.Errorf("opened for reading: %v, want the kernel's ENOENT", err)
		}
	})
	close(asked)
	var got []string
	for name := range asked {
		got = append(got, name)
	}
	if diff := cmp.Diff([]string{path + "\x00"}, got); diff != "" {
		t.Errorf("opens handed over (-want +got):\n%s", diff)
	}
}
