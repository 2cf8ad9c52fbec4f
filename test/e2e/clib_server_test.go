package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// replies is a server that answers the first call of each connection with the same bytes,
// and closes the connection at the second.
type replies struct {
	socket string
	reply  atomic.Pointer[reply]
}

// reply is what is sent, and whether the connection is closed after it.
type reply struct {
	bytes []byte
	close bool
}

// serveReplies starts the server.
func serveReplies(t *testing.T) *replies {
	t.Helper()
	s := &replies{socket: filepath.Join(testutil.TempSocketDir(t), "s")}
	l, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go s.serve(conn)
		}
	}()
	return s
}

func (s *replies) serve(conn net.Conn) {
	defer conn.Close()
	r := s.reply.Load()
	if r.bytes == nil {
		return
	}
	if _, err := io.ReadFull(conn, make([]byte, len(preface))); err != nil {
		return
	}
	if !awaitCall(conn) {
		return
	}
	if _, err := conn.Write(r.bytes); err != nil || r.close {
		return
	}
	awaitCall(conn)
}

// awaitCall reads until a call begins, and returns false if the connection ends first.
func awaitCall(conn io.Reader) bool {
	for {
		var header [9]byte
		if _, err := io.ReadFull(conn, header[:]); err != nil {
			return false
		}
		if _, err := io.CopyN(io.Discard, conn, int64(header[0])<<16|int64(header[1])<<8|int64(header[2])); err != nil {
			return false
		}
		if header[3] == frameHeaders {
			return true
		}
	}
}

// pad is the prefix of a message that is followed by n zero bytes.
func pad(n int) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(n)), make([]byte, n)...)
}

// block is a header block of names and values.
func block(namesAndValues ...string) (b []byte) {
	for pair := range slices.Chunk(namesAndValues, 2) {
		b = append(b, field(pair[0], pair[1])...)
	}
	return b
}

