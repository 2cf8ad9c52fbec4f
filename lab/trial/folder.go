package trial

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/regular"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// What the folder of a run may lack.
const (
	kfdTrace = "KFD trace"
	hipLogs  = "HIP logs"
)

// lacks notes why the folder does not have something. The first reason stays.
func (t *trial) lacks(what, why string) {
	if t.run.Missing == nil {
		t.run.Missing = map[string]string{}
	}
	if t.run.Missing[what] == "" {
		t.run.Missing[what] = firstLine(why)
	}
}

// path returns the path of a file of this repeat in a subfolder.
func (p *play) path(dir, name string) string {
	if p.name != "" {
		return filepath.Join(p.Dir, dir, p.name+name)
	}
	arm := strings.Map(func(c rune) rune {
		if c == ' ' || c == ':' || c == ',' {
			return '-'
		}
		return c
	}, p.arm.Name())
	return filepath.Join(p.Dir, dir, fmt.Sprintf("%s-%d%s", arm, p.repeat+1, name))
}

// traceKFD records the driver beside a repeat. It returns when the recording runs, and end ends it. A recording that fails
// does not end the repeat: it changes nothing of what is measured.
func (p *play) traceKFD(ctx context.Context) (end func()) {
	failed := func(err error) {
		p.untraced = true // the others would fail as well
		p.lacks(kfdTrace, fmt.Sprintf("%s, repeat %d: %v", p.arm.Name(), p.repeat+1, err))
	}
	switch {
	case p.run.Origin != evidence.Hardware:
		p.lacks(kfdTrace, fmt.Sprintf("the machine is %s, and this host's driver has no part in it", p.run.Origin))
		return func() {}
	case p.plan.NoKFDTrace || p.TraceKFD == nil:
		p.lacks(kfdTrace, "the plan has none")
		return func() {}
	case p.untraced:
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it ends after the jobs
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() { ended <- p.TraceKFD(ctx, p.path(evidence.KFDDir, ""), func() { close(started) }) }()
	select {
	case <-started:
	case err := <-ended:
		cancel()
		failed(err)
		return func() {}
	}
	return func() {
		cancel()
		if err := <-ended; err != nil {
			failed(err)
		}
	}
}

// defaultHIPLog is the level of HIP's log that a plan has by itself: errors and warnings, which cost nothing. From 3 on it
// has a line for each call.
const defaultHIPLog = "2"

// hipLevel is AMD_LOG_LEVEL of the commands that a trial starts: that of the plan, else that of this process.
func (p *Plan) hipLevel() string {
	if p.HIPLog > 0 {
		return strconv.Itoa(p.HIPLog)
	}
	if level := os.Getenv("AMD_LOG_LEVEL"); level != "" {
		return level
	}
	return defaultHIPLog
}

// environment returns the environment of a command whose output is in the log with this name.
func (p *play) environment(name string) ([]string, error) {
	// The command may change its directory.
	hip, err := filepath.Abs(p.path(evidence.LogsDir, "-"+name+hipEnding))
	env := append(environment(&p.plan, p.Socket, p.arm.Name(), p.repeat), p.priorityEnvironment(name)...)
	return append(env, "AMD_LOG_LEVEL="+p.plan.hipLevel(), "AMD_LOG_LEVEL_FILE="+hip), err
}

// hipEnding is the end of AMD_LOG_LEVEL_FILE. HIP adds _PID for each process.
const hipEnding = ".hip"

// checkHIPLogs notes which processes have no HIP log.
func (t *trial) checkHIPLogs() {
	delete(t.run.Missing, hipLogs)
	if found, err := filepath.Glob(filepath.Join(t.Dir, evidence.LogsDir, "*"+hipEnding+"*")); err == nil && len(found) == 0 {
		t.lacks(hipLogs, "no command that the trial started wrote one at AMD_LOG_LEVEL="+t.plan.hipLevel())
	}
	if t.plan.Offline.running() {
		t.lacks(hipLogs+" of running jobs", "they have the environment with which they were started")
	}
}

// pidRow says which process was what.
type pidRow struct {
	Arm           string   `json:"arm"`
	Repeat        int      `json:"repeat"`
	Role          string   `json:"role"`
	PID           int32    `json:"pid"`
	NamespacePIDs []int32  `json:"namespace_pids,omitempty"`
	Target        string   `json:"target,omitempty"`
	Comm          string   `json:"comm,omitempty"`
	Container     string   `json:"container,omitempty"`
	ContainerID   string   `json:"container_id,omitempty"`
	GPUs          []uint32 `json:"gpu_ids,omitempty"`
	Queues        uint32   `json:"queues,omitempty"`
	Mechanism     string   `json:"mechanism,omitempty"`
}

// notePIDs adds the targets of a role to the pid map, each once.
func (p *play) notePIDs(role string, targets []*gpreemptv1.Target) {
	for _, t := range targets {
		if slices.ContainsFunc(p.pids, func(r pidRow) bool { return r.Role == role && r.Target != "" && r.Target == t.GetTargetId() }) {
			continue
		}
		p.pids = append(p.pids, pidRow{
			Arm: p.arm.Name(), Repeat: p.repeat, Role: role, PID: t.GetPid(), NamespacePIDs: t.GetNamespacePids(), Target: t.GetTargetId(), Comm: t.GetComm(),
			Container: t.GetContainer().GetName(), ContainerID: t.GetContainer().GetContainerId(), GPUs: t.GetGpuIds(), Queues: t.GetQueueCount(), Mechanism: t.GetMechanism(),
		})
	}
}

// noteOnlinePIDs adds the online command and the processes below it that have queues. It is
// called before and after the requests: before them the daemon may not have scanned the new queues
// yet, and after them the command may have ended.
func (p *play) noteOnlinePIDs(ctx context.Context) error {
	if p.server == nil || p.server.process == nil {
		return nil
	}
	command := pidRow{Arm: p.arm.Name(), Repeat: p.repeat, Role: "online", PID: p.server.pid()}
	if !slices.ContainsFunc(p.pids, func(r pidRow) bool { return r.Role == command.Role && r.Target == "" }) {
		p.pids = append(p.pids, command)
	}
	targets, err := p.daemon.targets(ctx, []int32{p.server.pid()}, &Offline{})
	p.notePIDs("online", targets)
	return err
}

// readPIDs returns the pid map of the repeats that a run has.
func readPIDs(dir string, run *evidence.Run) (rows []pidRow, err error) {
	text, err := regular.Read(filepath.Join(dir, evidence.PIDsFile), evidence.MaxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no repeat was run
	}
	if err == nil {
		err = json.Unmarshal(text, &rows)
	}
	if err != nil {
		return nil, fmt.Errorf("the pid map of the run: %w", err)
	}
	return slices.DeleteFunc(rows, func(r pidRow) bool { return !hasRepeat(run, r.Arm, r.Repeat) }), nil
}

// hasRepeat reports whether a repeat of an arm was finished.
func hasRepeat(run *evidence.Run, arm string, repeat int) bool {
	return slices.ContainsFunc(run.Arms, func(a evidence.Arm) bool { return a.Name == arm && repeat < len(a.Repeats) })
}
