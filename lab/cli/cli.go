// Package cli implements gplab, the laboratory of gpreempt: evidence and forensics.
package cli

import (
	_ "embed"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
)

//go:embed help.txt
var help string

// Program is gplab.
var Program = &term.Program{
	Name: "gplab", Short: "Measures and simulates what gpreempt does to given work, and decodes what drivers and runtimes wrote",
	Help: help,
	Instead: map[string]string{
		"status": "gpctl status", "target": "gpctl target", "queue": "gpctl queue", "gpu": "gpctl gpu", "lease": "gpctl lease", "policy": "gpctl policy",
		"events": "gpctl events", "top": "gpctl top", "doctor": "gpctl doctor", "run": "gplab trial, or gplab sim run", "demo": "kfdemu demo",
	},
	Add: func(a *term.App, root *cobra.Command) {
		term.Group(root, "Evidence", trialCommand(a), compareCommand(a), simCommand(a), planCommand(a), reportCommand(a))
		term.Group(root, "Recordings", captureCommand(a), traceCommand(a), amdlogCommand(a))
		term.Group(root, "Queues", decodeCommand(a), adviceCommand(a))
		root.AddCommand(a.CompletionCommand(), a.VersionCommand())
	},
}
