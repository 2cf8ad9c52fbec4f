package gpumodel

import (
	"slices"
	"time"
)

// timer fires once at a time. All events of a machine are those of a few timers per GPU,
// so that searching them is fast, and setting one allocates nothing.
type timer struct {
	at time.Duration
	// order distinguishes timers set for the same time: first set, first fired.
	order uint64
	on    bool
	fire  func()
}

func (t *timer) set() bool { return t.on }

func (t *timer) before(o *timer) bool {
	return t.at < o.at || t.at == o.at && t.order < o.order
}

// timers are the timers that are set.
type timers struct {
	all    []*timer
	orders uint64
}

// first returns the timer that fires next, nil when none is set.
func (h *timers) first() (first *timer) {
	for _, t := range h.all {
		if first == nil || t.before(first) {
			first = t
		}
	}
	return first
}

// start sets t, or moves it.
func (h *timers) start(t *timer, at time.Duration) {
	if t.on && t.at == at {
		return
	}
	h.orders++
	t.at, t.order = at, h.orders
	if !t.on {
		t.on = true
		h.all = append(h.all, t)
	}
}

// stop removes t; harmless when it is not set.
func (h *timers) stop(t *timer) {
	if t.on {
		t.on = false
		i := slices.Index(h.all, t)
		h.all[i] = h.all[len(h.all)-1]
		h.all = h.all[:len(h.all)-1]
	}
}
