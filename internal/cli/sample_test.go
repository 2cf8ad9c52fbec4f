package cli

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// watchMachine runs gpctl against m on a clock that moves only while gpctl sleeps;
// slept is called with each pause.
func watchMachine(t *testing.T, m *clitest.Machine, slept func(time.Duration), args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return watchUntil(t.Context(), t, m, slept, args...)
}

func watchUntil(ctx context.Context, t *testing.T, m *clitest.Machine, slept func(time.Duration), args ...string) (code int, stdout, stderr string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	clitest.Serve(t, socket, m)
	var out, err bytes.Buffer
	streams := term.IO{In: strings.NewReader(""), Out: &out, Err: &err, Getenv: func(string) string { return "" }}
	now, sleep := clitest.Clock()
	streams.Now = now
	streams.Sleep = func(ctx context.Context, d time.Duration) error {
		slept(d)
		return sleep(ctx, d)
	}
	code = Program.Run(ctx, append(args, "--socket", socket), streams)
	return code, out.String(), err.String()
}

// sampledQueues are one to three queues of two runs of one program.
func sampledQueues(target string, pid int32, backlogs ...uint64) []*gpreemptv1.Queue {
	var all []*gpreemptv1.Queue
	for i, n := range backlogs {
		all = append(all, &gpreemptv1.Queue{
			TargetId: target, Pid: pid, QueueId: uint32(i), GpuId: 34535 + uint32(i)%2, Type: "compute", Comm: "train\x1b", RingBytes: 4096,
			RingAddress: new(0x7f0000000000 + uint64(i)<<12), FirstSeen: clitest.Ago(time.Minute), Backlog: &n, BacklogUnit: "packets",
		})
	}
	return all
}

func TestSamplesAreSummarized(t *testing.T) {
	m := clitest.NewMachine()
	m.QueuesAt = func(look int) ([]*gpreemptv1.Queue, error) {
		switch look {
		case 1:
			return sampledQueues("10@1", 10, 4, 0), nil
		case 2:
			return sampledQueues("10@1", 10, 8, 2, 6), nil
		case 3: // the first has ended, and its id is that of another queue
			reborn := sampledQueues("20@2", 20, 0)
			reborn[0].FirstSeen = clitest.Ago(-10 * time.Second)
			reborn[0].Backlog = nil
			return reborn, nil
		}
		return append(sampledQueues("20@2", 20, 7), sampledQueues("30@3", 30, 1, 1, 1)...), nil
	}
	var pauses []time.Duration
	code, stdout, stderr := watchMachine(t, m, func(d time.Duration) { pauses = append(pauses, d) },
		"queue", "sample", "--name", "train*", "--duration", "15s")
	want := `4 samples over 15s: 8 queues of 3 processes
simulated mi300x: no hardware is involved

PID  COMMAND  QUEUE  TYPE       GPU         ADDRESS  RING  HWPRIO  SEEN  OF ALL  BACKLOG MIN  MEAN  MAX  UNIT
 10  train?       0  compute  34535  0x7f0000000000  4KiB       -   2/4    50 %            4   6.0    8  packets
 10  train?       1  compute  34536  0x7f0000001000  4KiB       -   2/4    50 %            0   1.0    2  packets
 10  train?       2  compute  34535  0x7f0000002000  4KiB       -   1/4    25 %            6   6.0    6  packets
 20  train?       0  compute  34535  0x7f0000000000  4KiB       -   1/4    25 %            -     -    -  -
 20  train?       0  compute  34535  0x7f0000000000  4KiB       -   1/4    25 %            7   7.0    7  packets
 30  train?       0  compute  34535  0x7f0000000000  4KiB       -   1/4    25 %            1   1.0    1  packets
 30  train?       1  compute  34536  0x7f0000001000  4KiB       -   1/4    25 %            1   1.0    1  packets
 30  train?       2  compute  34535  0x7f0000002000  4KiB       -   1/4    25 %            1   1.0    1  packets

queues at once  min 1, mean 2.5, max 4, std 1.12
types           compute 8
GPUs            34535 6, 34536 2
changes         6 created, 4 destroyed
stability       not stable: 1 to 4 queues
runs            3 processes of train? with 3 1 3 queues: different numbers; 5 runs are recommended
`
	if diff := cmp.Diff(want, stdout); code != term.ExitOK || stderr != "" || diff != "" {
		t.Errorf("code %d, stderr %q, stdout (-want +got):\n%s", code, stderr, diff)
	}
	if diff := cmp.Diff([]time.Duration{5 * time.Second, 5 * time.Second, 5 * time.Second}, pauses); diff != "" {
		t.Errorf("pauses (-want +got):\n%s", diff)
	}
}

