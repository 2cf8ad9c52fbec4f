package term

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpreempt/gpreempt/internal/cmdline"
	"github.com/gpreempt/gpreempt/internal/spell"
)

// mostListed is how many subcommands an answer lists; with more of them the help does.
const mostListed = 6

// Unknown answers words of which the first is not a subcommand of cmd: with any command of the program that they may mean.
func Unknown(cmd *cobra.Command, words ...string) *cmdline.Mistake {
	m := cmdline.Unknown(cmd, words...)
	if cmd.Annotations[words[0]] != "" {
		return m
	}
	meant, rest := meaning(cmd, words)
	switch {
	case len(meant) == 1 && len(rest) > 0 && (meant[0].Args == nil || meant[0].Args(meant[0], rest) == nil):
		m.Next = meant[0].CommandPath() + " " + strings.Join(rest, " ")
	case len(meant) > 0:
		m.Next = list(meant, ", ", (*cobra.Command).CommandPath)
	case len(available(cmd)) <= mostListed:
		m.Next = "one of " + strings.Join(subcommandNames(cmd), ", ")
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
	near := cmd.SuggestionsFor(word)
	if len(near) == 0 {
		near = []string{spell.Nearest(word, subcommandNames(cmd))}
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

// wrongFlag answers an error of the flags of cmd.
func wrongFlag(cmd *cobra.Command, err error) error {
	if words := cmd.Flags().Args(); cmd.HasAvailableSubCommands() && len(words) > 0 {
		return Unknown(cmd, words...) // which would have the flag
	}
	m := cmdline.Flag(cmd, err)
	e, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok || m.Next != cmdline.Help(cmd) {
		return m
	}
	name := e.GetSpecifiedName()
	if meant := called(available(cmd), name); len(meant) == 1 { // drain --on
		m.Next = meant[0].CommandPath()
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		_, choices, _ := strings.Cut(f.Usage, ": ")
		switch {
		case strings.EqualFold(f.Shorthand, name):
			m.Next = "-" + f.Shorthand
		case slices.Contains(strings.Split(choices, ", "), name): // --json
			m.Next = "--" + f.Name + " " + name
		}
	})
	return m
}
