package server

import (
	"encoding/binary"
	"io"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// manyQueues makes the answer of ListQueues about 100 KB.
func (h *host) manyQueues() {
	p := discovery.Proc{Process: gpreempt.Process{Key: offline, Comm: "train"}}
	for i := range 500 {
		p.Queues = append(p.Queues, gpreempt.Queue{Process: offline, ID: uint32(i), GPU: gpuA, Type: gpreempt.QueueCompute, RingBytes: 4096})
	}
	h.setProcs(p)
}

// rawConn returns a connection on which the test writes frames. It answers nothing.
func (h *host) rawConn(t *testing.T, frames ...[]byte) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", h.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	b := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	for _, f := range frames {
		b = append(b, f...)
	}
	if _, err := conn.Write(b); err != nil {
		t.Fatal(err)
	}
	return conn
}

// zeroWindow is a SETTINGS frame after which the server may send no message.
func zeroWindow() []byte {
	return rawFrame(4, 0, 0, binary.BigEndian.AppendUint32([]byte{0, 4}, 0))
}

// listQueues is a call of ListQueues.
func listQueues(stream uint32) []byte {
	header := rawCall(gpreemptv1.AdminService_ListQueues_FullMethodName)
	binary.BigEndian.PutUint32(header[5:], stream)
	return append(header, rawFrame(0, 1, stream, make([]byte, 5))...)
}

// A client whose window is closed makes calls with large answers: its connection is closed,
// and nothing of it is counted any more.
func TestConnectionWithUnreadAnswersIsClosed(t *testing.T) {
	h := startHost(t)
	h.manyQueues()
	frames := [][]byte{zeroWindow()}
	for i := range uint32(40) {
		frames = append(frames, listQueues(2*i+1))
	}
	conn := h.rawConn(t, frames...)
	if _, err := io.Copy(io.Discard, conn); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Fatal(err)
	}
	h.server.clients.wait()
	if diff := cmp.Diff(map[gpreempt.Reason]uint64{gpreempt.ReasonSlowReader: 1}, h.events.Stats().Refused); diff != "" {
		t.Errorf("counted (-want +got):\n%s", diff)
	}
	if n := h.server.clients.unread.Load(); n != 0 {
		t.Errorf("%d bytes are counted after the end of the connection", n)
	}
}

// A connection with an answer that cannot be sent is closed at the second check, and one
// whose stream waits is not.
func TestConnectionThatTakesNoAnswerIsClosed(t *testing.T) {
	h := startHost(t)
	h.manyQueues()
	watch := rawCall(gpreemptv1.AdminService_WatchQueues_FullMethodName)
	watching := h.rawConn(t, zeroWindow(), watch, rawFrame(0, 1, 1, make([]byte, 5)))
	defer watching.Close()
	calling := h.rawConn(t, zeroWindow(), listQueues(1))
	h.awaitUnread(t, 2)
	h.server.clients.closeStuck()
	if h.events.Stats().Refused[gpreempt.ReasonSlowReader] != 0 {
		t.Error("a connection is closed at the first check")
	}
	h.server.clients.closeStuck()
	if _, err := io.Copy(io.Discard, calling); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Fatal(err)
	}
	h.server.clients.closeStuck()
	h.server.clients.closeStuck()
	if n := h.events.Stats().Refused[gpreempt.ReasonSlowReader]; n != 1 {
		t.Errorf("%d connections are closed, want that of the call", n)
	}
}

// awaitUnread waits until so many connections have unread answers.
func (h *host) awaitUnread(t *testing.T, n int) {
	t.Helper()
	cs := h.server.clients
	for {
		have := 0
		cs.mu.Lock()
		for c := range cs.conns {
			if c.unread.bytes.Load() > 10_000 {
				have++
			}
		}
		cs.mu.Unlock()
		if have == n {
			return
		}
		if t.Context().Err() != nil {
			t.Fatal(t.Context().Err())
		}
		runtime.Gosched()
	}
}

