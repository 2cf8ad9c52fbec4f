package cli

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/internal/term"
)

// topApp is gpctl in a terminal at noon.
func topApp() *term.App {
	return &term.App{IO: term.IO{
		Out: io.Discard, Err: io.Discard, Terminal: true, Getenv: func(string) string { return "" },
		Now: func() time.Time { return time.Unix(43200, 0).UTC() }, Sleep: term.Sleep,
	}, Timeout: time.Minute}
}

// topReading is a machine with two GPUs, trainings on both and an inference server, at a time of
// the daemon's clock. The first training has been suspended for half of the time.
func topReading(clock time.Duration) reading {
	backlog := uint64(41)
	target := func(pid int32, comm string, class gpreemptv1.Class, state gpreemptv1.TargetState, gpu uint32) *gpreemptv1.Target {
		return &gpreemptv1.Target{
			TargetId: fmt.Sprintf("%d@1", pid), Pid: pid, Comm: comm, Class: class, State: state, GpuIds: []uint32{gpu}, QueueCount: 2,
			Mechanism: "dbgtrap", SuspendedTotal: durationpb.New(0),
		}
	}
	trainer := target(5001, "trainer", gpreemptv1.Class_CLASS_OFFLINE, gpreemptv1.TargetState_TARGET_STATE_SUSPENDED, 63420)
	trainer.SuspendedTotal, trainer.Suspends = durationpb.New(clock/2), uint64(clock/(100*time.Millisecond))
	trainer.Container = &gpreemptv1.Container{Namespace: "ml", Pod: "bert-0"}
	trainer.Job = &gpreemptv1.Job{Name: "torch-1"}
	other := target(5002, "python3", gpreemptv1.Class_CLASS_OFFLINE, gpreemptv1.TargetState_TARGET_STATE_RUNNING, 61531)
	server := target(7000, "server", gpreemptv1.Class_CLASS_ONLINE, gpreemptv1.TargetState_TARGET_STATE_RUNNING, 63420)
	return reading{
		status: &gpreemptv1.GetStatusResponse{
			Backend: "emulated mi300x", Policy: "balanced", StartedAt: timestamppb.New(time.Unix(43200-105, 0)), Clock: durationpb.New(clock),
		},
		gpus: []*gpreemptv1.Gpu{
			{GpuId: 63420, Name: "gfx942", QueueCount: 4, QueueSlots: 24, LeaseCount: 1},
			{GpuId: 61531, Name: "gfx942", QueueCount: 2, QueueSlots: 24, BreakerOpen: true, BreakerClosesIn: durationpb.New(12 * time.Second)},
		},
		targets: []*gpreemptv1.Target{trainer, other, server},
		queues: []*gpreemptv1.Queue{
			{TargetId: "5001@1", QueueId: 1, GpuId: 63420, State: trainer.State, Backlog: &backlog, BacklogUnit: "packets"},
			{TargetId: "5001@1", QueueId: 2, GpuId: 63420, State: trainer.State},
		},
		leases: []*gpreemptv1.Lease{{
			LeaseId: "9f-3", GpuIds: []uint32{63420}, Priority: 8, State: gpreemptv1.LeaseState_LEASE_STATE_HELD, ClientPid: 7000, Label: "chat",
			CreatedAt: timestamppb.New(time.Unix(43199, 0)), ExpiresIn: durationpb.New(4 * time.Second),
		}},
	}
}

// topFilled is a screen after two readings and a few announcements.
func topFilled(a *term.App) *topScreen {
	s := newTopScreen(a)
	s.read(topReading(100 * time.Second))
	for i := range 20 {
		clock := 100*time.Second + time.Duration(i)*time.Second/4
		id := fmt.Sprintf("9f-%d", i)
		s.event(&gpreemptv1.Event{Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, LeaseId: id, ToLease: gpreemptv1.LeaseState_LEASE_STATE_QUIESCING, Clock: durationpb.New(clock)})
		s.event(&gpreemptv1.Event{
			Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: "5001@1", LeaseId: id, Cause: "lease", Took: durationpb.New(time.Millisecond),
			FromTarget: gpreemptv1.TargetState_TARGET_STATE_SUSPENDING, ToTarget: gpreemptv1.TargetState_TARGET_STATE_SUSPENDED,
			At: timestamppb.New(time.Date(1970, 1, 1, 11, 59, i, 0, time.Local)),
		})
		s.event(&gpreemptv1.Event{
			Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, LeaseId: id, FromLease: gpreemptv1.LeaseState_LEASE_STATE_QUIESCING,
			ToLease: gpreemptv1.LeaseState_LEASE_STATE_HELD, Clock: durationpb.New(clock + time.Duration(i+1)*100*time.Microsecond),
		})
	}
	s.read(topReading(105 * time.Second))
	return s
}

