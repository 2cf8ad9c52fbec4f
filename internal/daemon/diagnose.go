package daemon

import (
	"context"
	"slices"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/doctor"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// diagnose examines the host from inside the daemon.
func (d *daemon) diagnose(ctx context.Context) *doctor.Report {
	c := d.opts.examination(*d.config.Load())
	c.ByDaemon = true
	c.OpenDriver = func() (doctor.Driver, error) {
		switch {
		case d.backend.openErr != nil: // dbgtrap could not open it
			return doctor.Driver{}, d.backend.openErr
		case d.backend.device == nil: // no mechanism uses it
			return doctor.OpenDriver()
		}
		found := doctor.DriverOf(d.backend.device)
		if rule := d.backend.dbgtrap.PermissionRule(); rule != kfd.PermissionUnknown {
			found.Rule = rule.String()
		}
		return found, nil
	}
	c.Processes = d.processReports
	if h := d.hazards.Load(); h != nil {
		c.Hazards = doctor.HazardReports(h)
	}
	return doctor.Examine(ctx, c)
}

// processReports reports how each process of the driver is suspended, or why not.
func (d *daemon) processReports(ctx context.Context) []doctor.Process {
	var all []doctor.Process
	for _, proc := range d.inventory.Processes() {
		facts, known := d.registry.Facts(proc.Key)
		if !known {
			continue
		}
		state, _ := d.sessions.State(proc.Key)
		choice := state.Choice
		if choice.Mechanism == "" && len(choice.Rejected) == 0 { // not tried, or lost
			choice = d.sessions.Preview(ctx, proc.Key)
		}
		all = append(all, doctor.ReportProcess(proc.Process, facts.Decision, choice))
	}
	return all
}

// Diagnose examines the host without a daemon.
func Diagnose(ctx context.Context, opts Options) (*doctor.Report, error) {
	cfg, err := opts.load()
	if err != nil {
		return nil, err
	}
	rules, err := classify.New(cfg.Rules)
	if err != nil {
		return nil, err
	}
	return doctor.Standalone{
		Config: opts.examination(cfg), Mechanisms: cfg.Mechanisms, Rules: rules, Hazards: cfg.Safety.Hazards,
	}.Examine(ctx), nil
}

// examination returns the facts about this host and its config for the doctor.
func (o Options) examination(cfg config.Config) doctor.Config {
	return doctor.Config{
		Root: o.Host.files(), Simulated: o.Host.Simulated, Version: api.VersionString(), Lock: o.lockPath(cfg.Socket),
		Groups: slices.Concat(cfg.Access.OnlineGroups, cfg.Access.AdminGroups),
	}
}
