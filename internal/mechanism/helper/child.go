package helper

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
)

// child is a helper as the daemon knows it.
type child struct {
	codec
	file *os.File
	// pid is the pid of the process; kill ends it, and returns at once.
	pid  int
	kill func()
	log  *zap.Logger

	// calls and took are what its device has counted so far.
	calls int64
	took  time.Duration

	results chan result
	// wait returns at the end of the process. ended is closed then: the kernel has released its
	// memory, and with it what it held, before it closed the socket, and its traces after that
	// (do_exit).
	wait  func()
	ended chan struct{}
	// attached: it was asked to attach to something.
	attached atomic.Bool
	// session is the one that events are for, nil for none.
	session atomic.Pointer[session]
}

// listen takes the messages of the helper, until it ends.
func (c *child) listen() {
	defer close(c.ended)
	defer c.wait()
	defer c.file.Close()
	for {
		var m message
		if err := c.Decode(&m); err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
				c.log.Error("a helper cannot be understood, and is killed", log.Err(err))
			}
			c.kill()
			_, _ = io.Copy(io.Discard, c.packets) // its end
			break
		}
		switch s := c.session.Load(); {
		case m.Kind == kindResult:
			c.results <- m.Result
		case m.Kind == kindLog:
			log.Replay(c.log, m.Log)
		case s == nil:
		case m.Kind == kindDone:
			if done := s.done.Load(); done != nil {
				(*done)()
			}
		case m.Kind == kindEvent:
			s.notify()
		}
	}
	if s := c.session.Load(); s != nil {
		s.notify()
	}
}

// hasEnded reports whether the kernel has released what the helper held.
func (c *child) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// newChild returns the daemon's side of a helper.
func newChild(file *os.File, pid int, kill, wait func(), logger *zap.Logger) *child {
	c := &child{codec: newCodec(file), file: file, pid: pid, kill: kill, wait: wait, log: logger, results: make(chan result, 1), ended: make(chan struct{})}
	go c.listen()
	return c
}

// starter starts helpers, all from one OS thread: the kernel kills a helper when the thread
// ends that started it.
type starter struct {
	requests chan chan<- started
	once     sync.Once
	stop     chan struct{}
}

type started struct {
	file *os.File
	cmd  *exec.Cmd
	err  error
}

func newStarter() *starter {
	s := &starter{requests: make(chan chan<- started), stop: make(chan struct{})}
	go s.run()
	return s
}

func (s *starter) run() {
	runtime.LockOSThread()
	for {
		select {
		case answer := <-s.requests:
			file, cmd, err := startProgram()
			answer <- started{file, cmd, err}
		case <-s.stop:
			return
		}
	}
}

// start starts a helper.
func (s *starter) start(logger *zap.Logger) (*child, error) {
	answer := make(chan started, 1)
	select {
	case s.requests <- answer:
	case <-s.stop:
		return nil, errClosed
	}
	r := <-answer
	if r.err != nil {
		return nil, fmt.Errorf("start a helper process: %w", r.err)
	}
	process := r.cmd.Process
	kill := func() { _ = process.Kill() } // it may have ended
	wait := func() { _ = r.cmd.Wait() }   // how it ended is known by its socket
	return newChild(r.file, process.Pid, kill, wait, logger), nil
}

func (s *starter) close() { s.once.Do(func() { close(s.stop) }) }

// environment of a helper: it does little, and there may be one for each job of the host.
// The limits of its cgroup are not followed.
var environment = []string{"GOMAXPROCS=2", "GOGC=20", "GOTRACEBACK=single", "GODEBUG=containermaxprocs=0,updatemaxprocs=0"}

// startProgram starts this program as a helper. It inherits the standard error, for a panic.
func startProgram() (*os.File, *exec.Cmd, error) {
	daemon, helper, err := newPair()
	if err != nil {
		return nil, nil, err
	}
	defer helper.Close()
	// Also not what the daemon has inherited itself.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, nil, errors.Join(os.NewSyscallError("close_range", err), daemon.Close())
	}
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{"gpreemptd", Argument}, Env: environment,
		Stderr: os.Stderr, ExtraFiles: []*os.File{helper},
		SysProcAttr: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL},
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, errors.Join(err, daemon.Close())
	}
	return daemon, cmd, nil
}