func TestRunsWithinOneQueueAreConsistent(t *testing.T) {
	m := clitest.NewMachine()
	m.QueuesAt = func(look int) ([]*gpreemptv1.Queue, error) {
		pid := int32(10 * look)
		return sampledQueues(gpreempt.ProcessKey{PID: pid, Start: 1}.String(), pid, make([]uint64, 2+look%2)...), nil
	}
	code, stdout, stderr := watchMachine(t, m, func(time.Duration) {}, "queue", "sample", "--all", "--duration", "20s")
	for _, want := range []string{
		"stability       stable: the numbers differ by at most one\n",
		"runs            5 processes of train? with 3 2 3 2 3 queues: the same number, within one\n",
	} {
		if code != term.ExitOK || !strings.Contains(stdout, want) {
			t.Errorf("code %d, stderr %q, no %q in:\n%s", code, stderr, want, stdout)
		}
	}
}

func TestSamplingWaitsForAProcess(t *testing.T) {
	m := clitest.NewMachine()
	m.QueuesAt = func(look int) ([]*gpreemptv1.Queue, error) {
		if look < 4 {
			return sampledQueues("10@1", 10, 0), nil
		}
		return append(sampledQueues("10@1", 10, 0), sampledQueues("20@2", 20, 0, 0)...), nil
	}
	var pauses []time.Duration
	code, stdout, stderr := watchMachine(t, m, func(d time.Duration) { pauses = append(pauses, d) },
		"queue", "sample", "--all", "--wait", "--duration", "0s")
	if first, _, _ := strings.Cut(stdout, "\n"); code != term.ExitOK || first != "1 sample over 0s: 2 queues of 1 process" {
		t.Errorf("code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
	if diff := cmp.Diff([]time.Duration{waitInterval, waitInterval}, pauses); diff != "" {
		t.Errorf("pauses (-want +got):\n%s", diff)
	}
}

func TestSamplingWaitsForAPID(t *testing.T) {
	m := clitest.NewMachine()
	late := m.Targets[0]
	m.Targets = m.Targets[1:]
	waited := 0
	code, stdout, stderr := watchMachine(t, m, func(time.Duration) {
		m.Mu.Lock()
		defer m.Mu.Unlock()
		if waited++; waited == 3 {
			m.Targets = append(m.Targets, late)
		}
	}, "queue", "sample", "--pid", "4242", "--wait", "--duration", "0s")
	if first, _, _ := strings.Cut(stdout, "\n"); code != term.ExitOK || first != "1 sample over 0s: 3 queues of 1 process" || waited != 3 {
		t.Errorf("code %d, stderr %q, waited %d times, stdout:\n%s", code, stderr, waited, stdout)
	}
}

func TestInterruptedSamplingIsSummarized(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	pauses := 0
	code, stdout, stderr := watchUntil(ctx, t, clitest.NewMachine(), func(time.Duration) {
		if pauses++; pauses == 2 {
			cancel()
		}
	}, "queue", "sample", "--all", "--duration", "1h")
	if first, _, _ := strings.Cut(stdout, "\n"); code != term.ExitOK || first != "2 samples over 5s: 8 queues of 5 processes" {
		t.Errorf("code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
}

func TestInterruptedWaitingIsAnError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	code, stdout, stderr := watchUntil(ctx, t, clitest.NewMachine(), func(time.Duration) { cancel() }, "queue", "sample", "--name", "nobody", "--wait")
	if want := "gpctl: interrupted before the first sample\n"; code != term.ExitFailure || stdout != "" || stderr != want {
		t.Errorf("code %d, stdout %q, stderr %q, want %q", code, stdout, stderr, want)
	}
}

func TestSamplingEndsWithTheDaemon(t *testing.T) {
	m := clitest.NewMachine()
	m.QueuesAt = func(look int) ([]*gpreemptv1.Queue, error) {
		if look == 3 {
			return nil, clitest.Refuse(gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown, "the daemon is shutting down", "wait")
		}
		return sampledQueues("10@1", 10, 0), nil
	}
	code, stdout, stderr := watchMachine(t, m, func(time.Duration) {}, "queue", "sample", "--all")
	first, _, _ := strings.Cut(stdout, "\n")
	if code != term.ExitUnreachable || first != "2 samples over 5s: 1 queue of 1 process" || stderr != "gpctl: the daemon is shutting down\n  try: wait\n" {
		t.Errorf("code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
}

func TestSlotsAreWatchedUntilTheDaemonEnds(t *testing.T) {
	m := clitest.NewMachine()
	m.SlotsAt = func(look int) (*gpreemptv1.ListHqdsResponse, error) {
		list := clitest.Slots()
		switch look {
		case 2: // on the first XCC 4242 is unmapped and 5001 has read; on the second it is replaced
			list[1].State = gpreemptv1.HqdState_HQD_STATE_STALE
			list[2].ReadPointer = 1792
			list[7].TargetId, list[7].QueueId = "4300@1002", 0
		case 3: // nothing
			return &gpreemptv1.ListHqdsResponse{ReadAt: clitest.Ago(-2 * time.Second)}, nil
		case 4:
			return nil, clitest.Refuse(gpreempt.CodeUnavailable, gpreempt.ReasonShuttingDown, "the daemon is shutting down", "wait")
		}
		return &gpreemptv1.ListHqdsResponse{Hqds: list, ReadAt: clitest.Ago(time.Duration(1-look) * time.Second)}, nil
	}
	var pauses []time.Duration
	code, stdout, stderr := watchMachine(t, m, func(d time.Duration) { pauses = append(pauses, d) }, "queue", "moves", "--interval", "2s")
	want := `TIME          CHANGE      GPU  KIND  XCC  PIPE  SLOT  TARGET            QUEUE         ADDRESS        READ     WRITTEN      BEHIND
12:00:00.000  mapped    34535  cp      0     0     2  4242@1001             0  0x7f41b5200000        1600        1792  12 packets
12:00:00.000  mapped    34535  cp      0     0     3  5001@2000             0  0x7f0000200000        1600        1792  12 packets
12:00:00.000  mapped    34535  cp      1     0     2  4242@1001             0  0x7f41b5200000        1600        1792  12 packets
12:00:00.000  mapped    34535  cp      1     0     3  5001@2000             0  0x7f0000200000        1600        1792  12 packets
12:00:00.000  mapped    34535  sdma    0     1     3  -                     -  0x7f41b7000000        4096        8192  4096 bytes
12:00:01.000  unmapped  34535  cp      0     0     2  4242@1001             0  0x7f41b5200000        1600        1792  12 packets
12:00:01.000  moved     34535  cp      0     0     3  5001@2000             0  0x7f0000200000        1792        1792   0 packets
12:00:01.000  replaced  34535  cp      1     0     3  4300@1002             0  0x7f0000200000        1600        1792  12 packets
12:00:02.000  unmapped  34535  cp      0     0     3  5001@2000             0  0x7f0000200000        1792        1792   0 packets
12:00:02.000  unmapped  34535  cp      1     0     2  4242@1001             0  0x7f41b5200000        1600        1792  12 packets
12:00:02.000  unmapped  34535  cp      1     0     3  4300@1002             0  0x7f0000200000        1600        1792  12 packets
12:00:02.000  unmapped  34535  sdma    0     1     3  -                     -  0x7f41b7000000        4096        8192  4096 bytes
`
	if diff := cmp.Diff(want, stdout); code != term.ExitUnreachable || diff != "" {
		t.Errorf("code %d, stderr %q, stdout (-want +got):\n%s", code, stderr, diff)
	}
	if diff := cmp.Diff([]time.Duration{2 * time.Second, 2 * time.Second, 2 * time.Second}, pauses); diff != "" {
		t.Errorf("pauses (-want +got):\n%s", diff)
	}
}
