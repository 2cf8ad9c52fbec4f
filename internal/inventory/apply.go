package inventory

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Apply makes s, in the order discovery gives it, what lives now and tells what
// that changed; at is the wall clock time of the scan. The slices of s are kept.
// Readers see either all of the change or none of it.
func (v *Inventory) Apply(at time.Time, s discovery.Snapshot) Diff {
	v.mu.Lock()
	defer v.mu.Unlock()
	m := merge{inventory: v, at: at, next: make([]process, 0, len(s.Processes))}
	old := v.processes
	for _, p := range s.Processes {
		for len(old) > 0 && old[0].Key.PID < p.Key.PID {
			m.gone(old[0])
			old = old[1:]
		}
		switch {
		case len(old) == 0 || old[0].Key.PID != p.Key.PID:
			m.born(p)
			continue
		case old[0].Key != p.Key: // the pid was used again
			m.gone(old[0])
			m.born(p)
		default:
			m.stayed(old[0], p)
		}
		old = old[1:]
	}
	for _, p := range old {
		m.gone(p)
	}
	v.processes = m.next
	if len(m.diff.Queues) > 0 && v.wake != nil {
		close(v.wake)
		v.wake = nil
	}
	return m.diff
}

// merge goes through the old and the new processes side by side.
type merge struct {
	inventory *Inventory
	at        time.Time
	next      []process
	diff      Diff
}

func (m *merge) change(kind ChangeKind, q gpreempt.Queue, firstSeen time.Time) {
	v := m.inventory
	v.last++
	c := Change{Revision: v.last, Kind: kind, Queue: QueueEntry{Queue: q, FirstSeen: firstSeen}}
	*v.slot(v.last) = c
	m.diff.Queues = append(m.diff.Queues, c)
}

func (m *merge) gone(p process) {
	m.diff.Gone = append(m.diff.Gone, p.Key)
	for n, q := range p.Queues {
		m.change(Removed, q, p.firstSeen[n])
	}
}

func (m *merge) born(p discovery.Proc) {
	m.diff.Born = append(m.diff.Born, p)
	m.next = append(m.next, m.queues(process{}, p))
}

func (m *merge) stayed(old process, p discovery.Proc) {
	if old.Equal(p.Process) && sameQueues(old.Proc, p) {
		old.Proc = p
		m.next = append(m.next, old)
		return
	}
	m.diff.Changed = append(m.diff.Changed, p)
	m.next = append(m.next, m.queues(old, p))
}

// sameQueues tells that every queue of b is the queue of a in the same place.
func sameQueues(a, b discovery.Proc) bool {
	return slices.Equal(a.Queues, b.Queues) && slices.Equal(a.Incarnations, b.Incarnations)
}

// queues goes through the old and the new queues of one process side by side.
func (m *merge) queues(old process, p discovery.Proc) process {
	next := process{Proc: p, firstSeen: make([]time.Time, 0, len(p.Queues)), born: old.born}
	o := 0
	for n, q := range p.Queues {
		for ; o < len(old.Queues) && old.Queues[o].ID < q.ID; o++ {
			m.change(Removed, old.Queues[o], old.firstSeen[o])
		}
		if o < len(old.Queues) && old.Queues[o].ID == q.ID {
			if old.Queues[o] == q && incarnation(old.Proc, o) == incarnation(p, n) {
				next.firstSeen = append(next.firstSeen, old.firstSeen[o])
				o++
				continue
			}
			m.change(Removed, old.Queues[o], old.firstSeen[o])
			o++
		}
		m.change(Added, q, m.at)
		next.firstSeen = append(next.firstSeen, m.at)
		next.born++
	}
	for ; o < len(old.Queues); o++ {
		m.change(Removed, old.Queues[o], old.firstSeen[o])
	}
	return next
}

// incarnation gives the incarnation of the n-th queue, 0 when it is unknown.
func incarnation(p discovery.Proc, n int) uint64 {
	if n >= len(p.Incarnations) {
		return 0
	}
	return p.Incarnations[n]
}
