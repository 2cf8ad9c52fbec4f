package daemon

import (
	"maps"
	"slices"
	"sync"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// warnings holds what an admin should know now, by the part that says so.
type warnings struct {
	mu      sync.Mutex // guards current
	current map[string][]gpreempt.Warning
}

// set replaces what a part has to say; nothing when all is well again.
func (w *warnings) set(part string, now ...gpreempt.Warning) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		w.current = map[string][]gpreempt.Warning{}
	}
	if len(now) == 0 {
		delete(w.current, part)
		return
	}
	w.current[part] = now
}

// list gives all of them, in a fixed order.
func (w *warnings) list() []gpreempt.Warning {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []gpreempt.Warning
	for _, part := range slices.Sorted(maps.Keys(w.current)) {
		all = append(all, w.current[part]...)
	}
	return all
}
