package dbgtrap

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// eventPipe is where the driver writes a '.' for each exception. Once handed over,
// the driver has the only write end, so that the pipe also shows for how long the
// target is debugged by this program: it ends when debugging does, by whomever, and
// when the target exits or replaces its program.
type eventPipe struct {
	read *os.File
	// write is the write end, for ENABLE; -1 once handed over.
	write int
	// notify is called when something was written, and when the driver has released
	// the pipe.
	notify func()
	// done is closed when nothing reads any more.
	done chan struct{}
}

// newEventPipe makes a pipe that never blocks: the driver writes to it while it
// holds the target's lock, and a full one would hang the target.
func newEventPipe(notify func()) (*eventPipe, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	return &eventPipe{
		read:   os.NewFile(uintptr(fds[0]), "debug events"),
		write:  fds[1],
		notify: notify,
		done:   make(chan struct{}),
	}, nil
}

// handOver closes the write end that was given to the driver, and begins to read.
// It is called once.
func (p *eventPipe) handOver() {
	_ = unix.Close(p.write) // a pipe has nothing to flush
	p.write = -1
	go p.drain()
}

// drain reads until the pipe ends or is closed. What is read means no more than
// that something happened: the driver says what when it is asked.
func (p *eventPipe) drain() {
	defer close(p.done)
	buf := make([]byte, 512)
	for {
		n, err := p.read.Read(buf)
		if n > 0 || err != nil { // io.EOF, or the file was closed
			p.notify()
		}
		if err != nil {
			return
		}
	}
}

// taken reports whether the driver has the write end, after handOver.
func (p *eventPipe) taken() bool {
	conn, err := p.read.SyscallConn()
	if err != nil {
		return false
	}
	hungUp := true
	// The error says that the file was closed, and then nothing is taken.
	_ = conn.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			if _, err := unix.Poll(poll, 0); !errors.Is(err, unix.EINTR) {
				break
			}
		}
		hungUp = poll[0].Revents&unix.POLLHUP != 0
	})
	return !hungUp
}

// close ends the reading, after handOver.
func (p *eventPipe) close() {
	_ = p.read.Close() // it was only read from
	<-p.done
}
