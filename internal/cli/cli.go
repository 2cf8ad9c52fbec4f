// Package cli implements gpctl, an administrator's tool for gpreemptd.
package cli

import (
	_ "embed"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/cmdline"
	"github.com/gpreempt/gpreempt/internal/term"
)

//go:embed help.txt
var help string

// Program is gpctl.
var Program = &term.Program{
	Name: "gpctl", Short: "Inspects and controls gpreemptd, which pauses offline GPU work for online work",
	Help: help, ManyHosts: true, Check: checkHosts,
	Instead: map[string]string{
		"config": "gpreemptd config", "trial": "gplab trial", "compare": "gplab compare", "sim": "gplab sim", "plan": "gplab plan",
		"report": "gplab report", "trace": "gplab trace", "amdlog": "gplab amdlog", "hqd": "gpctl queue slots, or gplab decode hqd of a file",
		"mqd": "gpctl queue list -o wide, or gplab decode mqd of a file", "accept": "gpaccept", "log": logs, "logs": logs,
		"start": "systemctl start gpreemptd", "restart": "systemctl restart gpreemptd", "reload": "systemctl reload gpreemptd",
		"--watch": "gpctl top", "-w": "gpctl top, or -o wide", "-n": "--container NAMESPACE/POD", "--namespace": "--container NAMESPACE/POD",
	},
	Add: func(a *term.App, root *cobra.Command) {
		term.Group(root, "Look", statusCommand(a), doctorCommand(a), topCommand(a), webCommand(a), statsCommand(a), eventsCommand(a))
		term.Group(root, "Inventory", gpuCommand(a), targetCommand(a), queueCommand(a))
		term.Group(root, "Act", leaseCommand(a), policyCommand(a), drainCommand(a), runCommand(a), fleetCommand(a))
		root.AddCommand(a.CompletionCommand(), a.VersionCommand())
		forHosts(a, root)
		teach(root)
	},
}

const logs = "journalctl -u gpreemptd, or gpctl events --follow"

// wordsFor are words of other programs for which commands are suggested.
var wordsFor = map[string]string{
	"doctor": "diagnose check", "events": "watch history", "stats": "metrics", "status": "info health",
	"gpu": "gpus node nodes device devices", "gpu list": "ls show get describe explain",
	"target": "targets process processes pod pods job jobs task tasks", "target list": "ls ps get", "target explain": "show describe inspect info why",
	"target suspend": "stop pause freeze kill", "target resume": "continue unpause thaw", "target classify": "class tag label",
	"queue": "queues", "queue list": "ls get", "queue find": "show describe explain", "queue slots": "hqds",
	"lease": "leases", "lease list": "ls show get describe explain", "lease create": "add new", "lease release": "delete rm remove end revoke",
	"policy": "policies preset", "policy get": "show list ls", "policy set": "use",
	"drain on": "true start enable", "drain off": "false stop disable", "run": "exec",
}

// teach tells the commands what people may write for them, and what to write instead of arguments too many and unknown flags.
func teach(root *cobra.Command) {
	at := func(path string) *cobra.Command {
		cmd, rest, err := root.Find(strings.Fields(path))
		if err != nil || len(rest) > 0 {
			panic("there is no gpctl " + path)
		}
		if cmd.Annotations == nil {
			cmd.Annotations = map[string]string{}
		}
		return cmd
	}
	for path, words := range wordsFor {
		at(path).SuggestFor = strings.Fields(words)
	}
	at("target list").Annotations[cmdline.Extra] = "gpctl target explain %s"
	at("queue list").Annotations[cmdline.Extra] = "gpctl queue list --target %s"
	at("lease create").Annotations[cmdline.Extra] = "gpctl lease create --gpu %s"
	at("events").Annotations["--tail"] = "gpctl events -n 20"
	at("policy set").Annotations["--preset"] = "gpctl policy set PRESET"
	for _, knob := range term.KnobNames() {
		for _, name := range []string{knob, strings.ReplaceAll(knob, "_", "-")} {
			at("policy").Annotations[name] = "gpctl policy set --knob " + knob + "=VALUE"
			at("policy").Annotations["--"+name] = "--knob " + knob + "=VALUE"
		}
	}
	for _, preset := range presets {
		at("policy").Annotations[preset] = "gpctl policy set " + preset
	}
}
