package kfdtrace

import (
	"context"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// lookEvery is the pause between two looks at KFD's list of processes: a queue
// that lived shorter can be missed.
const lookEvery = 50 * time.Millisecond

// QueueChange is a queue that was there from the beginning, was born or died
// while the trace was recorded.
type QueueChange struct {
	// At is when it was seen, after the beginning of the recording: up to 50 ms late.
	At     time.Duration `json:"at_ns"`
	Change string        `json:"change"` // present, born, gone
	PID    int32         `json:"pid"`
	Comm   string        `json:"comm"`
	// NamespacePIDs are its pids in the pid namespaces below, such as a container's.
	NamespacePIDs []int32        `json:"namespace_pids,omitempty"`
	ContainerID   string         `json:"container_id,omitempty"`
	QueueID       uint32         `json:"queue_id"`
	GPU           gpreempt.GPUID `json:"gpu_id"`
	Type          string         `json:"type"`
}

// The words of QueueChange.Change.
const (
	QueuePresent = "present"
	QueueBorn    = "born"
	QueueGone    = "gone"
)

// queueKey names one queue for ever: ids and pids are used again.
type queueKey struct {
	process     gpreempt.ProcessKey
	id          uint32
	incarnation uint64
}

// nursery follows which queues there are.
type nursery struct {
	alive   map[queueKey]QueueChange
	changes []QueueChange
}

// look takes what a scan found at a time after the beginning. The first scan finds
// what is present.
func (n *nursery) look(at time.Duration, found []discovery.Proc) {
	word := QueueBorn
	if n.alive == nil {
		n.alive = map[queueKey]QueueChange{}
		word = QueuePresent
	}
	var gone []QueueChange
	seen := make(map[queueKey]bool, len(n.alive))
	for _, p := range found {
		for i, q := range p.Queues {
			key := queueKey{process: p.Key, id: q.ID}
			if i < len(p.Incarnations) {
				key.incarnation = p.Incarnations[i]
			}
			seen[key] = true
			if _, known := n.alive[key]; known {
				continue
			}
			c := QueueChange{
				At: at, Change: word, PID: p.Key.PID, Comm: p.Comm, NamespacePIDs: p.NamespacePIDs,
				ContainerID: p.Cgroup.ContainerID, QueueID: q.ID, GPU: q.GPU, Type: q.Type.String(),
			}
			n.alive[key] = c
			n.changes = append(n.changes, c)
		}
	}
	for key, c := range n.alive {
		if !seen[key] {
			delete(n.alive, key)
			c.At, c.Change = at, QueueGone
			gone = append(gone, c)
		}
	}
	slices.SortFunc(gone, func(a, b QueueChange) int {
		if a.PID != b.PID {
			return int(a.PID) - int(b.PID)
		}
		return int(a.QueueID) - int(b.QueueID)
	})
	n.changes = append(n.changes, gone...)
}

// watch looks until ctx ends, and once more then. The error is the first one met.
func (n *nursery) watch(ctx context.Context, host *discovery.FS, began time.Time) error {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var first error
	for done := false; ; {
		s, err := host.Scan()
		if err == nil {
			n.look(time.Since(began), s.Processes)
		} else if first == nil {
			first = err
		}
		if done {
			return first
		}
		select {
		case <-ctx.Done():
			done = true
		case <-ticker.C:
		}
	}
}
