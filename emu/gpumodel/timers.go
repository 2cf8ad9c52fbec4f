package gpumodel

import "time"

// timer fires once at a time. Everything that can happen by itself is one of a
// few timers per GPU, so the heap stays small and setting one allocates nothing.
type timer struct {
	at time.Duration
	// order tells apart timers set for the same time: first set, first fired.
	order uint64
	// place is the index in the heap plus one; 0 when not set.
	place int
	fire  func()
}

func (t *timer) set() bool { return t.place != 0 }

func (t *timer) before(o *timer) bool {
	return t.at < o.at || t.at == o.at && t.order < o.order
}

// timers is a binary heap of the timers that are set.
type timers struct {
	heap   []*timer
	orders uint64
}

func (h *timers) first() *timer {
	if len(h.heap) == 0 {
		return nil
	}
	return h.heap[0]
}

// start sets t, or moves it.
func (h *timers) start(t *timer, at time.Duration) {
	if t.set() && t.at == at {
		return
	}
	h.orders++
	t.at, t.order = at, h.orders
	if !t.set() {
		h.heap = append(h.heap, t)
		t.place = len(h.heap)
	}
	h.fix(t)
}

// stop takes t out; harmless when it is not set.
func (h *timers) stop(t *timer) {
	if !t.set() {
		return
	}
	last := h.heap[len(h.heap)-1]
	h.put(last, t.place-1)
	h.heap[len(h.heap)-1] = nil
	h.heap = h.heap[:len(h.heap)-1]
	t.place = 0
	if last != t {
		h.fix(last)
	}
}

func (h *timers) put(t *timer, i int) {
	h.heap[i] = t
	t.place = i + 1
}

// fix moves t up or down to where it belongs.
func (h *timers) fix(t *timer) {
	i := t.place - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !t.before(h.heap[parent]) {
			break
		}
		h.put(h.heap[parent], i)
		i = parent
	}
	for {
		child := 2*i + 1
		if child >= len(h.heap) {
			break
		}
		if right := child + 1; right < len(h.heap) && h.heap[right].before(h.heap[child]) {
			child = right
		}
		if !h.heap[child].before(t) {
			break
		}
		h.put(h.heap[child], i)
		i = child
	}
	h.put(t, i)
}
