package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// Bounds of waiting.
const (
	// readyTime is how long a job may take until it has queues, and a server until it is ready.
	readyTime = 2 * time.Minute
	// stopTime is how long processes may take to end by SIGTERM.
	stopTime = 20 * time.Second
	// undoTime bounds the calls that undo what an arm changed.
	undoTime = 10 * time.Second
	// pollTime is the pause between two looks at the daemon's state.
	pollTime = 20 * time.Millisecond
)

// Config is what a trial needs besides its plan.
type Config struct {
	// Dir is the folder of the run. It must not have a run yet, except for Resume.
	Dir string
	// Client is connected to the daemon, and Socket its address for the commands.
	Client *client.Client
	Socket string
	// Version is that of this program.
	Version string
	// Command is "trial" or "compare".
	Command string
	// TraceKFD records the KFD driver of this host into files whose paths begin with path, until ctx ends. It calls started
	// when the recording runs. The error is why there is no recording, or why it is not complete. It may be nil.
	TraceKFD func(ctx context.Context, path string, started func()) error
	// SkipMissing has arms left out whose mechanism the daemon does not have, unless that are all
	// protected ones: the run keeps the reason. Otherwise Run refuses a plan with such an arm.
	SkipMissing bool
	// Progress is called when something was done. It may be nil.
	Progress func(Progress)
}

// Progress is how far a trial is.
type Progress struct {
	// Done and Total count steps: the repeats of all arms.
	Done, Total int
	// Requests are those of the present repeat, of Expected (0 if that is not known).
	Requests, Expected int
	Text               string
	// Left is about how long the rest takes.
	Left time.Duration
}

// Run runs a plan, which was checked, and returns what it measured; the folder has the same, and the
// repeats that were run when the error is not nil.
func Run(ctx context.Context, p Plan, cfg Config) (*evidence.Run, error) {
	if _, err := os.Stat(filepath.Join(cfg.Dir, evidence.RunFile)); err == nil {
		return nil, fmt.Errorf("%s has a run already: choose another folder, or continue it with --resume %s", cfg.Dir, cfg.Dir)
	}
	t := newTrial(p, cfg)
	var err error
	if t.run, err = t.begin(ctx); err != nil {
		return nil, err
	}
	if err := t.preflight(ctx); err != nil {
		return nil, err
	}
	t.run.Plan = t.plan.YAML()
	return t.run, t.all(ctx)
}

