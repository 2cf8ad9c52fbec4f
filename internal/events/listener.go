package events

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"

	"github.com/gpreempt/gpreempt/internal/auth"
)

// listener bounds the connections of the metrics: nothing identifies who connects, and a probe
// must be answered whatever others do. When every place is taken, a new connection takes the
// place of the oldest one without a request in progress, of the network that has most.
type listener struct {
	net.Listener
	mu   sync.Mutex // guards open, and busy of each of its elements
	open []*conn    // oldest first
}

// conn is a connection of a listener.
type conn struct {
	net.Conn
	from *listener
	// network is the address of the client, or its /64 of IPv6.
	network netip.Prefix
	busy    bool // a complete request is being answered
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: raw, from: l, network: auth.Network(raw.RemoteAddr())}
		displaced := l.add(c)
		if displaced != nil {
			_ = displaced.Conn.Close() // its reader gets the error
		}
		if displaced != c {
			return c, nil
		}
	}
}

// add adds a connection, and returns the one that has to be closed for it, which may be
// itself; nil while there is room.
func (l *listener) add(c *conn) (displaced *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = append(l.open, c)
	if len(l.open) <= connections {
		return nil
	}
	of, most := map[netip.Prefix]int{}, 0
	for _, o := range l.open {
		of[o.network]++
		most = max(most, of[o.network])
	}
	oldest := slices.IndexFunc(l.open, func(o *conn) bool { return !o.busy && of[o.network] == most })
	if oldest < 0 {
		oldest = len(l.open) - 1
	}
	displaced = l.open[oldest]
	l.open = slices.Delete(l.open, oldest, oldest+1)
	return displaced
}

func (c *conn) setBusy(busy bool) {
	c.from.mu.Lock()
	defer c.from.mu.Unlock()
	c.busy = busy
}

func (c *conn) Close() error {
	c.from.mu.Lock()
	c.from.open = slices.DeleteFunc(c.from.open, func(o *conn) bool { return o == c })
	c.from.mu.Unlock()
	return c.Conn.Close()
}

// connKey is the key of a request's *conn in its context.
type connKey struct{}

// protectRequests has a connection keep its place while h answers a request on it.
func protectRequests(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*conn); ok {
			c.setBusy(true)
			defer c.setBusy(false)
		}
		h.ServeHTTP(w, r)
	})
}
