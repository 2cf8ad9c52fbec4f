package server

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/auth"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// rawFrame returns an HTTP/2 frame (RFC 9113, 4.1).
func rawFrame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := append([]byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(b[5:], stream)
	return append(b, payload...)
}

// rawCall returns the beginning of the first call of a connection: HEADERS, with literal
// fields (RFC 7541, 6.2.2).
func rawCall(method string) []byte {
	var block []byte
	for _, s := range []string{":method", "POST", ":scheme", "http", ":authority", "x", ":path", method, "content-type", "application/grpc", "te", "trailers"} {
		if s[0] == ':' || s == "content-type" || s == "te" {
			block = append(block, 0)
		}
		block = append(append(block, byte(len(s))), s...)
	}
	return rawFrame(1, 4, 1, block)
}

func rawMessage(m proto.Message) []byte {
	payload, _ := proto.Marshal(m) // a message of the test
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(payload))), payload...)
}

// memoryConn is a connection in memory that has the peer of another connection.
type memoryConn struct {
	auth.Conn
	pipe net.Conn
	once sync.Once
	done chan struct{}
}

func (c *memoryConn) Read(b []byte) (int, error)         { return c.pipe.Read(b) }
func (c *memoryConn) Write(b []byte) (int, error)        { return c.pipe.Write(b) }
func (c *memoryConn) SetDeadline(t time.Time) error      { return c.pipe.SetDeadline(t) }
func (c *memoryConn) SetReadDeadline(t time.Time) error  { return c.pipe.SetReadDeadline(t) }
func (c *memoryConn) SetWriteDeadline(t time.Time) error { return c.pipe.SetWriteDeadline(t) }
func (c *memoryConn) Done() <-chan struct{}              { return c.done }
func (c *memoryConn) Died() bool                         { return false }
func (c *memoryConn) Exiting() bool                      { return false }
func (c *memoryConn) Left() bool                         { return false }

func (c *memoryConn) Close() error {
	c.once.Do(func() { close(c.done) })
	return c.pipe.Close()
}

// memoryListener accepts what is sent to it.
type memoryListener struct {
	net.Listener
	conns chan net.Conn
	once  sync.Once
	ended chan struct{}
}

func newMemoryListener() *memoryListener {
	return &memoryListener{conns: make(chan net.Conn), ended: make(chan struct{})}
}

func (l *memoryListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.ended:
		return nil, net.ErrClosed
	}
}

func (l *memoryListener) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "unix"} }

func (l *memoryListener) Close() error {
	l.once.Do(func() { close(l.ended) })
	return nil
}

// dial returns the client's side of a new connection, which has the peer of another.
func (l *memoryListener) dial(peer auth.Conn) net.Conn {
	client, server := net.Pipe()
	l.conns <- &memoryConn{Conn: peer, pipe: server, done: make(chan struct{})}
	return client
}

// startInMemory is startHost without a socket, for a bubble. peer is from identity.
func startInMemory(tb testing.TB, peer auth.Conn, opts ...option) *host {
	tb.Helper()
	l := newMemoryListener()
	h := startOn(tb, l, opts...)
	h.listener, h.peer = l, peer
	return h
}

// identity returns a connection of this process, for the peer that it has.
func identity(tb testing.TB) auth.Conn {
	tb.Helper()
	socket := filepath.Join(testutil.TempSocketDir(tb), "s")
	raw, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		tb.Fatal(err)
	}
	l := auth.NewUnixListener(raw, auth.UnixOptions{})
	client, err := net.Dial("unix", socket)
	if err != nil {
		tb.Fatal(err)
	}
	conn, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = errors.Join(client.Close(), conn.Close(), l.Close()) })
	return conn.(auth.Conn)
}

// accounts is what the server counts of connections, calls, streams and answers.
func (h *host) accounts() (all map[string]int64) {
	cs := h.server.clients
	cs.mu.Lock()
	defer cs.mu.Unlock()
	all = map[string]int64{
		"connections": int64(len(cs.conns)), "admins": int64(cs.admins), "clients": int64(len(cs.byID)),
		"unread": cs.unread.Load(), "leases": int64(len(h.leases())),
	}
	for _, u := range cs.users {
		all["connections of users"] += int64(u.conns)
		all["unread of users"] += u.unread.Load()
		all["calls"] += int64(len(u.calls))
		all["reads"] += int64(len(u.reads))
	}
	return all
}

// FuzzConnection has an admin write bytes to the server, in memory and in fake time, and
// then wait. The first byte says whether the client reads, and whether it closes its side. The
// server closes the connection by itself, no goroutine remains, and every account is 0.
func FuzzConnection(f *testing.F) {
	const reads, closes = 1, 2
	preface := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	hello := append(bytes.Clone(preface), rawFrame(4, 0, 0, nil)...)
	shut := rawFrame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0}) // a window of 0
	announce := &gpreemptv1.NotifyOnlineRequest{Label: "fuzz"}
	seeds := [][]byte{
		nil,
		append(rawCall(gpreemptv1.OnlineService_NotifyOnline_FullMethodName), rawFrame(0, 1, 1, rawMessage(announce))...),
		append(rawCall(gpreemptv1.OnlineService_Session_FullMethodName), rawFrame(0, 0, 1, rawMessage(announceFrame(1, announce)))...),
		append(rawCall(gpreemptv1.OnlineService_Session_FullMethodName), rawFrame(0, 0, 1, rawMessage(completeFrame(1, "x")))...),
		append(rawCall(gpreemptv1.AdminService_SetDrain_FullMethodName), rawFrame(0, 1, 1, rawMessage(&gpreemptv1.SetDrainRequest{Drain: true, Wait: true}))...),
		rawFrame(6, 0, 0, make([]byte, 8)),
		rawFrame(8, 0, 0, []byte{0x7f, 0xff, 0xff, 0xff}),
		rawFrame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}),
		rawFrame(1, 0, 1, []byte{0x82, 0x86}),
	}
	for _, method := range served() {
		one := append(rawCall(method), rawFrame(0, 1, 1, make([]byte, 5))...)
		seeds = append(seeds, one, append(bytes.Clone(shut), one...))
	}
	for _, seed := range seeds {
		for mode := range byte(reads | closes + 1) {
			f.Add(append(append([]byte{mode}, hello...), seed...))
		}
	}
	f.Add(append([]byte{reads}, preface[:10]...))
	f.Add([]byte("\x01GET / HTTP/1.1\r\n\r\n"))
	peer := identity(f)
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) == 0 {
			return
		}
		synctest.Test(t, func(t *testing.T) {
			l := newMemoryListener()
			h := startOn(t, l)
			client, server := net.Pipe()
			conn := &memoryConn{Conn: peer, pipe: server, done: make(chan struct{})}
			l.conns <- conn
			var both sync.WaitGroup
			if input[0]&reads != 0 {
				both.Go(func() { _, _ = io.Copy(io.Discard, client) })
			}
			both.Go(func() {
				_, _ = client.Write(input[1:]) // the server may have closed before the end
				if input[0]&closes != 0 {
					_ = client.Close()
				}
			})
			late := time.NewTimer(time.Hour)
			defer late.Stop()
			select {
			case <-conn.done:
			case <-late.C:
				t.Error("the server does not close the connection")
			}
			_ = client.Close()
			both.Wait()
			synctest.Wait()
			for account, n := range h.accounts() {
				if n != 0 {
					t.Errorf("%s: %d are counted after the end of the connection", account, n)
				}
			}
		})
	})
}
