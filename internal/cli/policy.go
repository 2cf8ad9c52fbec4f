package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

func (a *app) policyCommand() *cobra.Command {
	return noun("policy", "When offline work is suspended and when it runs again", a.policyGet(), a.policySet())
}

func (a *app) policyGet() *cobra.Command {
	return &cobra.Command{
		Use:   "get",
		Short: "Show the policy in force; -o wide explains the knobs and names the presets",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				resp, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) {
					t := p.table("", columns{"KNOB", "VALUE", "+MEANING"})
					for _, k := range knobs() {
						t.row(text(k.Name()), text(knobText(resp.GetPolicy(), k)), text(knobMeaning[string(k.Name())]))
					}
					t.flush()
					if p.wide {
						p.linef("")
						p.linef("presets: %s", strings.Join(resp.GetPresets(), ", "))
					}
				})
			})
		},
	}
}

func (a *app) policySet() *cobra.Command {
	var (
		assignments []string
		dryRun      bool
	)
	cmd := &cobra.Command{
		Use:   "set [PRESET|-] [--knob NAME=VALUE ...]",
		Short: "Replace the policy until the daemon reloads or restarts",
		Long: `Replaces the policy until the daemon reloads its configuration or restarts.
PRESET sets every knob, --knob changes single ones on top; without PRESET the
others stay as they are. - reads a policy from standard input, as
` + "`gpctl policy get -o yaml`" + ` or -o json writes it.`,
		Example: `  gpctl policy set strict
  gpctl policy set --knob share_floor=0.2 --knob max_wait=5ms --dry-run
  gpctl policy get -o yaml | sed 's/share_floor:.*/share_floor: 0.3/' | gpctl policy set -`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && len(assignments) == 0 {
				return usage(cmd, "name a preset, - or at least one --knob")
			}
			return operands(make([]string, min(1, len(args)))...)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{}, DryRun: dryRun}
			switch {
			case len(args) == 1 && args[0] == "-":
				if err := a.readPolicy(cmd, req); err != nil {
					return err
				}
			case len(args) == 1:
				req.Preset = args[0]
			}
			for _, s := range assignments {
				name, value, ok := strings.Cut(s, "=")
				if !ok {
					return usage(cmd, "--knob %q: want NAME=VALUE", s)
				}
				if err := setKnob(req, name, value); err != nil {
					return usage(cmd, "--knob %s: %v", name, err)
				}
			}
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				before, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
				if err != nil {
					return err
				}
				resp, err := admin.SetPolicy(ctx, req)
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) { printPolicyChange(p, before.GetPolicy(), resp.GetPolicy(), dryRun) })
			})
		},
	}
	cmd.Flags().StringArrayVar(&assignments, "knob", nil, "NAME=VALUE, as in the configuration file; may be repeated")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "check and show, change nothing")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.offer(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) ([]cobra.Completion, error) {
			resp, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
			return resp.GetPresets(), err
		})
	}
	return cmd
}

func printPolicyChange(p *printer, before, after *gpreemptv1.Policy, dryRun bool) {
	switch {
	case proto.Equal(before, after):
		p.linef("the policy is %s already; nothing changes", after.GetPreset())
		return
	case dryRun:
		p.linef("the policy would be %s; nothing was changed (--dry-run)", after.GetPreset())
	default:
		p.linef("the policy is %s, until the daemon reloads or restarts", after.GetPreset())
	}
	t := p.table("  ", columns{"KNOB", "WAS", "IS"})
	for _, k := range knobs() {
		if was, is := knobText(before, k), knobText(after, k); was != is {
			t.row(text(k.Name()), text(was), text(is))
		}
	}
	t.flush()
}

// maxPolicy bounds a policy read from standard input, in bytes.
const maxPolicy = 64 << 10

// readPolicy reads knobs from standard input: a policy as gpctl prints it, in
// YAML or JSON, which is YAML too.
func (a *app) readPolicy(cmd *cobra.Command, req *gpreemptv1.SetPolicyRequest) error {
	data, err := io.ReadAll(io.LimitReader(a.In, maxPolicy+1))
	if err != nil {
		return fmt.Errorf("cannot read the policy from standard input: %w", err)
	}
	var doc map[string]yaml.Node
	if len(data) > maxPolicy {
		return usage(cmd, "standard input is larger than %d bytes: is it a policy?", maxPolicy)
	}
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return usage(cmd, "standard input is no policy: %v", err)
	}
	if whole, ok := doc["policy"]; ok {
		doc = nil
		if err := whole.Decode(&doc); err != nil {
			return usage(cmd, "standard input is no policy: %v", err)
		}
	}
	if len(doc) == 0 {
		return usage(cmd, "standard input holds no policy")
	}
	for _, k := range knobs() {
		name := string(k.Name())
		n, ok := doc[name]
		if !ok {
			continue
		}
		delete(doc, name)
		if n.Kind != yaml.ScalarNode {
			return usage(cmd, "standard input: %s is not one value", name)
		}
		if name == presetKnob {
			// "custom" is what the daemon calls knobs that are no preset's.
			if n.Value != "custom" {
				req.Preset = n.Value
			}
			continue
		}
		if err := setKnob(req, name, n.Value); err != nil {
			return usage(cmd, "standard input: %s: %v", name, err)
		}
	}
	for name := range doc {
		return usage(cmd, "standard input: there is no knob %s: the knobs are %s", name, strings.Join(knobNames(), ", "))
	}
	return nil
}
