// Package events hides how the daemon remembers its state changes: a bounded
// log with revisions, and the statistics folded from what goes into it.
package events

import (
	"context"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// ReadChunk is the most entries one Read gives: it bounds how long a reader
// keeps Append waiting.
const ReadChunk = 256

// ErrCompacted reports that a reader asked to go on from a revision the log
// cannot go on from: what follows it is overwritten, or it never was.
var ErrCompacted error = &gpreempt.Error{
	Code:    gpreempt.CodeOutOfRange,
	Reason:  gpreempt.ReasonRevisionCompacted,
	Message: "the events after this revision are no longer kept",
	Next:    "watch again from revision 0 and read the present state anew",
}

// Entry is one state change, or one verb an admin used.
type Entry struct {
	// Revision is the position in the log: the first entry has 1, the next one more.
	Revision uint64
	// At is the wall clock, for people.
	At time.Time
	// Record is the change. Its kind is RecordNone when Admin is set.
	Record scheduler.Record
	// Admin says which verb was used by whom; "" for a state change.
	Admin string
}

// Log keeps the last entries and counts all of them. Its methods may be called
// by any number of goroutines.
type Log struct {
	// mu guards everything below. Readers hold it for copies only: Append is on the
	// scheduler's hot path.
	mu   sync.Mutex
	ring []Entry
	last uint64
	// wake is closed and forgotten by the next append; nil when nobody waits.
	wake     chan struct{}
	counters counters
}

// NewLog returns an empty log that keeps the last capacity entries, at least 1.
// It takes its memory, some 150 bytes an entry, at once.
func NewLog(capacity int) *Log {
	return &Log{ring: make([]Entry, max(capacity, 1)), counters: newCounters()}
}

// Append adds a state change seen at the given wall clock time. It waits for no reader
// longer than a copy of ReadChunk entries takes, and allocates only to count a cause,
// a mechanism or a duration unlike any before, and to close a channel that Wait made.
// mechanism is the name of the target's mechanism, "" for none; it is only counted.
func (l *Log) Append(at time.Time, r scheduler.Record, mechanism string) {
	l.append(at, r, mechanism, "")
}

// AppendAdmin adds a verb an admin used: text says which and who, and must not
// be empty; r says on what, and its kind is ignored. It counts in no statistic.
func (l *Log) AppendAdmin(at time.Time, text string, r scheduler.Record) {
	r.Kind = scheduler.RecordNone
	l.append(at, r, "", text)
}

func (l *Log) append(at time.Time, r scheduler.Record, mechanism, admin string) {
	l.mu.Lock()
	l.last++
	l.ring[l.slot(l.last)] = Entry{Revision: l.last, At: at, Record: r, Admin: admin}
	l.counters.record(r, mechanism)
	wake := l.wake
	l.wake = nil
	l.mu.Unlock()
	if wake != nil {
		close(wake)
	}
}

// slot is the place of a revision in the ring.
func (l *Log) slot(revision uint64) int {
	return int((revision - 1) % uint64(len(l.ring)))
}

// Revision returns the revision of the newest entry; 0 when there is none.
func (l *Log) Revision() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// Oldest returns the revision of the oldest entry kept; 0 when there is none.
func (l *Log) Oldest() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.oldest()
}

func (l *Log) oldest() uint64 {
	if l.last <= uint64(len(l.ring)) {
		return min(l.last, 1)
	}
	return l.last - uint64(len(l.ring)) + 1
}

// Read appends to dst the entries after a revision, oldest first, at most
// ReadChunk of them, and none when there are none yet. After 0 it begins with
// the oldest entry kept. The error is ErrCompacted: the entries next to after
// are overwritten, or after is a revision this log has not reached.
func (l *Log) Read(after uint64, dst []Entry) ([]Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := l.oldest()
	if after > l.last || after != 0 && after+1 < oldest {
		return dst, ErrCompacted
	}
	if after == l.last {
		return dst, nil
	}
	first := max(after+1, oldest)
	n := int(min(l.last-first+1, ReadChunk))
	start := l.slot(first)
	head := l.ring[start:min(start+n, len(l.ring))]
	dst = append(dst, head...)
	return append(dst, l.ring[:n-len(head)]...), nil
}

// Wait returns nil as soon as Revision is past after, or the cause of ctx when
// that is done first.
func (l *Log) Wait(ctx context.Context, after uint64) error {
	for {
		l.mu.Lock()
		if l.last > after {
			l.mu.Unlock()
			return nil
		}
		if l.wake == nil {
			l.wake = make(chan struct{})
		}
		wake := l.wake
		l.mu.Unlock()
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Answered counts the answer to an announcement, and where its time went. It is as
// cheap as Append.
func (l *Log) Answered(a scheduler.Answer, s Stages) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counters.answer(a, s)
}

// Refused counts a request or a connection that was refused. It is as cheap as
// Append.
func (l *Log) Refused(why gpreempt.Reason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counters.refused(why)
}
