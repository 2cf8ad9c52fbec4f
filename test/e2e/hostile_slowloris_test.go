package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// hello is what an honest connection begins with.
var hello = append([]byte(preface), frame(frameSettings, 0, 0, nil)...)

// abuse is what a hostile client does to a connection. It writes and does not read,
// unless it says so.
type abuse struct {
	name string
	// write sends what there is to send; the error is that the daemon has closed.
	write func(c net.Conn) error
	// ends is the time within which the daemon closes the connection; 0 if it cannot be
	// distinguished from an honest one, and may stay.
	ends time.Duration
}

const (
	// atOnceEnds is for what gRPC closes as soon as it is seen; a busy machine is slow.
	atOnceEnds = 10 * time.Second
	// The handshake may take 5 s, and a message 5 s after its header.
	handshakeEnds, messageEnds = 15 * time.Second, 15 * time.Second
	// A frame that does not end: 20 s until a sign of life is asked for, 10 s until it
	// is missed.
	frameEnds = 45 * time.Second
)

var (
	notify  = gpreemptv1.OnlineService_NotifyOnline_FullMethodName
	session = gpreemptv1.OnlineService_Session_FullMethodName
)

// bytesOf writes once.
func bytesOf(parts ...[]byte) func(net.Conn) error {
	all := bytes.Join(parts, nil)
	return func(c net.Conn) error {
		_, err := c.Write(all)
		return err
	}
}

// flood writes hello and then what next gives, in pieces, so often.
func flood(times int, next func(i int) []byte) func(net.Conn) error {
	return func(c net.Conn) error {
		b := bytes.Clone(hello)
		for i := range times {
			if b = append(b, next(i)...); len(b) > 1<<14 {
				if _, err := c.Write(b); err != nil {
					return err
				}
				b = b[:0]
			}
		}
		_, err := c.Write(b)
		return err
	}
}

func streamID(i int) uint32 { return uint32(2*i + 1) }

// bomb is a header block that puts a large field into the table and repeats it: a
// few bytes that unpack to megabytes.
func bomb() []byte {
	b := append([]byte{0x40}, field("x-bomb", strings.Repeat("x", 4000))[1:]...)
	return append(append(b, callHeader(notify)...), bytes.Repeat([]byte{0x80 | 62}, 8000)...)
}

