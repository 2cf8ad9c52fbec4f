package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// hostileEnv makes the test binary a hostile client; it holds an attack as JSON.
const hostileEnv = "GPREEMPT_E2E_HOSTILE"

// attack is what a hostile client does.
type attack struct {
	Socket string
	// PerSecond announcements are offered for so long: the clock says when the next
	// one is due, whatever became of the last.
	PerSecond int
	Length    time.Duration
	// Sessions and Calls are connections: with a Session stream, and with a call for
	// each announcement. Each has the same part.
	Sessions, Calls int
	// Connect: instead, connections are made one after the other, as fast as can be,
	// and closed.
	Connect bool
	// Abuse: instead, everything in abuses is done at once.
	Abuse bool
	// ZeroWindow: instead, so many connections are made, each with Calls calls of
	// GetStatistics whose answers may not be sent.
	ZeroWindow int
	// Hold: instead, so many connections are made and kept until standard input ends.
	Hold int
	// Leases: instead, leases are taken and kept, as many as there are, until standard input
	// ends.
	Leases bool
	// Serve: instead, announcements are made and completed, as an inference server does, for
	// Length.
	Serve bool
	// Processes: instead, so many processes do all this. Subordinates: each is another user, in a
	// namespace of this one's; Members is set for the process that starts them.
	Processes             int
	Subordinates, Members bool
	// Reason: instead, one call is made, and Failure is the reason of its error.
	Reason bool
	// Play: instead, orders are read from standard input and carried out.
	Play bool
}

// tally is what became of an attack's announcements.
type tally struct {
	// Offered were due. Sent of them were taken by the socket; the others were due
	// while it, or the daemon's window, had no room.
	Offered, Sent uint64
	// Accepted and Refused were answered so, and Reset not at all.
	Accepted, Refused, Reset uint64
	Failure                  string `json:",omitempty"`
}

// hostileMain carries out an attack and prints its tally: a first line when every
// connection stands, and the outcome when all answers have come.
func hostileMain(text string, out io.Writer) int {
	var a attack
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		fmt.Fprintln(out, err)
		return 2
	}
	switch {
	case a.Processes > 0:
		return crowdMain(a, out)
	case a.Leases:
		return leasesMain(a, os.Stdin, out)
	case a.Serve:
		return serveMain(a, out)
	case a.Connect:
		return connectMain(a, out)
	case a.Abuse:
		return abuseMain(a.Socket, out)
	case a.ZeroWindow > 0:
		return zeroWindowMain(a, out)
	case a.Hold > 0:
		return holdMain(a, os.Stdin, out)
	case a.Reason:
		return reasonMain(a, out)
	case a.Play:
		return playerMain(os.Stdin, out)
	}
	var all []*attacker
	for i := range a.Sessions + a.Calls {
		at := &attacker{every: time.Second * time.Duration(a.Sessions+a.Calls) / time.Duration(a.PerSecond)}
		if err := at.connect(a.Socket, i < a.Sessions); err != nil {
			fmt.Fprintln(out, err)
			return 2
		}
		all = append(all, at)
	}
	fmt.Fprintln(out, "ready")
	var wg sync.WaitGroup
	began := time.Now()
	for _, at := range all {
		wg.Go(func() { at.run(began, began.Add(a.Length)) })
	}
	wg.Wait()
	var sum tally
	for _, at := range all {
		at.wait()
		sum.Offered += uint64(a.Length / at.every)
		sum.Sent += at.sent.Load()
		sum.Accepted += at.accepted.Load()
		sum.Refused += at.refused.Load()
		sum.Reset += at.reset.Load()
		if at.failure != nil && sum.Failure == "" {
			sum.Failure = at.failure.Error()
		}
	}
	if err := json.NewEncoder(out).Encode(sum); err != nil {
		return 1
	}
	return 0
}

