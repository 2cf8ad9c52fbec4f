package dbgtrap

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// idSet is a set of queue ids.
type idSet map[uint32]struct{}

// forgetReborn removes from held the queues of snapshot that were born since they were
// put there: ids are used again.
func forgetReborn(held idSet, snapshot []kfd.QueueSnapshotEntry) {
	for i := range snapshot {
		if snapshot[i].ExceptionStatus.Has(kfd.ECQueueNew) {
			delete(held, snapshot[i].QueueID)
		}
	}
}

// maxSkips is how often the driver may skip one queue in a suspension: the queue may have
// been born, or its destruction begun, after the snapshot that lists it.
const maxSkips = 2

// suspendPass is one suspension of a target, which may take several calls: it decides
// which queues each call is for and what the results mean.
type suspendPass struct {
	// suspended are the queues that are suspended.
	suspended idSet
	// skipped counts how often the driver did not suspend a queue that was asked for.
	skipped map[uint32]int
}

func newSuspendPass(suspended idSet) suspendPass {
	return suspendPass{suspended: suspended, skipped: map[uint32]int{}}
}

// next returns the queues of a snapshot that are not suspended yet, SDMA queues included,
// in its order. The snapshot must have cleared ECQueueNew.
func (p suspendPass) next(snapshot []kfd.QueueSnapshotEntry) []uint32 {
	forgetReborn(p.suspended, snapshot)
	var ids []uint32
	for i := range snapshot {
		q := &snapshot[i]
		if _, ok := p.suspended[q.QueueID]; ok {
			continue
		}
		if q.ExceptionStatus.Has(kfd.ECQueueNew) {
			p.skipped[q.QueueID] = 0 // it is not the one that was skipped
		}
		ids = append(ids, q.QueueID)
	}
	return ids
}

// take records the results of a call for the queues that next returned for snapshot. again: queues
// were skipped, and another snapshot shows why, and what is left to do. failed are the GPUs that
// failed, and refused the queues that the driver will not suspend.
func (p suspendPass) take(results []kfd.QueueResult, snapshot []kfd.QueueSnapshotEntry) (again bool, failed []gpreempt.GPUID, refused []uint32) {
	for _, r := range results {
		switch r.Status {
		case kfd.QueueOK:
			p.suspended[r.ID] = struct{}{}
		case kfd.QueueHardwareError:
		default:
			again = true
			if p.skipped[r.ID]++; p.skipped[r.ID] >= maxSkips {
				refused = append(refused, r.ID)
			}
		}
	}
	return again, gpusOf(failures(results), snapshot), refused
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
