// Package cmdline answers invalid command lines with what to write instead.
package cmdline

import (
	"errors"
	"fmt"
	"slices"
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

// mostListed is how many subcommands an answer lists; with more of them the help does.
const mostListed = 6

// Answer makes root and the commands below it answer wrong flags.
func Answer(root *cobra.Command) {
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if words := cmd.Flags().Args(); cmd.HasAvailableSubCommands() && len(words) > 0 {
			return Unknown(cmd, words...) // which would have the flag
		}
		return Flag(cmd, err)
	})
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
	m := &Mistake{fmt.Sprintf("unexpected argument %q", word), help(cmd)}
	if instead := cmd.Annotations[Extra]; instead != "" {
		m.Next = fmt.Sprintf(instead, word)
	}
	return m
}

func help(cmd *cobra.Command) string { return cmd.CommandPath() + " --help" }

// Unknown answers words of which the first is not a subcommand of cmd.
func Unknown(cmd *cobra.Command, words ...string) *Mistake {
	m := &Mistake{fmt.Sprintf("unknown command %q", cmd.CommandPath()+" "+words[0]), help(cmd)}
	if other := cmd.Annotations[words[0]]; other != "" {
		m.Next = other
		if !strings.Contains(other, ",") { // one command, which may take the other words
			m.Next = strings.Join(append([]string{other}, words[1:]...), " ")
		}
		return m
	}
	meant, rest := meaning(cmd, words)
	switch {
	case len(meant) == 1 && len(rest) > 0 && (meant[0].Args == nil || meant[0].Args(meant[0], rest) == nil):
		m.Next = meant[0].CommandPath() + " " + strings.Join(rest, " ")
	case len(meant) > 0:
		m.Next = list(meant, ", ", (*cobra.Command).CommandPath)
	case len(available(cmd)) <= mostListed:
		m.Next = "one of " + list(available(cmd), ", ", (*cobra.Command).Name)
	}
	return m
}

// meaning returns the commands that words may have meant, and the words that follow them.
func meaning(cmd *cobra.Command, words []string) (meant []*cobra.Command, rest []string) {
	word, rest := words[0], words[1:]
	if meant := called(available(cmd), word); len(meant) > 0 {
		return meant, rest
	}
	if len(rest) > 0 { // get gpus, for gpu list
		for _, noun := range called(available(cmd), rest[0]) {
			if meant := called(available(noun), word); len(meant) > 0 {
				return meant, rest[1:]
			}
		}
	}
	if meant := called(below(cmd), word); len(meant) > 0 { // explain, for target explain
		return meant, rest
	}
	// Of a short word most names are near.
	cmd.SuggestionsMinimumDistance = 1 + min(len(word)/5, 1)
	near := cmd.SuggestionsFor(word)
	if len(near) == 0 {
		near = []string{spell.Nearest(word, strings.Fields(list(available(cmd), " ", (*cobra.Command).Name)))}
	}
	for _, c := range available(cmd) {
		if slices.Contains(near, c.Name()) {
			meant = append(meant, c)
		}
	}
	return meant, rest
}

// called returns the commands that have a word as their name, or else those that are suggested for it.
func called(commands []*cobra.Command, word string) (found []*cobra.Command) {
	for _, c := range commands {
		if strings.EqualFold(c.Name(), word) {
			found = append(found, c)
		}
	}
	if len(found) > 0 {
		return found
	}
	for _, c := range commands {
		if slices.ContainsFunc(c.SuggestFor, func(s string) bool { return strings.EqualFold(s, word) }) {
			found = append(found, c)
		}
	}
	return found
}

// below returns all commands below those of cmd.
func below(cmd *cobra.Command) (all []*cobra.Command) {
	for _, c := range available(cmd) {
		all = append(append(all, available(c)...), below(c)...)
	}
	return all
}

func available(cmd *cobra.Command) []*cobra.Command {
	return slices.DeleteFunc(slices.Clone(cmd.Commands()), func(c *cobra.Command) bool { return c.Hidden })
}

func list(commands []*cobra.Command, separator string, text func(*cobra.Command) string) string {
	texts := make([]string, len(commands))
	for i, c := range commands {
		texts[i] = text(c)
	}
	return strings.Join(texts, separator)
}

// Flag answers an error of the flags of cmd.
func Flag(cmd *cobra.Command, err error) *Mistake {
	m := &Mistake{err.Error(), help(cmd)}
	if e, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		m.Message = fmt.Sprintf("invalid --%s %q; use %s", e.GetFlag().Name, e.GetValue(), values(e.GetFlag()))
	}
	if e, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		m.Message = fmt.Sprintf("--%s needs a value: %s", e.GetFlag().Name, values(e.GetFlag()))
	}
	if e, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name := e.GetSpecifiedName()
		dashed := "--" + name
		if e.GetSpecifiedShortnames() != "" {
			dashed = "-" + name
		}
		m.Message = "unknown flag " + dashed
		if instead := unknownFlag(cmd, dashed, name); instead != "" {
			m.Next = instead
		}
	}
	return m
}

// values describes the values of a flag.
func values(f *pflag.Flag) string {
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

// unknownFlag returns what to write instead of a flag that does not exist, or "".
func unknownFlag(cmd *cobra.Command, dashed, name string) string {
	for c := cmd; c != nil; c = c.Parent() {
		if instead := c.Annotations[dashed]; instead != "" {
			return instead
		}
	}
	if meant := called(available(cmd), name); len(meant) == 1 { // drain --on
		return meant[0].CommandPath()
	}
	var names []string
	choice := ""
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		names = append(names, f.Name)
		_, choices, _ := strings.Cut(f.Usage, ": ")
		switch {
		case strings.EqualFold(f.Shorthand, name):
			choice = "-" + f.Shorthand
		case slices.Contains(strings.Split(choices, ", "), name): // --json
			choice = "--" + f.Name + " " + name
		}
	})
	if choice != "" || len(name) == 1 {
		return choice
	}
	if near := spell.Nearest(strings.ReplaceAll(name, "_", "-"), names); near != "" {
		return "--" + near
	}
	return ""
}
