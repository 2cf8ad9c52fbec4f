package cli

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
)

// runnable calls do with the words of each command that does something.
func runnable(cmd *cobra.Command, words []string, do func(words []string)) {
	for _, c := range cmd.Commands() {
		below := slices.Concat(words, []string{c.Name()})
		if !c.HasAvailableSubCommands() {
			do(below)
		}
		runnable(c, below, do)
	}
}

func TestEmptyNameOfADaemonIsRefusedByEveryCommand(t *testing.T) {
	none := func(string) string { return "" }
	for _, tt := range []struct {
		flag, env, want string
	}{
		{"--hosts=", "", "--hosts is empty"},
		{"--address=", "", "--address is empty"},
		{"--socket=", "", "--socket is empty"},
		{"", "GPREEMPT_ADDRESS=", "GPREEMPT_ADDRESS is set and empty"},
		{"", "GPREEMPT_SOCKET=", "GPREEMPT_SOCKET is set and empty"},
	} {
		commands := 0
		runnable(Program.New(term.IO{Getenv: none}), nil, func(words []string) {
			var out, errs bytes.Buffer
			streams := term.IO{In: strings.NewReader(""), Out: &out, Err: &errs, Getenv: none, Environ: func() []string { return []string{tt.env} }}
			// Cobra checks the operands first: a command gets as many as it takes.
			cmd, _, err := Program.New(streams).Find(words)
			if err != nil {
				t.Fatal(err)
			}
			if tt.flag != "" {
				words = append(words, tt.flag)
			}
			if words[0] == "run" {
				words = append(words, "--class=offline", "--", "true")
			} else if cmd.Args != nil {
				for args := []string(nil); cmd.Args(cmd, args) != nil && len(args) < 4; args = append(args, "x") {
					words = append(words, "x")
				}
			}
			code := Program.Run(context.Background(), words, streams)
			if want := fmt.Sprintf("gpctl: %s: name a daemon, or ", tt.want); code != term.ExitUsage || !strings.HasPrefix(errs.String(), want) || out.Len() > 0 {
				t.Errorf("gpctl %s with %q: exit code %d, output %q, error %q, want 2 and %q", strings.Join(words, " "), tt.env, code, &out, &errs, want)
			}
			commands++
		})
		if commands < 30 {
			t.Errorf("%d commands were run", commands)
		}
	}
}

// What is given takes precedence over the environment, also when that is empty.
func TestEmptyEnvironmentDoesNotMatterWhenADaemonIsNamed(t *testing.T) {
	var out, errs bytes.Buffer
	streams := term.IO{
		In: strings.NewReader(""), Out: &out, Err: &errs, Getenv: func(string) string { return "" },
		Environ: func() []string { return []string{"GPREEMPT_ADDRESS=", "GPREEMPT_SOCKET="} },
	}
	if code := Program.Run(t.Context(), []string{"drain", "on", "--socket", t.TempDir() + "/none"}, streams); code != term.ExitUnreachable {
		t.Errorf("exit code %d, want %d: %s", code, term.ExitUnreachable, &errs)
	}
}
