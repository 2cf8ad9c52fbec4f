package server

import (
	"context"
	"net"
	"sync"
)

// drainer closes listeners before the server stops, so that no accepted connection is
// lost. gRPC, when it stops, closes connections that it has accepted and whose handshake
// it has not begun (handleRawConn), and their clients fail. All other clients are sent
// GOAWAY, and connections that still wait in the queue of a socket that outlives the
// daemon are accepted by the next one.
type drainer struct {
	mu        sync.Mutex // guards all below
	listeners []net.Listener
	closed    bool
	// accepting counts the calls of Accept in progress and the connections they
	// returned whose handshake has not begun; idle is closed when it becomes 0.
	accepting int
	idle      chan struct{}
}

// drainListener is a listener of a drainer.
type drainListener struct {
	net.Listener
	drainer *drainer
}

// listen returns l as a listener of the drainer.
func (d *drainer) listen(l net.Listener) net.Listener {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		_ = l.Close() // as gRPC does with a listener after Stop
	}
	d.listeners = append(d.listeners, l)
	return drainListener{l, d}
}

func (l drainListener) Accept() (net.Conn, error) {
	l.drainer.count(1)
	conn, err := l.Listener.Accept()
	if err != nil {
		l.drainer.count(-1)
	}
	return conn, err
}

// handshake is called when the handshake of an accepted connection begins.
func (d *drainer) handshake() { d.count(-1) }

func (d *drainer) count(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.accepting += n; d.accepting == 0 && d.idle != nil {
		close(d.idle)
		d.idle = nil
	}
}

// close closes the listeners and waits, no longer than ctx, until the handshake of each
// accepted connection has begun.
func (d *drainer) close(ctx context.Context) {
	idle := make(chan struct{})
	d.mu.Lock()
	d.closed = true
	for _, l := range d.listeners {
		_ = l.Close() // gRPC closes it again and ignores the error too
	}
	if d.accepting > 0 {
		d.idle = idle
	} else {
		close(idle)
	}
	d.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
