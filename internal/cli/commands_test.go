package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// elsewhere are the commands whose output is compared by other tests than the scripts.
var elsewhere = map[string]string{
	"gpctl hqd watch":    "TestSlotsAreWatchedUntilTheDaemonEnds",
	"gpctl sim fit":      "TestValidationIsShownInTables",
	"gpctl sim validate": "TestValidationIsShownInTables, and docs/reference/validation.md",
	"gpctl top":          "TestTopScreen: the screens of docs/images",
	"gpctl fleet top":    "TestFleetTopShowsTheHostsAgainAndAgain",
	"gpctl trace kfd":    "TestTraceShowsHowLongQueueOperationsTake",
	"gpctl web":          "TestWebShowsWhatTheDaemonAnswers, and the pages of docs/images",
}

// TestEveryCommandHasGoldenOutput walks the commands: each is run by a script that compares its
// output.
func TestEveryCommandHasGoldenOutput(t *testing.T) {
	root := New(IO{Getenv: func(string) string { return "" }})
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
