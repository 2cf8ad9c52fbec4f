package workload

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestMain(m *testing.M) {
	if what := os.Getenv(childEnv); what != "" {
		os.Exit(child(what))
	}
	os.Exit(testutil.VerifyMain(m))
}

// program is a client that runs in this process, with m as its driver.
type program struct {
	t        *testing.T
	in       *io.PipeWriter
	messages chan Message
	code     chan int
	seen     []Message
}

func start(t *testing.T, ctx context.Context, m *machine, args ...string) *program { //nolint:revive // t comes first in a test
	t.Helper()
	return runClient(t, func(in io.Reader, out io.Writer) int { return Main(ctx, m, args, in, out, io.Discard) })
}

// runClient is start for any client.
func runClient(t *testing.T, client func(in io.Reader, out io.Writer) int) *program {
	t.Helper()
	in, stdin := io.Pipe()
	stdout, out := io.Pipe()
	p := &program{t: t, in: stdin, messages: make(chan Message, 100), code: make(chan int, 1)}
	go func() {
		p.code <- client(in, out)
		_ = out.Close()
		_ = in.Close()
	}()
	go func() {
		defer close(p.messages)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var message Message
			if err := json.Unmarshal(lines.Bytes(), &message); err != nil {
				t.Errorf("the client wrote %q: %v", lines.Text(), err)
			}
			p.messages <- message
		}
	}()
	return p
}

// say sends the client a command.
func (p *program) say(format string, args ...any) {
	p.t.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		p.t.Fatalf("write to the client: %v", err)
	}
}

// await returns the next message of a kind. It ignores others, except errors.
func (p *program) await(event string) Message {
	p.t.Helper()
	for message := range p.messages {
		p.seen = append(p.seen, message)
		if message.Event == event {
			return message
		}
		if message.Event == "error" {
			p.t.Fatalf("waiting for %s: the client reports: %s", event, message.What)
		}
	}
	p.t.Fatalf("the client ended without saying %s", event)
	return Message{}
}

// exits checks how the client ends.
func (p *program) exits(want int) {
	p.t.Helper()
	for range p.messages {
	}
	if got := <-p.code; got != want {
		p.t.Errorf("the client's exit code is %d, want %d", got, want)
	}
}

// checkClean checks that a client released everything.
func checkClean(t *testing.T, m *machine) {
	t.Helper()
	if queues, events, mappings, files := m.leftovers(); queues+events+mappings+files != 0 {
		t.Errorf("the client left %d queues, %d events, %d mappings and %d open files", queues, events, mappings, files)
	}
}

// A client with 40 packets per queue proves that each ran once, with either way of
// waiting, and although every third call is interrupted.
func TestClientProvesItsWork(t *testing.T) {
	tests := []struct {
		name   string
		args   string
		queues int
	}{
		{"events", "--queues 2 --runtime", 4},
		{"memory", "--queues 2 --wait poll", 4},
		{"one at a time", "--depth 1", 2},
		{"a full ring", "--depth 64 --packets 300", 2},
		{"one GPU of two", "--gpus 77 --queues 3", 3},
		{"copies", "--queues 0 --sdma --packets 100", 2},
		{"copies seen in memory", "--queues 0 --sdma --packets 100 --wait poll", 2},
		{"both", "--sdma --duration 500 --occupancy 250000", 4},
		{"on time", "--rate 2000 --duration 100", 2},
		{"churn", "--queues 3 --churn --packets 400", 6},
		{"churn of copies", "--queues 1 --sdma --churn --packets 400 --wait poll", 4},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 77, 99)
				m.interrupt = 3
				args := append([]string{"--packets", "40"}, strings.Fields(test.args)...)
				p := start(t, t.Context(), m, args...)
				ready, done := p.await("ready"), p.await("done")
				p.exits(exitProved)
				if len(ready.Queues) != test.queues || ready.PID != os.Getpid() {
					t.Errorf("ready reports pid %d and %d queues, want %d and %d", ready.PID, len(ready.Queues), os.Getpid(), test.queues)
				}
				cfg, err := ParseArgs(args, io.Discard)
				if err != nil {
					t.Fatal(err)
				}
				if want := cfg.Packets * uint64(test.queues); done.Packets != want || done.Count+done.Abandoned != want || !done.OK {
					t.Errorf("done reports %+v, want %d packets and ok", *done.Tally, want)
				}
				if !cfg.Churn && (done.Abandoned != 0 || done.Made != uint64(test.queues)) {
					t.Errorf("done reports %d packets abandoned and %d queues made, want 0 and %d", done.Abandoned, done.Made, test.queues)
				}
				if cfg.Churn && (done.Abandoned == 0 || done.Count == 0 || done.Made < 20) {
					t.Errorf("churn abandoned %d packets, ran %d and made %d queues: want some of each", done.Abandoned, done.Count, done.Made)
				}
				for _, q := range done.Queues {
					if q.Hash != q.Want || q.Packets != cfg.Packets {
						t.Errorf("queue %d: %d packets with the hash %s, want %d and %s", q.ID, q.Packets, q.Hash, cfg.Packets, q.Want)
					}
				}
				if done.Interrupted == 0 || done.P50US <= 0 || done.P99US < done.P50US {
					t.Errorf("done reports %d calls interrupted, p50 %v us, p99 %v us", done.Interrupted, done.P50US, done.P99US)
				}
				checkClean(t, m)
				_ = p.in.Close()
			})
		})
	}
}

