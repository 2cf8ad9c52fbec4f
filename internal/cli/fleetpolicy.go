package cli

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/fleet"
	"github.com/gpreempt/gpreempt/internal/term"
)

// rolloutEvery is the time between two readings of all hosts during a rollout.
const rolloutEvery = 2 * time.Second

func fleetPolicySet(a *term.App) *cobra.Command {
	var (
		assignments []string
		canary      string
		plan        fleet.Plan
		dryRun      bool
	)
	cmd := &cobra.Command{
		Use:         "set [PRESET] [--knob NAME=VALUE ...] --canary N|LIST",
		Short:       "Replace the policy of the hosts of --hosts, in stages",
		Annotations: map[string]string{term.NoData: term.NoData},
		RunE: func(cmd *cobra.Command, args []string) error {
			hosts, err := hostList(a, cmd)
			if err != nil {
				return err
			}
			if err := divide(cmd, hosts, canary, &plan); err != nil {
				return err
			}
			req, err := policyRequest(cmd, args, assignments)
			if err != nil {
				return err
			}
			return (&rollout{App: a, hosts: hosts, req: req, core: fleet.NewRollout(plan), dryRun: dryRun}).run(cmd.Context())
		},
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && len(assignments) == 0 {
				return term.Usage(cmd, "missing argument: a preset or --knob")
			}
			return term.Operands(make([]string, min(1, len(args)))...)(cmd, args)
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&assignments, "knob", nil, "NAME=VALUE, as in the configuration file; may be repeated")
	flags.StringVar(&canary, "canary", "1", "the hosts that get it first: how many of the list, or their names")
	flags.IntVar(&plan.Batch, "batch", 10, "how many of the other hosts get it at a time")
	flags.DurationVar(&plan.Shadow, "shadow", time.Minute, "how long the canary decides by it without suspending; 0s for not at all")
	flags.DurationVar(&plan.Observe, "observe", 5*time.Minute, "how long each later stage is watched")
	flags.Float64Var(&plan.Slower, "slower", 2, "an alarm: the p99 of the time to quiet GPUs grows by this factor; 0 for none")
	flags.BoolVar(&dryRun, "dry-run", false, "check it on all hosts and show the stages, change nothing")
	return cmd
}

// divide fills in which hosts are the canary.
func divide(cmd *cobra.Command, hosts []fleet.Host, canary string, plan *fleet.Plan) error {
	var names []string
	for _, h := range hosts {
		names = append(names, h.Name)
	}
	if n, err := strconv.Atoi(canary); err == nil {
		if n < 1 || n > len(names) {
			return term.Usage(cmd, "--canary %d is not between 1 and the number of hosts, %d", n, len(names))
		}
		plan.Canary, plan.Rest = names[:n], names[n:]
		return nil
	}
	chosen, err := fleet.ParseHosts(canary)
	if err != nil {
		return term.Usage(cmd, "--canary: %v", err)
	}
	for _, h := range chosen {
		if !slices.Contains(names, h.Name) {
			return term.Usage(cmd, "--canary: host %s is not in --hosts", h.Name)
		}
		plan.Canary = append(plan.Canary, h.Name)
	}
	for _, name := range names {
		if !slices.Contains(plan.Canary, name) {
			plan.Rest = append(plan.Rest, name)
		}
	}
	return nil
}

// rollout carries out what its core decides.
type rollout struct {
	*term.App
	hosts  []fleet.Host
	req    *gpreemptv1.SetPolicyRequest
	core   *fleet.Rollout
	dryRun bool
	// The policies of each host, by its name.
	policies map[string]map[fleet.Mode]*gpreemptv1.Policy
}

