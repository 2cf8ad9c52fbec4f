package host

import (
	"errors"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// stream is an event stream of the driver's for a program, a pair of sockets in the
// place of the driver's file. It differs from it in this: the socket holds a few
// kilobytes of events besides the driver's own buffer, a mask counts from the next
// call of any program or Sweep on, and a write that the driver would refuse succeeds.
type stream struct {
	smi *driver.SMIStream

	mu   sync.Mutex
	fd   int // our end; -1 when it is closed
	over bool
	// out is what the socket had no room for.
	out []byte
}

// Install implements driver.Task. The number is negative, an errno, if there was
// none to be had.
func (t *Task) Install(smi *driver.SMIStream) int {
	c := t.call.Load()
	if c == nil {
		return -int(unix.ESRCH) // the call was given up: its thread is dead
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

// installStream makes a stream and returns its number in the program. The driver's lock
// is held: a stream that nobody got is left to Sweep, which finds it closed.
func (h *Host) installStream(smi *driver.SMIStream, install func(int) (int, error)) (int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	// It is the driver's buffer that is to overflow: the socket's is as small as can be.
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

// openStreams returns the streams there are.
func (h *Host) openStreams() []*stream {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.streams // never changed in place
}

// takeMasks takes in the masks that programs have written so far.
func (h *Host) takeMasks() {
	for _, s := range h.openStreams() {
		s.takeMasks()
	}
}

// giveEvents returns out the events there are so far.
func (h *Host) giveEvents() {
	for _, s := range h.openStreams() {
		s.giveEvents()
	}
}

// endStreams ends the streams that programs have closed; with all every one.
func (h *Host) endStreams(all bool) {
	// They are asked without h.mu: who has a stream's lock waits for the driver's, and
	// who has that for h.mu.
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
			_, _ = s.smi.Write(mask[:n]) // what is too short for a mask changes nothing
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
			if err != nil { // EAGAIN: there are none
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

// close ends the stream. What is in the socket stays there for the program.
func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	_ = unix.Close(s.fd)
	s.fd = -1
}
