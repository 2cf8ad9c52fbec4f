package trial

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// spoken is what a process wrote.
type spoken struct {
	mu    sync.Mutex
	lines []string
	any   chan struct{}
}

func (s *spoken) line(_ time.Time, line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, line)
	select {
	case s.any <- struct{}{}:
	default:
	}
}

func (s *spoken) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(slices.Values(s.lines))
}

func TestProcessPassesOnLinesOfBothOutputs(t *testing.T) {
	log := filepath.Join(t.TempDir(), "logs", "a.log")
	said := &spoken{any: make(chan struct{}, 1)}
	p, err := startProcess("a", `printf 'one\ntwo\rthree'; echo four >&2; echo "$X"`, log, []string{"X=five"}, said.line)
	if err != nil {
		t.Fatal(err)
	}
	<-p.silent
	if p.stop(time.Minute) {
		t.Error("it had to be killed")
	}
	// "three" and "five" are on one line of standard output.
	if diff := cmp.Diff([]string{"four", "one", "threefive", "two"}, said.all()); diff != "" {
		t.Error(diff)
	}
	text, err := os.ReadFile(log)
	if err != nil || !strings.Contains(string(text), "two\rthree") {
		t.Errorf("the log is %q: %v", text, err)
	}
}

func TestStoppedProcessLeavesNoChild(t *testing.T) {
	for name, command := range map[string]string{
		"ends by SIGTERM":   `sleep 1000 & echo $!; wait`,
		"ignores SIGTERM":   `trap '' TERM; sleep 1000 & echo $!; wait; wait`,
		"a pipe":            `while sleep 0.01; do echo x; done | (echo $$; cat >/dev/null)`,
		"closes its output": `sleep 1000 >/dev/null 2>&1 & echo $!; exec >/dev/null 2>&1; sleep 1000`,
	} {
		t.Run(name, func(t *testing.T) {
			said := &spoken{any: make(chan struct{}, 1)}
			p, err := startProcess("a", command, filepath.Join(t.TempDir(), "a.log"), os.Environ(), said.line)
			if err != nil {
				t.Fatal(err)
			}
			<-said.any
			p.stop(50 * time.Millisecond)
			// A group without processes cannot be signalled. Its zombies are reaped by init.
			for late := time.Now().Add(time.Minute); syscall.Kill(-int(p.pid()), 0) == nil && !onlyZombies(t, p.pid()); {
				if time.Now().After(late) {
					t.Fatal("a process is left")
				}
			}
		})
	}
}

// onlyZombies reports whether no process of a group runs.
func onlyZombies(t *testing.T, group int32) bool {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		if s, err := discovery.ParseProcStat(text); err == nil && s.Group == group && !s.MainEnded() {
			return false
		}
	}
	return true
}

func TestCommandThatCannotBeStartedIsAnError(t *testing.T) {
	if _, err := startProcess("a", "true", "/dev/null/log", nil, func(time.Time, string) {}); err == nil {
		t.Error("it was started")
	}
}
