package kfdtrace

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// scanEvery is the pause between two scans of KFD's list of processes. A queue that
// lives shorter can be missed.
const scanEvery = 50 * time.Millisecond

// QueueChange is a queue that was present at the beginning of the recording, or was
// created or destroyed during it.
type QueueChange struct {
	// At is when the change was seen, after the beginning of the recording: up to 50 ms
	// late.
	At     time.Duration `json:"at_ns"`
	Change string        `json:"change"` // present, created, destroyed
	PID    int32         `json:"pid"`
	Comm   string        `json:"comm"`
	// NamespacePIDs are its pids in the pid namespaces below, such as a container's.
	NamespacePIDs []int32        `json:"namespace_pids,omitempty"`
	ContainerID   string         `json:"container_id,omitempty"`
	QueueID       uint32         `json:"queue_id"`
	GPU           gpreempt.GPUID `json:"gpu_id"`
	Type          string         `json:"type"`
}

// The values of QueueChange.Change.
const (
	QueuePresent   = "present"
	QueueCreated   = "created"
	QueueDestroyed = "destroyed"
)

// queueKey identifies one queue permanently: ids and pids are reused.
type queueKey struct {
	process     gpreempt.ProcessKey
	id          uint32
	incarnation uint64
}

// queueTracker records which queues exist.
type queueTracker struct {
	alive   map[queueKey]QueueChange // nil before the first scan
	changes []QueueChange
}

// update takes the result of a scan at a time after the beginning.
func (t *queueTracker) update(at time.Duration, found []discovery.Proc) {
	change := QueueCreated
	if t.alive == nil {
		change = QueuePresent
	}
	alive := map[queueKey]QueueChange{}
	for _, p := range found {
		for i, q := range p.Queues {
			key := queueKey{process: p.Key, id: q.ID}
			if i < len(p.Incarnations) {
				key.incarnation = p.Incarnations[i]
			}
			c, known := t.alive[key]
			if !known {
				c = QueueChange{
					At: at, Change: change, PID: p.Key.PID, Comm: p.Comm, NamespacePIDs: p.NamespacePIDs,
					ContainerID: p.Cgroup.ContainerID, QueueID: q.ID, GPU: q.GPU, Type: q.Type.String(),
				}
				t.changes = append(t.changes, c)
			}
			alive[key] = c
		}
	}
	var destroyed []QueueChange
	for key, c := range t.alive {
		if _, ok := alive[key]; !ok {
			c.At, c.Change = at, QueueDestroyed
			destroyed = append(destroyed, c)
		}
	}
	slices.SortFunc(destroyed, func(a, b QueueChange) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.QueueID, b.QueueID))
	})
	t.alive, t.changes = alive, append(t.changes, destroyed...)
}

// watch scans until ctx ends, and once more then. It returns the first error.
func (t *queueTracker) watch(ctx context.Context, host *discovery.FS, began time.Time) error {
	ticker := time.NewTicker(scanEvery)
	defer ticker.Stop()
	var first error
	for done := false; ; {
		s, err := host.Scan()
		if err == nil {
			t.update(time.Since(began), s.Processes)
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
