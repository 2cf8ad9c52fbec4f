package kfdemu

import (
	"errors"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// stream is an event stream of the driver in a program, with a pair of sockets in place of
// the driver's file. The differences are: the socket buffers a few kilobytes of events in
// addition to the driver's buffer, a mask takes effect at the next call of any program or
// Sweep, and a write that the driver would reject succeeds.
type stream struct {
	smi *driver.SMIStream

	mu   sync.Mutex
	fd   int // our end; -1 when it is closed
	over bool
	// out is the events that did not fit into the socket.
	out []byte
}

// Install implements driver.Task. It returns a negative errno if no descriptor is
// available.
func (t *Task) Install(smi *driver.SMIStream) int {
	c := t.call.Load()
	if c == nil {
		return -int(unix.ESRCH) // the call was abandoned: its thread is dead
	}
	fd, err := t.h.installStream(smi, c.install)
	if err != nil {
		var errno syscall.Errno
		if !errors.As(err, &errno) {
			errno = unix.EMFILE
		}
		return -int(errno)
	}
	return fd
}

// installStream creates a stream and returns its number in the program. The driver's lock
// is held, so after a failure Sweep removes the stream, which it finds closed.
func (h *Host) installStream(smi *driver.SMIStream, install func(int) (int, error)) (int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	// The driver's buffer should overflow: the socket's is as small as possible.
	_ = unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_SNDBUF, 0)
	fd, err := install(pair[1])
	_ = unix.Close(pair[1])
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		_ = unix.Close(pair[0])
		return -1, os.ErrClosed
	}
	h.streams = append(slices.Clone(h.streams), &stream{smi: smi, fd: pair[0]})
	return fd, err
}

// openStreams returns the open streams.
func (h *Host) openStreams() []*stream {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.streams // never changed in place
}

// eachStream calls f for each open stream: takeMasks applies the masks that programs have
// written so far, giveEvents sends the pending events.
func (h *Host) eachStream(f func(*stream)) {
	for _, s := range h.openStreams() {
		f(s)
	}
}

// endStreams ends the streams that programs have closed, or with all every stream.
func (h *Host) endStreams(all bool) {
	// h.mu is not held: with a stream's lock held the driver's is taken, and with that
	// h.mu.
	over := map[*stream]bool{}
	for _, s := range h.openStreams() {
		over[s] = s.isOver()
	}
	h.mu.Lock()
	var ended []*stream
	h.streams = slices.DeleteFunc(slices.Clone(h.streams), func(s *stream) bool {
		if all || over[s] {
			ended = append(ended, s)
			return true
		}
		return false
	})
	h.mu.Unlock()
	for _, s := range ended {
		s.close()
		s.smi.Release()
	}
}

func (s *stream) takeMasks() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.over {
		var mask [8]byte
		n, _, err := unix.Recvfrom(s.fd, mask[:], unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return
		case err != nil || n == 0:
			s.over = true
		default:
			_, _ = s.smi.Write(mask[:n]) // too few bytes for a mask change nothing
		}
	}
}

func (s *stream) giveEvents() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.over {
		if len(s.out) == 0 {
			var buf [4096]byte
			n, err := s.smi.Read(buf[:])
			if err != nil { // EAGAIN: no events
				return
			}
			s.out = append(s.out, buf[:n]...)
		}
		n, err := unix.SendmsgN(s.fd, s.out, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return
		case err != nil:
			s.over = true
		default:
			s.out = s.out[n:]
		}
	}
}

func (s *stream) isOver() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}

// close ends the stream. The program can still read what is in the socket.
func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	_ = unix.Close(s.fd)
	s.fd = -1
}
