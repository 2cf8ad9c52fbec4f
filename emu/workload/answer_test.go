package workload

import (
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"
)

// startAnswer is start for a client that works on request.
func startAnswer(t *testing.T, m *machine, args string) *program {
	t.Helper()
	return runClient(t, func(in io.Reader, out io.Writer) int {
		return Answer(t.Context(), m, strings.Fields(args), in, out, io.Discard)
	})
}

// ran returns the number of packets that a queue has run.
func (m *machine) ran(id uint32) uint64 {
	q := m.queue(id)
	m.mu.Lock()
	defer m.mu.Unlock()
	return uint64(q.ran)
}

func TestEachQuestionIsAnsweredWhenItsPacketsAreOver(t *testing.T) {
	for _, args := range []string{"--packets 30", "--packets 30 --queues 2", "--packets 1", "--packets 200 --wait poll"} {
		t.Run(args, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 77)
				m.interrupt = 3
				p := startAnswer(t, m, args)
				ready := p.await("ready")
				cfg, err := ParseArgs(strings.Fields(args), io.Discard)
				if err != nil {
					t.Fatal(err)
				}
				const questions = 5
				for n := range uint64(questions) {
					p.say("")
					p.await("answer")
					for _, q := range ready.Queues {
						if ran := m.ran(q.ID); ran != (n+1)*cfg.Packets {
							t.Errorf("at answer %d queue %d has run %d packets, want %d", n+1, q.ID, ran, (n+1)*cfg.Packets)
						}
					}
				}
				_ = p.in.Close()
				done := p.await("done")
				p.exits(exitProved)
				if want := questions * cfg.Packets * uint64(len(ready.Queues)); done.Count != want || done.Packets != want || !done.OK {
					t.Errorf("done reports %+v, want %d packets and ok", *done.Tally, want)
				}
				checkClean(t, m)
			})
		})
	}
}

func TestAnswersProveThatEachPacketRanOnce(t *testing.T) {
	tests := []struct {
		name  string
		fault fault
		want  string
	}{
		{"a packet runs twice", twice, "packets ran, of"},
		{"a packet does not run", never, "progress is 0"},
		{"a packet runs with another value", swapped, "with the hash"},
		{"the event of the last packet is lost", silent, "the event of the last was not raised"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine(t, 7)
				m.fault = test.fault
				p := startAnswer(t, m, "--packets 8")
				go func() { // until the client ends
					for {
						if _, err := io.WriteString(p.in, "\n"); err != nil {
							return
						}
					}
				}()
				var what []string
				answers := 0
				for message := range p.messages {
					switch message.Event {
					case "error":
						what = append(what, message.What)
					case "answer":
						if answers++; answers == 3 {
							_ = p.in.Close()
						}
					}
				}
				p.exits(exitWrong)
				if all := strings.Join(what, "\n"); !strings.Contains(all, test.want) {
					t.Errorf("the client reports %q, want %q in it", all, test.want)
				}
				checkClean(t, m)
				_ = p.in.Close()
			})
		})
	}
}

func TestAnswersEndWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, 7)
		ctx, cancel := context.WithCancel(t.Context())
		p := runClient(t, func(in io.Reader, out io.Writer) int {
			return Answer(ctx, m, strings.Fields("--packets 3"), in, out, io.Discard)
		})
		p.say("")
		p.await("answer")
		cancel()
		if done := p.await("done"); done.Count != 3 || !done.OK {
			t.Errorf("done reports %+v, want 3 packets and ok", *done.Tally)
		}
		p.exits(exitProved)
		checkClean(t, m)
		_ = p.in.Close()
	})
}

func TestAnswersNeedANumberOfPacketsThatFits(t *testing.T) {
	for _, args := range []string{"", "--packets 4097", "--packets 3 --churn", "--packets 3 --rate 5", "--packets 3 --sdma", "--nonsense"} {
		var help strings.Builder
		if code := Answer(t.Context(), nil, strings.Fields(args), strings.NewReader(""), io.Discard, &help); code != exitUsage || help.Len() == 0 {
			t.Errorf("%q: exit code %d, and it says %q", args, code, help.String())
		}
	}
}