func (r *rollout) run(ctx context.Context) error {
	if err := r.prepare(ctx); err != nil {
		return err
	}
	p := r.Printer()
	for i, line := range r.core.Stages() {
		p.Linef("stage %d, %s", i+1, line)
	}
	if r.dryRun {
		p.Linef("every host accepts the policy; nothing was changed (--dry-run)")
		return p.Err
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	begun := r.Now()
	for stage := 0; ; {
		now, readings := r.Now().Sub(begun), r.read(ctx)
		if ctx.Err() != nil { // what was read is worthless
			r.carryOut(ctx, r.core.Abort("interrupted"))
		} else {
			r.carryOut(ctx, r.core.Step(now, readings))
		}
		name, number, of, left := r.core.Now(now)
		if number != stage && !r.core.Done() {
			stage = number
			p.Linef("%s  stage %d of %d, %s: set; watched for %s", r.Now().Format(time.TimeOnly), number, of, name, term.Duration(left))
		}
		if r.core.Done() {
			break
		}
		_ = r.Sleep(ctx, min(rolloutEvery, max(left, time.Millisecond))) // the end of ctx is seen above
	}
	if why := r.core.Stopped; why != "" {
		return &term.Failure{Code: term.ExitPartial, Message: "the rollout stopped: " + why + "; " + r.undone(), Next: "gpctl fleet status, and gpctl target explain on that host"}
	}
	p.Linef("%s  the policy is in force on all of %s, until their daemons reload or restart: write it into their files too", r.Now().Format(time.TimeOnly), term.Count(len(r.hosts), "host"))
	return p.Err
}

// prepare reads the policy of each host, and what the new one would be. Nothing is changed.
func (r *rollout) prepare(ctx context.Context) error {
	results := make([]hostResult, len(r.hosts))
	all := make([]map[fleet.Mode]*gpreemptv1.Policy, len(r.hosts))
	eachHost(r.hosts, func(i int, h fleet.Host) {
		results[i].Host, all[i] = h.Name, map[fleet.Mode]*gpreemptv1.Policy{}
		err := r.ask(ctx, h, func(ctx context.Context, admin term.AdminClient) error {
			now, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
			if err != nil {
				return err
			}
			all[i][fleet.Old] = now.GetPolicy()
			for mode, req := range map[fleet.Mode]*gpreemptv1.SetPolicyRequest{fleet.New: r.req, fleet.Shadow: inShadow(r.req)} {
				req := proto.CloneOf(req)
				req.DryRun = true
				would, err := admin.SetPolicy(ctx, req)
				if err != nil {
					return err
				}
				all[i][mode] = would.GetPolicy()
			}
			return nil
		})
		if err != nil {
			f := term.AsFailure(err)
			results[i].Error = &hostError{f.Code, f.Message, f.Next}
		}
	})
	r.policies = map[string]map[fleet.Mode]*gpreemptv1.Policy{}
	for i, h := range r.hosts {
		r.policies[h.Name] = all[i]
	}
	if err := sumUp(r.App, results); err != nil {
		return errors.Join(err, errors.New("nothing was changed"))
	}
	return nil
}

// inShadow returns the request for the same policy, without acting.
func inShadow(req *gpreemptv1.SetPolicyRequest) *gpreemptv1.SetPolicyRequest {
	req = proto.CloneOf(req)
	req.Policy.Shadow = new(true)
	return req
}

// ask makes requests of one host, within --timeout.
func (r *rollout) ask(ctx context.Context, h fleet.Host, fn func(context.Context, term.AdminClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	return onHost(r.App, h).Stream(ctx, fn)
}

// read reads all hosts, with the policies in force.
func (r *rollout) read(ctx context.Context) map[string]fleet.Reading {
	policies := make([]*gpreemptv1.Policy, len(r.hosts))
	view := readFleet(ctx, r.App, r.hosts, func(ctx context.Context, i int, admin term.AdminClient) error {
		resp, err := admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
		policies[i] = resp.GetPolicy()
		return err
	})
	readings := map[string]fleet.Reading{}
	for i, h := range r.hosts {
		is := view.Hosts[i].reading
		is.Mode = r.modeOf(h.Name, policies[i])
		readings[h.Name] = is
	}
	return readings
}

// modeOf returns which policy of a host is in force. The new one comes first: it may be the old one, too.
func (r *rollout) modeOf(host string, policy *gpreemptv1.Policy) fleet.Mode {
	wanted := r.core.Wanted(host)
	for _, mode := range []fleet.Mode{wanted, fleet.New, fleet.Shadow, fleet.Old} {
		if proto.Equal(policy, r.policies[host][mode]) {
			return mode
		}
	}
	return fleet.Unknown
}

// carryOut sets policies, and reports failures to the core, which then takes everything back. Taking back goes on after an
// interrupt.
func (r *rollout) carryOut(ctx context.Context, orders []fleet.Order) {
	for len(orders) > 0 {
		o := orders[0]
		orders = orders[1:]
		var hosts []fleet.Host
		for _, h := range r.hosts {
			if slices.Contains(o.Hosts, h.Name) {
				hosts = append(hosts, h)
			}
		}
		within := ctx
		if o.Mode == fleet.Old {
			within = context.WithoutCancel(ctx)
		}
		failures := make([]error, len(hosts))
		eachHost(hosts, func(i int, h fleet.Host) { failures[i] = r.set(within, h, o.Mode) })
		for i, err := range failures {
			switch {
			case err == nil:
			case o.Mode == fleet.Old:
				(&term.Failure{Message: fmt.Sprintf("host %s keeps the new policy: %v", hosts[i].Name, err), Next: "gpctl policy set there, or reload its daemon"}).Print(r.Err, r.Program.Name)
			default:
				orders = append(orders, r.core.Fail(hosts[i].Name, err)...)
			}
		}
	}
}

func (r *rollout) set(ctx context.Context, h fleet.Host, mode fleet.Mode) error {
	req := r.req
	switch mode {
	case fleet.Shadow:
		req = inShadow(r.req)
	case fleet.Old:
		req = &gpreemptv1.SetPolicyRequest{Policy: proto.CloneOf(r.policies[h.Name][fleet.Old])}
		req.Policy.Preset = ""
	case fleet.New, fleet.Unknown:
	}
	return r.ask(ctx, h, func(ctx context.Context, admin term.AdminClient) error {
		_, err := admin.SetPolicy(ctx, req)
		return err
	})
}

// undone says what became of the hosts that had got the policy.
func (r *rollout) undone() string {
	changed := r.core.Changed()
	if len(changed) == 0 {
		return "no host was changed"
	}
	return "the old policy is set again on " + strings.Join(changed, ", ")
}
