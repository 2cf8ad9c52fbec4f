package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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

// Columns are shown whole or not at all, with the last text cut. Where they do not fit, the less important ones are missing.
func TestTopScreenHasWholeColumns(t *testing.T) {
	for _, size := range []struct{ width, height int }{{80, 24}, {120, 40}, {50, 10}} {
		a := topApp()
		a.Getenv = func(name string) string { return map[string]string{"NO_COLOR": "1"}[name] }
		s := topFilled(a)
		s.read(crowded(105 * time.Second))
		var got strings.Builder
		for _, line := range s.lines(size.width, size.height) {
			got.WriteString(strings.TrimRight(line, " ") + "\n")
		}
		path := fmt.Sprintf("testdata/top-%dx%d.golden", size.width, size.height)
		if *update {
			if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got.String()); diff != "" {
			t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
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
