package doctor

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/classify"
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

// Standalone configures an examination without a daemon.
type Standalone struct {
	// Config has no functions.
	Config Config
	// Mechanisms are the enabled mechanisms, best first.
	Mechanisms []string
	Rules      *classify.Classifier
	// Hazards are the rows of the site.
	Hazards []hazard.Row
}

// Examine checks a host without a daemon. It opens the driver, so that this program is one
// of the driver's processes until it ends, and suspends nothing.
func (s Standalone) Examine(ctx context.Context) *Report {
	c := s.Config
	c.OpenDriver = OpenDriver
	files := discovery.NewFS(c.Root)
	files.SetEnv(s.Rules.Env())
	// An error of GPUs is found by the checks.
	if gpus, err := files.GPUs(); err == nil && len(gpus) > 0 {
		hazards, _ := targets.NewHazards(c.Root, gpus, s.Hazards)
		c.Hazards = HazardReports(hazards)
		c.Processes = func(ctx context.Context) []Process { return s.processes(ctx, files, gpus, hazards) }
	}
	return Examine(ctx, c)
}

// processes reports how each process of the driver would be suspended.
func (s Standalone) processes(ctx context.Context, files *discovery.FS, gpus []gpreempt.GPU, hazards *targets.Hazards) []Process {
	snapshot, err := files.Scan()
	if err != nil {
		return nil
	}
	proc := func(key gpreempt.ProcessKey) discovery.Proc {
		for _, proc := range snapshot.Processes {
			if proc.Key == key {
				return proc
			}
		}
		return discovery.Proc{}
	}
	start := time.Now()
	sessions := targets.NewSessions(targets.Config{
		Mechanisms: s.mechanisms(func(key gpreempt.ProcessKey) []gpreempt.GPU { return targets.GPUsWithQueues(gpus, proc(key)) }),
		Assess: func(mechanism string, key gpreempt.ProcessKey) targets.Assessment {
			return hazards.Assess(mechanism, proc(key), gpus)
		},
		Now: func() time.Duration { return time.Since(start) },
		Log: zap.NewNop(),
	})
	var all []Process
	for _, proc := range snapshot.Processes {
		// Container names, priorities and addresses are unknown without a daemon.
		subject := classify.Subject{Process: proc.Process, GPUs: targets.GPUsWithQueues(gpus, proc)}
		all = append(all, ReportProcess(proc.Process, s.Rules.Decide(&subject), sessions.Preview(ctx, proc.Key)))
	}
	return all
}

// mechanisms returns the mechanisms to probe. None of them attaches, so they need no
// thread and no journal. The driver stays open, because the program ends soon.
func (s Standalone) mechanisms(gpusOf func(gpreempt.ProcessKey) []gpreempt.GPU) []mechanism.Mechanism {
	var all []mechanism.Mechanism
	for _, name := range s.Mechanisms {
		switch name {
		case byDbgtrap:
			if device, err := kfd.Open(); err == nil { // OpenDriver reports the error
				all = append(all, dbgtrap.New(dbgtrap.Config{Device: device, GPUs: gpusOf}))
			}
		case byCRIU:
			all = append(all, criu.New(criu.Config{Sys: kfd.Kernel(), Log: zap.NewNop()}))
		case byFreezer:
			all = append(all, freezer.New(freezer.Config{Root: "/", Log: zap.NewNop()}))
		}
	}
	return all
}

// ReportProcess reports how a process is or would be suspended.
func ReportProcess(proc gpreempt.Process, decision classify.Decision, choice targets.Choice) Process {
	p := Process{
		Key: proc.Key, Comm: proc.Comm, Offline: decision.Class == gpreempt.Offline, Mechanism: choice.Mechanism, Why: choice.Why,
	}
	if !p.Offline {
		p.Why = "never suspended: " + decision.Class.String() + " by " + decision.By
	}
	for _, r := range choice.Rejected {
		p.Rejected = append(p.Rejected, Rejection(r))
	}
	return p
}

// HazardReports returns a Config.Hazards with the results for dbgtrap.
func HazardReports(h *targets.Hazards) func([]gpreempt.GPU) []Hazard {
	actions := map[hazard.Action]HazardAction{hazard.Allow: HazardAllow, hazard.Limit: HazardLimit, hazard.Deny: HazardDeny}
	return func([]gpreempt.GPU) []Hazard {
		var all []Hazard
		for gpu, result := range h.Results(byDbgtrap) {
			all = append(all, Hazard{GPU: gpu, Action: actions[result.Action], Reason: result.Reason, Mechanisms: result.Row.Mechanisms})
		}
		return all
	}
}

// OpenDriver opens the driver of this host, and closes it.
func OpenDriver() (Driver, error) {
	device, err := kfd.Open()
	if err != nil {
		return Driver{}, err
	}
	return DriverOf(device), device.Close()
}

// DriverOf describes an open driver, without the permission rule that a session found out.
func DriverOf(device *kfd.Device) Driver {
	d := Driver{
		Version: device.Version().String(), Minor: device.Version().Minor,
		Profile: device.Profile().Name, ProfileRule: device.Profile().Permission.String(),
	}
	if w := device.Warning(); w != nil {
		d.Note = w.String()
	}
	return d
}
