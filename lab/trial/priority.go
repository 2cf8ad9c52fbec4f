package trial

import (
	"context"
	"slices"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// streamPriority begins the variable with the HIP priority of the streams that a command makes in an
// arm with stream priorities: -1, which is high, for online work, and 0 for offline work. No runtime
// reads it: the command must.
const streamPriority = "GPREEMPT_STREAM_PRIORITY="

// priorityEnvironment is what the arm adds to the environment of a command.
func (p *play) priorityEnvironment(name string) []string {
	switch {
	case p.arm.Kind != evidence.StreamPriority:
		return nil
	case name == "online":
		return []string{streamPriority + "-1"}
	}
	return []string{streamPriority + "0"}
}

// What a run lacks about stream priorities.
const (
	priorityEffect = "effect of stream priorities"
	priorityCheck  = "check of stream priorities"
)

// checkPriorities notes when the queues contradict an arm with stream priorities, or do not show
// them: the commands may ignore the variable, and the arm would then be the arm shared.
func (p *play) checkPriorities(ctx context.Context, offline []*gpreemptv1.Target) error {
	if p.arm.Kind != evidence.StreamPriority {
		return nil
	}
	if p.run.Origin != evidence.Hardware {
		p.lacks(priorityEffect, "a GPU that is "+string(p.run.Origin)+" does not order queues by priority")
	}
	if p.server.process == nil {
		p.lacks(priorityCheck, "the trial did not start the server")
		return nil
	}
	online, err := p.daemon.targets(ctx, []int32{p.server.pid()}, &Offline{})
	if err != nil {
		return err
	}
	for end := time.Now().Add(slotTime); ; { // on a busy host the daemon may not have read them yet
		queues, err := p.daemon.admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{})
		if err != nil {
			return err
		}
		fault, missing := judgePriorities(queues.GetQueues(), online, offline)
		switch {
		case fault != "":
			p.fault(false, "%s", fault)
			return nil
		case missing == "":
			return nil
		case time.Now().After(end):
			p.lacks(priorityCheck, missing)
			return nil
		}
		if err := sleep(ctx, pollTime); err != nil {
			return err
		}
	}
}

// judgePriorities returns how the queues of the online and the offline targets contradict the arm, or
// why they do not show it. Without offline targets one process does both kinds of work, and has queues
// of two priorities.
func judgePriorities(queues []*gpreemptv1.Queue, online, offline []*gpreemptv1.Target) (fault, missing string) {
	high, known := prioritiesOf(queues, online)
	low, alsoKnown := prioritiesOf(queues, offline)
	switch {
	case !known || !alsoKnown:
		return "", "the daemon does not know the priorities of all queues: gpctl queue list -o wide shows why"
	case len(high) == 0:
		return "", "the online command has no queue"
	case len(low) == 0:
		if slices.Max(high) == slices.Min(high) {
			return "all queues of the online command have the same priority", ""
		}
		return "", ""
	case slices.Max(high) <= slices.Max(low):
		return "no online queue has a higher priority than the offline ones: the commands must make their streams with $" +
			strings.TrimSuffix(streamPriority, "="), ""
	}
	return "", ""
}

// prioritiesOf returns the driver's priorities of the compute queues of targets, and whether all are known.
func prioritiesOf(queues []*gpreemptv1.Queue, targets []*gpreemptv1.Target) (all []uint32, known bool) {
	for _, q := range queues {
		if q.GetType() != "compute" || !slices.ContainsFunc(targets, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == q.GetTargetId() }) {
			continue
		}
		if q.KfdPriority == nil {
			return nil, false
		}
		all = append(all, q.GetKfdPriority())
	}
	return all, true
}
