package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/breaker"
	"github.com/gpreempt/gpreempt/internal/preempt"
	"github.com/gpreempt/gpreempt/internal/preempt/ladder"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// hooks gives the mechanisms the daemon's ear.
func (d *daemon) hooks() hooks {
	return hooks{
		gpus: d.gpusOf,
		births: func(gpreempt.ProcessKey) {
			select {
			case d.look <- struct{}{}:
			default: // a scan is asked for already
			}
		},
		lost: func(mechanism string, target gpreempt.ProcessKey, err error) {
			if hardware, ok := errors.AsType[*preempt.HardwareError](err); ok {
				for _, gpu := range hardware.GPUs {
					d.runner.Post(scheduler.Alarm{GPU: gpu})
				}
			}
			d.ladder.Lost(mechanism, target, err)
		},
	}
}

// gpusOf gives the GPUs the queues of a target are on.
func (d *daemon) gpusOf(key gpreempt.ProcessKey) []gpreempt.GPU {
	proc, ok := d.inventory.Process(key)
	if !ok {
		return nil
	}
	return gpusWithQueues(d.inventory.GPUs(), proc)
}

// gpusWithQueues picks the GPUs that have a queue of a process.
func gpusWithQueues(gpus []gpreempt.GPU, proc discovery.Proc) []gpreempt.GPU {
	var with []gpreempt.GPU
	for _, gpu := range gpus {
		if slices.ContainsFunc(proc.Queues, func(q gpreempt.Queue) bool { return q.GPU == gpu.ID }) {
			with = append(with, gpu)
		}
	}
	return with
}

// judge says what stands against a mechanism on a target that the mechanism does not
// see: queues out of its reach, and the hazard table. A simulated GPU has no hazards.
func (d *daemon) judge(mechanism string, target gpreempt.ProcessKey) ladder.Verdict {
	if proc, ok := d.inventory.Process(target); ok && outOfReach(mechanism, proc) {
		return ladder.Verdict{Evidence: secondaryContexts}
	}
	if p := d.backend.pauses; p != nil && p.orphaned(target) {
		return ladder.Verdict{Evidence: preempt.Evidence{Check: "journal", Found: "an earlier daemon's pause of it is not undone yet"}}
	}
	h := d.hazards.Load()
	if h == nil {
		simulated := d.backend.machine != nil
		return ladder.Verdict{Evidence: preempt.Evidence{Check: "hazard table", Found: "it knows no GPU of this machine", OK: simulated}}
	}
	return h.judge(mechanism, d.gpusOf(target))
}

// secondaryContexts stands against dbgtrap, which reaches the first KFD context of a
// process only (kfd_ioctl_set_debug_trap, Linux 7.2).
var secondaryContexts = preempt.Evidence{
	Check: "KFD contexts", Found: "it has queues in a secondary one, which DBG_TRAP cannot suspend",
	Remedy: "let criu or freezer hold the process: the config key mechanisms names them",
}

func outOfReach(mechanism string, proc discovery.Proc) bool {
	return mechanism == "dbgtrap" && slices.ContainsFunc(proc.Queues, func(q gpreempt.Queue) bool { return q.ID >= discovery.ContextQueueID(0, 0) })
}

// letGoOutOfReach ends the hold on processes that got queues out of their mechanism's
// reach since: to say that all of them are suspended would be wrong.
func (d *daemon) letGoOutOfReach(changed []discovery.Proc) {
	for _, proc := range changed {
		choice, _ := d.ladder.Choice(proc.Key)
		if outOfReach(choice.Mechanism, proc) {
			d.ladder.Lost(choice.Mechanism, proc.Key, errors.New(secondaryContexts.Found))
		}
	}
}

// kernelLog is where the kernel tells of GPUs in trouble.
const kernelLog = "/dev/kmsg"

// kernelLogAgain is how long after it could not be read it is tried again.
const kernelLogAgain = time.Minute

// watchKernelLog opens the breaker of a GPU the kernel complains of.
func (d *daemon) watchKernelLog(ctx context.Context) {
	if d.backend.machine != nil {
		return
	}
	for {
		works := time.AfterFunc(time.Second, func() { d.warnings.set("kmsg") })
		err := breaker.Watch(ctx, kernelLog, d.inventory.GPUs, d.alarm)
		works.Stop()
		if err == nil {
			return
		}
		d.warnings.set("kmsg", server.Warning{
			Code: "KERNEL_LOG_UNREADABLE", Severity: "warning", Text: err.Error(),
			Remedy: "run gpreemptd as root, or with CAP_SYSLOG",
		})
		select {
		case <-ctx.Done():
			return
		case <-time.After(kernelLogAgain):
		}
	}
}

func (d *daemon) alarm(a breaker.Alarm) {
	d.log.Error("the kernel tells of a GPU in trouble", zap.Stringer("gpu", a.GPU), zap.String("pattern", a.Pattern),
		zap.String("line", a.Line), zap.String("issue", a.Issue))
	d.runner.Post(scheduler.Alarm{GPU: a.GPU})
}

const (
	// orphansAgain is the time between two attempts to undo an earlier daemon's pauses.
	orphansAgain = 5 * time.Second
	// orphansTime is how long the start of the daemon waits for the first.
	orphansTime = 2 * time.Second
)

// undoOrphans lets what an earlier daemon left paused run again, and tries until
// all of it does, which may take as long as a GPU that hangs. It calls tried after
// the first attempt.
func (d *daemon) undoOrphans(ctx context.Context, tried func()) {
	defer tried()
	if d.backend.pauses == nil {
		return
	}
	for {
		_, failures := d.backend.pauses.undoOrphans(ctx)
		var warnings []server.Warning
		for _, err := range failures {
			warnings = append(warnings, server.Warning{
				Code: "ORPHANED_PAUSE", Severity: "error", Text: fmt.Sprintf("an earlier daemon may have left it paused: %v", err),
				Remedy: "it is tried again all the time; ending the process ends the pause too",
			})
		}
		d.warnings.set("orphans", warnings...)
		tried()
		if len(failures) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(orphansAgain):
		}
	}
}