// connectMain connects and closes; what the kernel has no room for counts as reset.
func connectMain(a attack, out io.Writer) int {
	fmt.Fprintln(out, "ready")
	var offered, reset atomic.Uint64
	var wg sync.WaitGroup
	until := time.Now().Add(a.Length)
	for range 2 {
		wg.Go(func() {
			for time.Now().Before(until) {
				offered.Add(1)
				c, err := net.Dial("unix", a.Socket)
				if err != nil {
					reset.Add(1)
					continue
				}
				_, _ = io.WriteString(c, preface) // an error is the refusal
				_ = c.Close()
			}
		})
	}
	wg.Wait()
	if err := json.NewEncoder(out).Encode(tally{Offered: offered.Load(), Reset: reset.Load()}); err != nil {
		return 1
	}
	return 0
}

// zeroWindowMain makes calls on each of its connections, and reads what comes. A connection
// counts as accepted when the daemon begins an answer with a message; then it must close
// the connection, because the answer cannot be sent. A connection whose calls are all refused
// may stay open and unread: nothing is kept for it.
func zeroWindowMain(a attack, out io.Writer) int {
	b := settings(4, 0)
	for i := range a.Calls {
		b = append(b, call(streamID(i), gpreemptv1.AdminService_GetStatistics_FullMethodName)...)
		b = append(b, frame(frameData, flagEndStream, streamID(i), message(&gpreemptv1.GetStatisticsRequest{}))...)
	}
	fmt.Fprintln(out, "ready")
	failures := make([]error, a.ZeroWindow)
	var accepted atomic.Uint64
	var all sync.WaitGroup
	for i := range failures {
		all.Go(func() {
			c, err := dialH2(a.Socket)
			if err != nil {
				failures[i] = err
				return
			}
			defer c.Close()
			open, began := a.Calls, false
			c.onFrame = func(kind, flags byte, _ uint32, _ []byte) {
				switch {
				case kind == frameHeaders && flags&flagEndStream == 0:
					began = true
				case kind == frameHeaders:
					if open--; open == 0 { // every call was refused
						_ = c.Close()
					}
				}
			}
			_ = c.SetDeadline(time.Now().Add(zeroWindowEnds))
			if err := c.send(b); err != nil {
				return // it is refused
			}
			err = c.read()
			if began {
				accepted.Add(1)
			}
			if isTimeout(err) && began {
				failures[i] = fmt.Errorf("not closed within %v, %d calls without an answer", zeroWindowEnds, open)
			}
		})
	}
	all.Wait()
	is := tally{Accepted: accepted.Load()}
	if err := errors.Join(failures...); err != nil {
		is.Failure = err.Error()
	}
	if err := json.NewEncoder(out).Encode(is); err != nil {
		return 1
	}
	return 0
}

// zeroWindowEnds is how long the daemon may take to close a connection that takes no answer.
const zeroWindowEnds = 25 * time.Second

// attacker is one connection of an attack.
type attacker struct {
	*h2
	every   time.Duration // between announcements
	session bool
	next    uint32        // stream of the next call
	slots   chan struct{} // calls that may be in flight
	ended   chan struct{}
	failure error

	sent, accepted, refused, reset atomic.Uint64

	rest []byte          // of the session's answers; the reader's
	seen map[uint32]bool // calls with a message in their answer; the reader's
}

const sessionStream = 1

func (a *attacker) connect(socket string, session bool) (err error) {
	if a.h2, err = dialH2(socket); err != nil {
		return err
	}
	a.session, a.next, a.ended = session, 1, make(chan struct{})
	a.slots, a.seen = make(chan struct{}, 32), map[uint32]bool{}
	a.onFrame = a.answer
	go func() {
		defer close(a.ended)
		a.failure = a.read()
	}()
	if session {
		a.streams[sessionStream] = h2Window
		return a.send(call(sessionStream, gpreemptv1.OnlineService_Session_FullMethodName))
	}
	return nil
}

// hostileAnnouncement has a short life, so that the rate limits it and not the number of
// leases.
var hostileAnnouncement = &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(5 * time.Millisecond), MaxWait: durationpb.New(0)}

