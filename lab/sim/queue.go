package sim

import "time"

// event is something that happens at a time. Events at one time happen in the order in which
// they were set.
type event struct {
	at  time.Duration
	seq uint64
	do  func()
	// place is its index in the heap plus one, 0 while it is not set.
	place int
}

// eventQueue is a binary heap of events.
type eventQueue struct {
	heap []*event
	seq  uint64
}

func (q *eventQueue) before(i, j int) bool {
	a, b := q.heap[i], q.heap[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}

func (q *eventQueue) swap(i, j int) {
	q.heap[i], q.heap[j] = q.heap[j], q.heap[i]
	q.heap[i].place, q.heap[j].place = i+1, j+1
}

// set sets or moves an event.
func (q *eventQueue) set(ev *event, at time.Duration) {
	q.seq++
	ev.at, ev.seq = at, q.seq
	if ev.place == 0 {
		q.heap = append(q.heap, ev)
		ev.place = len(q.heap)
	}
	q.fix(ev.place - 1)
}

// clear removes an event that may not be set.
func (q *eventQueue) clear(ev *event) {
	if ev.place == 0 {
		return
	}
	i, last := ev.place-1, len(q.heap)-1
	q.swap(i, last)
	q.heap[last] = nil
	q.heap = q.heap[:last]
	ev.place = 0
	if i < last {
		q.fix(i)
	}
}

func (q *eventQueue) fix(i int) {
	for i > 0 && q.before(i, (i-1)/2) {
		q.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(q.heap); c++ {
			if q.before(c, least) {
				least = c
			}
		}
		if least == i {
			return
		}
		q.swap(i, least)
		i = least
	}
}

// pop removes the first event; nil for an empty queue.
func (q *eventQueue) pop() *event {
	if len(q.heap) == 0 {
		return nil
	}
	ev := q.heap[0]
	q.clear(ev)
	return ev
}