// The pictures of docs/operate.md are made by this test: go test ./internal/cli -run TestTopScreen -update.
func TestTopScreen(t *testing.T) {
	for _, size := range []struct{ width, height int }{{80, 24}, {160, 50}} {
		name := fmt.Sprintf("top-%dx%d.svg", size.width, size.height)
		path := filepath.Join("../../docs/images", name)
		got := picture(topFilled(topApp()).lines(size.width, size.height), size.width)
		if *update {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s (-want +got; -update writes it):\n%s", name, diff)
		}
	}
}

// picture returns lines of a terminal as SVG.
func picture(lines []string, width int) string {
	colours := map[term.Style]string{term.StyleBold: "#ffffff", term.StyleGood: "#7ec699", term.StyleNote: "#e6c07b", term.StyleBad: "#f08d8d"}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="monospace" font-size="14.95">`+"\n", width*9, len(lines)*18+8)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#1d2026"/><g fill="#d5d8df">`+"\n")
	for y, line := range lines {
		x, look := 0, term.StyleNone
		for line != "" {
			if rest, ok := strings.CutPrefix(line, "\x1b["); ok {
				code, after, _ := strings.Cut(rest, "m")
				look, line = term.Style(code), after
				continue
			}
			run, _, _ := strings.Cut(line, "\x1b[")
			cells := len([]rune(run))
			fill := ""
			if c := colours[look]; c != "" {
				fill = ` fill="` + c + `"`
			}
			for at, word := range words(run) { // each at its cell, whatever the font
				fmt.Fprintf(&b, `<text x="%d" y="%d" textLength="%d"%s>%s</text>`+"\n", (x+at)*9, y*18+18, len([]rune(word))*9, fill, html.EscapeString(word))
			}
			x, line = x+cells, line[len(run):]
		}
	}
	b.WriteString("</g></svg>\n")
	return b.String()
}

// words returns the words of a text with the cell that each begins at.
func words(text string) iter.Seq2[int, string] {
	return func(yield func(int, string) bool) {
		at := 0
		for _, word := range strings.SplitAfter(text, " ") {
			if bare := strings.TrimRight(word, " "); bare != "" && !yield(at, bare) {
				return
			}
			at += len([]rune(word))
		}
	}
}

// withoutStyle removes the sequences of printer.
func withoutStyle(line string) string {
	for {
		before, after, found := strings.Cut(line, "\x1b[")
		if !found {
			return line
		}
		_, after, _ = strings.Cut(after, "m")
		line = before + after
	}
}

func TestTopMeasuresSharesRatesAndQuietTimes(t *testing.T) {
	s := topFilled(topApp())
	share, rate, ok := s.rates("5001@1")
	if share != 0.5 || rate != 10 || !ok {
		t.Errorf("suspended for %v, %v suspends a second, %v; want 0.5, 10, true", share, rate, ok)
	}
	if _, _, ok := s.rates("1@1"); ok {
		t.Error("rates of a target that does not exist")
	}
	if p50, p99 := stat.Quantile(slices.Sorted(slices.Values(s.quiet)), 0.5), stat.Quantile(slices.Sorted(slices.Values(s.quiet)), 0.99); p50 != time.Millisecond || p99 != 2*time.Millisecond {
		t.Errorf("quiet after %v and %v, want 1ms and 2ms", p50, p99)
	}
	if got := sparkline([]time.Duration{0, 1, 4, 8}, 3); got != "▂▅█" {
		t.Errorf("sparkline %q", got)
	}
	// A target that has exited is forgotten.
	r := topReading(106 * time.Second)
	r.targets = r.targets[1:]
	s.read(r)
	if len(s.usage) != 2 || s.causes[entry{"5001@1", gpreemptv1.TargetState_TARGET_STATE_SUSPENDED}] != "" {
		t.Errorf("kept of a target that has exited: %v %v", s.usage, s.causes)
	}
	// The daemon's event of the end of a suspend does not have its cause.
	const running, suspending, suspended = gpreemptv1.TargetState_TARGET_STATE_RUNNING, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING, gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
	s.event(&gpreemptv1.Event{Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: "5002@1", LeaseId: "9f-9", Cause: "lease", FromTarget: running, ToTarget: suspending})
	s.event(&gpreemptv1.Event{Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: "5002@1", Cause: "done", FromTarget: suspending, ToTarget: suspended})
	if got := s.last[0].comm + ": " + s.last[0].why + ", " + s.causes[entry{"5002@1", gpreemptv1.TargetState_TARGET_STATE_SUSPENDED}]; got != "python3: lease 9f-9, lease" {
		t.Errorf("the last preemption is %q", got)
	}
	// The clock and the counts of a restarted daemon begin again.
	r = topReading(time.Second)
	r.status.StartedAt = timestamppb.New(time.Unix(43300, 0))
	s.read(r)
	if _, _, ok := s.rates("5002@1"); ok {
		t.Error("rates across a restart of the daemon")
	}
}