// run offers announcements as the clock says.
func (a *attacker) run(began, until time.Time) {
	const atOnce = 200
	one := message(announceFrame(1, hostileAnnouncement))
	batch := make([]byte, 0, atOnce*len(one))
	for range atOnce {
		batch = append(batch, one...)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	offered := 0
	for range tick.C {
		now := time.Now()
		if now.After(until) {
			return
		}
		due := int(now.Sub(began) / a.every)
		n := min(due-offered, atOnce)
		offered = due // what was due while the last batch waited is not made up for
		if n <= 0 {
			continue
		}
		var err error
		if a.session {
			err = a.data(sessionStream, 0, batch[:n*len(one)])
			if err == nil {
				a.sent.Add(uint64(n))
			}
		} else {
			err = a.calls(n)
		}
		if err != nil {
			return // told by failure
		}
	}
}

// calls makes up to n calls, as many as may be in flight.
func (a *attacker) calls(n int) error {
	first := len(a.slots) == 0 && a.next == 1
	var b []byte
	made := uint64(0)
	body := message(hostileAnnouncement)
	for range n {
		select {
		case a.slots <- struct{}{}:
		default:
			n = 0
		}
		if n == 0 {
			break
		}
		header := callAgain
		if first {
			header, first = callOnce(gpreemptv1.OnlineService_NotifyOnline_FullMethodName), false
		}
		b = append(b, frame(frameHeaders, flagEndHeaders, a.next, header)...)
		b = append(b, frame(frameData, flagEndStream, a.next, body)...)
		a.next += 2
		made++
	}
	if made == 0 {
		return nil
	}
	a.mu.Lock()
	for a.h2.ended == nil && a.conn < len(b) {
		a.changed.Wait()
	}
	a.conn -= int(made) * len(body)
	a.mu.Unlock()
	if err := a.send(b); err != nil {
		return err
	}
	a.sent.Add(made)
	return nil
}

// answer counts what the daemon answers.
func (a *attacker) answer(kind, flags byte, stream uint32, payload []byte) {
	switch {
	case a.session && kind == frameData:
		var all [][]byte
		all, a.rest = messages(append(a.rest, payload...))
		for _, m := range all {
			if number, _ := fieldNumber(m); number == 2 {
				a.accepted.Add(1)
			} else {
				a.refused.Add(1)
			}
		}
	case a.session:
	case kind == frameData:
		a.seen[stream] = true
	case kind == frameHeaders && flags&flagEndStream != 0:
		if a.seen[stream] {
			a.accepted.Add(1)
		} else {
			a.refused.Add(1)
		}
		delete(a.seen, stream)
		<-a.slots
	case kind == frameReset && !a.seen[stream]:
		a.reset.Add(1)
	}
}

// wait returns when everything sent is answered, or the connection ended.
func (a *attacker) wait() {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(time.Minute)
	for a.accepted.Load()+a.refused.Load() < a.sent.Load() {
		select {
		case <-tick.C:
		case <-a.ended:
			return
		case <-late:
			a.failure = fmt.Errorf("%d of %d announcements are answered a minute later", a.accepted.Load()+a.refused.Load(), a.sent.Load())
			return
		}
	}
	_ = a.Close()
	<-a.ended
	a.failure = nil // it was stopped
}

// callOnce is a header block that has the server remember its fields, and callAgain
// the block that repeats it (RFC 7541, 6.1 and 6.2.1).
func callOnce(method string) []byte {
	b := []byte{0x83, 0x86} // :method POST, :scheme http
	for _, f := range [][2]string{{":path", method}, {":authority", "localhost"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		b = append(b, 0x40)
		b = append(append(b, hpackString(f[0])...), hpackString(f[1])...)
	}
	return b
}

var callAgain = []byte{0x83, 0x86, 0x80 | 65, 0x80 | 64, 0x80 | 63, 0x80 | 62}
