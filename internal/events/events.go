// Package events implements the daemon's log of state changes, which is bounded and has
// revisions, the statistics counted from it, and the metrics that Prometheus scrapes: what the log counts, and
// a snapshot of the present state.
package events

import (
	"context"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// ErrCompacted is the error for a revision whose next entry is overwritten, or that the
// log has not reached.
var ErrCompacted error = &gpreempt.Error{
	Code:    gpreempt.CodeOutOfRange,
	Reason:  gpreempt.ReasonRevisionCompacted,
	Message: "the events after this revision are no longer kept",
	Next:    "read the present state, then watch from revision 0",
}

// Entry is one state change, or one action of an admin.
type Entry struct {
	// Revision is the position in the log: the first entry has 1, the next one more.
	Revision uint64
	// At is the wall clock time.
	At time.Time
	// Record is the change. Its kind is RecordNone when Admin is set.
	Record scheduler.Record
	// Admin describes the action and the admin; "" for a state change.
	Admin string
}

// AdminsKept is how many actions of admins the log keeps when more recent state changes have
// displaced them: any client that may announce causes thousands of those a second.
const AdminsKept = 128

// Log keeps the last entries, and the last actions of admins, and counts all of them. It is
// safe for concurrent use.
type Log struct {
	// mu guards everything below. Readers hold it for copies only: Append is on the
	// scheduler's hot path.
	mu       sync.Mutex
	entries  inventory.Ring[Entry]
	admins   inventory.Ring[Entry] // copies of the entries with Admin
	counters counters
}

// NewLog returns an empty log that keeps the last capacity entries, at least 1. It
// allocates its memory, some 150 bytes an entry, at once.
func NewLog(capacity int) *Log {
	return &Log{entries: inventory.NewRing[Entry](capacity), admins: inventory.NewRing[Entry](AdminsKept), counters: newCounters()}
}

// Append adds a state change seen at the given wall clock time. It waits for no reader
// longer than a copy of inventory.ReadChunk entries takes, and allocates only to count a cause,
// a mechanism or a duration unlike any before, and to close a channel that Wait made.
// mechanism is the name of the target's mechanism, "" for none; it is only counted.
func (l *Log) Append(at time.Time, r scheduler.Record, mechanism string) {
	l.append(at, r, mechanism, "")
}

// AppendAdmin adds an action of an admin: text describes both, and must not be empty; r
// has the object of the action, and its kind is ignored. No statistic counts it.
func (l *Log) AppendAdmin(at time.Time, text string, r scheduler.Record) {
	r.Kind = scheduler.RecordNone
	l.append(at, r, "", text)
}

func (l *Log) append(at time.Time, r scheduler.Record, mechanism, admin string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	revision, entry := l.entries.Next()
	*entry = Entry{Revision: revision, At: at, Record: r, Admin: admin}
	if admin != "" {
		_, kept := l.admins.Next()
		*kept = *entry
	}
	l.counters.record(r, mechanism)
	l.entries.Wake()
}

// Revision returns the revision of the newest entry; 0 for an empty log.
func (l *Log) Revision() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries.Last()
}

// Oldest returns the revision of the oldest entry kept; 0 for an empty log.
func (l *Log) Oldest() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries.Oldest()
}

// Read appends to dst the entries after a revision, oldest first and at most inventory.ReadChunk of
// them. After 0 it begins with the actions of admins that are older than the oldest entry
// kept, at most AdminsKept. The error is ErrCompacted.
func (l *Log) Read(after uint64, dst []Entry) ([]Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if after == 0 {
		after = max(l.entries.Oldest(), 1) - 1
		kept, _ := l.admins.Read(max(l.admins.Oldest(), 1)-1, nil)
		for _, e := range kept {
			if e.Revision <= after {
				dst = append(dst, e)
			}
		}
	}
	dst, ok := l.entries.Read(after, dst)
	if !ok {
		return dst, ErrCompacted
	}
	return dst, nil
}

// Wait returns nil once Revision is greater than after, or the cause of ctx when that is
// done first.
func (l *Log) Wait(ctx context.Context, after uint64) error {
	return l.entries.Wait(ctx, &l.mu, after)
}

// Answered counts the answer to an announcement, and the stages of its time. It costs as
// much as Append.
func (l *Log) Answered(a scheduler.Answer, s Stages) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counters.answer(a, s)
}

// Disturbed counts runlist cycles on a GPU that attaching to a target caused, or releasing
// it, without a queue of the target on that GPU.
func (l *Log) Disturbed(gpu gpreempt.GPUID, cycles int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counters.cycles.of(gpu.String()).Add(float64(cycles))
}

// Refused counts a rejected request or connection. It costs as much as Append.
func (l *Log) Refused(why gpreempt.Reason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counters.refused.of(string(why)).Inc()
}
