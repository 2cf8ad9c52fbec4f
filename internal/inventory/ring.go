package inventory

import (
	"context"
	"sync"
)

// ReadChunk is the largest number of entries that one Read returns: it bounds how long a
// reader delays a writer.
const ReadChunk = 256

// Ring keeps the last entries that were added. The first entry has revision 1. A mutex of
// the caller guards it: all methods except Wait are called with the mutex held.
type Ring[T any] struct {
	slots []T
	last  uint64
	// wake is closed and cleared by Wake; nil without a waiting reader.
	wake chan struct{}
}

// NewRing returns a ring that keeps the last capacity entries, at least 1. It allocates its
// memory at once.
func NewRing[T any](capacity int) Ring[T] { return Ring[T]{slots: make([]T, max(capacity, 1))} }

// Next adds an entry and returns its revision and its slot, for the caller to fill in.
func (r *Ring[T]) Next() (revision uint64, entry *T) {
	r.last++
	return r.last, &r.slots[r.index(r.last)]
}

// Wake wakes all readers in Wait.
func (r *Ring[T]) Wake() {
	if r.wake != nil {
		close(r.wake)
		r.wake = nil
	}
}

func (r *Ring[T]) index(revision uint64) int {
	return int((revision - 1) % uint64(len(r.slots)))
}

// Last returns the revision of the newest entry; 0 for an empty ring.
func (r *Ring[T]) Last() uint64 { return r.last }

// Oldest returns the revision of the oldest entry kept; 0 for an empty ring.
func (r *Ring[T]) Oldest() uint64 {
	if r.last <= uint64(len(r.slots)) {
		return min(r.last, 1)
	}
	return r.last - uint64(len(r.slots)) + 1
}

// Read appends to dst the entries after a revision, oldest first and at most ReadChunk of
// them. It returns false when the next entry after the revision is overwritten, or the
// ring has not reached the revision.
func (r *Ring[T]) Read(after uint64, dst []T) ([]T, bool) {
	if after > r.last || r.last-after > uint64(len(r.slots)) {
		return dst, false
	}
	if after == r.last {
		return dst, true
	}
	n := int(min(r.last-after, ReadChunk))
	start := r.index(after + 1)
	head := r.slots[start:min(start+n, len(r.slots))]
	dst = append(dst, head...)
	return append(dst, r.slots[:n-len(head)]...), true
}

// Wait returns nil once Last is greater than after, or the cause of ctx when that is done
// first. mu is the mutex that guards r; the caller does not hold it.
func (r *Ring[T]) Wait(ctx context.Context, mu sync.Locker, after uint64) error {
	for {
		mu.Lock()
		if r.last > after {
			mu.Unlock()
			return nil
		}
		if r.wake == nil {
			r.wake = make(chan struct{})
		}
		wake := r.wake
		mu.Unlock()
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
