package server

import (
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// gRPC keeps an answer until the windows of HTTP/2 and the socket have room for it,
// which is for ever when the client reads nothing, and the handler has returned by then.
// So the bytes of each answer are counted from the time when it is encoded until gRPC
// frees it, and a connection whose client does not read is closed.

const (
	// unreadPerConnection, unreadPerUser and unreadTotal bound the bytes of answers that
	// are not yet written. Above a bound, the connection that has most of them is closed.
	unreadPerConnection = 1 << 20
	unreadPerUser       = 20 << 20
	unreadTotal         = 64 << 20
	// answerBytes is what gRPC needs for an answer beside its bytes.
	answerBytes = 512
	// stuckTime is how long the answers of calls, or one write to the socket, may make no
	// progress. It is checked at intervals of stuckTime, so the connection is closed after
	// up to twice that. Streams have no such bound: a person may read events in a pager.
	stuckTime = 5 * time.Second
)

// backlog is the answers of a connection that are not yet written.
type backlog struct {
	bytes     atomic.Int64
	user, all *atomic.Int64 // the sums for the user and for all connections
	writes    atomic.Uint64 // to the socket: begun plus ended, so odd during one

	mu    sync.Mutex // guards all below
	ended bool       // nothing is counted any more
	calls int        // answers of calls that are not streams
	freed uint64     // those that were written, or dropped with their stream

	// The values at the last check.
	callsBefore               int
	freedBefore, writesBefore uint64
}

// due is one answer in a backlog.
type due struct {
	of      *backlog
	bytes   int64
	call    bool // of a call that is not a stream, and that the client has not given up
	settled bool // guarded by of.mu
}

// answer is a message on its way to the client. It is encoded with an empty buffer at its
// end, and is the pool of that buffer: gRPC returns it when the message is written, or
// dropped with its stream or its connection.
type answer struct {
	message any
	c       *connection
	empty   []byte
	due     *due
	call    bool
	charged bool // its bytes
}

// emptyBuffer has the capacity that mem.NewBuffer requires of a buffer that is returned.
var emptyBuffer = make([]byte, 0, 4<<10)

// Get is never called.
func (*answer) Get(n int) *[]byte { return mem.DefaultBufferPool().Get(n) }

// Put is called when gRPC no longer has the message.
func (a *answer) Put(*[]byte) { a.due.settle() }

// codec is gRPC's codec for messages, and counts those that are answers.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	a, ok := v.(*answer)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	data, err := c.CodecV2.Marshal(a.message)
	if err != nil {
		return nil, err
	}
	a.empty = emptyBuffer
	a.due = a.c.unread.add(int64(data.Len()+answerBytes), a.call)
	a.c.s.boundUnread(a.c)
	if a.charged {
		a.c.client.charge(a.c.s.cfg.Limits(), data.Len()/answerShare)
	}
	return append(data, mem.NewBuffer(&a.empty, a)), nil
}

// sendAnswer sends a message of a method. call says that it is the answer of a call that is
// not a stream.
func (c *connection) sendAnswer(method string, message any, call bool, ss grpc.ServerStream) error {
	a := &answer{message: message, c: c, call: call, charged: !strings.HasPrefix(method, onlinePrefix)}
	err := ss.SendMsg(a)
	if a.due != nil && (err != nil || ss.Context().Err() != nil) {
		// The stream has ended, and gRPC drops the message. It does not free it when it was
		// queued just after that end; then only the garbage collector knows.
		a.due.giveUp()
		runtime.AddCleanup(a, func(d *due) { d.settle() }, a.due)
	}
	return err
}

// add counts an answer.
func (b *backlog) add(bytes int64, call bool) *due {
	d := &due{of: b, bytes: bytes, call: call}
	b.mu.Lock()
	defer b.mu.Unlock()
	if d.settled = b.ended; d.settled {
		return d
	}
	b.count(bytes)
	if call {
		b.calls++
	}
	return d
}

func (b *backlog) count(bytes int64) {
	b.bytes.Add(bytes)
	b.user.Add(bytes)
	b.all.Add(bytes)
}

