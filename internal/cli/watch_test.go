package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

// errEnough ends a watch that a test has seen enough of.
var errEnough = errors.New("enough")

// watchTable runs gpctl with --watch. steps are called one after another when the table has been
// read, in each pause; then the watch ends.
func watchTable(t *testing.T, m *clitest.Machine, args []string, steps ...func()) (stdout, stderr string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	clitest.Serve(t, socket, m)
	var out, complaints bytes.Buffer
	streams := term.IO{In: strings.NewReader(""), Out: &out, Err: &complaints, Getenv: func(string) string { return "" }}
	var mu sync.Mutex // guards at
	at := clitest.Noon
	streams.Now = func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return at
	}
	streams.Sleep = func(_ context.Context, d time.Duration) error {
		switch {
		case d != defaultWatch:
			return fmt.Errorf("it waits for %v", d)
		case len(steps) == 0:
			return errEnough
		}
		steps[0]()
		steps = steps[1:]
		mu.Lock()
		defer mu.Unlock()
		at = at.Add(defaultWatch)
		return nil
	}
	if code := Program.Run(t.Context(), append(args, "--socket", socket), streams); code != term.ExitFailure || !strings.Contains(complaints.String(), errEnough.Error()) {
		t.Fatalf("code %d, stdout %q, stderr %q", code, out.String(), complaints.String())
	}
	return out.String(), complaints.String()
}

// watchMachine runs gpctl against m on a clock that moves only while gpctl sleeps;
// slept, if it is not nil, is called with each pause.
func watchMachine(t *testing.T, m *clitest.Machine, slept func(time.Duration), args ...string) (code int, stdout, stderr string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	clitest.Serve(t, socket, m)
	var out, err bytes.Buffer
	streams := term.IO{In: strings.NewReader(""), Out: &out, Err: &err, Getenv: func(string) string { return "" }}
	now, sleep := clitest.Clock()
	streams.Now = now
	streams.Sleep = func(ctx context.Context, d time.Duration) error {
		if slept != nil {
			slept(d)
		}
		return sleep(ctx, d)
	}
	code = Program.Run(t.Context(), append(args, "--socket", socket), streams)
	return code, out.String(), err.String()
}

func TestWatchPrintsEachChangeOnce(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"lease", "list", "-w", "--jq", ".leases | length"}, "2\n1\n"},
		{[]string{"lease", "list", "--watch"}, `LEASE  LABEL  STATE      PRIO  HIP  GPUS         OWNER       AGE  EXPIRES IN
k3-1   llama  held         11  0    34535        pid 5001  1.5ms       998ms
k3-2   -      quiescing    12  0,1  34535,41235  admin      40µs          2s
--- 12:00:04
LEASE  LABEL  STATE  PRIO  HIP  GPUS   OWNER     AGE  EXPIRES IN
k3-1   llama  held     11  0    34535  pid 5001   4s         1ms
`},
	} {
		m := clitest.NewMachine()
		ages := func() {
			m.Mu.Lock()
			defer m.Mu.Unlock()
			m.Leases[0] = proto.CloneOf(m.Leases[0])
			m.Leases[0].ExpiresIn = clitest.Dur(time.Millisecond)
		}
		ends := func() {
			m.Mu.Lock()
			defer m.Mu.Unlock()
			m.Leases = m.Leases[:1:1]
		}
		got, _ := watchTable(t, m, tt.args, ages, ends)
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.args, diff)
		}
	}
}

func TestEveryTableCanBeWatched(t *testing.T) {
	for _, args := range []string{"status", "stats", "gpu list", "target list", "queue list", "lease list", "queue slots"} {
		got, note := watchTable(t, clitest.NewMachine(), append(strings.Fields(args), "--watch", "-o", "json", "--jq", "type"), func() {})
		if got != "object\n" {
			t.Errorf("%s: %q, %q", args, got, note)
		}
	}
	m := clitest.NewMachine()
	if code, _, stderr := watchMachine(t, m, nil, "gpu", "list", "--watch=500ms"); code != term.ExitUsage || !strings.Contains(stderr, "at least 1s") {
		t.Errorf("code %d, %q", code, stderr)
	}
	if code, _, stderr := watchMachine(t, m, nil, "status", "--watch", "--check"); code != term.ExitUsage || !strings.Contains(stderr, "mutually exclusive") {
		t.Errorf("code %d, %q", code, stderr)
	}
}