// The same work has the same hash with either way of waiting.
func TestHashDependsOnTheWorkOnly(t *testing.T) {
	var hashes []string
	for _, args := range []string{"--wait poll", "--wait event --depth 16", "--rate 5000"} {
		synctest.Test(t, func(t *testing.T) {
			p := start(t, t.Context(), newMachine(t, 7), strings.Fields("--queues 2 --sdma --packets 50 "+args)...)
			hashes = append(hashes, p.await("done").Hash)
			p.exits(exitProved)
			_ = p.in.Close()
		})
	}
	if hashes[0] != hashes[1] || hashes[0] != hashes[2] {
		t.Errorf("three clients with the same work have the hashes %v", hashes)
	}
}

// Each fault of a GPU makes the proof fail.
func TestClientNoticesFaultsOfTheGPU(t *testing.T) {
	tests := []struct {
		name  string
		fault fault
		args  string
		want  string
	}{
		{"a packet runs twice", twice, "", "21 packets ran, of 20"},
		{"a packet does not run", never, "", "progress is 0"},
		{"a packet runs with another value", swapped, "", "with the hash"},
		{"a signal is decremented twice", decrement, "", "packet 7 is -1"},
		{"a kernel ends before it is done", progress, "", "its progress is"},
		{"a packet stays in its slot", header, "", "still has a packet"},
		{"the read index stays behind", behind, "", "the read index is 7"},
		{"an event is lost", silent, "", "event was not raised"},
		{"a copy has a wrong bit", flipped, "--queues 0 --sdma", "differs"},
		{"a fence has a wrong value", fence, "--queues 0 --sdma", "the fence of copy 7"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 7)
				m.fault = test.fault
				p := start(t, t.Context(), m, append([]string{"--packets", "20"}, strings.Fields(test.args)...)...)
				var what []string
				var done Message
				for message := range p.messages {
					switch message.Event {
					case "error":
						what = append(what, message.What)
					case "done":
						done = message
					}
				}
				p.exits(exitWrong)
				if all := strings.Join(what, "\n"); !strings.Contains(all, test.want) {
					t.Errorf("the client reports %q, want %q in it", all, test.want)
				}
				if done.Tally == nil || done.OK {
					t.Errorf("done reports %+v, want it not ok", done)
				}
				checkClean(t, m)
				_ = p.in.Close()
			})
		})
	}
}

// A packet that runs after its queue was destroyed is noticed, although no goroutine waits
// for it.
func TestClientNoticesPacketsThatRunTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 7)
		p := start(t, t.Context(), m, "--duration", "100000")
		id := p.await("ready").Queues[0].ID
		p.flying(id)
		q := m.queue(id)
		p.say("destroy %d", id)
		p.await("destroyed")
		m.finish(q)
		p.say("stop")
		if message := p.next(); message.Event != "error" || !strings.Contains(message.What, "destroyed, and 1 later") {
			t.Errorf("the client reports %+v", message)
		}
		if done := p.next(); done.Event != "done" || done.OK {
			t.Errorf("the client reports %+v, want it not ok", done)
		}
		p.exits(exitWrong)
		_ = p.in.Close()
	})
}

