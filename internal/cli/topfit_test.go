package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

// crowded is topReading with what is long on real hosts: names, leases and reasons.
func crowded(clock time.Duration) reading {
	r := topReading(clock)
	for i := range r.gpus {
		r.gpus[i].Name = "AMD Instinct MI300X"
	}
	r.targets[0].Comm, r.targets[1].AttachError = "python3-trainer", "the debugger of another process holds it"
	r.leases[0].LeaseId, r.leases[0].Label = "5c1f09a3b7e2d4f8-1041", "llama-70b-chat"
	return r
}

// The screens of gpctl top as an operator sees them. Columns are shown whole or not at all, with the last text cut;
// where they do not fit, the less important ones are missing.
func TestTopScreens(t *testing.T) {
	explanation := &gpreemptv1.ExplainTargetResponse{
		Verdict: "Suspended: a lease covers its GPUs (lease).", Target: crowded(105 * time.Second).targets[0],
		Classification: []*gpreemptv1.ClassifyStep{
			{By: "admin", Detail: "no admin override"},
			{By: "rule training", Matches: true, Decides: true, Class: gpreemptv1.Class_CLASS_OFFLINE, Detail: `comm "python3-trainer" is "python3*"`},
		},
		Checks: []*gpreemptv1.ExplainCheck{
			{Check: "class", Result: gpreemptv1.CheckResult_CHECK_RESULT_PASS, Detail: "class offline, priority 0; 4 processes of job torch-1"},
			{Check: "lease", Result: gpreemptv1.CheckResult_CHECK_RESULT_SUSPEND, Decides: true, Detail: "highest lease priority 8, target priority 0"},
		},
		Leases: crowded(105 * time.Second).leases,
	}
	down := &term.Failure{Code: term.ExitUnreachable, Message: "cannot reach the daemon: socket /run/gpreempt/gpreemptd.sock does not exist", Next: "systemctl status gpreemptd, or use --socket"}
	busy := func(s *topScreen) {
		r := crowded(105 * time.Second)
		for i := range 12 {
			r.gpus = append(r.gpus, &gpreemptv1.Gpu{GpuId: uint32(100 + i), Name: "AMD Instinct MI300X", QueueSlots: 24})
			other := proto.CloneOf(r.targets[1])
			other.TargetId, other.Pid = fmt.Sprintf("%d@1", 6000+i), int32(6000+i)
			r.targets = append(r.targets, other)
		}
		s.read(r)
	}
	views := []struct {
		name string
		keys string // "space" for a space
		make func(s *topScreen)
	}{
		{name: "list"},
		{name: "more than fits", make: busy},
		{name: "the last of many selected", make: func(s *topScreen) { busy(s); s.selected, s.moved = "6011@1", true; s.choose(0) }},
		{name: "help", keys: "?"},
		{name: "explained", keys: "enter", make: func(s *topScreen) { s.explanation = explanation }},
		{name: "not explained yet", keys: "enter"},
		{name: "paused", keys: "space"},
		{name: "filter typed", keys: "/ t r a"},
		{name: "filtered and paused", keys: "/ t r a enter space"},
		{name: "nothing matches", keys: "/ x x enter"},
		{name: "warnings", make: warnedScreen},
		{name: "warnings with their remedies", keys: "w", make: warnedScreen},
		{name: "draining", make: func(s *topScreen) { s.now.status.Draining = true }},
		{name: "daemon lost", make: func(s *topScreen) { s.lose(down) }},
		{name: "no daemon", make: func(s *topScreen) { *s = *newTopScreen(s.a); s.lose(down) }},
		{name: "no daemon yet", make: func(s *topScreen) { *s = *newTopScreen(s.a) }},
		{name: "no target", make: func(s *topScreen) { r := crowded(105 * time.Second); r.targets = nil; s.read(r) }},
	}
	for _, size := range []struct{ width, height int }{{80, 24}, {120, 40}, {50, 10}} {
		var got strings.Builder
		for _, view := range views {
			a := topApp()
			a.Getenv = func(name string) string { return map[string]string{"NO_COLOR": "1"}[name] }
			s := topFilled(a)
			s.read(crowded(105 * time.Second))
			for key := range strings.FieldsSeq(view.keys) {
				s.key(strings.Replace(key, "space", " ", 1))
			}
			if view.make != nil {
				view.make(s)
			}
			fmt.Fprintf(&got, "-- %s --\n", view.name)
			for _, line := range s.lines(size.width, size.height) {
				got.WriteString(strings.TrimRight(line, " ") + "\n")
			}
		}
		golden(t, fmt.Sprintf("testdata/top-%dx%d.golden", size.width, size.height), got.String())
	}
}

// golden compares a text with a file, or writes it.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}

// warnedScreen adds two warnings of the daemon.
func warnedScreen(s *topScreen) {
	s.now.status.Warnings = []*gpreemptv1.Warning{
		{Severity: "error", Code: "NO_MECHANISM", Text: "no usable mechanism: nothing can be suspended on this host", Remedy: "gpctl doctor shows what is missing"},
		{Severity: "warning", Code: "CANNOT_SUSPEND", Text: "1 target: process 5002: the debugger of another process holds it", Remedy: "gpctl target list"},
	}
}

// What the whole screen depends on is never cut: it is on the left of the first line, in reverse video.
func TestTopShowsItsStateWhereNothingIsCut(t *testing.T) {
	s := topFilled(topApp())
	warnedScreen(s)
	for _, key := range []string{"/", "t", "r", "a", "enter", " "} {
		s.key(key)
	}
	want := "\x1b[1mgpreempt\x1b[0m  \x1b[7mPAUSED\x1b[0m  \x1b[7mFILTER tra\x1b[0m  \x1b[7m1 error, 1 warning\x1b[0m"
	for _, view := range []topView{viewTargets, viewExplain, viewHelp, viewWarnings} {
		s.view = view
		for _, width := range []int{50, 80, 300} {
			if got := s.lines(width, 10)[0]; !strings.HasPrefix(got, want) {
				t.Errorf("view %d, %d cells: the first line is %q", view, width, got)
			}
		}
	}
}

func TestTopScreenFitsEveryTerminal(t *testing.T) {
	headings := strings.Fields("LEASE LABEL STATE PRIO HIP GPUS PRODUCT OWNER UID AGE EXPIRES IN TARGETS LAST PREEMPTIONS PID COMMAND TOOK FOR " +
		"GPU NAME QUEUES SUSPENDED LEASES EVICTIONS BREAKER CLASS SUSP% /S BACKLOG CONTAINER MECHANISM JOB WHY")
	for _, width := range []int{20, 79, 80, 81, 100, 139, 140, 300} {
		for _, height := range []int{10, 24, 50, 100} {
			s := topFilled(topApp())
			s.read(crowded(105 * time.Second))
			for _, key := range []string{"down", "?", "esc", "/", "x", "esc"} {
				s.key(key)
				lines := s.lines(width, height)
				if len(lines) != height {
					t.Fatalf("%dx%d after %q: %d lines", width, height, key, len(lines))
				}
				for _, line := range lines {
					if cells := len([]rune(withoutStyle(line))); cells > width {
						t.Fatalf("%dx%d after %q: %d cells: %q", width, height, key, cells, line)
					}
					words := strings.Fields(line)
					if key != "?" && len(words) > 0 && slices.Contains([]string{"HIP", "PID", "LEASE", "LAST"}, words[0]) {
						for _, word := range words {
							if !slices.Contains(headings, word) {
								t.Fatalf("%dx%d: the heading %q is cut: %q", width, height, word, line)
							}
						}
					}
				}
			}
		}
	}
}
