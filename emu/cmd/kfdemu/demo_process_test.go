package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// roleEnv makes the test binary a program that the demo starts: see roles.
const roleEnv = "GPREEMPT_DEMO_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(roles[role](bufio.NewScanner(os.Stdin), os.Stdout))
	}
	os.Exit(testutil.VerifyMain(m))
}

const ready = `{"event":"ready"}`

// roles are programs that speak as the samples of kfdemu do.
var roles = map[string]func(in *bufio.Scanner, out io.Writer) int{
	// A job that ends as the rest of its command line says.
	"job": func(in *bufio.Scanner, out io.Writer) int {
		fmt.Fprintln(out, ready)
		for n := 0; in.Scan(); n++ {
			switch in.Text() {
			case "report":
				fmt.Fprintln(out, report(n))
			case "stop":
				code := 0
				for _, line := range os.Args[1:] {
					if line == "exit 1" {
						code = 1
						continue
					}
					fmt.Fprintln(out, line)
				}
				return code
			}
		}
		return 0
	},
	"answering": func(in *bufio.Scanner, out io.Writer) int {
		fmt.Fprintln(out, ready)
		for in.Scan() {
			fmt.Fprintln(out, `{"event":"answer"}`)
		}
		fmt.Fprintln(out, `{"event":"done","ok":true}`)
		return 0
	},
	"spoiled": func(in *bufio.Scanner, out io.Writer) int {
		fmt.Fprintln(out, ready)
		for in.Scan() {
		}
		fmt.Fprintln(out, `{"event":"error","what":"a packet ran twice"}`)
		return 1
	},
	"broken": func(_ *bufio.Scanner, out io.Writer) int {
		fmt.Fprintln(out, `{"event":"error","what":"open /dev/kfd: no such file"}`)
		return 1
	},
	"talking": func(*bufio.Scanner, io.Writer) int {
		fmt.Println("hello")
		return 1
	},
	"stubborn": func(in *bufio.Scanner, out io.Writer) int {
		signal.Ignore(os.Interrupt)
		fmt.Fprintln(out, ready)
		for in.Scan() {
		}
		select {}
	},
	"interruptible": func(_ *bufio.Scanner, out io.Writer) int {
		interrupted := make(chan os.Signal, 1)
		signal.Notify(interrupted, os.Interrupt)
		fmt.Fprintln(out, ready)
		<-interrupted
		return 0
	},
}

// report is the n-th of a job: in each, one queue more has ended a kernel.
func report(n int) string {
	var queues []string
	for i := range jobQueues {
		count := 100
		if n > i {
			count = 101
		}
		queues = append(queues, fmt.Sprintf(`{"count":%d}`, count))
	}
	return `{"event":"report","queues":[` + strings.Join(queues, ",") + `]}`
}

// startRole starts a program of roles.
func startRole(t *testing.T, role string, args ...string) (*process, error) {
	t.Helper()
	t.Setenv(roleEnv, role)
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	return startSample(t.Context(), io.Discard, detached(os.Args[0], args...))
}

// mustStart is startRole for one that gets ready.
func mustStart(t *testing.T, role string, args ...string) *process {
	t.Helper()
	p, err := startRole(t, role, args...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestAProgramThatDoesNotGetReadySaysWhy(t *testing.T) {
	for role, want := range map[string]string{"broken": "open /dev/kfd: no such file", "talking": `said "hello"`} {
		_, err := startRole(t, role)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q in it", role, err, want)
		}
	}
}

func TestWhatBecameOfTheJobsPacketsIsItsOwnProof(t *testing.T) {
	const mistake = `{"event":"error","what":"when each runs once and in order"}`
	tests := []struct {
		name string
		says []string
		want packets
		err  string
	}{
		{name: "all ran", says: []string{`{"event":"done","packets":70,"count":70,"ok":true}`}, want: packets{executed: 70}},
		{name: "lost", says: []string{mistake, `{"event":"done","packets":70,"count":68}`, "exit 1"}, want: packets{executed: 68, lost: 2}},
		{name: "repeated", says: []string{mistake, `{"event":"done","packets":70,"count":71}`, "exit 1"}, want: packets{executed: 71, repeated: 1}},
		{
			name: "abandoned is not lost", says: []string{`{"event":"done","packets":70,"count":60,"abandoned":10,"ok":true}`},
			want: packets{executed: 60},
		},
		{
			name: "out of order", says: []string{mistake, `{"event":"done","packets":70,"count":70}`, "exit 1"},
			want: packets{executed: 70}, err: "once and in order",
		},
		{name: "ended without a word", says: []string{"exit 1"}, err: "ended before it said"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			m := &emulated{job: mustStart(t, "job", test.says...), server: mustStart(t, "answering")}
			got, err := m.stopJob(t.Context())
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(packets{})); diff != "" {
				t.Error(diff)
			}
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("the error is %v, want %q", err, test.err)
			}
			if err := m.close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// countingClock advances by a millisecond each time it is read.
type countingClock struct{ at time.Duration }

func (c *countingClock) Now() (time.Duration, error) {
	c.at += time.Millisecond
	return c.at, nil
}

func (c *countingClock) Close() error { return nil }

func TestEachQueueIsLookedAtWhenAKernelOfItEnds(t *testing.T) {
	m := &emulated{job: mustStart(t, "job"), server: mustStart(t, "answering"), clock: &countingClock{}}
	parts, err := m.work(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := make([]progress, jobQueues)
	for i := range want {
		want[i].work = 101 * 25 * time.Millisecond * 3 / 10
	}
	if diff := cmp.Diff(want, parts, cmp.AllowUnexported(progress{}), cmpopts.IgnoreFields(progress{}, "at")); diff != "" {
		t.Error(diff)
	}
	for i := 1; i < len(parts); i++ {
		if parts[i].at <= parts[i-1].at {
			t.Errorf("queue %d ended a kernel after queue %d and is said to have at %v, not after %v", i, i-1, parts[i].at, parts[i-1].at)
		}
	}
	if err := m.close(); err != nil {
		t.Error(err)
	}
}

func TestTheRateOfAJobIsThatOfItsParts(t *testing.T) {
	begin := []progress{{at: time.Second, work: 10 * time.Second}, {at: 2 * time.Second}}
	end := []progress{{at: 3 * time.Second, work: 11 * time.Second}, {at: 6 * time.Second, work: time.Second}}
	if got := rate(begin, end); got != 0.75 {
		t.Errorf("rate = %v, want 0.75", got)
	}
}

func TestRequestsAreAnsweredAndTheServersProofCounts(t *testing.T) {
	m := &emulated{server: mustStart(t, "answering")}
	for range 3 {
		if err := m.request(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.close(); err != nil {
		t.Error(err)
	}
	m = &emulated{server: mustStart(t, "spoiled")}
	if err := m.close(); err == nil || !strings.Contains(err.Error(), "a packet ran twice") {
		t.Errorf("close: %v, want what the server says", err)
	}
}

func TestInterruptEndsAProgram(t *testing.T) {
	if err := mustStart(t, "interruptible").interrupt(); err != nil {
		t.Error(err)
	}
}

func TestKillEndsAProgramThatDoesNotWantTo(t *testing.T) {
	p := mustStart(t, "stubborn")
	if err := p.kill(); err != nil {
		t.Error(err)
	}
	if !p.hasEnded() {
		t.Error("it still runs")
	}
}
