package kfdemu

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// poller waits for descriptors whose mode it must not change: those of pipes, which other
// processes share, and of processes. It uses one goroutine and no thread.
type poller struct {
	fd   int
	file *os.File // of fd, which the runtime's own poller watches
	done sync.WaitGroup

	mu     sync.Mutex
	closed bool
	lastID int32
	then   map[int32]func()
}

// watch is a descriptor that the poller waits for.
type watch struct {
	p      *poller
	fd     int
	id     int32
	events uint32
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err == nil {
		err = unix.SetNonblock(fd, true) // so that NewFile has the runtime watch it
	}
	if err != nil {
		return nil, fmt.Errorf("create an epoll descriptor: %w", err)
	}
	p := &poller{fd: fd, file: os.NewFile(uintptr(fd), "epoll"), then: map[int32]func(){}}
	raw, err := p.file.SyscallConn()
	if err != nil {
		p.file.Close()
		return nil, fmt.Errorf("watch an epoll descriptor: %w", err)
	}
	p.done.Go(func() {
		// It ends when the file is closed.
		_ = raw.Read(func(fd uintptr) bool { return !p.look(int(fd)) })
	})
	return p, nil
}

// look calls the functions of ready descriptors. It returns false after an error of epoll.
func (p *poller) look(fd int) bool {
	var events [16]unix.EpollEvent
	for {
		n, err := unix.EpollWait(fd, events[:], 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return false
		case n == 0:
			return true
		}
		for _, e := range events[:n] {
			p.mu.Lock()
			then := p.then[e.Fd]
			p.mu.Unlock()
			if then != nil {
				then()
			}
		}
	}
}

// add waits for a descriptor once: then is called when it has one of events or an error,
// and must not wait.
func (p *poller) add(fd int, events uint32, then func()) (*watch, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, fmt.Errorf("watch descriptor %d: %w", fd, os.ErrClosed)
	}
	p.lastID++
	w := &watch{p: p, fd: fd, id: p.lastID, events: events | unix.EPOLLONESHOT}
	if err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: w.events, Fd: w.id}); err != nil {
		return nil, fmt.Errorf("watch descriptor %d: %w", fd, err)
	}
	p.then[w.id] = then
	return w, nil
}

// again waits for the descriptor again.
func (w *watch) again() error {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	if w.p.closed {
		return fmt.Errorf("watch descriptor %d: %w", w.fd, os.ErrClosed)
	}
	if err := unix.EpollCtl(w.p.fd, unix.EPOLL_CTL_MOD, w.fd, &unix.EpollEvent{Events: w.events, Fd: w.id}); err != nil {
		return fmt.Errorf("watch descriptor %d: %w", w.fd, err)
	}
	return nil
}

// remove ends the wait. Call it before the descriptor is closed: others may have the same
// open file, and then epoll would keep it. The function may still be running.
func (w *watch) remove() {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	delete(w.p.then, w.id)
	if !w.p.closed {
		_ = unix.EpollCtl(w.p.fd, unix.EPOLL_CTL_DEL, w.fd, nil) // it cannot fail
	}
}

// close ends the goroutine.
func (p *poller) close() error {
	p.mu.Lock()
	p.closed = true
	clear(p.then)
	p.mu.Unlock()
	err := p.file.Close()
	p.done.Wait()
	return err
}
