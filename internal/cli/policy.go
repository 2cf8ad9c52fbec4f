package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

// presets are those of the daemon: a test compares them.
var presets = []string{"balanced", "strict", "share", "shadow"}

func policyCommand(a *term.App) *cobra.Command {
	return term.Noun("policy", "When offline work is suspended and resumed", policyGet(a), policySet(a))
}

func policyGet(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:   "get",
		Short: "Show the policy and the presets; -o wide explains the knobs",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return term.Ask(cmd, a, term.AdminClient.GetPolicy, &gpreemptv1.GetPolicyRequest{}, func(p *term.Printer, resp *gpreemptv1.GetPolicyResponse) {
				t := p.Table("", term.Columns{"KNOB", "VALUE", "+MEANING"})
				for _, k := range term.Knobs() {
					t.Row(k.Name(), term.KnobText(resp.GetPolicy(), k), term.KnobMeaning[string(k.Name())])
				}
				t.Flush()
				p.Linef("")
				p.Linef("presets: %s", strings.Join(resp.GetPresets(), ", "))
			})
		},
	}
}

func policySet(a *term.App) *cobra.Command {
	var (
		assignments []string
		dryRun      bool
	)
	cmd := &cobra.Command{
		Use:   "set [PRESET] [--knob NAME=VALUE ...]",
		Short: "Replace the policy until the daemon reloads or restarts",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && len(assignments) == 0 {
				next := cmd.CommandPath() + " strict, or " + cmd.CommandPath() + " --knob share_floor=0.2"
				return &term.Failure{Code: term.ExitUsage, Message: "missing argument: a preset or --knob", Next: next}
			}
			return term.Operands(make([]string, min(1, len(args)))...)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := policyRequest(cmd, args, assignments)
			if err != nil {
				return err
			}
			req.DryRun = dryRun
			return a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
				before, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
				if err != nil {
					return err
				}
				resp, err := admin.SetPolicy(ctx, req)
				if err != nil {
					return err
				}
				return a.Show(resp, func(p *term.Printer) { printPolicyChange(p, before.GetPolicy(), resp.GetPolicy(), dryRun) })
			})
		},
	}
	cmd.Flags().StringArrayVar(&assignments, "knob", nil, "NAME=VALUE, as in the configuration file; may be repeated")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "check and show the change without making it")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.Offer(cmd, func(ctx context.Context, admin term.AdminClient) ([]cobra.Completion, error) {
			resp, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
			return resp.GetPresets(), err
		})
	}
	return cmd
}

// policyRequest returns the request for a preset, or none, and knobs, NAME=VALUE.
func policyRequest(cmd *cobra.Command, args, assignments []string) (*gpreemptv1.SetPolicyRequest, error) {
	req := &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{}}
	if len(args) == 1 {
		name, value, isKnob := strings.Cut(args[0], "=")
		switch {
		case isKnob && name == term.PresetKnob:
			return nil, &term.Failure{Code: term.ExitUsage, Message: fmt.Sprintf("invalid preset %q", args[0]), Next: cmd.CommandPath() + " " + value}
		case isKnob:
			return nil, &term.Failure{Code: term.ExitUsage, Message: fmt.Sprintf("invalid preset %q", args[0]), Next: cmd.CommandPath() + " --knob " + args[0]}
		}
		req.Preset = args[0]
	}
	for _, s := range assignments {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return nil, term.Usage(cmd, "invalid --knob %q; use NAME=VALUE, such as share_floor=0.2", s)
		}
		if err := term.SetKnob(req.GetPolicy(), name, value); err != nil {
			return nil, term.Usage(cmd, "--knob %s: %v", name, err)
		}
	}
	return req, nil
}

func printPolicyChange(p *term.Printer, before, after *gpreemptv1.Policy, dryRun bool) {
	switch {
	case proto.Equal(before, after):
		p.Linef("the policy is already %s; no change", after.GetPreset())
		return
	case dryRun:
		p.Linef("the policy would be %s; not changed (--dry-run)", after.GetPreset())
	default:
		p.Linef("the policy is %s, until the daemon reloads or restarts", after.GetPreset())
	}
	t := p.Table("  ", term.Columns{"KNOB", "OLD", "NEW"})
	for _, k := range term.Knobs() {
		if was, is := term.KnobText(before, k), term.KnobText(after, k); was != is {
			t.Row(k.Name(), was, is)
		}
	}
	t.Flush()
}
