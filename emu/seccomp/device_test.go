package seccomp

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// clientVariable names the client that the test binary runs as.
const clientVariable = "SECCOMP_TEST_CLIENT"

// Clients run on the first thread of their process, which only init guarantees.
func init() {
	if os.Getenv(clientVariable) != "" {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if name := os.Getenv(clientVariable); name != "" {
		os.Exit(runClient(name, os.Args[1:]))
	}
	os.Exit(testutil.VerifyMain(m))
}

// The ioctls of the device the tests emulate. Their argument is a number.
const (
	ioctlType = 'X'

	nrEcho    = iota // returns the argument, and is counted
	nrWait           // blocks until the test releases it
	nrFile           // returns a descriptor of the device's file
	nrErrno          // fails with the argument
	nrSilence        // the handler does not answer it
	nrPass           // the kernel executes it
)

func request(nr uintptr) uintptr { return 1<<30 | 8<<16 | ioctlType<<8 | nr }

// device is the emulated device of the tests.
type device struct {
	t testing.TB
	// file is the file of nrFile.
	file int
	// arrived has the calls that wait. They end with a value from release, or when they
	// are interrupted; then interrupted gets a value.
	arrived     chan *Call
	release     chan int64
	interrupted chan error
	// onFile is called before a descriptor is returned.
	onFile func()

	mu    sync.Mutex
	echos map[uint64]int
	tids  map[int32]int
}

func newDevice(t testing.TB) *device {
	t.Helper()
	file, err := unix.MemfdCreate("device", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(file) })
	return &device{
		t: t, file: file,
		arrived: make(chan *Call, 64), release: make(chan int64), interrupted: make(chan error, 64),
		onFile: func() {},
		echos:  make(map[uint64]int), tids: make(map[int32]int),
	}
}

func isDevice(c *Call) bool {
	return c.NR == unix.SYS_IOCTL && byte(c.Args[1]>>8) == ioctlType
}

func (d *device) handle(c *Call) {
	if !isDevice(c) {
		d.check(c.Continue())
		return
	}
	d.mu.Lock()
	d.tids[c.TID]++
	d.mu.Unlock()
	switch byte(c.Args[1]) {
	case nrEcho:
		d.mu.Lock()
		d.echos[c.Args[2]]++
		d.mu.Unlock()
		d.check(c.Return(int64(c.Args[2]), 0))
	case nrWait:
		d.wait(c)
	case nrFile:
		d.onFile()
		if err := c.ReturnFD(d.file, c.Args[2] != 0); err != nil {
			d.check(c.Return(0, unix.EMFILE))
		}
	case nrErrno:
		d.check(c.Return(0, syscall.Errno(c.Args[2])))
	case nrSilence:
	case nrPass:
		d.check(c.Continue())
	}
}

func (d *device) wait(c *Call) {
	c.Wait()
	woken := make(chan struct{})
	c.Watch(func() { close(woken) })
	d.arrived <- c
	select {
	case v := <-d.release:
		d.check(c.Return(v, 0))
	case <-woken:
		d.interrupted <- c.Return(0, ERESTARTSYS)
	}
}

// check reports a failed answer. It ignores killed callers, which some tests kill.
func (d *device) check(err error) {
	if err != nil {
		d.t.Error(err)
	}
}

func (d *device) echoCounts() map[int]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	how := make(map[int]int)
	for _, n := range d.echos {
		how[n]++
	}
	return how
}

// needSupport skips the test if the machine lacks support.
func needSupport(t testing.TB) {
	t.Helper()
	if err := Supported(); err != nil {
		t.Skip(err)
	}
}

// call makes one of the device's calls on the calling thread.
func call(nr, arg uintptr) (uintptr, syscall.Errno) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, ^uintptr(0), request(nr), arg)
	return r, errno
}

// served has the functions of a listener.
type served interface {
	handle(c *Call)
}

// handler is one for calls that do not block.
type handler func(*Call)

func (h handler) handle(c *Call) { h(c) }

// inProcess runs f on a new thread with the device's filter, and returns when the listener
// has ended.
func inProcess(t testing.TB, d served, f func(l *Listener)) {
	t.Helper()
	needSupport(t)
	filter := Filter(ioctlType)
	var l *Listener
	OwnThread(func() {
		fd, err := Install(filter)
		if err != nil {
			t.Error(err)
			return
		}
		l = NewListener(fd, d.handle)
		f(l)
	})
	if l == nil {
		t.FailNow()
	}
	if err := l.Wait(); err != nil {
		t.Error(err)
	}
}

// program is a client with the device's filter.
type program struct {
	*exec.Cmd
	t        testing.TB
	listener *Listener
	out      func() string
}

// command returns a client that was not started yet.
func command(t testing.TB, client string, args ...string) *exec.Cmd {
	t.Helper()
	// Not the binary's path: other users may not be able to get there.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", args...)
	// The race detector makes a program sleep for a second before it ends.
	cmd.Env = append(os.Environ(), clientVariable+"="+client, "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	cmd.Stderr = os.Stderr
	return cmd
}

// launch starts a client that inherits the device's filter.
func launch(t testing.TB, d served, client string, args ...string) *program {
	t.Helper()
	return start(t, d, command(t, client, args...))
}

// start starts a command that inherits the device's filter.
func start(t testing.TB, d served, cmd *exec.Cmd) *program {
	t.Helper()
	needSupport(t)
	filter := Filter(ioctlType)
	p := &program{Cmd: cmd, t: t}
	p.out = output(p.Cmd)
	OwnThread(func() {
		fd, err := Install(filter)
		if err != nil {
			t.Error(err)
			return
		}
		p.listener = NewListener(fd, d.handle)
		if err := p.Start(); err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() { p.listener.Close() })
	return p
}

// output collects what a client prints.
func output(cmd *exec.Cmd) func() string {
	var out buffer
	cmd.Stdout = &out
	return out.String
}

// finish waits for the client and returns its output. The listener must have noticed that
// no thread has the filter.
func (p *program) finish() string {
	p.t.Helper()
	if err := p.Wait(); err != nil {
		p.t.Fatalf("%v, it printed %q", err, p.out())
	}
	if err := p.listener.Wait(); err != nil {
		p.t.Error(err)
	}
	return p.out()
}

// signal sends a signal to the thread that waits in a call.
func (p *program) signal(c *Call, sig syscall.Signal) {
	p.t.Helper()
	if err := unix.Tgkill(p.Process.Pid, int(c.TID), sig); err != nil {
		p.t.Fatal(fmt.Errorf("signal thread %d: %w", c.TID, err))
	}
}
