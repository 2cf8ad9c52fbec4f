package nvchannels

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"sync"
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
	file *os.File
	fd   int
	pid  int
	// lapsed is called when the supervisor has put everything on, because of silence.
	lapsed func()

	mu      sync.Mutex // guards what follows
	number  uint64
	waiting map[uint64]chan struct{}
	// ended is closed when the supervisor has.
	ended chan struct{}
}

// start starts this program as a supervisor. It gets a process group of its own: what a terminal
// kills is the daemon's group.
func start(socket *os.File) (pid int, err error) {
	// Also not what the daemon has inherited itself.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return 0, os.NewSyscallError("close_range", err)
	}
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{"gpreemptd", Argument}, Env: []string{"GOMAXPROCS=2", "GOTRACEBACK=single"},
		Stderr: os.Stderr, ExtraFiles: []*os.File{socket}, SysProcAttr: &unix.SysProcAttr{Setpgid: true},
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	go func() { _ = cmd.Wait() }() // how it ended is known by its socket
	return cmd.Process.Pid, nil
}

// newGuard starts a supervisor.
func newGuard(start func(*os.File) (int, error), lapsed func()) (*guard, error) {
	daemon, supervisor, err := newPair()
	if err != nil {
		return nil, err
	}
	defer supervisor.Close()
	pid, err := start(supervisor)
	if err != nil {
		return nil, errors.Join(err, daemon.Close())
	}
	g := &guard{file: daemon, fd: int(daemon.Fd()), pid: pid, lapsed: lapsed, waiting: map[uint64]chan struct{}{}, ended: make(chan struct{})}
	go g.listen()
	return g, nil
}

// listen takes what the supervisor says, until it ends.
func (g *guard) listen() {
	defer close(g.ended)
	buf := make([]byte, 4096)
	for {
		m, _, err := receive(g.fd, buf)
		if err != nil {
			return
		}
		switch m.Kind {
		case kindLapsed:
			g.lapsed()
		case kindDone:
			g.mu.Lock()
			if done := g.waiting[m.Number]; done != nil {
				close(done)
				delete(g.waiting, m.Number)
			}
			g.mu.Unlock()
		}
	}
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
	g.mu.Unlock()
	if err := send(g.fd, m, 0, descriptors...); err != nil {
		return fmt.Errorf("tell the supervisor: %w", err)
	}
	late := time.NewTimer(answerTime)
	defer late.Stop()
	select {
	case <-done:
		return nil
	case <-g.ended:
		return errors.New("the supervisor has ended")
	case <-late.C:
		return fmt.Errorf("the supervisor, process %d, does not answer within %v", g.pid, answerTime)
	}
}

// arm tells the supervisor which channels of a process to put on. It replaces an earlier list.
func (g *guard) arm(target gpreempt.ProcessKey, pidfd int, channels []nvrm.Channel) error {
	return g.ask(message{Kind: kindArm, Target: target, Channels: channels}, pidfd)
}

// disarm has the supervisor forget a process that runs.
func (g *guard) disarm(target gpreempt.ProcessKey) error {
	return g.ask(message{Kind: kindDisarm, Target: target})
}

// beat does not block.
func (g *guard) beat() { _ = send(g.fd, message{Kind: kindBeat}, unix.MSG_DONTWAIT) } // a full socket has others

// close has the supervisor end, and waits for that a moment.
func (g *guard) close() {
	_ = unix.Shutdown(g.fd, unix.SHUT_RDWR)
	select {
	case <-g.ended:
	case <-time.After(time.Second):
	}
	_ = g.file.Close() // nothing is lost
}