// After calls and streams that are read or given up, nothing is counted.
func TestReadAnswersAreNotCounted(t *testing.T) {
	h := startHost(t)
	h.manyQueues()
	admin := h.admin(t)
	for range 50 {
		if _, err := admin.ListQueues(t.Context(), &gpreemptv1.ListQueuesRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	c := h.session(t)
	for tag := range uint64(100) {
		c.do(completeFrame(tag, "x"))
	}
	// Answers that the client gives up, some before, some while and some after they are sent.
	frames := [][]byte{zeroWindow()}
	for i := range uint32(8) {
		frames = append(frames, listQueues(2*i+1), rawFrame(3, 0, 2*i+1, []byte{0, 0, 0, 8}))
	}
	ping := rawFrame(6, 0, 0, make([]byte, 8))
	given := h.rawConn(t, append(frames, ping)...)
	for h.server.clients.unread.Load() != 0 {
		runtime.GC() // see sendAnswer
		if t.Context().Err() != nil {
			t.Fatalf("%d bytes are counted", h.server.clients.unread.Load())
		}
	}
	h.server.clients.closeStuck()
	h.server.clients.closeStuck()
	if n := h.events.Stats().Refused[gpreempt.ReasonSlowReader]; n != 0 {
		t.Errorf("%d connections are closed", n)
	}
	_ = given.Close()
}

// backlogs returns connections, each with unread bytes, of users by name.
func backlogs(h *host, users map[string][]int64) map[string][]*connection {
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	all := map[string][]*connection{}
	for name, sizes := range users {
		u := newUser(name, &meter{})
		cl := newClient(scheduler.ClientID{PID: 1}, auth.Process{}, u)
		for _, size := range sizes {
			conn := &closable{done: make(chan struct{})}
			c := &connection{s: h.server, Conn: conn, peer: auth.Process{}, client: cl, unread: backlog{user: &u.unread, all: &cs.unread}}
			cs.conns[c] = true
			c.unread.add(size, true)
			all[name] = append(all[name], c)
		}
	}
	return all
}

// closable is a connection that is only closed.
type closable struct {
	auth.Conn
	done   chan struct{}
	closed atomic.Bool
}

func (e *closable) Close() error { e.closed.Store(true); return nil }

// Above its bound a connection is closed, above that of a user its largest backlog is closed, and above that of all the
// largest of the user who has most; others are left alone.
func TestLargestBacklogIsClosed(t *testing.T) {
	const mb = 1 << 20
	for name, c := range map[string]struct {
		users map[string][]int64
		want  map[string][]bool
	}{
		"within the bounds": {map[string][]int64{"a": {mb / 2}, "b": {mb / 3}}, map[string][]bool{"a": {false}, "b": {false}}},
		"of a connection":   {map[string][]int64{"a": {mb + 1, mb}, "b": {mb}}, map[string][]bool{"a": {true, false}, "b": {false}}},
		"of a user": {
			map[string][]int64{"a": append([]int64{mb - 1, mb}, sizes(19, mb-1)...), "b": {mb}},
			map[string][]bool{"a": append([]bool{false, true}, make([]bool, 19)...), "b": {false}},
		},
		"of all": {
			map[string][]int64{"a": sizes(20, mb-1), "b": append(sizes(18, mb-1), mb), "c": sizes(20, mb-2), "d": sizes(6, mb-1)},
			map[string][]bool{"a": append([]bool{true}, make([]bool, 19)...), "b": make([]bool, 19), "c": make([]bool, 20), "d": make([]bool, 6)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := startHost(t)
			all := backlogs(h, c.users)
			if name == "of all" { // which of several that are equal is closed is not said
				all["a"][0].unread.add(1, true)
			}
			for _, conns := range all {
				h.server.boundUnread(conns[0])
			}
			got := map[string][]bool{}
			for user, conns := range all {
				for _, c := range conns {
					got[user] = append(got[user], c.Conn.(*closable).closed.Load())
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("closed (-want +got):\n%s", diff)
			}
			cs := h.server.clients
			cs.mu.Lock()
			for _, conns := range all {
				for _, c := range conns {
					delete(cs.conns, c)
				}
			}
			cs.mu.Unlock()
		})
	}
}

func sizes(n int, each int64) (all []int64) {
	for range n {
		all = append(all, each)
	}
	return all
}

// The message that is sent is the one that was answered, also an empty one.
func TestCodecAddsNothingToAnAnswer(t *testing.T) {
	h := startHost(t)
	all := backlogs(h, map[string][]int64{"a": {0}})
	cs := h.server.clients
	defer func() { cs.mu.Lock(); delete(cs.conns, all["a"][0]); cs.mu.Unlock() }()
	for _, m := range []proto.Message{&gpreemptv1.CompleteResponse{}, &gpreemptv1.ListQueuesRequest{TargetId: strings.Repeat("x", 100_000)}} {
		a := &answer{message: m, c: all["a"][0], call: true}
		data, err := newCodec().Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		plain, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(plain), string(data.Materialize())); diff != "" {
			t.Errorf("encoded (-want +got):\n%s", diff)
		}
		if got, want := cs.unread.Load(), int64(len(plain)+answerBytes); got != want {
			t.Errorf("%d bytes are counted, want %d", got, want)
		}
		data.Free()
		if got := cs.unread.Load(); got != 0 {
			t.Errorf("%d bytes are counted after the answer is written", got)
		}
	}
}
