package daemon

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/config"
	"github.com/gpreempt/gpreempt/internal/doctor"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/criu"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/mechanism/freezer"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// diagnose examines the host from inside the daemon.
func (d *daemon) diagnose(ctx context.Context) *doctor.Report {
	cfg := d.config.Load()
	c := doctor.Config{
		Root: d.backend.root, ByDaemon: true, Version: api.VersionString(), Lock: d.opts.lockPath(cfg.Socket), Groups: groups(*cfg),
		OpenDriver: func() (doctor.Driver, error) {
			switch {
			case d.backend.openErr != nil: // dbgtrap could not open it
				return doctor.Driver{}, d.backend.openErr
			case d.backend.device == nil: // no mechanism uses it
				return openDriver()
			}
			found := describe(d.backend.device)
			if rule := d.backend.dbgtrap.PermissionRule(); rule != kfd.PermissionUnknown {
				found.Rule = rule.String()
			}
			return found, nil
		},
		Processes: d.processReports,
		Simulated: d.backend.simulated,
	}
	if h := d.hazards.Load(); h != nil {
		c.Hazards = hazardReports(h)
	}
	return doctor.Examine(ctx, c)
}

// hazardReports returns a function that reports the results of the hazard table for
// dbgtrap.
func hazardReports(h *targets.Hazards) func([]gpreempt.GPU) []doctor.Hazard {
	actions := map[hazard.Action]doctor.HazardAction{
		hazard.Allow: doctor.HazardAllow, hazard.Limit: doctor.HazardLimit, hazard.Deny: doctor.HazardDeny,
	}
	return func([]gpreempt.GPU) []doctor.Hazard {
		var all []doctor.Hazard
		for gpu, result := range h.Results("dbgtrap") {
			all = append(all, doctor.Hazard{GPU: gpu, Action: actions[result.Action], Reason: result.Reason, Mechanisms: result.Row.Mechanisms})
		}
		return all
	}
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
		all = append(all, processReport(proc.Process, facts.Decision, choice))
	}
	return all
}

func processReport(proc gpreempt.Process, decision classify.Decision, choice targets.Choice) doctor.Process {
	p := doctor.Process{
		Key: proc.Key, Comm: proc.Comm, Offline: decision.Class == gpreempt.Offline, Mechanism: choice.Mechanism, Why: choice.Why,
	}
	if !p.Offline {
		p.Why = "never suspended: " + decision.Class.String() + " by " + decision.By
	}
	for _, r := range choice.Rejected {
		p.Rejected = append(p.Rejected, doctor.Rejection(r))
	}
	return p
}

// Diagnose examines the host without a daemon. It opens the driver, so that this program
// is one of the driver's processes until it ends, and suspends nothing.
func Diagnose(ctx context.Context, opts Options) (*doctor.Report, error) {
	cfg, err := opts.load()
	if err != nil {
		return nil, err
	}
	rules, err := classify.New(cfg.Rules)
	if err != nil {
		return nil, err
	}
	root := opts.Host.files()
	hosts := discovery.NewFS(root)
	hosts.SetEnv(rules.Env())
	c := doctor.Config{
		Root: root, Version: api.VersionString(), Lock: opts.lockPath(cfg.Socket), Groups: groups(cfg), OpenDriver: openDriver,
	}
	// The doctor reports an error of GPUs.
	if gpus, err := hosts.GPUs(); err == nil && len(gpus) > 0 {
		h, _ := targets.NewHazards(root, gpus, cfg.Safety.Hazards)
		c.Hazards = hazardReports(h)
		c.Processes = func(ctx context.Context) []doctor.Process {
			snapshot, err := hosts.Scan()
			if err != nil {
				return nil
			}
			s := &scan{gpus: gpus, snapshot: snapshot}
			sessions := targets.NewSessions(targets.Config{
				Mechanisms: s.mechanisms(cfg), Assess: s.assess(h), Now: clock{time.Now()}.Now, Log: zap.NewNop(),
			})
			var all []doctor.Process
			for _, proc := range snapshot.Processes {
				// Container names, priorities and addresses are unknown without a daemon.
				subject := classify.Subject{Process: proc.Process, GPUs: targets.GPUsWithQueues(gpus, proc)}
				all = append(all, processReport(proc.Process, rules.Decide(&subject), sessions.Preview(ctx, proc.Key)))
			}
			return all
		}
	}
	return doctor.Examine(ctx, c), nil
}

// scan has the processes to probe the mechanisms on.
type scan struct {
	gpus     []gpreempt.GPU
	snapshot discovery.Snapshot
}

// mechanisms returns those to probe. None of them attaches, so they need no thread and
// no journal. The driver stays open, because the program ends soon.
func (s *scan) mechanisms(cfg config.Config) []mechanism.Mechanism {
	var all []mechanism.Mechanism
	for _, name := range cfg.Mechanisms {
		switch name {
		case "dbgtrap":
			if device, err := kfd.Open(); err == nil { // the doctor reports the error
				all = append(all, dbgtrap.New(dbgtrap.Config{Device: device, GPUs: s.gpusOf}))
			}
		case "criu":
			all = append(all, criu.New(criu.Config{Sys: kfd.Kernel(), Log: zap.NewNop()}))
		case "freezer":
			all = append(all, freezer.New(freezer.Config{Root: "/", Log: zap.NewNop()}))
		}
	}
	return all
}

func (s *scan) proc(key gpreempt.ProcessKey) discovery.Proc {
	for _, proc := range s.snapshot.Processes {
		if proc.Key == key {
			return proc
		}
	}
	return discovery.Proc{}
}

func (s *scan) gpusOf(key gpreempt.ProcessKey) []gpreempt.GPU {
	return targets.GPUsWithQueues(s.gpus, s.proc(key))
}

func (s *scan) assess(h *targets.Hazards) func(string, gpreempt.ProcessKey) targets.Assessment {
	return func(mechanism string, target gpreempt.ProcessKey) targets.Assessment {
		return h.Assess(mechanism, s.proc(target), s.gpus)
	}
}

func groups(cfg config.Config) []string {
	return slices.Concat(cfg.Access.OnlineGroups, cfg.Access.AdminGroups)
}

func openDriver() (doctor.Driver, error) {
	device, err := kfd.Open()
	if err != nil {
		return doctor.Driver{}, err
	}
	return describe(device), device.Close()
}

func describe(device *kfd.Device) doctor.Driver {
	found := doctor.Driver{
		Version: device.Version().String(), Minor: device.Version().Minor,
		Profile: device.Profile().Name, ProfileRule: device.Profile().Permission.String(),
	}
	if w := device.Warning(); w != nil {
		found.Note = w.String()
	}
	return found
}