// settle counts an answer out, once.
func (d *due) settle() {
	b := d.of
	b.mu.Lock()
	defer b.mu.Unlock()
	if d.settled || b.ended {
		return
	}
	d.settled = true
	b.count(-d.bytes)
	b.giveUp(d)
}

// giveUp keeps the bytes of an answer counted and no longer waits for it.
func (d *due) giveUp() {
	d.of.mu.Lock()
	defer d.of.mu.Unlock()
	d.of.giveUp(d)
}

// giveUp is the part of due.giveUp for which mu is held.
func (b *backlog) giveUp(d *due) {
	if d.call {
		d.call = false
		b.calls--
		b.freed++
	}
}

// end counts all answers out, because the connection ends. It reports whether it was the
// first call.
func (b *backlog) end() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return false
	}
	b.ended = true
	b.count(-b.bytes.Load())
	return true
}

// check reports whether the peer has taken nothing since the last check, and whether
// there is anything that it has to take.
func (b *backlog) check() (stuck, waiting bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	writes := b.writes.Load()
	writing := writes%2 == 1
	stuck = writing && writes == b.writesBefore || b.calls > 0 && b.callsBefore > 0 && b.freed == b.freedBefore
	waiting = writing || b.calls > 0
	b.callsBefore, b.freedBefore, b.writesBefore = b.calls, b.freed, writes
	return stuck && !b.ended, waiting && !b.ended
}

// The causes in the log of a connection that is closed because of its answers.
const (
	causeConnection = "connection" // unreadPerConnection
	causeUser       = "user"       // unreadPerUser
	causeTotal      = "total"      // unreadTotal
	causeStuck      = "stuck"      // stuckTime
)

// boundUnread closes connections until the bounds hold. c is the connection that has just
// got an answer.
func (s *Server) boundUnread(c *connection) {
	s.clients.watchUnread()
	for {
		switch {
		case c.unread.bytes.Load() > unreadPerConnection:
			s.closeUnread(c, causeConnection)
		case c.unread.user.Load() > unreadPerUser:
			s.closeUnread(s.clients.mostUnread(c.client.user), causeUser)
		case c.unread.all.Load() > unreadTotal:
			s.closeUnread(s.clients.mostUnread(nil), causeTotal)
		default:
			return
		}
	}
}

// closeUnread closes a connection whose answers are not read. c is nil when it has been
// closed meanwhile.
func (s *Server) closeUnread(c *connection, cause string) {
	if c == nil {
		return
	}
	unread := c.unread.bytes.Load()
	if !c.unread.end() {
		return
	}
	s.cfg.Events.Refused(gpreempt.ReasonSlowReader)
	s.cfg.Log.Warn("connection closed: its client does not read the answers", log.Peer(c.peer), log.Cause(cause), log.Unread(unread))
	_ = c.Close()
}

// mostUnread returns the connection of a user that has most unread bytes; without a user,
// that of the user whose connections together have most. It returns nil when every backlog is empty.
func (cs *clients) mostUnread(of *user) (most *connection) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if of == nil {
		for c := range cs.conns {
			if u := c.client.user; of == nil || u.unread.Load() > of.unread.Load() {
				of = u
			}
		}
	}
	bytes := int64(0)
	for c := range cs.conns {
		if n := c.unread.bytes.Load(); c.client.user == of && n > bytes {
			most, bytes = c, n
		}
	}
	return most
}

// watchUnread has closeStuck called later, unless that is due already.
func (cs *clients) watchUnread() {
	if !cs.watching.Load() && cs.watching.CompareAndSwap(false, true) {
		time.AfterFunc(stuckTime, cs.closeStuck)
	}
}

// closeStuck closes the connections whose peer has taken nothing since the last call.
func (cs *clients) closeStuck() {
	cs.watching.Store(false)
	var stuck []*connection
	again := false
	cs.mu.Lock()
	for c := range cs.conns {
		is, waiting := c.unread.check()
		if is {
			stuck = append(stuck, c)
		}
		again = again || waiting
	}
	cs.mu.Unlock()
	for _, c := range stuck {
		cs.s.closeUnread(c, causeStuck)
	}
	if again {
		cs.watchUnread()
	}
}
