package main

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/gpreempt/gpreempt/accept"
	"github.com/gpreempt/gpreempt/internal/cli"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/daemon"
	"github.com/gpreempt/gpreempt/internal/term"
	lab "github.com/gpreempt/gpreempt/lab/cli"
)

// manual is a program with its section of the manual.
type manual struct {
	section string
	root    *cobra.Command
}

// commands returns the programs that have pages.
func commands() []manual {
	streams := term.IO{Getenv: func(string) string { return "" }}
	return []manual{{"1", cli.Program.New(streams)}, {"1", lab.Program.New(streams)}, {"8", daemon.Command()}, {"8", accept.Command()}}
}

// writeManual writes the manual below dir, compressed as in distributions: a page for each
// command, and gpreemptd.yaml(5).
func writeManual(dir, version string, date time.Time) error {
	pages := filepath.Join(dir, "pages")
	for _, m := range commands() {
		section := filepath.Join(pages, "man"+m.section)
		if err := os.MkdirAll(section, 0o755); err != nil {
			return err
		}
		untagged(m.root)
		header := &doc.GenManHeader{Section: m.section, Source: "gpreempt " + version, Manual: "gpreempt", Date: &date}
		if err := doc.GenManTree(m.root, header, section); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Join(pages, "man5"), 0o755); err != nil {
		return err
	}
	title := fmt.Sprintf("%% \"gpreemptd.yaml\" \"5\" \"%s\" \"gpreempt %s\" \"gpreempt\"\n", date.Format("Jan 2006"), version)
	page := md2man.Render([]byte(title + configManual()))
	if err := os.WriteFile(filepath.Join(pages, "man5", "gpreemptd.yaml.5"), page, 0o644); err != nil {
		return err
	}
	all, err := filepath.Glob(filepath.Join(pages, "man*", "*"))
	if err != nil {
		return err
	}
	for _, name := range all {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		within, err := filepath.Rel(pages, name)
		if err != nil {
			return err
		}
		if err := stage(filepath.Join(dir, "man", within+".gz"), packed(text), 0o644); err != nil {
			return err
		}
	}
	return os.RemoveAll(pages)
}

// configManual returns the manual page of the config file in Markdown, without its title:
// the default file explains every key.
func configManual() string {
	return "# NAME\ngpreemptd.yaml - configuration of gpreemptd\n\n# SYNOPSIS\n" + config.DefaultPath + "\n\n# DESCRIPTION\n" +
		"One YAML file. Every key is optional. This is the default file, as **gpreemptd config default** prints it; " +
		"**gpreemptd config check** lists every error in a file.\n\n    " +
		strings.ReplaceAll(strings.TrimSpace(string(config.DefaultYAML())), "\n", "\n    ") +
		"\n\n# SEE ALSO\n**gpreemptd(8)**, **gpreemptd-config-default(8)**, **gpctl(1)**, **gplab(1)**, /usr/share/doc/gpreempt\n"
}

// untagged removes a remark of the generator from the pages.
func untagged(cmd *cobra.Command) {
	cmd.DisableAutoGenTag = true
	for _, sub := range cmd.Commands() {
		untagged(sub)
	}
}

// packed compresses like gzip -9n.
func packed(text []byte) []byte {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		panic(err) // the level is valid
	}
	_, _ = z.Write(text) // a Buffer does not fail
	_ = z.Close()
	return b.Bytes()
}

// writeCompletions writes the completion scripts of the shells.
func writeCompletions(dir string) error {
	for _, m := range commands() {
		root, name := m.root, m.root.Name()
		var bash, zsh, fish bytes.Buffer
		if err := root.GenBashCompletionV2(&bash, true); err != nil {
			return err
		}
		if err := root.GenZshCompletion(&zsh); err != nil {
			return err
		}
		if err := root.GenFishCompletion(&fish, true); err != nil {
			return err
		}
		for file, script := range map[string][]byte{
			"bash/" + name: bash.Bytes(), "zsh/_" + name: zsh.Bytes(), "fish/" + name + ".fish": fish.Bytes(),
		} {
			if err := stage(filepath.Join(dir, "completions", file), script, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
