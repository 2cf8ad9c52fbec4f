package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// diagnose examines the host from inside the daemon.
func (d *daemon) diagnose(ctx context.Context) *gpreemptv1.DiagnoseResponse {
	c := d.opts.examination(*d.config.Load())
	c.ByDaemon = true
	c.OpenDriver = func() (safety.Driver, error) {
		switch {
		case d.backend.openErr != nil: // dbgtrap could not open it
			return safety.Driver{}, d.backend.openErr
		case d.backend.device == nil: // no mechanism uses it
			return openDriver()
		}
		return describeDriver(d.backend.device), nil
	}
	c.Processes = d.processReports
	if h := d.hazards.Load(); h != nil {
		c.Hazards = h.Results(mechanism.DBGTrap)
	}
	return safety.Examine(ctx, c)
}

// processReports reports how each process of the driver is suspended, or why not.
func (d *daemon) processReports(ctx context.Context) (all []*gpreemptv1.DiagnosedProcess) {
	announced := map[gpreempt.ProcessKey]gpreempt.ProcessKey{}
	d.runner.View(func(core *scheduler.Core) {
		for _, t := range core.Targets() {
			if t.Class == gpreempt.Offline && len(t.Owners) > 0 {
				announced[t.Key] = t.Owners[0]
			}
		}
	})
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
		p := processReport(proc.Process, facts.Decision, choice, facts.JobName, facts.Job)
		if owner, is := announced[proc.Key]; is {
			p.Why = strings.TrimPrefix(p.GetWhy()+"; ", "; ") + fmt.Sprintf(
				"process %d announces its work, which the leases of others suspend: see the warning %s of gpctl status", owner.PID, gpreempt.WarnOwnerOffline.Code)
		}
		all = append(all, p)
	}
	return all
}

// processReport reports how a process is or would be suspended.
func processReport(proc gpreempt.Process, decision classify.Decision, choice targets.Choice, jobName string, job classify.Job) *gpreemptv1.DiagnosedProcess {
	p := &gpreemptv1.DiagnosedProcess{
		TargetId: proc.Key.String(), Pid: proc.Key.PID, Comm: proc.Comm,
		Offline: decision.Class == gpreempt.Offline, Mechanism: choice.Mechanism, Why: choice.Why,
		Job: jobName, JobIsLocal: jobName != "" && job.IsLocal(),
	}
	if !p.GetOffline() {
		p.Why = "never suspended: " + decision.Class.String() + " by " + decision.By
	}
	for _, r := range choice.Rejected {
		p.Rejected = append(p.Rejected, &gpreemptv1.Rejection{Mechanism: r.Mechanism, Why: r.Why, Remedy: r.Remedy, Reason: string(r.Reason)})
	}
	return p
}

// Diagnose examines the host without a daemon. It opens the driver, so that this program is
// one of the driver's processes until it ends, and suspends nothing.
func Diagnose(ctx context.Context, opts Options) *gpreemptv1.DiagnoseResponse {
	cfg, err := opts.load()
	if err != nil {
		cfg = config.Default()
	}
	c := opts.examination(cfg)
	c.ConfigErr = err
	c.OpenDriver = openDriver
	// An error of GPUs is found by the checks.
	if gpus, err := discovery.NewFS(c.Root).GPUs(); err == nil && len(gpus) > 0 {
		hazards, _ := targets.NewHazards(c.Root, gpus, cfg.Safety.Hazards)
		c.Hazards = hazards.Results(mechanism.DBGTrap)
	}
	return safety.Examine(ctx, c)
}

// examination returns the facts about this host and its config for an examination.
func (o Options) examination(cfg config.Config) safety.Config {
	var nvidia func() (string, string, bool)
	if slices.Contains(cfg.Mechanisms, mechanism.NVChannels) && o.Host.RM != nil {
		nvidia = func() (string, string, bool) { return examineNVIDIA(o.Host.files(), o.Host.RM, cfg.Safety.Hazards) }
	}
	return safety.Config{
		NVIDIA: nvidia, Debugfs: cfg.Discovery.Debugfs,
		Root: o.Host.files(), Simulated: o.Host.Simulated, Version: api.VersionString(),
		PrivateKey: keyWarnings(cfg.TCP),
	}
}

// openDriver opens the driver of this host, and closes it.
func openDriver() (safety.Driver, error) {
	device, err := kfd.Open()
	if err != nil {
		return safety.Driver{}, err
	}
	return describeDriver(device), device.Close()
}

// describeDriver describes an open driver.
func describeDriver(device *kfd.Device) safety.Driver {
	return safety.Driver{Version: device.Version().String(), Minor: device.Version().Minor, Profile: device.Profile(), Note: device.Warning()}
}
