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
	return noun("policy", "When offline work is suspended and resumed", a.policyGet(), a.policySet())
}

func (a *app) policyGet() *cobra.Command {
	return &cobra.Command{
		Use:   "get",
		Short: "Show the policy and the presets; -o wide explains the knobs",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(cmd, a, adminClient.GetPolicy, &gpreemptv1.GetPolicyRequest{}, func(p *printer, resp *gpreemptv1.GetPolicyResponse) {
				t := p.table("", columns{"KNOB", "VALUE", "+MEANING"})
				for _, k := range knobs() {
					t.row(k.Name(), knobText(resp.GetPolicy(), k), knobMeaning[string(k.Name())])
				}
				t.flush()
				p.linef("")
				p.linef("presets: %s", strings.Join(resp.GetPresets(), ", "))
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
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && len(assignments) == 0 {
				return usage(cmd, "missing argument: a preset, - or --knob")
			}
			return operands(make([]string, min(1, len(args)))...)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := a.policyRequest(cmd, args, assignments)
			if err != nil {
				return err
			}
			req.DryRun = dryRun
			return a.call(cmd, func(ctx context.Context, admin adminClient) error {
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
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "check and show the change without making it")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.offer(cmd, func(ctx context.Context, admin adminClient) ([]cobra.Completion, error) {
			resp, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
			return resp.GetPresets(), err
		})
	}
	return cmd
}

// policyRequest returns the request for a preset, or - for standard input, and knobs, NAME=VALUE.
func (a *app) policyRequest(cmd *cobra.Command, args, assignments []string) (*gpreemptv1.SetPolicyRequest, error) {
	req := &gpreemptv1.SetPolicyRequest{Policy: &gpreemptv1.Policy{}}
	switch {
	case len(args) == 1 && args[0] == "-":
		if err := a.readPolicy(cmd, req); err != nil {
			return nil, err
		}
	case len(args) == 1:
		req.Preset = args[0]
	}
	for _, s := range assignments {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return nil, usage(cmd, "invalid --knob %q; use NAME=VALUE", s)
		}
		if err := setKnob(req, name, value); err != nil {
			return nil, usage(cmd, "--knob %s: %v", name, err)
		}
	}
	return req, nil
}

func printPolicyChange(p *printer, before, after *gpreemptv1.Policy, dryRun bool) {
	switch {
	case proto.Equal(before, after):
		p.linef("the policy is already %s; no change", after.GetPreset())
		return
	case dryRun:
		p.linef("the policy would be %s; not changed (--dry-run)", after.GetPreset())
	default:
		p.linef("the policy is %s, until the daemon reloads or restarts", after.GetPreset())
	}
	t := p.table("  ", columns{"KNOB", "OLD", "NEW"})
	for _, k := range knobs() {
		if was, is := knobText(before, k), knobText(after, k); was != is {
			t.row(k.Name(), was, is)
		}
	}
	t.flush()
}

// maxPolicy is the largest policy read from standard input, in bytes.
const maxPolicy = 64 << 10

// readPolicy reads a policy from standard input, as gpctl prints it: in YAML, or in JSON,
// which is YAML too.
func (a *app) readPolicy(cmd *cobra.Command, req *gpreemptv1.SetPolicyRequest) error {
	data, err := io.ReadAll(io.LimitReader(a.In, maxPolicy+1))
	if err != nil {
		return fmt.Errorf("cannot read the policy from standard input: %w", err)
	}
	var doc map[string]yaml.Node
	if len(data) > maxPolicy {
		return usage(cmd, "standard input is larger than a policy: more than %d bytes", maxPolicy)
	}
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return usage(cmd, "invalid policy on standard input: %v", err)
	}
	if whole, ok := doc["policy"]; ok {
		doc = nil
		if err := whole.Decode(&doc); err != nil {
			return usage(cmd, "invalid policy on standard input: %v", err)
		}
	}
	if len(doc) == 0 {
		return usage(cmd, "no policy on standard input")
	}
	for _, k := range knobs() {
		name := string(k.Name())
		n, ok := doc[name]
		if !ok {
			continue
		}
		delete(doc, name)
		if n.Kind != yaml.ScalarNode {
			return usage(cmd, "standard input: %s must be a single value", name)
		}
		if name == presetKnob {
			// "custom" is the daemon's name for knobs that differ from all presets.
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
		return usage(cmd, "standard input: unknown knob %s; use %s", name, strings.Join(knobNames(), ", "))
	}
	return nil
}