func TestTopDrawsRunningAndSuspendedQueuesInTheSlots(t *testing.T) {
	s := topFilled(topApp())
	for _, tt := range []struct {
		queues, slots uint32
		want          string
	}{
		{4, 24, "█░·········· 4/24"},
		{24, 24, "███████████░ 24/24"},
		{48, 24, "████████████ 48/24"},
		{2, 24, "░··········· 2/24"},
		{0, 0, "············ 0/0"},
	} {
		if got := s.busy(&gpreemptv1.Gpu{GpuId: 63420, QueueCount: tt.queues, QueueSlots: tt.slots}, 12); got != tt.want {
			t.Errorf("%d queues in %d slots: %q, want %q", tt.queues, tt.slots, got, tt.want)
		}
	}
}

func TestTopKeys(t *testing.T) {
	s := topFilled(topApp())
	pids := func() (list []int32) {
		for _, target := range s.listed() {
			list = append(list, target.GetPid())
		}
		return list
	}
	steps := []struct {
		keys string
		want []int32
	}{
		{"", []int32{5001, 5002, 7000}},
		{"s s s", []int32{5001, 5002, 7000}}, // by state
		{"/ p y t enter", []int32{5002}},
		{"esc", []int32{5001, 5002, 7000}},
		{"/ b e r t backspace t", []int32{5001}},
		{"esc", []int32{5001, 5002, 7000}},
	}
	for _, step := range steps {
		for key := range strings.FieldsSeq(step.keys) {
			if _, quit := s.key(key); quit {
				t.Fatalf("%q quits", key)
			}
		}
		if diff := cmp.Diff(step.want, pids()); diff != "" {
			t.Errorf("after %q (-want +got):\n%s", step.keys, diff)
		}
	}
	for _, step := range []struct{ key, selected string }{{"", "5001@1"}, {"down", "5002@1"}, {"down", "7000@1"}, {"down", "7000@1"}, {"up", "5002@1"}} {
		if s.key(step.key); s.selected != step.selected {
			t.Errorf("%s selects %s, want %s", step.key, s.selected, step.selected)
		}
	}
	if explain, _ := s.key("enter"); explain != "5002@1" {
		t.Errorf("enter explains %q", explain)
	}
	for _, view := range []string{"enter", "?", "w"} { // before the daemon has answered, too
		s.view = viewTargets
		if _, _ = s.key(view); s.view == viewTargets {
			t.Errorf("%s opens nothing", view)
		}
		if _, quit := s.key("q"); quit || s.view != viewTargets {
			t.Errorf("q after %s quits, or does not close it", view)
		}
	}
	s.key(" ")
	if _, quit := s.key("q"); !quit || !s.paused {
		t.Error("q does not quit, or space does not pause")
	}
}

// topDaemon answers with the reading of topReading.
type topDaemon struct {
	gpreemptv1.AdminServiceClient
	clock time.Duration
	down  bool
}

func (d *topDaemon) GetStatus(context.Context, *gpreemptv1.GetStatusRequest, ...grpc.CallOption) (*gpreemptv1.GetStatusResponse, error) {
	if d.down {
		return nil, status.Error(codes.Internal, "broken for the test")
	}
	return topReading(d.clock).status, nil
}

