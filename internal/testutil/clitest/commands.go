package clitest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
)

// EveryCommand walks the commands of a program: each has a short description and refuses operands that
// it does not take, and is run by a script of testdata that compares its output, or by one of the tests elsewhere.
func EveryCommand(t *testing.T, program *term.Program, elsewhere map[string]string) {
	t.Helper()
	root := program.New(term.IO{Getenv: func(string) string { return "" }})
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
			case slices.Contains([]string{program.Name, "terminal", "exits"}, words[0]):
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
		if cmd.Args == nil && cmd.Name() != "help" {
			t.Errorf("%s accepts any operands", cmd.CommandPath())
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
