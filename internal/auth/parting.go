package auth

import (
	"net"
	"sync"
	"time"
)

const (
	// partingConns is how many refused connections stay open for their clients to read why, and
	// partingTime for how long at most. A further one takes the place of the oldest.
	partingConns = 16
	partingTime  = time.Second
)

// Parting closes connections that were refused a little later, without a goroutine for each: a
// client whose connection is closed at once fails to write, and does not read. The zero Parting
// has none. Its methods are safe for concurrent use.
type Parting struct {
	mu    sync.Mutex // guards conns
	conns []parting  // oldest first
}

type parting struct {
	conn net.Conn
	end  *time.Timer // closes it
}

// Close closes a connection, no later than partingTime.
func (p *Parting) Close(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, parting{c, time.AfterFunc(partingTime, func() { _ = c.Close() })})
	if len(p.conns) > partingConns {
		p.conns[0].end.Stop()
		_ = p.conns[0].conn.Close() // again, if its time is over
		p.conns = append(p.conns[:0], p.conns[1:]...)
	}
}