func (d *topDaemon) ListGpus(context.Context, *gpreemptv1.ListGpusRequest, ...grpc.CallOption) (*gpreemptv1.ListGpusResponse, error) {
	return &gpreemptv1.ListGpusResponse{Gpus: topReading(d.clock).gpus}, nil
}

func (d *topDaemon) ListTargets(context.Context, *gpreemptv1.ListTargetsRequest, ...grpc.CallOption) (*gpreemptv1.ListTargetsResponse, error) {
	return &gpreemptv1.ListTargetsResponse{Targets: topReading(d.clock).targets}, nil
}

func (d *topDaemon) ListQueues(context.Context, *gpreemptv1.ListQueuesRequest, ...grpc.CallOption) (*gpreemptv1.ListQueuesResponse, error) {
	return &gpreemptv1.ListQueuesResponse{Queues: topReading(d.clock).queues}, nil
}

func (d *topDaemon) ListLeases(context.Context, *gpreemptv1.ListLeasesRequest, ...grpc.CallOption) (*gpreemptv1.ListLeasesResponse, error) {
	return &gpreemptv1.ListLeasesResponse{Leases: topReading(d.clock).leases}, nil
}

func (d *topDaemon) WatchEvents(context.Context, *gpreemptv1.WatchEventsRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[gpreemptv1.WatchEventsResponse], error) {
	return &noEvents{}, nil
}

func (d *topDaemon) ExplainTarget(_ context.Context, req *gpreemptv1.ExplainTargetRequest, _ ...grpc.CallOption) (*gpreemptv1.ExplainTargetResponse, error) {
	return &gpreemptv1.ExplainTargetResponse{Verdict: "It runs: " + req.GetTargetId(), Target: topReading(d.clock).targets[0]}, nil
}

type noEvents struct{ grpc.ClientStream }

func (*noEvents) Recv() (*gpreemptv1.WatchEventsResponse, error) { return nil, io.EOF }

// watchedScreen sends its text whenever it has been painted.
type watchedScreen struct {
	tcell.SimulationScreen
	painted chan string
}

func (w watchedScreen) Show() {
	w.SimulationScreen.Show()
	cells, width, _ := w.GetContents()
	var b strings.Builder
	for i, c := range cells {
		if i%width == 0 {
			b.WriteByte('\n')
		}
		b.WriteString(string(c.Runes))
	}
	select {
	case <-w.painted: // only the last text is of interest
	default:
	}
	w.painted <- b.String()
}

// await waits until the screen contains a text.
func (w watchedScreen) await(text string) {
	for !strings.Contains(<-w.painted, text) {
	}
}

// recordingTerminal counts what is written to a terminal of 100 columns and 30 lines.
type recordingTerminal struct {
	io.ReadCloser
	written *bytes.Buffer
}

func (recordingTerminal) Start() error        { return nil }
func (recordingTerminal) Stop() error         { return nil }
func (t recordingTerminal) Drain() error      { return t.Close() }
func (recordingTerminal) NotifyResize(func()) {}

func (recordingTerminal) WindowSize() (tcell.WindowSize, error) {
	return tcell.WindowSize{Width: 100, Height: 30}, nil
}

func (t recordingTerminal) Write(b []byte) (int, error) { return t.written.Write(b) }

// A cell that is sent again although it has not changed flickers, and is slow over ssh.
func TestTopSendsOnlyTheCellsThatChanged(t *testing.T) {
	t.Setenv("TERM", "xterm-256color")
	t.Setenv("LC_ALL", "C.UTF-8")
	for _, noColour := range []string{"", "1"} {
		in, _ := io.Pipe()
		terminal := recordingTerminal{in, &bytes.Buffer{}}
		screen, err := tcell.NewTerminfoScreenFromTty(terminal)
		if err != nil {
			t.Fatal(err)
		}
		if err := screen.Init(); err != nil {
			t.Fatal(err)
		}
		a := topApp()
		a.Getenv = func(name string) string { return map[string]string{"NO_COLOR": noColour}[name] }
		s := topFilled(a)
		paint(screen, s)
		if coloured := strings.Contains(terminal.written.String(), "\x1b[32m"); coloured != (noColour == "") {
			t.Errorf("NO_COLOR=%q: colours are sent: %v", noColour, coloured)
		}
		terminal.written.Reset()
		paint(screen, s)
		same := terminal.written.Len()
		s.key("s")
		terminal.written.Reset()
		paint(screen, s)
		// A few sequences move the cursor and begin and end the update.
		if !strings.Contains(terminal.written.String(), "a second") || same > 50 || terminal.written.Len() > same+50 {
			t.Errorf("NO_COLOR=%q: %d bytes for the same screen, and for a new word %.200q", noColour, same, terminal.written)
		}
		screen.Fini()
	}
}

