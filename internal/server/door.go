package server

import (
	"context"
	"net"
	"sync"
)

// door is closed before the server stops. gRPC cuts connections that it has accepted and
// not begun to shake hands with when it stops (handleRawConn), and their clients fail;
// all others are told to go elsewhere, and whoever waits in the queue of a socket that
// outlives the daemon meets the next one.
type door struct {
	mu        sync.Mutex // guards all below
	listeners []net.Listener
	shut      bool
	// between counts the calls of Accept under way and what they gave that shakes no
	// hands yet; empty is closed when there are none any more.
	between int
	empty   chan struct{}
}

// guardedListener is a listener behind a door.
type guardedListener struct {
	net.Listener
	door *door
}

// listen puts a listener behind the door.
func (d *door) listen(l net.Listener) net.Listener {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.shut {
		_ = l.Close() // as gRPC does with a listener that comes too late
	}
	d.listeners = append(d.listeners, l)
	return guardedListener{l, d}
}

func (l guardedListener) Accept() (net.Conn, error) {
	l.door.count(1)
	conn, err := l.Listener.Accept()
	if err != nil {
		l.door.count(-1)
	}
	return conn, err
}

// begun notes that a connection shakes hands.
func (d *door) begun() { d.count(-1) }

func (d *door) count(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.between += n; d.between == 0 && d.empty != nil {
		close(d.empty)
		d.empty = nil
	}
}

// close lets nobody in any more, and waits, no longer than ctx, until whoever was let in
// shakes hands.
func (d *door) close(ctx context.Context) {
	d.mu.Lock()
	d.shut = true
	for _, l := range d.listeners {
		_ = l.Close() // gRPC closes it again and has as little use for the error
	}
	var empty chan struct{}
	if d.between > 0 {
		if d.empty == nil {
			d.empty = make(chan struct{})
		}
		empty = d.empty
	}
	d.mu.Unlock()
	if empty == nil {
		return
	}
	select {
	case <-empty:
	case <-ctx.Done():
	}
}