func TestCLibrarySurvivesMalformedAnswers(t *testing.T) {
	const flagPadded = 8
	var (
		begin   = settings(3, 100)
		head    = frame(frameHeaders, flagEndHeaders, 1, block(":status", "200", "content-type", "application/grpc"))
		granted = message(&gpreemptv1.NotifyOnlineResponse{LeaseId: "0123456789abcdef-1", Quiesced: true, Reason: gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE})
		body    = frame(frameData, 0, 1, granted)
		end     = frame(frameHeaders, flagEndHeaders|flagEndStream, 1, block("grpc-status", "0"))
		refuse  = func(fields ...string) []byte {
			return slices.Concat(begin, frame(frameHeaders, flagEndHeaders|flagEndStream, 1, block(append([]string{":status", "200"}, fields...)...)))
		}
		answer = func(frames ...[]byte) []byte { return slices.Concat(append([][]byte{begin, head}, frames...)...) }
		data   = func(b []byte) (frames []byte) {
			for chunk := range slices.Chunk(b, 16384) {
				frames = append(frames, frame(frameData, 0, 1, chunk)...)
			}
			return frames
		}
		code   = func(c uint32) []byte { return binary.BigEndian.AppendUint32(nil, c) }
		goAway = func(why uint32, text string) []byte {
			return slices.Concat(begin, frame(frameGoAway, 0, 0, append(append(code(0), code(why)...), text...)))
		}
	)
	cases := []struct {
		name  string
		reply []byte
		close bool
		want  string
	}{
		{"the right answer", answer(body, end), false, "ok"},
		{"in frames of one byte", answer(frame(frameData, 0, 1, granted[:1]), frame(frameData, 0, 1, granted[1:]), end), false, "ok"},
		{"a reset after it", answer(body, end, frame(frameReset, 0, 1, code(0))), false, "ok"},
		{"a close after it", answer(body, end), true, "ok"},

		{"closed at once", nil, true, "ECONNRESET"},
		{"no answer, and closed", []byte{}, true, "ECONNRESET"},
		{"closed in the settings", begin[:5], true, "ECONNRESET"},
		{"closed in the header", answer()[:len(answer())-3], true, "ECONNRESET"},
		{"closed in the message", answer(body[:len(body)-3]), true, "ECONNRESET"},
		{"closed before the trailers", answer(body), true, "ECONNRESET"},
		{"going away", goAway(0, ""), false, "ECONNRESET"},
		{"too many pings", goAway(11, "too_many_pings"), false, "ECONNRESET"},
		{"a refused connection", goAway(11, "CONNECTIONS_PER_USER: \x1b[31muid 7"), false, "EBUSY: CONNECTIONS_PER_USER: ?[31muid 7"},
		{"a refused connection, with 15 kB", goAway(11, "CONNECTIONS_PER_USER: "+strings.Repeat("\x00", 15000)), true, "EBUSY: CONNECTIONS_PER_USER: "},
		{"the call is refused by HTTP", slices.Concat(begin, frame(frameReset, 0, 1, code(7))), false, "ECONNRESET"},

		{"no answer", []byte{}, false, "ETIMEDOUT"},
		{"settings only", begin, false, "ETIMEDOUT"},
		{"half an answer", answer(body[:len(body)-3]), false, "ETIMEDOUT"},
		{"no window", settings(4, 0), false, "ETIMEDOUT"},
		{"pings only", slices.Concat(begin, bytes.Repeat(frame(framePing, 0, 0, make([]byte, 8)), 500)), false, "ETIMEDOUT"},

		{"HTTP/1", []byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), false, "EPROTO"},
		{"a frame of 16 MiB", append(slices.Clone(begin), 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1), false, "EPROTO"},
		{"a window of more than 31 bits", slices.Concat(begin, frame(frameWindow, 0, 0, code(1<<31-1)), frame(frameWindow, 0, 0, code(1<<31-1))), false, "EPROTO"},
		{"a message on no stream", slices.Concat(begin, frame(frameData, 0, 0, granted)), false, "EPROTO"},
		{"a message on a stream of the future", slices.Concat(begin, frame(frameData, 0, 9, granted)), false, "EPROTO"},
		{"padding longer than the frame", answer(frame(frameData, flagPadded, 1, []byte{200, 0})), false, "EPROTO"},
		{"a pushed stream", slices.Concat(begin, frame(5, flagEndHeaders, 1, append(code(2), block(":status", "200")...))), false, "ETIMEDOUT"},
		{"a header that is not HPACK", slices.Concat(begin, frame(frameHeaders, flagEndHeaders, 1, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})), false, "EPROTO"},
		{"a header of a megabyte", slices.Concat(begin, frame(frameHeaders, 0, 1, block(":status", "200")),
			bytes.Repeat(frame(frameMore, 0, 1, field("x", strings.Repeat("x", 16000))), 64)), false, "EPROTO"},
		{"pings without end", slices.Concat(begin, bytes.Repeat(frame(framePing, 0, 0, make([]byte, 8)), 200000)), false, "EPROTO"},
		{"cancelled before its time", slices.Concat(begin, frame(frameReset, 0, 1, code(8))), false, "EPROTO"},
		{"a reset", slices.Concat(begin, frame(frameReset, 0, 1, code(2))), false, "EPROTO"},

		{"no status", answer(body, frame(frameData, flagEndStream, 1, nil)), false, "EPROTO"},
		{"a status in words", refuse("grpc-status", "fine"), false, "EPROTO"},
		{"an empty status", refuse("grpc-status", ""), false, "EPROTO"},
		{"another HTTP status", slices.Concat(begin, frame(frameHeaders, flagEndHeaders|flagEndStream, 1, block(":status", "503"))), false, "EPROTO"},
		{"no message", answer(end), false, "EPROTO"},
		{"half a prefix", answer(data(granted[:3]), end), false, "EPROTO"},
		{"a compressed message", answer(data(append([]byte{1}, granted[1:]...)), end), false, "EPROTO"},
		{"a message shorter than its prefix says", answer(data(append([]byte{0, 0, 0, 0, granted[4] + 1}, granted[5:]...)), end), false, "EPROTO"},
		{"two messages", answer(body, body, end), false, "EPROTO"},
		{"a message that is not protobuf", answer(data([]byte{0, 0, 0, 0, 3, 0xff, 0xff, 0xff}), end), false, "EPROTO"},
		{"a message without a lease", answer(data(pad(0)), end), false, "EPROTO"},
		{"a lease of 64 bytes", answer(data(message(&gpreemptv1.NotifyOnlineResponse{LeaseId: strings.Repeat("x", 64)})), end), false, "EPROTO"},

		{"a message that is too large", answer(data(pad(65537)), end), false, "EMSGSIZE"},
		{"a message without end", answer(data(make([]byte, 65536)), data(make([]byte, 65536))), false, "EMSGSIZE"},
		{"an unknown status", refuse("grpc-status", "99"), false, "EREMOTEIO"},
		{"details that are not base64", refuse("grpc-status", "8", "grpc-status-details-bin", "%%%"), false, "EBUSY"},
		{"details that are not protobuf", refuse("grpc-status", "8", "grpc-status-details-bin", "////////"), false, "EBUSY"},
		{"details of 20 kB", refuse("grpc-status", "8", "grpc-status-details-bin", strings.Repeat("A", 15000)), false, "EBUSY"},
		{"a text of 15 kB with escapes", refuse("grpc-status", "14", "grpc-message", strings.Repeat("%1b%", 3000)), false, "ESHUTDOWN"},
	}
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		s := serveReplies(t)
		p := program(t, s.socket)
		got, want := map[string]string{}, map[string]string{}
		for _, tc := range cases {
			want[tc.name] = tc.want
			s.reply.Store(&reply{tc.reply, tc.close})
			p.do("socket %s", s.socket) // a new connection
			maxWait := 10000            // for a busy machine
			if tc.want == "ETIMEDOUT" {
				maxWait = -1
			}
			got[tc.name], _, _ = strings.Cut(p.do("online x %d", maxWait), " ")
			if strings.Contains(tc.want, ": ") {
				got[tc.name] += ": " + p.do("error")
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("results (-want +got):\n%s", diff)
		}

		// A connection that breaks during its second call is replaced.
		right := answer(body, end)
		s.reply.Store(&reply{right, false})
		p.check([][2]string{{"socket " + s.socket, "ok"}, {"online a 10000", "ok quiet=1 suspended=0"}, {"online b 10000", "ok quiet=1 suspended=0"}})

		// Mutations of the right answer, with a fixed seed.
		random := rand.New(rand.NewPCG(1, 2))
		for i := range 300 {
			mutant := slices.Clone(right)
			for range 1 + random.IntN(4) {
				switch at := random.IntN(len(mutant)); random.IntN(3) {
				case 0:
					mutant[at] = byte(random.Uint32())
				case 1:
					mutant = slices.Insert(mutant, at, byte(random.Uint32()))
				case 2:
					mutant = slices.Delete(mutant, at, at+1)
				}
			}
			s.reply.Store(&reply{mutant, i%8 != 0})
			p.do("socket %s", s.socket)
			for _, call := range []string{"online x -1", "all", "complete"}[:1+i%3] {
				result, _, _ := strings.Cut(p.do("%s", call), " ")
				if !slices.Contains([]string{"ok", "ECONNRESET", "ETIMEDOUT", "EPROTO", "EMSGSIZE", "EREMOTEIO", "EBUSY", "EINVAL", "EEXIST", "EACCES", "ENOENT", "EOPNOTSUPP", "ESHUTDOWN"}, result) {
					t.Errorf("mutation %d, %s: %s, which gpreempt.h does not list; the answer was %x", i, call, result, mutant)
				}
			}
		}
	})
}

