package scheduler

import "math"

// Never is later than every deadline.
const Never Time = math.MaxInt64

// timer is the one deadline an entity of the core has at a time. The heap below
// orders timers by due time, and by the order they were set in when due together:
// never by map order or address, so that a replay is exact.
type timer struct {
	due   Time
	seq   uint64
	index int // place in the heap plus one; 0 when unset
	owner timed
}

// timed is called when its timer is due.
type timed interface{ fire(c *Core) }

type timerHeap struct {
	items []*timer
	seq   uint64
}

func (h *timerHeap) next() (Time, bool) {
	if len(h.items) == 0 {
		return 0, false
	}
	return h.items[0].due, true
}

// set arms t, or moves it; Never clears it.
func (h *timerHeap) set(t *timer, due Time) {
	switch {
	case due == Never:
		h.clear(t)
		return
	case t.index != 0 && t.due == due:
		return
	}
	h.seq++
	t.due, t.seq = due, h.seq
	if t.index == 0 {
		h.items = append(h.items, t)
		t.index = len(h.items)
	}
	h.down(h.up(t.index - 1))
}

func (h *timerHeap) clear(t *timer) {
	if t.index == 0 {
		return
	}
	i, last := t.index-1, len(h.items)-1
	h.swap(i, last)
	h.items[last] = nil
	h.items = h.items[:last]
	t.index = 0
	if i < last {
		h.down(h.up(i))
	}
}

// popDue takes the first timer due at now or before, or nil.
func (h *timerHeap) popDue(now Time) *timer {
	if len(h.items) == 0 || h.items[0].due > now {
		return nil
	}
	t := h.items[0]
	h.clear(t)
	return t
}

func (h *timerHeap) less(i, j int) bool {
	a, b := h.items[i], h.items[j]
	if a.due != b.due {
		return a.due < b.due
	}
	return a.seq < b.seq
}

func (h *timerHeap) swap(i, j int) {
	h.items[i], h.items[j] = h.items[j], h.items[i]
	h.items[i].index, h.items[j].index = i+1, j+1
}

func (h *timerHeap) up(i int) int {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(i, parent) {
			break
		}
		h.swap(i, parent)
		i = parent
	}
	return i
}

func (h *timerHeap) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(h.items) {
			return
		}
		if child+1 < len(h.items) && h.less(child+1, child) {
			child++
		}
		if !h.less(child, i) {
			return
		}
		h.swap(i, child)
		i = child
	}
}
