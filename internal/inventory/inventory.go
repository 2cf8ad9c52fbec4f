// Package inventory implements the set of the processes and queues on the host's GPUs.
// An Observer reads the sources, each at its own interval, the cheapest most often; an
// Inventory holds what they report, with a log of changes; a BacklogReader reads how much
// work waits on a queue.
package inventory

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ErrCompacted reports that the inventory cannot continue from a revision: the changes
// after it are overwritten, or it never existed.
var ErrCompacted error = &gpreempt.Error{
	Code:    gpreempt.CodeOutOfRange,
	Reason:  gpreempt.ReasonRevisionCompacted,
	Message: "the queue changes after this revision are no longer kept",
	Next:    "list the queues again and watch from the revision of the list",
}

// ChangeKind is what happened to a queue.
type ChangeKind uint8

// The kinds of change.
const (
	// Added: the queue was created.
	Added ChangeKind = iota + 1
	// Modified: SetInfos changed the info of the queue. No scan leads to it: other facts
	// under the same id mean another queue, which is removed and added, so that no new
	// queue escapes a suspension.
	Modified
	// Removed: the queue was destroyed, or its process exited.
	Removed
)

// Change is one step from a set of queues to the next.
type Change struct {
	// Revision is the position among all changes: the first has 1, the next one more.
	Revision uint64
	Kind     ChangeKind
	// At is the wall clock time of the scan or the other source.
	At time.Time
	// Queue is the queue as it is, or was when it was removed.
	Queue gpreempt.QueueEntry
}

// Diff is what one scan changed. A process that exited and another one that has its pid
// now are Gone and Born.
type Diff struct {
	// Born are processes seen for the first time.
	Born []discovery.Proc
	// Changed are processes whose facts or queues are not what they were.
	Changed []discovery.Proc
	// Gone are processes that exited or closed KFD.
	Gone []gpreempt.ProcessKey
	// Queues are the changes of queues, including those of the processes above.
	Queues []Change
}

// Empty reports whether nothing changed.
func (d Diff) Empty() bool {
	return len(d.Born) == 0 && len(d.Changed) == 0 && len(d.Gone) == 0 && len(d.Queues) == 0
}

// Inventory is the set of living processes and their queues. Apply, ApplyOne, SetInfos
// and SetGPUs are called by one goroutine, the other methods by any. What they return is
// shared and must not be changed.
type Inventory struct {
	// mu guards everything below. It is held to copy and to compare, never to wait.
	mu        sync.Mutex
	gpus      []gpreempt.GPU
	processes []process // ascending by pid
	changes   Ring[Change]
}

// process is a living process with what a scan does not report.
type process struct {
	discovery.Proc
	// entries belong to Queues, index by index.
	entries []gpreempt.QueueEntry
	// born is how many queues it has ever had.
	born uint64
}

// New returns an empty inventory that keeps the last capacity changes, at least 1.
func New(capacity int) *Inventory {
	return &Inventory{changes: NewRing[Change](capacity)}
}

// SetGPUs replaces the GPUs. It keeps the slice.
func (v *Inventory) SetGPUs(gpus []gpreempt.GPU) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.gpus = gpus
}

// GPUs returns the argument of the last SetGPUs.
func (v *Inventory) GPUs() []gpreempt.GPU {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.gpus
}

// Processes returns the living processes, ascending by pid.
func (v *Inventory) Processes() []discovery.Proc {
	v.mu.Lock()
	defer v.mu.Unlock()
	procs := make([]discovery.Proc, len(v.processes))
	for n, p := range v.processes {
		procs[n] = p.Proc
	}
	return procs
}

// Process returns one living process. A key with Start 0 is the living process
// with that pid.
func (v *Inventory) Process(key gpreempt.ProcessKey) (discovery.Proc, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p, ok := v.find(key)
	return p.Proc, ok
}

func (v *Inventory) find(key gpreempt.ProcessKey) (process, bool) {
	n, found := v.index(key)
	if !found {
		return process{}, false
	}
	return v.processes[n], true
}

// index returns the place of a process.
func (v *Inventory) index(key gpreempt.ProcessKey) (n int, found bool) {
	n, found = slices.BinarySearchFunc(v.processes, key.PID, func(p process, pid int32) int {
		return int(p.Key.PID) - int(pid)
	})
	return n, found && (key.Start == 0 || v.processes[n].Key == key)
}

// QueuesBorn returns how many queues a living process has created in total. It is 0 for
// an unknown process.
func (v *Inventory) QueuesBorn(key gpreempt.ProcessKey) uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	p, _ := v.find(key)
	return p.born
}

// Queues returns the existing queues, ascending by pid and id, and the present revision:
// Read after it returns how they change.
func (v *Inventory) Queues() ([]gpreempt.QueueEntry, uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []gpreempt.QueueEntry
	for _, p := range v.processes {
		all = append(all, p.entries...)
	}
	return all, v.changes.Last()
}

// hasQueues reports whether any queue exists.
func (v *Inventory) hasQueues() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.ContainsFunc(v.processes, func(p process) bool { return len(p.entries) > 0 })
}

// QueuesOf returns the queues of one living process, ascending by id; nil when it is
// unknown.
func (v *Inventory) QueuesOf(key gpreempt.ProcessKey) []gpreempt.QueueEntry {
	v.mu.Lock()
	defer v.mu.Unlock()
	p, _ := v.find(key)
	return p.entries
}

// Revision returns the revision of the newest change; 0 before the first.
func (v *Inventory) Revision() uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changes.Last()
}

// Read appends to dst the changes after a revision, oldest first, at most
// ReadChunk of them, and none when there are none yet. Revision 0 is the empty
// inventory. The error is ErrCompacted: changes next to after are overwritten,
// or after is a revision this inventory has not reached.
func (v *Inventory) Read(after uint64, dst []Change) ([]Change, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	dst, ok := v.changes.Read(after, dst)
	if !ok {
		return dst, ErrCompacted
	}
	return dst, nil
}

// Wait returns nil as soon as Revision is larger than after, or the cause of ctx when
// that ends first.
func (v *Inventory) Wait(ctx context.Context, after uint64) error {
	return v.changes.Wait(ctx, &v.mu, after)
}
