package dbgtrap

import (
	"maps"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Foreign has the targets that somebody else debugs. Its zero value has none; its methods may
// be called by several goroutines at once.
type Foreign struct {
	mu      sync.Mutex
	targets map[gpreempt.ProcessKey]sighting
}

// sighting is when a target was first and last found debugged by somebody else.
type sighting struct{ first, last time.Time }

// forgetForeign is how long nobody asks for a target that has ended.
const forgetForeign = time.Hour

// Seen notes that somebody else debugs target, and returns for how long that is known.
func (f *Foreign) Seen(target gpreempt.ProcessKey) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(f.targets, func(_ gpreempt.ProcessKey, s sighting) bool { return now.Sub(s.last) > forgetForeign })
	if f.targets == nil {
		f.targets = map[gpreempt.ProcessKey]sighting{}
	}
	s, ok := f.targets[target]
	if !ok {
		s.first = now
	}
	s.last = now
	f.targets[target] = s
	return now.Sub(s.first)
}

// Since returns for how long somebody else is known to debug target.
func (f *Foreign) Since(target gpreempt.ProcessKey) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s, ok := f.targets[target]; ok {
		return time.Since(s.first)
	}
	return 0
}

// Known notes that somebody else has debugged target since first.
func (f *Foreign) Known(target gpreempt.ProcessKey, first time.Time) {
	f.Seen(target)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.targets[target] = sighting{first, f.targets[target].last}
}

// Forget notes that nobody debugs target.
func (f *Foreign) Forget(target gpreempt.ProcessKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.targets, target)
}
