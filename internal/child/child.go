// Package child runs this program again in processes of their own, for calls that the daemon must not
// make itself, or that must be made after its death. It has both ends of the connection with such a
// process, the child: it answers requests, and reports without being asked.
package child

import (
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
)

// Errors of Call. After each the child is killed.
var (
	ErrEnded = errors.New("it has ended")
	ErrLate  = errors.New("it does not answer")
)

// Process is a child as the daemon knows it: it takes requests Q, and sends messages A.
type Process[Q, A any] struct {
	// PID is 0 for a child that is a part of a test.
	PID  int
	conn *conn[Q, A]
	// Closed is closed at the end of the connection, and Ended at that of the process: until then the
	// kernel may not have released what it held (do_exit).
	Closed, Ended <-chan struct{}
	kill          func()

	mu      sync.Mutex // guards what follows
	number  uint64
	waiting map[uint64]chan A
}

// Start starts this program as a child with one argument, which inherits its end of the socket, as
// descriptor 3, and the standard error.
func Start(argument string, attr *syscall.SysProcAttr, env ...string) (daemon *os.File, cmd *exec.Cmd, err error) {
	daemon, theirs, err := Pair()
	if err != nil {
		return nil, nil, err
	}
	defer theirs.Close()
	// Also not what the daemon has inherited itself.
	if err = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err == nil {
		cmd = &exec.Cmd{
			Path: "/proc/self/exe", Args: []string{"gpreemptd", argument}, Env: append(env, "GOMAXPROCS=2", "GOTRACEBACK=single"),
			Stderr: os.Stderr, ExtraFiles: []*os.File{theirs}, SysProcAttr: attr,
		}
		err = cmd.Start()
	}
	if err != nil {
		return nil, nil, errors.Join(err, daemon.Close())
	}
	return daemon, cmd, nil
}

// New returns the daemon's side of the connection with a child. kill ends it, and returns at once;
// wait returns at its end. each is called with every message, in order, before the answer to a call
// is returned.
func New[Q, A any](daemon *os.File, pid int, kill, wait func(), each func(A), logger *zap.Logger) *Process[Q, A] {
	closed, ended := make(chan struct{}), make(chan struct{})
	p := &Process[Q, A]{PID: pid, conn: newConn[Q, A](daemon), kill: kill, Closed: closed, Ended: ended, waiting: map[uint64]chan A{}}
	go func() {
		defer close(ended)
		defer wait()
		defer close(closed)
		defer daemon.Close()
		p.listen(each, logger)
	}()
	return p
}

// Started is New for what Start returns; cmd is nil for a child that is a part of a test.
func Started[Q, A any](daemon *os.File, cmd *exec.Cmd, each func(A), logger *zap.Logger) *Process[Q, A] {
	if cmd == nil {
		return New[Q](daemon, 0, func() {}, func() {}, each, logger)
	}
	kill := func() { _ = cmd.Process.Kill() } // it may have ended
	wait := func() { _ = cmd.Wait() }         // how it ended is known by its socket
	return New[Q](daemon, cmd.Process.Pid, kill, wait, each, logger)
}

// listen takes the messages of the child, until it ends.
func (p *Process[Q, A]) listen(each func(A), logger *zap.Logger) {
	for {
		m, err := p.conn.receive()
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
				logger.Error("a child process cannot be understood, and is killed", log.Err(err))
			}
			p.kill()
			return
		}
		each(m.Body)
		p.mu.Lock()
		if answer := p.waiting[m.Number]; answer != nil {
			answer <- m.Body
			delete(p.waiting, m.Number)
		}
		p.mu.Unlock()
	}
}

// HasEnded reports whether the process has ended.
func (p *Process[Q, A]) HasEnded() bool { return isClosed(p.Ended) }

// HasClosed reports whether the child has closed its socket: it answers and does nothing any more.
func (p *Process[Q, A]) HasClosed() bool { return isClosed(p.Closed) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Tell sends a request whose answer nobody waits for. It blocks while the socket is full.
func (p *Process[Q, A]) Tell(q Q) error { return p.conn.send(0, q) }

// Call sends a request and returns the answer. limit returns how long to wait, and again after
// that time for how much longer; 0 ends it.
func (p *Process[Q, A]) Call(q Q, limit func() time.Duration) (answer A, err error) {
	answers := make(chan A, 1)
	p.mu.Lock()
	p.number++
	number := p.number
	p.waiting[number] = answers
	p.mu.Unlock()
	sent := make(chan error, 1)
	go func() { sent <- p.conn.send(number, q) }() // it blocks if the child does not read
	timer := time.NewTimer(limit())
	defer timer.Stop()
	for {
		select {
		case answer = <-answers:
			return answer, nil
		case err = <-sent:
			if sent = nil; err != nil {
				p.Kill()
				return answer, ErrEnded
			}
		case <-p.Closed:
			select {
			case answer = <-answers: // it ended after that
				return answer, nil
			default:
				return answer, ErrEnded
			}
		case <-timer.C:
			more := limit()
			if more <= 0 {
				p.Kill()
				return answer, ErrLate
			}
			timer.Reset(more)
		}
	}
}

// Kill kills the child, which ends after a call of the driver that it is in.
func (p *Process[Q, A]) Kill() { p.kill() }

// Shutdown ends one or both directions of the connection (unix.SHUT_WR and others), also with a child that
// is in a call of the driver.
func (p *Process[Q, A]) Shutdown(how int) { shutdown(p.conn.file, how) }

func shutdown(socket *os.File, how int) {
	if c, err := socket.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), how) }) // it fails only after the end
	}
}
