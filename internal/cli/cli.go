// Package cli implements gpctl, an administrator's tool for gpreemptd.
package cli

import (
	_ "embed"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
)

//go:embed help.txt
var help string

// Program is gpctl.
var Program = &term.Program{
	Name: "gpctl", Short: "Inspects and controls gpreemptd, which pauses offline GPU work for online work",
	Help: help, ManyHosts: true, Check: checkHosts,
	Elsewhere: map[string]string{
		"config": "gpreemptd config", "trial": "gplab trial", "compare": "gplab compare", "sim": "gplab sim", "plan": "gplab plan",
		"report": "gplab report", "trace": "gplab trace", "amdlog": "gplab amdlog",
	},
	Add: func(a *term.App, root *cobra.Command) {
		term.Group(root, "Look", statusCommand(a), doctorCommand(a), topCommand(a), webCommand(a), statsCommand(a), eventsCommand(a))
		term.Group(root, "Inventory", gpuCommand(a), targetCommand(a), queueCommand(a))
		term.Group(root, "Act", leaseCommand(a), policyCommand(a), drainCommand(a), runCommand(a), fleetCommand(a))
		root.AddCommand(a.CompletionCommand(), a.VersionCommand())
		forHosts(a, root)
	},
}
