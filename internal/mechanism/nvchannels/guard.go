package nvchannels

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// answerTime is how long the supervisor may take to answer. It makes no call of the driver
// meanwhile, unless the daemon was silent.
const answerTime = 2 * time.Second

// guard is the daemon's side of a supervisor.
type guard struct {
	// process is nil for a supervisor that is not a program.
	process *os.Process
	// lapsed is called when the supervisor has resumed everything because the daemon was silent. lapses
	// is increased before.
	lapsed func()
	lapses atomic.Int64
	// heard is the time of the supervisor's last answer, in nanoseconds since begin.
	begin time.Time
	heard atomic.Int64

	mu sync.Mutex // guards what follows
	// file is the daemon's end of the socket, whose descriptor is fd, or -1 after the supervisor has
	// ended.
	file    *os.File
	fd      int
	number  uint64
	waiting map[uint64]chan struct{}
	// ended is closed when the supervisor has ended.
	ended chan struct{}
}

// start starts this program as a supervisor, in a process group of its own: a terminal kills the
// daemon's group.
func start(socket *os.File) (*os.Process, error) {
	// Descriptors that the daemon has inherited are not passed on either.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("close_range", err)
	}
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{"gpreemptd", Argument}, Env: []string{"GOMAXPROCS=2", "GOTRACEBACK=single"},
		Stderr: os.Stderr, ExtraFiles: []*os.File{socket}, SysProcAttr: &unix.SysProcAttr{Setpgid: true},
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = cmd.Wait() }() // its socket shows that it has ended
	return cmd.Process, nil
}

// newGuard starts a supervisor.
func newGuard(start func(*os.File) (*os.Process, error), lapsed func()) (*guard, error) {
	daemon, supervisor, err := newPair()
	if err != nil {
		return nil, err
	}
	defer supervisor.Close()
	process, err := start(supervisor)
	if err != nil {
		return nil, errors.Join(err, daemon.Close())
	}
	g := &guard{begin: time.Now(), file: daemon, fd: int(daemon.Fd()), process: process, lapsed: lapsed, waiting: map[uint64]chan struct{}{}, ended: make(chan struct{})}
	go g.listen(g.fd)
	return g, nil
}

// listen receives the supervisor's messages until it ends.
func (g *guard) listen(fd int) {
	defer g.end()
	buf := make([]byte, 4096)
	for {
		m, _, err := receive(fd, buf)
		if err != nil {
			return
		}
		switch m.Kind {
		case kindLapsed:
			g.lapses.Add(1)
			g.lapsed()
		case kindDone:
			g.heard.Store(int64(time.Since(g.begin)))
			g.mu.Lock()
			if done := g.waiting[m.Number]; done != nil {
				close(done)
				delete(g.waiting, m.Number)
			}
			g.mu.Unlock()
		}
	}
}

// end closes the socket of a supervisor that has ended.
func (g *guard) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	_ = g.file.Close() // nothing is lost
	g.fd = -1
	close(g.ended)
}

func (g *guard) hasEnded() bool {
	select {
	case <-g.ended:
		return true
	default:
		return false
	}
}

// ask sends a message and waits for the answer.
func (g *guard) ask(m message, descriptors ...int) error {
	done := make(chan struct{})
	g.mu.Lock()
	g.number++
	m.Number = g.number
	g.waiting[m.Number] = done
	err := send(g.fd, m, unix.MSG_DONTWAIT, descriptors...)
	g.mu.Unlock()
	if err != nil {
		if errors.Is(err, unix.EAGAIN) { // it does not read
			g.kill()
		}
		return fmt.Errorf("call the supervisor: %w", err)
	}
	const parts = 4 // a pause of both programs takes one, however long it is
	late := time.NewTimer(answerTime / parts)
	defer late.Stop()
	for range parts {
		select {
		case <-done:
			return nil
		case <-g.ended:
			return errors.New("the supervisor has ended")
		case <-late.C:
			late.Reset(answerTime / parts)
		}
	}
	g.kill()
	return fmt.Errorf("the supervisor does not answer within %v", answerTime)
}

// arm sends the supervisor the list of channels of a process to enable. It replaces an earlier list.
func (g *guard) arm(target gpreempt.ProcessKey, pidfd int, channels []nvrm.Channel) error {
	return g.ask(message{Kind: kindArm, Target: target, Channels: channels}, pidfd)
}

// disarm makes the supervisor forget a process that runs.
func (g *guard) disarm(target gpreempt.ProcessKey) error {
	return g.ask(message{Kind: kindDisarm, Target: target})
}

// beat sends a beat. It does not block: a full socket contains other beats.
func (g *guard) beat() {
	g.mu.Lock()
	defer g.mu.Unlock()
	_ = send(g.fd, message{Kind: kindBeat}, unix.MSG_DONTWAIT)
}

// fresh reports whether the supervisor has answered so recently that it cannot have resumed anything
// since.
func (g *guard) fresh() bool { return time.Since(g.begin)-time.Duration(g.heard.Load()) < Silence/2 }

// kill ends a supervisor that does not answer, because it would not resume anything. The next
// action starts another one.
func (g *guard) kill() {
	g.shutdown(unix.SHUT_RDWR)
	if g.process != nil {
		_ = g.process.Kill() // it may have ended
	}
	<-g.ended
}

// close makes the supervisor resume everything and end, and waits a second for that.
func (g *guard) close() {
	g.shutdown(unix.SHUT_WR)
	select {
	case <-g.ended:
	case <-time.After(time.Second):
		g.shutdown(unix.SHUT_RD)
		<-g.ended
	}
}

// shutdown ends one or both directions of the socket.
func (g *guard) shutdown(how int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	_ = unix.Shutdown(g.fd, how) // it fails only after the end
}