func TestTopFollowsTheDaemonAndTheKeys(t *testing.T) {
	for _, down := range []bool{false, true} {
		screen := watchedScreen{tcell.NewSimulationScreen("UTF-8"), make(chan string, 1)}
		if err := screen.Init(); err != nil {
			t.Fatal(err)
		}
		screen.SetSize(100, 30)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			topOn(t.Context(), topApp(), &topDaemon{clock: time.Minute, down: down}, screen, time.Millisecond)
		}()
		if down {
			screen.await("broken for the test")
		} else {
			screen.await("trainer")
			screen.InjectKey(tcell.KeyEnter, 0, tcell.ModNone) // the first target is selected
			screen.await("It runs: 5001@1")
			screen.InjectKey(tcell.KeyEscape, 0, tcell.ModNone)
			screen.await("order: suspended share")
		}
		screen.InjectKey(tcell.KeyRune, 'q', tcell.ModNone)
		<-ended
		screen.Fini()
	}
}

func TestTopOncePrintsAScreen(t *testing.T) {
	a := topApp()
	var out strings.Builder
	a.Out, a.Terminal = &out, false
	if err := topOnce(t.Context(), a, &topDaemon{clock: time.Minute}, time.Nanosecond, 80, 24); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(out.String(), "\n"); got != 24 || !strings.Contains(out.String(), "5001 ") || strings.Contains(out.String(), "\x1b") {
		t.Errorf("%d lines:\n%s", got, out.String())
	}
}

func TestTopShowsTheCauseOfTheStateThatItShows(t *testing.T) {
	const running, suspended = gpreemptv1.TargetState_TARGET_STATE_RUNNING, gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
	s := newTopScreen(topApp())
	s.read(topReading(100 * time.Second))
	for _, e := range []*gpreemptv1.Event{
		{Cause: "lease", FromTarget: running, ToTarget: gpreemptv1.TargetState_TARGET_STATE_SUSPENDING},
		{Cause: "done", FromTarget: gpreemptv1.TargetState_TARGET_STATE_SUSPENDING, ToTarget: suspended},
		{Cause: "lease-ended", FromTarget: suspended, ToTarget: gpreemptv1.TargetState_TARGET_STATE_RESUMING},
		{Cause: "done", FromTarget: gpreemptv1.TargetState_TARGET_STATE_RESUMING, ToTarget: running},
	} {
		e.Kind, e.TargetId = gpreemptv1.EventKind_EVENT_KIND_TARGET, "5001@1"
		s.event(e)
	}
	got := map[gpreemptv1.TargetState]string{}
	for _, state := range []gpreemptv1.TargetState{running, suspended, gpreemptv1.TargetState_TARGET_STATE_QUARANTINED} {
		got[state] = s.why(&gpreemptv1.Target{TargetId: "5001@1", State: state})
	}
	want := map[gpreemptv1.TargetState]string{running: "the last lease has ended", suspended: "a lease covers its GPUs", gpreemptv1.TargetState_TARGET_STATE_QUARANTINED: "-"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("why (-want +got):\n%s", diff)
	}
}

func TestTopSelectsTheFirstTargetUntilTheUserChooses(t *testing.T) {
	s := newTopScreen(topApp())
	var got []string
	for n, step := range []struct {
		suspended time.Duration // of 5002; 5001 is suspended for half of the time
		keys      []string
	}{{}, {suspended: time.Second}, {keys: []string{"down", "up"}, suspended: 2 * time.Second}, {}} {
		r := topReading(time.Duration(100+n) * time.Second)
		r.targets[1].SuspendedTotal = durationpb.New(step.suspended)
		s.read(r)
		for _, key := range step.keys {
			s.key(key)
		}
		got = append(got, s.listed()[0].GetTargetId()+" selected "+s.selected)
	}
	want := []string{"5001@1 selected 5001@1", "5002@1 selected 5002@1", "5002@1 selected 5002@1", "5001@1 selected 5002@1"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("first (-want +got):\n%s", diff)
	}
}
