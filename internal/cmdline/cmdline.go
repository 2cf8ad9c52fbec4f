// Package cmdline answers invalid command lines with what to write instead.
package cmdline

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpreempt/gpreempt/internal/spell"
)

// Mistake is an error in a command line.
type Mistake struct {
	Message string
	// Next is what to write instead, or where to read that.
	Next string
}

func (m *Mistake) Error() string { return m.Message + "\n  try: " + m.Next }

// Extra is the annotation of a command that says what to write instead of an argument too many, which
// takes the place of %s. The annotation of a word is what to write instead of that subcommand, and that
// of --NAME or -N instead of that flag, also of the commands below.
const Extra = "%s"

// Answer makes root and the commands below it answer wrong flags.
func Answer(root *cobra.Command) {
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return Flag(cmd, err) })
}

// NoArgs checks the arguments of a command that takes none, or only subcommands.
func NoArgs(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case cmd.HasAvailableSubCommands():
		return Unknown(cmd, args...)
	}
	return Argument(cmd, args[0])
}

// Argument answers an argument too many.
func Argument(cmd *cobra.Command, word string) *Mistake {
	m := &Mistake{fmt.Sprintf("unexpected argument %q", word), Help(cmd)}
	if instead := cmd.Annotations[Extra]; instead != "" {
		m.Next = fmt.Sprintf(instead, word)
	}
	return m
}

// Help returns the command that shows the help of cmd.
func Help(cmd *cobra.Command) string { return cmd.CommandPath() + " --help" }

// Unknown answers words of which the first is not a subcommand of cmd.
func Unknown(cmd *cobra.Command, words ...string) *Mistake {
	m := &Mistake{fmt.Sprintf("unknown command %q", cmd.CommandPath()+" "+words[0]), Help(cmd)}
	cmd.SuggestionsMinimumDistance = 1 + min(len(words[0])/5, 1) // of a short word most names are near
	near := cmd.SuggestionsFor(words[0])
	switch other := cmd.Annotations[words[0]]; {
	case strings.Contains(other, ","):
		m.Next = other
	case other != "":
		m.Next = strings.Join(append([]string{other}, words[1:]...), " ")
	case len(near) == 1:
		m.Next = strings.Join(append([]string{cmd.CommandPath(), near[0]}, words[1:]...), " ")
	case len(near) > 1:
		m.Next = cmd.CommandPath() + " " + strings.Join(near, ", "+cmd.CommandPath()+" ")
	}
	return m
}

// Flag answers an error of the flags of cmd.
func Flag(cmd *cobra.Command, err error) *Mistake {
	m := &Mistake{err.Error(), Help(cmd)}
	if e, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		m.Message = fmt.Sprintf("invalid --%s %q; use %s", e.GetFlag().Name, e.GetValue(), describeValues(e.GetFlag()))
	}
	if e, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		m.Message = fmt.Sprintf("--%s needs a value: %s", e.GetFlag().Name, describeValues(e.GetFlag()))
	}
	if e, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name, dashed := e.GetSpecifiedName(), "--"+e.GetSpecifiedName()
		if e.GetSpecifiedShortnames() != "" {
			dashed = "-" + name
		}
		m.Message = "unknown flag " + dashed
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := spell.Nearest(strings.ReplaceAll(name, "_", "-"), names); near != "" && len(name) > 1 {
			m.Next = "--" + near
		}
		for c := cmd; c != nil; c = c.Parent() {
			if instead := c.Annotations[dashed]; instead != "" {
				m.Next = instead
				break
			}
		}
	}
	return m
}

// describeValues describes the values of a flag.
func describeValues(f *pflag.Flag) string {
	_, about := pflag.UnquoteUsage(f)
	switch kind := f.Value.Type(); {
	case kind == "duration":
		return "a number with its unit, such as 500ms, 30s or 1h"
	case kind == "bool":
		return "true or false"
	case strings.Contains(kind, "int"):
		return "a whole number: " + about
	}
	return about
}
