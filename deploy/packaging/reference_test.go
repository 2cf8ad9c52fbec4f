package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

var update = flag.Bool("update", false, "write the reference of the commands")

// reference returns the page of a program: the help of each command.
func reference(root *cobra.Command) string {
	var page strings.Builder
	of := root.Name()
	if root.HasSubCommands() {
		of += " COMMAND"
	}
	page.WriteString("# Reference of " + root.Name() + "\n\nGenerated from the program by `make gen`: what `" + of + " --help` prints. For operators.\n")
	var add func(*cobra.Command)
	add = func(cmd *cobra.Command) {
		if cmd.Hidden {
			return
		}
		cmd.InitDefaultHelpFlag()
		var help bytes.Buffer
		cmd.SetOut(&help)
		_ = cmd.Help() // a Buffer does not fail
		text, _, _ := strings.Cut(help.String(), "\nGlobal Flags:")
		page.WriteString("\n## " + cmd.CommandPath() + "\n\n```\n" + strings.TrimSpace(text) + "\n```\n")
		for _, sub := range cmd.Commands() {
			add(sub)
		}
	}
	add(root)
	return page.String()
}

func TestReferenceOfTheCommandsIsThatOfThePrograms(t *testing.T) {
	for _, m := range commands() {
		root := m.root
		name := filepath.Join("..", "..", "docs", "reference", root.Name()+".md")
		want := reference(root)
		if *update {
			if err := os.WriteFile(name, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("%s is stale: run make gen (-want +got):\n%s", name, diff)
		}
	}
}