// A call that the server permits no stream for is still queued when its caller leaves.
func TestCLibraryKeepsNoPointerToACallThatTimedOut(t *testing.T) {
	clib(t)
	dir := t.TempDir()
	if err := buildCLibraryIn(dir, "-O1", "-fno-analyzer", "-fsanitize=address", "-Wl,-z,undefs"); err != nil {
		if strings.Contains(err.Error(), "asan") {
			t.Skip("the address sanitizer of the compiler is missing: ", err)
		}
		t.Fatal(err)
	}
	socket := filepath.Join(testutil.TempSocketDir(t), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := startC(t, exec.Command(filepath.Join(dir, "driver")), socket, "ASAN_OPTIONS=detect_stack_use_after_return=1")
	p.check([][2]string{{"init", "ok"}})
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(settings(3, 0)); err != nil { // no streams
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	call := func() { // that is submitted
		p.do("online x -1")
		for strings.Contains(p.do("error"), "a moment ago") {
			p.do("online x -1")
		}
	}
	call()
	call()
	if _, err := conn.Write(settings(3, 100)); err != nil {
		t.Fatal(err)
	}
	call()
}

// While the program does not run the time of its call is over, for the server too, which cancels it.
func TestCLibraryTakesACancellationInTimeForATimeOut(t *testing.T) {
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		socket := filepath.Join(testutil.TempSocketDir(t), "s")
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		p := program(t, socket)
		failed := make(chan error, 1)
		go func() {
			conn, err := l.Accept()
			if err == nil {
				defer conn.Close()
				_, err = io.ReadFull(conn, make([]byte, len(preface)))
			}
			if err == nil && !awaitCall(conn) {
				err = io.ErrUnexpectedEOF
			}
			if err == nil {
				err = p.cmd.Process.Signal(syscall.SIGSTOP)
			}
			if err == nil {
				_, err = conn.Write(slices.Concat(settings(3, 100), frame(frameReset, 0, 1, binary.BigEndian.AppendUint32(nil, 8))))
				<-time.After(200 * time.Millisecond) // its time is 100 ms
				err = errors.Join(err, p.cmd.Process.Signal(syscall.SIGCONT))
			}
			failed <- err
		}()
		p.check([][2]string{{"online x -1", "ETIMEDOUT quiet=0 suspended=0"}})
		if err := <-failed; err != nil {
			t.Error(err)
		}
	})
}

