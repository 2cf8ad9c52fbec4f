package cli

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/term"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// elsewhere are the commands whose output is compared by other tests than the scripts.
var elsewhere = map[string]string{
	"gpctl hqd watch":    "TestSlotsAreWatchedUntilTheDaemonEnds",
	"gpctl sim fit":      "TestValidationIsShownInTables",
	"gpctl sim validate": "TestValidationIsShownInTables, and docs/validation.md",
	"gpctl top":          "TestTopScreen: the screens of docs/images",
	"gpctl fleet top":    "TestFleetTopShowsTheHostsAgainAndAgain",
	"gpctl trace kfd":    "TestTraceShowsHowLongQueueOperationsTake",
	"gpctl web":          "TestWebShowsWhatTheDaemonAnswers, and the pages of docs/images",
}

// TestEveryCommandHasGoldenOutput walks the commands: each is run by a script that compares its
// output.
func TestEveryCommandHasGoldenOutput(t *testing.T) {
	root := Program.New(term.IO{Getenv: func(string) string { return "" }})
	compared := map[string]bool{}
	scripts, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	compares := regexp.MustCompile(`^(cmp stdout |stdout ')`)
	for _, script := range scripts {
		text, err := os.ReadFile(script)
		if err != nil {
			t.Fatal(err)
		}
		command, _, _ := strings.Cut(string(text), "\n-- ")
		ran := ""
		for line := range strings.Lines(command) {
			words := strings.Fields(line)
			switch {
			case len(words) == 0:
			case compares.MatchString(line):
				compared[ran] = true
			case slices.Contains([]string{"gpctl", "terminal", "exits"}, words[0]):
				words = slices.DeleteFunc(words[1:], func(w string) bool { return strings.HasPrefix(w, "<") })
				if cmd, _, err := root.Find(words[min(len(words), strings.Count(line[:6], "exits")):]); err == nil {
					ran = cmd.CommandPath()
				}
			}
		}
	}
	for _, cmd := range leaves(root) {
		if path := cmd.CommandPath(); !compared[path] && elsewhere[path] == "" {
			t.Errorf("no script of testdata compares the output of %s", path)
		}
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: %q is no short description", cmd.CommandPath(), cmd.Short)
		}
	}
}

// leaves returns the commands below cmd that have no subcommands.
func leaves(cmd *cobra.Command) []*cobra.Command {
	if !cmd.HasSubCommands() {
		return []*cobra.Command{cmd}
	}
	var all []*cobra.Command
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			all = append(all, leaves(c)...)
		}
	}
	return all
}

func TestGraphicsVersionsHaveCompilerNames(t *testing.T) {
	for v, want := range map[uint32]string{0: "-", 90402: "gfx942", 90010: "gfx90a", 110000: "gfx1100", 90008: "gfx908"} {
		if got := gfx(v); got != want {
			t.Errorf("gfx(%d) = %q, want %q", v, got, want)
		}
	}
}

func TestEveryCommandHasADescription(t *testing.T) {
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		if cmd.Short == "" || cmd.Args == nil && cmd.Name() != "help" {
			t.Errorf("%s: no short description, or any operands accepted", cmd.CommandPath())
		}
		for _, c := range cmd.Commands() {
			visit(c)
		}
	}
	visit(Program.New(term.IO{Out: &bytes.Buffer{}, Err: &bytes.Buffer{}, Getenv: func(string) string { return "" }}))
}

// FuzzReadPolicy checks that a policy on standard input is either an error or a request
// that sets what it lists.
func FuzzReadPolicy(f *testing.F) {
	f.Add([]byte("policy:\n  share_floor: 0.3\n  max_wait: 0.005s\n"))
	f.Add([]byte(`{"preset": "custom", "linger": "LINGER_NONE", "shadow": true}`))
	f.Add([]byte("a: &a [*a]\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		a := &term.App{IO: term.IO{In: bytes.NewReader(data)}}
		req := &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{}}
		if err := readPolicy(a, &cobra.Command{Use: "set"}, req); err != nil {
			if f, ok := errors.AsType[*term.Failure](err); !ok || f.Code != term.ExitUsage {
				t.Errorf("not a usage error: %v", err)
			}
			return
		}
		if len(req.GetFields()) == 0 && req.GetPreset() == "" && !bytes.Contains(data, []byte("preset")) {
			t.Error("accepted without effect")
		}
	})
}

// The read position of some queues wraps at the end of the ring, and the write position never
// does.
func TestPositionsAreThoseInTheRing(t *testing.T) {
	const ring = 4096 // bytes: 1024 dwords, 64 packets
	type row struct {
		r, w   uint64
		behind string
	}
	for name, test := range map[string]struct {
		hqd  *gpreemptv1.Hqd
		want row
	}{
		"the write position is a ring ahead": {&gpreemptv1.Hqd{Kind: "cp", Aql: true, RingBytes: ring, ReadPointer: 1008, WritePointer: 2*1024 + 16}, row{1008, 16, "2 packets"}},
		"both grow":                          {&gpreemptv1.Hqd{Kind: "cp", RingBytes: ring, ReadPointer: 5 * 1024, WritePointer: 5*1024 + 7}, row{0, 7, "7 dwords"}},
		"nothing behind":                     {&gpreemptv1.Hqd{Kind: "cp", Aql: true, RingBytes: ring, ReadPointer: 16, WritePointer: 1024 + 16}, row{16, 16, "0 packets"}},
		"no ring":                            {&gpreemptv1.Hqd{Kind: "cp", ReadPointer: 3, WritePointer: 4}, row{3, 4, "-"}},
		"SDMA counts bytes":                  {&gpreemptv1.Hqd{Kind: "sdma", RingBytes: ring, ReadPointer: 9000, WritePointer: 9064}, row{9000, 9064, "64 bytes"}},
		"SDMA that was reset":                {&gpreemptv1.Hqd{Kind: "sdma", RingBytes: ring, ReadPointer: 9000, WritePointer: 64}, row{9000, 64, "-"}},
	} {
		r, w, behind := positions(test.hqd)
		if got := (row{r, w, behind}); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}
