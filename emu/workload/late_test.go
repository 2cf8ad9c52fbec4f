package workload

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpreempt/gpreempt/emu/engine"
)

// head is the packet at the head of a queue, with its kernel's arguments.
func (q *fakeQueue) head() ([]byte, engine.Mix) {
	packet := q.packet(q.read)
	return packet, engine.DecodeMix(q.get(engine.DecodeDispatch(packet).Kernarg, engine.MixBytes))
}

// The work of a queue is proved even if the queue is destroyed in the middle of it.
func TestAbandonedPacketsAreProved(t *testing.T) {
	tests := []struct {
		name    string
		corrupt func(q *fakeQueue)
		want    string
	}{
		{"a packet ran with another value", func(q *fakeQueue) {
			_, mix := q.head()
			mix.Value++
			q.mix(mix)
		}, "when each runs once and in order"},
		{"a packet that did not run is marked complete", func(q *fakeQueue) {
			packet, _ := q.head()
			q.put(q.slot(q.read), []byte{byte(engine.PacketInvalid), 0})
			q.put64(engine.CompletionOf(packet)+engine.SignalValue, 0)
		}, "the completion signal of packet 0 is 0"},
		{"a packet that ran is not marked complete", func(q *fakeQueue) {
			_, mix := q.head()
			q.mix(mix)
		}, "the completion signal of packet 0 is 1"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 7)
				p := start(t, t.Context(), m, "--duration", "100000")
				p.await("ready")
				p.flying(0)
				m.mu.Lock()
				test.corrupt(m.queues[0])
				m.mu.Unlock()
				p.say("destroy 0")
				if message := p.next(); message.Event != "error" || !strings.Contains(message.What, test.want) {
					t.Errorf("the client reports %+v, want an error with %q", message, test.want)
				}
				p.await("destroyed")
				p.say("stop")
				if done := p.await("done"); done.OK {
					t.Errorf("done reports %+v, want it not ok", *done.Tally)
				}
				p.exits(exitWrong)
				_ = p.in.Close()
			})
		})
	}
}

// Packets are submitted at the configured rate, and a queue catches up after it was
// suspended: the latency of each packet counts from the time it was due.
func TestPacketsAreSubmittedOnTime(t *testing.T) {
	for _, wait := range []string{"event", "poll"} {
		t.Run(wait, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 7)
				p := start(t, t.Context(), m, "--rate", "100", "--packets", "101", "--duration", "100", "--wait", wait)
				p.await("ready")
				begin := time.Now()
				done := p.await("done")
				took := time.Since(begin)
				if took < time.Second || took > time.Second+50*time.Millisecond || done.P99US > 5000 {
					t.Errorf("101 packets, 100 a second, took %v, of which one at most %v us", took, done.P99US)
				}
				p.exits(exitProved)
				_ = p.in.Close()
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 7)
		p := start(t, t.Context(), m, "--rate", "100", "--packets", "101", "--duration", "100")
		p.await("ready")
		begin := time.Now()
		m.suspend(0, true)
		<-time.After(time.Second / 2)
		m.suspend(0, false)
		done := p.await("done")
		took := time.Since(begin)
		if took > time.Second+50*time.Millisecond || done.P99US < 450_000 || done.P50US < 5000 {
			t.Errorf("101 packets, suspended for the first half of a second, took %v, one of them %v us, half of them %v us", took, done.P99US, done.P50US)
		}
		p.exits(exitProved)
		_ = p.in.Close()
	})
}

// The driver may lose an event that is raised as a wait times out.
func TestOneLostEventIsNoFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 7)
		m.fault = lost
		p := start(t, t.Context(), m, "--packets", "20", "--depth", "1")
		if done := p.await("done"); !done.OK || done.Count != 20 {
			t.Errorf("done reports %+v, want 20 packets and ok", *done.Tally)
		}
		p.exits(exitProved)
		_ = p.in.Close()
	})
}