// inventory is a server with lists that a simulated machine does not have.
type inventory struct {
	gpreemptv1.UnimplementedAdminServiceServer
	queues  int
	targets []*gpreemptv1.Target
}

func (s *inventory) ListQueues(context.Context, *gpreemptv1.ListQueuesRequest) (*gpreemptv1.ListQueuesResponse, error) {
	all := make([]*gpreemptv1.Queue, s.queues)
	for i := range all { // the last one first
		n := int32(s.queues - 1 - i)
		all[i] = &gpreemptv1.Queue{Pid: 100 + n%3, QueueId: uint32(n / 3), State: gpreemptv1.TargetState_TARGET_STATE_RUNNING, Comm: "a-name-of-more-than-15-bytes"}
	}
	return &gpreemptv1.ListQueuesResponse{Queues: all}, nil
}

func (s *inventory) ListTargets(context.Context, *gpreemptv1.ListTargetsRequest) (*gpreemptv1.ListTargetsResponse, error) {
	return &gpreemptv1.ListTargetsResponse{Targets: s.targets}, nil
}

func TestCLibraryListsAreBoundedAndHaveTags(t *testing.T) {
	tagged := func(pid int32, tag string) *gpreemptv1.Target {
		return &gpreemptv1.Target{Pid: pid, Environment: map[string]string{"AMD_QUEUE_TAG": tag, "AMD_QUEUE_PRIORITY": "2"}}
	}
	runC(t, func(t *testing.T, program func(*testing.T, string) *cProgram) {
		socket := filepath.Join(testutil.TempSocketDir(t), "s")
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		s := &inventory{queues: 6, targets: []*gpreemptv1.Target{
			tagged(100, "ONLINE_AI"), tagged(101, "OFFLINE_AI"), tagged(102, strings.Repeat("x", 100)), tagged(103, "OFFLINE_AI"),
		}}
		server := grpc.NewServer()
		gpreemptv1.RegisterAdminServiceServer(server, s)
		go func() { _ = server.Serve(l) }()
		t.Cleanup(server.Stop)
		p := program(t, socket)
		queue := func(pid, id int, tag string) string {
			return fmt.Sprintf(" %d:%d:active:a-name-of-more-:%s", pid, id, tag)
		}
		long := strings.Repeat("x", 63)
		p.check([][2]string{
			{"tag OFFLINE_AI", "ok" + queue(101, 0, "OFFLINE_AI") + queue(101, 1, "OFFLINE_AI")},
			{"tag OFFLINE", "ok"},
			{"all", "ok" + queue(100, 0, "ONLINE_AI") + queue(100, 1, "ONLINE_AI") + queue(101, 0, "OFFLINE_AI") + queue(101, 1, "OFFLINE_AI") + queue(102, 0, long) + queue(102, 1, long)},
			{"status 102 1", "ok active=1"},
		})
		s.queues = 65537
		p.check([][2]string{{"process 100", "EMSGSIZE"}})
		s.queues, s.targets = 1, []*gpreemptv1.Target{{Cmdline: strings.Repeat("x", 17<<20)}}
		p.check([][2]string{{"all", "EMSGSIZE"}, {"suspend 0", "EOPNOTSUPP"}})
	})
}