func TestWatchRedrawsInPlace(t *testing.T) {
	screen := watchedScreen{tcell.NewSimulationScreen("UTF-8"), make(chan string, 1)}
	if err := screen.Init(); err != nil {
		t.Fatal(err)
	}
	defer screen.Fini()
	screen.SetSize(61, 4)
	next := make(chan func() ([]string, error))
	a := topApp()
	a.Now, a.Sleep = func() time.Time { return clitest.Noon }, func(ctx context.Context, _ time.Duration) error { return ctx.Err() }
	a.Simulated.Store(new("simulated mi300x"))
	var last []string
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		last = watchOn(t.Context(), a, screen, "gpctl x", defaultWatch, func(ctx context.Context) (proto.Message, func(*term.Printer), error) {
			var lines []string
			err := ctx.Err()
			select {
			case read := <-next:
				lines, err = read()
			case <-ctx.Done():
			}
			return &gpreemptv1.ListGpusResponse{}, func(p *term.Printer) {
				for _, line := range lines {
					p.Line(term.Cell{Text: line, Style: term.StyleBad})
				}
			}, err
		})
	}()
	five := []string{"one", "two", "three", "four", "five"}
	next <- func() ([]string, error) { return five, nil }
	screen.await("\ngpctl x  12:00:00  every 2s; q quits, arrows move  (simulated\none  ")
	screen.InjectKey(tcell.KeyDown, 0, tcell.ModNone)
	screen.await("\ntwo   ")
	for range 9 {
		screen.InjectKey(tcell.KeyDown, 0, tcell.ModNone)
	}
	screen.await("\nfive  ")
	next <- func() ([]string, error) { return nil, errors.New("no daemon") }
	screen.await("\nno daemon  ")
	next <- func() ([]string, error) { return five[:1], nil }
	screen.await("simulated\none   ")
	screen.InjectKey(tcell.KeyRune, 'q', tcell.ModNone)
	<-ended
	if !slices.Equal(last, []string{"\x1b[31mone\x1b[0m"}) {
		t.Errorf("what was shown last: %q", last)
	}
}

func TestRunReportsWhatTheDaemonMakesOfTheTree(t *testing.T) {
	offline, online := gpreemptv1.Class_CLASS_OFFLINE, gpreemptv1.Class_CLASS_ONLINE
	for _, tt := range []struct {
		target *gpreemptv1.Target
		want   string
	}{
		{&gpreemptv1.Target{Class: offline, DecidedBy: "tag", Mechanism: "dbgtrap"}, "is offline, priority 0, by tag: leases suspend it by dbgtrap\n"},
		{&gpreemptv1.Target{Class: offline, DecidedBy: "tag"}, "is offline, priority 0, by tag: leases may suspend it; no mechanism is attached yet\n"},
		{&gpreemptv1.Target{Class: offline, DecidedBy: "rule a", AttachError: "no\x1b"}, "is offline, priority 0, by rule a: cannot be suspended: no?\n"},
		{&gpreemptv1.Target{Class: online, Priority: 11}, "is online, priority 11, by default: never suspended; it has to announce its work itself (the tag says offline: gpctl target explain PID)\n"},
	} {
		m := clitest.NewMachine()
		g := tt.target
		g.Pid, g.TargetId, g.Comm, g.QueueCount, g.GpuIds = int32(os.Getpid()), pidText(os.Getpid())+"@7", "train", 1, []uint32{34535}
		m.Targets = append(m.Targets, g)
		code, stdout, stderr := watchMachine(t, m, nil, reportRun, pidText(os.Getppid()), "offline")
		want := "gpctl: train (PID) " + tt.want
		if got := strings.ReplaceAll(stderr, pidText(os.Getpid()), "PID"); code != term.ExitOK || stdout != "" || got != want {
			t.Errorf("code %d, stdout %q, stderr %q, want %q", code, stdout, got, want)
		}
	}
}

func pidText(pid int) string { return term.Numbers([]int{pid}) }

func TestRunReportEndsWithTheCommand(t *testing.T) {
	sleeper := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	began, err := readStat(int32(sleeper.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	looks := 0
	a := &term.App{IO: term.IO{Sleep: func(context.Context, time.Duration) error {
		switch looks++; looks {
		case 3:
			if err := sleeper.Process.Kill(); err != nil {
				t.Error(err)
			}
			_ = sleeper.Wait() // killed
		case 6:
			return errEnough
		}
		return nil
	}}}
	awaitEnd(t.Context(), a, began)
	if looks != 3 {
		t.Errorf("the end was seen at look %d, want 3", looks)
	}
	if _, err := readStat(began.PID); err == nil {
		t.Error("a process that has ended was read")
	}
	// Another process with the pid is not this one.
	self, err := readStat(int32(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	self.Start--
	if awaitEnd(t.Context(), a, self); looks != 4 {
		t.Errorf("another process was seen at look %d, want 4", looks)
	}
	self.Start++
	if awaitEnd(t.Context(), a, self); looks != 6 {
		t.Errorf("the end of the context was seen at look %d, want 6", looks)
	}
}