// A suspended queue is destroyed when it is resumed, and not before. The other queue
// continues.
func TestDestroyOfASuspendedQueueWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 7)
		p := start(t, t.Context(), m, "--queues", "2")
		ready := p.await("ready")
		m.suspend(ready.Queues[0].ID, true)
		p.say("destroy %d", ready.Queues[0].ID)
		p.say("destroy %d", ready.Queues[0].ID)
		if message := p.next(); message.Event != "error" || !strings.Contains(message.What, "unknown queue 0") {
			t.Errorf("destroying it twice: the client reports %+v", message)
		}
		p.say("report")
		before := p.await("report")
		p.running(before.Queues[1])
		if diff := cmp.Diff([]uint32{0, 1}, m.living()); diff != "" {
			t.Errorf("the queues while one is suspended (-want +got):\n%s", diff)
		}
		m.suspend(ready.Queues[0].ID, false)
		q := p.await("destroyed").Queues[0]
		if q.Hash != q.Want || q.Packets != q.Count+q.Abandoned || q.Abandoned == 0 {
			t.Errorf("destroyed reports %+v", q)
		}
		p.say("stop")
		if done := p.await("done"); !done.OK {
			t.Errorf("done reports %+v", *done.Tally)
		}
		p.exits(exitProved)
		checkClean(t, m)
		_ = p.in.Close()
	})
}

// running waits until a queue has run more packets than before.
func (p *program) running(before Queue) {
	p.t.Helper()
	for ; ; <-time.After(tick) { // of the bubble
		p.say("report")
		for _, q := range p.await("report").Queues {
			if q.ID == before.ID && q.Count > before.Count {
				return
			}
		}
	}
}

// flying waits until a queue has a packet.
func (p *program) flying(id uint32) {
	p.t.Helper()
	for ; ; <-time.After(tick) { // of the bubble
		p.say("report")
		for _, q := range p.await("report").Queues {
			if q.ID == id && q.Write > q.Read {
				return
			}
		}
	}
}

// next returns the next message of any kind.
func (p *program) next() Message {
	p.t.Helper()
	message, more := <-p.messages
	if !more {
		p.t.Fatal("the client ended")
	}
	return message
}

// A client stops by a command, by its context, or by a context that ended before. It
// waits until its queues are empty.
func TestClientStopsOnRequest(t *testing.T) {
	tests := map[string]func(p *program, cancel func()){
		"by a command":  func(p *program, _ func()) { p.flying(0); p.say("stop"); p.say("stop") },
		"by a signal":   func(p *program, cancel func()) { p.flying(0); cancel() },
		"at the start":  func(_ *program, cancel func()) { cancel() },
		"out of words":  func(p *program, cancel func()) { p.flying(0); _ = p.in.Close(); cancel() },
		"while on time": func(p *program, _ func()) { p.say("stop") },
	}
	for name, stop := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 7)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				args := []string{"--queues", "2", "--runtime"}
				if name == "while on time" {
					args = append(args, "--rate", "0.01")
				}
				p := start(t, ctx, m, args...)
				p.await("ready")
				stop(p, cancel)
				done := p.await("done")
				p.exits(exitProved)
				if !done.OK || done.Packets != done.Count || done.Abandoned != 0 {
					t.Errorf("done reports %+v", *done.Tally)
				}
				if m.runtime {
					t.Error("the client left the runtime on")
				}
				checkClean(t, m)
				_ = p.in.Close()
			})
		})
	}
}

func TestCommandsAreCarriedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 7, 9)
		m.interrupt = 2
		p := start(t, t.Context(), m, "--queues", "1", "--wait", "poll")
		p.await("ready")
		p.say("")
		p.say("create")
		if q := p.await("created").Queues; len(q) != 1 || q[0].ID != 2 || q[0].GPU != 7 {
			t.Errorf("created reports %+v, want queue 2 on GPU 7", q)
		}
		p.running(Queue{ID: 2})
		for command, want := range map[string]string{
			"destroy": "0 arguments", "destroy x": "invalid syntax", "destroy 9": "unknown queue 9", "fork": "0 arguments", "dance": "unknown command",
			"rtenable": "file exists",
		} {
			p.say("%s", command)
			if message := p.next(); message.Event != "error" || !strings.Contains(message.What, want) {
				t.Errorf("%s: the client reports %+v, want an error with %q", command, message, want)
			}
		}
		for id := range 3 {
			p.say("destroy %d", id)
			if q := p.await("destroyed").Queues[0]; q.ID != uint32(id) || q.Hash != q.Want {
				t.Errorf("destroyed reports %+v", q)
			}
		}
		p.say("rtenable")
		p.await("rtenabled")
		p.say("rtenable")
		if message := p.next(); message.Event != "error" || message.Errno != int(unix.EBUSY) {
			t.Errorf("enabling the runtime twice: the client reports %+v", message)
		}
		p.say("rtdisable")
		p.await("rtdisabled")
		p.say("create")
		p.await("created")
		p.say("stop")
		if done := p.await("done"); !done.OK || done.Made != 4 || len(done.Queues) != 4 {
			t.Errorf("done reports %+v", *done.Tally)
		}
		p.exits(exitProved)
		checkClean(t, m)
		_ = p.in.Close()
	})
}

// An error of the driver is reported with its errno, and everything is released.
func TestErrorsOfTheDriverAreReported(t *testing.T) {
	tests := []struct {
		req  kfd.Request
		args string
		want string
	}{
		{kfdabi.ReqCreateQueue, "", "CREATE_QUEUE GPU 7: no space left"},
		{kfdabi.ReqCreateEvent, "", "CREATE_EVENT: no space left"},
		{kfdabi.ReqRuntimeEnable, "--runtime", "RUNTIME_ENABLE: no space left"},
		{kfdabi.ReqGetProcessAperturesNew, "", "GET_PROCESS_APERTURES_NEW: no space left"},
		{0, "--gpus 8", "use GPU 8"},
	}
	for _, test := range tests {
		t.Run(test.want, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 7)
				m.refuse[test.req] = unix.ENOSPC
				p := start(t, t.Context(), m, strings.Fields(test.args)...)
				message := p.next()
				if message.Event != "error" || !strings.Contains(message.What, test.want) {
					t.Errorf("the client reports %+v, want an error with %q", message, test.want)
				}
				if test.req != 0 && message.Errno != int(unix.ENOSPC) {
					t.Errorf("the client says errno %d, want %d", message.Errno, unix.ENOSPC)
				}
				p.exits(exitWrong)
				checkClean(t, m)
				_ = p.in.Close()
			})
		})
	}
}

// The report has the progress of a kernel that was unmapped in the middle.
func TestReportShowsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 7)
		p := start(t, t.Context(), m, "--duration", "100000")
		p.await("ready")
		p.flying(0)
		for progress := uint64(0); progress < engine.WholeGPU/2; <-time.After(tick) {
			p.say("report")
			progress = p.await("report").Queues[0].Progress
		}
		p.say("stop")
		p.await("done")
		p.exits(exitProved)
		_ = p.in.Close()
	})
}

// The input after an exec is for the next program.
func TestInputIsReadLineByLine(t *testing.T) {
	lines, next, end := make(chan string), make(chan struct{}), make(chan struct{})
	in := strings.NewReader("report\nexec --queues 1\nstop\n")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		read(in, lines, next, end)
	}()
	var got []string
	got = append(got, <-lines)
	next <- struct{}{}
	got = append(got, <-lines)
	close(end)
	<-ended
	if diff := cmp.Diff([]string{"report", "exec --queues 1"}, got); diff != "" {
		t.Errorf("the lines (-want +got):\n%s", diff)
	}
	if rest, err := io.ReadAll(in); err != nil || string(rest) != "stop\n" {
		t.Errorf("the next program gets %q, want the last line", rest)
	}
}