var abuses = []abuse{
	{"nothing", bytesOf(), handshakeEnds},
	{"half a preface", bytesOf([]byte(preface[:12])), handshakeEnds},
	{"a preface without settings", bytesOf([]byte(preface)), handshakeEnds},
	{"another protocol", bytesOf([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")), atOnceEnds},
	{"noise", func(c net.Conn) error {
		b := make([]byte, 1<<14)
		for i := range b {
			b[i] = byte(rand.Uint32())
		}
		return bytesOf(hello, b)(c)
	}, frameEnds},
	{"half a frame's header", bytesOf(hello, call(1, notify)[:5]), frameEnds},
	{"half a frame", bytesOf(hello, call(1, notify)[:60]), frameEnds},
	{"headers that do not end", bytesOf(hello, frame(frameHeaders, 0, 1, callHeader(notify))), frameEnds},
	{"headers that never end", flood(1<<14, func(i int) []byte {
		if i == 0 {
			return frame(frameHeaders, 0, 1, callHeader(notify))
		}
		return frame(frameMore, 0, 1, field("x", strings.Repeat("y", 100)))
	}), atOnceEnds},
	{"a frame larger than may be", bytesOf(hello, []byte{0xff, 0xff, 0xff, frameData, 0, 0, 0, 0, 1}), atOnceEnds},
	{"data on no stream", bytesOf(hello, frame(frameData, 0, 0, []byte("x"))), atOnceEnds},
	{"a window that overflows", bytesOf(hello, frame(frameWindow, 0, 0, []byte{0x7f, 0xff, 0xff, 0xff})), 0},
	{"a ping flood", flood(1<<14, func(int) []byte { return frame(framePing, 0, 0, make([]byte, 8)) }), atOnceEnds},
	{"a settings flood", flood(1<<14, func(i int) []byte { return settings(4, uint32(i)) }), 0},
	{"calls whose message does not come", flood(100, func(i int) []byte { return call(streamID(i), notify) }), messageEnds},
	{"calls whose message comes in part", flood(50, func(i int) []byte {
		return append(call(streamID(i), notify), frame(frameData, 0, streamID(i), []byte{0, 0, 0, 4, 0, 10})...)
	}), messageEnds},
	{"messages larger than may be", flood(50, func(i int) []byte {
		return append(call(streamID(i), notify), frame(frameData, flagEndStream, streamID(i), []byte{0, 0xff, 0xff, 0xff, 0xff})...)
	}), 0},
	{"a header that unpacks to megabytes", flood(20, func(i int) []byte { return frame(frameHeaders, flagEndHeaders, streamID(i), bomb()) }), frameEnds},
	{"large headers", flood(100, func(i int) []byte {
		return frame(frameHeaders, flagEndHeaders, streamID(i), callHeader(notify, field("x", strings.Repeat("y", 15<<10))))
	}), 0},
	{"streams reset at once", flood(1<<13, func(i int) []byte {
		return append(call(streamID(i), notify), frame(frameReset, 0, streamID(i), []byte{0, 0, 0, 8})...)
	}), 0},
	{"more streams than may be", flood(1<<12, func(i int) []byte { return call(streamID(i), session) }), 0},
	{"answers that are not read", flood(1<<12, func(i int) []byte {
		return append(call(streamID(i), notify), frame(frameData, flagEndStream, streamID(i), message(announcement()))...)
	}), 0},
	{"a window that is never opened", func(c net.Conn) error {
		return flood(1<<10, func(i int) []byte {
			if i == 0 {
				return settings(4, 0)
			}
			return append(call(streamID(i), notify), frame(frameData, flagEndStream, streamID(i), message(announcement()))...)
		})(c)
	}, 0},
	{"a session whose answers are not read", func(c net.Conn) error {
		one := message(announceFrame(1, &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Millisecond)}))
		return bytesOf(hello, call(1, session), frame(frameData, 0, 1, bytes.Repeat(one, 1000)))(c)
	}, 0},
}

// Whatever a client does to its connections, others are served, the daemon stays
// small, and what is no honest connection is closed in bounded time.
func TestAbusedConnectionsDoNotAffectOthers(t *testing.T) {
	t.Parallel()
	d := startForStrangers(t)
	ctx, cancel := context.WithCancel(t.Context())
	var served []time.Duration
	var legitimate sync.WaitGroup
	legitimate.Go(func() { served = d.serveUntil(ctx.Done()) }) //nolint:contextcheck // it is the test's that calls use
	fds, rss := d.fds(), d.kib("VmRSS")

	is := d.attack(attack{Abuse: true})()
	cancel()
	legitimate.Wait()
	t.Logf("%d announcements beside it, p99 %v; RSS %d KiB before, %d KiB at most; refused: %v",
		len(served), percentile(served, 99), rss, d.kib("VmHWM"), d.refusals())
	if is.Failure != "" {
		t.Error(is.Failure)
	}
	if len(served) == 0 {
		t.Error("nobody was served meanwhile")
	}
	if grown := d.kib("VmHWM") - rss; grown > floodMemory && !racing() {
		t.Errorf("the daemon grew by %d KiB, want at most %d", grown, floodMemory)
	}
	d.eventually("the hostile connections leave no descriptor", func() bool { return d.fds() <= fds })
}

// abuseMain does everything that can be done to a connection, to one each.
func abuseMain(socket string, out io.Writer) int {
	fmt.Fprintln(out, "ready")
	failures := make([]error, len(abuses))
	var all sync.WaitGroup
	for i, a := range abuses {
		all.Go(func() {
			if err := a.carryOut(socket); err != nil {
				failures[i] = fmt.Errorf("%s: %w", a.name, err)
			}
		})
	}
	all.Wait()
	var is tally
	if err := errors.Join(failures...); err != nil {
		is.Failure = err.Error()
	}
	if err := json.NewEncoder(out).Encode(is); err != nil {
		return 1
	}
	return 0
}

// carryOut does it, and waits until the daemon has closed the connection if it must.
func (a *abuse) carryOut(socket string) error {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer c.Close()
	// What is not taken within this time is held up, which is as good as refused.
	ends := a.ends
	if ends == 0 {
		ends = 3 * time.Second
	}
	if err := c.SetDeadline(time.Now().Add(ends)); err != nil {
		return err
	}
	began := time.Now()
	err = a.write(c)
	if a.ends == 0 {
		if err == nil || closed(err) || isTimeout(err) {
			return nil
		}
		return err
	}
	if err == nil {
		_, err = io.Copy(io.Discard, c)
	}
	if isTimeout(err) {
		return fmt.Errorf("the daemon did not close within %v", time.Since(began).Round(time.Second))
	}
	return nil
}

func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

func isTimeout(err error) bool {
	late, ok := errors.AsType[net.Error](err)
	return ok && late.Timeout()
}

// A flood of connections is refused before anybody looks who they are of; others
// connect meanwhile.
func TestConnectionFloodDoesNotLockOutOthers(t *testing.T) {
	t.Parallel()
	// A busy host accepts a few hundred connections in all: they are above this rate, and the
	// honest clients below it.
	d := startForStrangers(t, "limits: {requests_per_user: 100}\n")
	outcome := d.attack(attack{Connect: true, Length: 6 * time.Second})
	const honest = 20
	longest := time.Duration(0)
	for client := range honest {
		conn, err := connect(d.socket)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := gpreemptv1.NewAdminServiceClient(conn).GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{}, grpc.WaitForReady(true)); err != nil {
			t.Errorf("the honest client %d is not served: %v", client, err)
		}
		longest = max(longest, time.Since(began))
		_ = conn.Close()
	}
	is := outcome()
	t.Logf("%d connections tried, %d refused by the kernel; %d honest clients served, after %v at most; %v", is.Offered, is.Reset, honest, longest, d.refusals())
	if refused := d.refusals(); refused[string(gpreempt.ReasonRateLimited)] == 0 {
		t.Errorf("no connection was refused for its rate: %v", refused)
	}
}