// Resume continues the run in the folder, on the same machine.
func Resume(ctx context.Context, cfg Config) (*evidence.Run, error) {
	was, err := evidence.Read(cfg.Dir)
	if err != nil {
		return nil, err
	}
	p, err := Parse(filepath.Join(cfg.Dir, evidence.PlanFile), []byte(was.Plan))
	if err == nil {
		err = p.Check()
	}
	if err != nil {
		return nil, fmt.Errorf("the plan of the run: %w", err)
	}
	cfg.Command, cfg.SkipMissing = was.Command, true
	t := newTrial(p, cfg)
	now, err := t.begin(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := evidence.Compare(was, now); err != nil {
		return nil, fmt.Errorf("the run cannot be continued here: %w", err)
	}
	// A repeat that was not finished is run again: what went wrong in it does not count.
	was.Faults = slices.DeleteFunc(was.Faults, func(f evidence.Fault) bool { return !hasRepeat(was, f.Arm, f.Repeat) })
	if t.pids, err = readPIDs(cfg.Dir, was); err != nil {
		return nil, err
	}
	for i := range was.Arms { // the plans are the same
		was.Arms[i].Missing = now.Arms[i].Missing
	}
	t.run = was
	if t.done() < t.total() {
		if err := t.preflight(ctx); err != nil {
			return nil, err
		}
	}
	return was, t.all(ctx)
}

// trial is a plan that is being run.
type trial struct {
	Config
	plan   Plan
	daemon *daemon
	run    *evidence.Run
	// limits are those of the plan's profile, and served is the daemon's process, 0 if it is not known.
	limits evidence.Profile
	served int32
	// pids are the processes of all repeats.
	pids []pidRow
	// untraced: the driver cannot be recorded.
	untraced bool
	// spent is the time that the steps of this process took.
	spent time.Duration
	steps int
}

func newTrial(p Plan, cfg Config) *trial {
	return &trial{Config: cfg, plan: p, daemon: &daemon{admin: cfg.Client.Admin(), classified: map[string]time.Time{}, containers: map[string]string{}}}
}

// begin returns a run without repeats. It refuses when the daemon cannot be reached.
func (t *trial) begin(ctx context.Context) (*evidence.Run, error) {
	env, backend, err := t.daemon.environment(ctx, t.Version)
	if err != nil {
		return nil, err
	}
	env["AMD_LOG_LEVEL"] = t.plan.hipLevel()
	origin := originOf(backend)
	t.plan.suit(origin)
	if t.plan.Profile != evidence.NoProfile {
		if t.limits, err = evidence.LoadProfile(t.plan.Profile); err != nil {
			return nil, err
		}
	}
	t.served = daemonPID(ctx, t.Socket, readStats())
	if err := t.daemon.findContainers(ctx, &t.plan.Offline); err != nil {
		return nil, err
	}
	if t.plan.Arrivals.Kind == scenario.Trace {
		s := scenario.Scenario{Online: []scenario.Service{{Name: "online", Arrivals: t.plan.Arrivals}}}
		if err := s.Load(""); err != nil {
			return nil, err
		}
		t.plan.Arrivals = s.Online[0].Arrivals
	}
	run := &evidence.Run{
		Format: evidence.Format, Name: t.plan.Name, Command: t.Command, Origin: origin, Backend: backend, Began: time.Now().UTC().Truncate(time.Millisecond),
		Seed: t.plan.Seed, Plan: t.plan.YAML(), Environment: env, Planned: t.plan.Repeats,
		Work: t.plan.work(),
	}
	if t.plan.Offline.running() && !t.plan.wants(evidence.OnlineAlone) {
		run.LeftOut = map[evidence.ArmKind]string{evidence.OnlineAlone: alreadyRunning}
	}
	missing, err := t.daemon.missing(ctx, t.plan.Arms)
	if err != nil {
		return nil, err
	}
	left := 0
	for i, arm := range t.plan.Arms {
		run.Arms = append(run.Arms, evidence.Arm{
			Name: arm.Name(), Kind: arm.Kind, Mechanism: arm.Mechanism, Policy: arm.Policy, Missing: missing[i], Repeats: []evidence.Repeat{},
		})
		if arm.Kind == evidence.Protected && missing[i] == "" {
			left++
		}
	}
	for i, why := range missing {
		if why != "" && (!t.SkipMissing || left == 0) {
			return nil, &MissingError{Arm: run.Arms[i].Name, Why: why}
		}
	}
	return run, nil
}

// MissingError reports an arm that the daemon cannot run. Nothing was started.
type MissingError struct{ Arm, Why string }

func (e *MissingError) Error() string { return fmt.Sprintf("arm %q: %s", e.Arm, e.Why) }

// all runs the repeats that are missing. The arms take turns, and each round begins with another,
// so that a drift of the machine reaches all of them.
func (t *trial) all(ctx context.Context) error {
	if err := evidence.Write(t.Dir, t.run); err != nil {
		return err
	}
	n := len(t.plan.Arms)
	for repeat := range t.plan.Repeats {
		for i := range n {
			at := (i + repeat) % n
			if arm := &t.run.Arms[at]; arm.Missing != "" || len(arm.Repeats) > repeat {
				continue
			}
			began := time.Now()
			if err := t.step(ctx, at, repeat); err != nil {
				return err
			}
			t.spent += time.Since(began)
			t.steps++
		}
	}
	t.report("", 0, 0)
	return nil
}

// done returns how many steps are done.
func (t *trial) done() (n int) {
	for _, arm := range t.run.Arms {
		n += len(arm.Repeats)
	}
	return n
}

// total returns how many steps there are.
func (t *trial) total() (n int) {
	for _, arm := range t.run.Arms {
		if arm.Missing == "" {
			n += t.plan.Repeats
		}
	}
	return n
}

// report reports progress.
func (t *trial) report(text string, requests, expected int) {
	if t.Progress == nil {
		return
	}
	p := Progress{Done: t.done(), Total: t.total(), Requests: requests, Expected: expected, Text: text}
	each := t.plan.Estimate() / time.Duration(max(1, len(t.plan.Arms)*t.plan.Repeats))
	if t.steps > 0 {
		each = t.spent / time.Duration(t.steps)
	}
	p.Left = each * time.Duration(p.Total-p.Done)
	t.Progress(p)
}

// step runs a repeat of an arm and keeps it. A repeat that cannot be finished leaves a fault, and
// ends the trial.
func (t *trial) step(ctx context.Context, at, repeat int) error {
	arm := t.plan.Arms[at]
	p := &play{trial: t, arm: arm, repeat: repeat}
	err := p.play(ctx)
	if ctx.Err() != nil {
		return fmt.Errorf("%s, repeat %d was interrupted: %w", arm.Name(), repeat+1, context.Cause(ctx))
	}
	t.run.Faults = append(t.run.Faults, p.faults...)
	t.run.Alarms = append(t.run.Alarms, p.alarms...)
	t.pids = append(t.pids, p.pids...)
	t.checkHIPLogs()
	keep := evidence.WriteJSON(t.Dir, evidence.PIDsFile, t.pids)
	if err != nil {
		t.run.Faults = append(t.run.Faults, evidence.Fault{Arm: arm.Name(), Repeat: repeat, What: firstLine(err.Error())})
		return errors.Join(fmt.Errorf("%s, repeat %d: %w", arm.Name(), repeat+1, err), evidence.Write(t.Dir, t.run), keep)
	}
	if p.mechanism != "" {
		t.run.Arms[at].Mechanism = p.mechanism
	}
	return errors.Join(evidence.Append(t.Dir, t.run, arm.Name(), &p.result), keep)
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
