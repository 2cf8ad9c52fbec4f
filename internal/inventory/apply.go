package inventory

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Apply replaces the processes by those of s, which ascend by pid, and returns what
// changed; at is the wall clock time of the scan. It keeps the slices of s. Readers see
// either all of the change or none of it.
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
	if len(m.diff.Queues) > 0 {
		v.changes.Wake()
	}
	return m.diff
}

// ApplyOne is Apply for one process. It changes nothing when the process is unknown.
func (v *Inventory) ApplyOne(at time.Time, p discovery.Proc) Diff {
	v.mu.Lock()
	defer v.mu.Unlock()
	n, known := v.index(p.Key)
	if !known {
		return Diff{}
	}
	m := merge{inventory: v, at: at}
	m.stayed(v.processes[n], p)
	v.processes[n] = m.next[0]
	if len(m.diff.Queues) > 0 {
		v.changes.Wake()
	}
	return m.diff
}

// SetInfos sets the info of the queues of a process, index by index with proc.Queues; at
// is the wall clock time. It skips queues that proc no longer describes, and those
// beyond the end of infos. Each info that differs becomes a change. Readers see either
// all of them or none.
//
// The info ends with its queue: another one under the same id begins without info.
func (v *Inventory) SetInfos(at time.Time, proc discovery.Proc, infos []gpreempt.QueueInfo) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n, known := v.index(proc.Key)
	if !known || proc.Key.Start == 0 {
		return
	}
	p := &v.processes[n]
	copied := false
	o := 0
	for n, q := range proc.Queues[:min(len(proc.Queues), len(infos))] {
		for o < len(p.Queues) && p.Queues[o].ID < q.ID {
			o++
		}
		if o == len(p.Queues) {
			break
		}
		if p.Queues[o] != q || incarnation(p.Proc, o) != incarnation(proc, n) || p.entries[o].Info == infos[n] {
			continue
		}
		if !copied { // readers may hold the old ones
			p.entries = slices.Clone(p.entries)
			copied = true
		}
		p.entries[o].Info, p.entries[o].ChangedAt = infos[n], at
		v.log(Modified, p.entries[o], at)
	}
	if copied {
		v.changes.Wake()
	}
}

// log appends a change.
func (v *Inventory) log(kind ChangeKind, q gpreempt.QueueEntry, at time.Time) Change {
	revision, slot := v.changes.Next()
	c := Change{Revision: revision, Kind: kind, At: at, Queue: q}
	*slot = c
	return c
}

// merge compares the old and the new processes side by side.
type merge struct {
	inventory *Inventory
	at        time.Time
	next      []process
	diff      Diff
}

func (m *merge) change(kind ChangeKind, q gpreempt.QueueEntry) {
	m.diff.Queues = append(m.diff.Queues, m.inventory.log(kind, q, m.at))
}

func (m *merge) gone(p process) {
	m.diff.Gone = append(m.diff.Gone, p.Key)
	for _, q := range p.entries {
		m.change(Removed, q)
	}
}

func (m *merge) born(p discovery.Proc) {
	m.diff.Born = append(m.diff.Born, p)
	m.next = append(m.next, m.queues(process{}, p))
}

func (m *merge) stayed(old process, p discovery.Proc) {
	if old.Equal(p.Process) && slices.Equal(old.Queues, p.Queues) && slices.Equal(old.Incarnations, p.Incarnations) &&
		slices.Equal(old.DRM, p.DRM) && old.DRMAssumed == p.DRMAssumed {
		old.Proc = p
		m.next = append(m.next, old)
		return
	}
	m.diff.Changed = append(m.diff.Changed, p)
	m.next = append(m.next, m.queues(old, p))
}

// queues compares the old and the new queues of one process side by side.
func (m *merge) queues(old process, p discovery.Proc) process {
	next := process{Proc: p, entries: make([]gpreempt.QueueEntry, 0, len(p.Queues)), born: old.born}
	o := 0
	for n, q := range p.Queues {
		for ; o < len(old.Queues) && old.Queues[o].ID < q.ID; o++ {
			m.change(Removed, old.entries[o])
		}
		if o < len(old.Queues) && old.Queues[o].ID == q.ID {
			if old.Queues[o] == q && incarnation(old.Proc, o) == incarnation(p, n) {
				next.entries = append(next.entries, old.entries[o])
				o++
				continue
			}
			m.change(Removed, old.entries[o])
			o++
		}
		born := gpreempt.QueueEntry{Queue: q, FirstSeen: m.at}
		m.change(Added, born)
		next.entries = append(next.entries, born)
		next.born++
	}
	for ; o < len(old.Queues); o++ {
		m.change(Removed, old.entries[o])
	}
	return next
}

// incarnation returns the incarnation of the n-th queue, 0 when it is unknown.
func incarnation(p discovery.Proc, n int) uint64 {
	if n >= len(p.Incarnations) {
		return 0
	}
	return p.Incarnations[n]
}
