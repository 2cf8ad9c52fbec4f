package dbgtrap

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// idSet is a set of queue ids.
type idSet map[uint32]struct{}

// forgetReborn takes the queues of snapshot out of held that were born since they
// were put there: ids are used again.
func forgetReborn(held idSet, snapshot []kfd.QueueSnapshotEntry) {
	for i := range snapshot {
		if snapshot[i].ExceptionStatus.Has(kfd.ECQueueNew) {
			delete(held, snapshot[i].QueueID)
		}
	}
}

// patience is how often the driver may pass over one queue in a suspension: it
// may have been born, or begun to end, after the snapshot it was found in.
const patience = 2

// campaign is one suspension of a target: it decides what each call asks for and
// what its answer means, until nothing is left to ask.
type campaign struct {
	// held are the queues that are suspended.
	held idSet
	// passed counts how often the driver passed over a queue.
	passed map[uint32]int
}

func newCampaign(held idSet) campaign { return campaign{held: held, passed: map[uint32]int{}} }

// next returns the queues of a snapshot that are to be suspended yet, SDMA queues
// among them, in its order. It is for a snapshot that clears ECQueueNew.
func (c campaign) next(snapshot []kfd.QueueSnapshotEntry) []uint32 {
	forgetReborn(c.held, snapshot)
	var ids []uint32
	for i := range snapshot {
		q := &snapshot[i]
		if _, held := c.held[q.QueueID]; held {
			continue
		}
		if q.ExceptionStatus.Has(kfd.ECQueueNew) {
			c.passed[q.QueueID] = 0 // it is not the one that was passed over
		}
		ids = append(ids, q.QueueID)
	}
	return ids
}

// verdict is what an answer comes to.
type verdict struct {
	// again tells that queues were passed over: another snapshot shows why, and
	// what remains to be done.
	again bool
	// failed are the GPUs that failed.
	failed []gpreempt.GPUID
	// refused are the queues that the driver will not suspend.
	refused []uint32
}

// judge takes note of what became of the queues that next gave for snapshot.
func (c campaign) judge(results []kfd.QueueResult, snapshot []kfd.QueueSnapshotEntry) verdict {
	var v verdict
	var failed []uint32
	for _, r := range results {
		switch r.Status {
		case kfd.QueueOK:
			c.held[r.ID] = struct{}{}
		case kfd.QueueHardwareError:
			failed = append(failed, r.ID)
		default:
			v.again = true
			if c.passed[r.ID]++; c.passed[r.ID] >= patience {
				v.refused = append(v.refused, r.ID)
			}
		}
	}
	v.failed = gpusOf(failed, snapshot)
	return v
}

// gpusOf returns the GPUs that the queues ids are on, ascending.
func gpusOf(ids []uint32, snapshot []kfd.QueueSnapshotEntry) []gpreempt.GPUID {
	var gpus []gpreempt.GPUID
	for i := range snapshot {
		if slices.Contains(ids, snapshot[i].QueueID) {
			gpus = append(gpus, gpreempt.GPUID(snapshot[i].GPUID))
		}
	}
	slices.Sort(gpus)
	return slices.Compact(gpus)
}

// failures returns the queues whose GPU failed.
func failures(results []kfd.QueueResult) []uint32 {
	var ids []uint32
	for _, r := range results {
		if r.Status == kfd.QueueHardwareError {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

func idsOf(snapshot []kfd.QueueSnapshotEntry) []uint32 {
	ids := make([]uint32, len(snapshot))
	for i := range snapshot {
		ids[i] = snapshot[i].QueueID
	}
	return ids
}
