package daemon

import (
	"maps"
	"slices"
	"sync"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/internal/logkey"
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

// list returns all of them, in a fixed order.
func (w *warnings) list() []gpreempt.Warning {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []gpreempt.Warning
	for _, part := range slices.Sorted(maps.Keys(w.current)) {
		all = append(all, w.current[part]...)
	}
	return all
}

// told is what the log was last told of warnings, by code. One goroutine uses it.
type told map[string]gpreempt.Warning

// tell logs what began to hold and what no longer does. A text that changes is not
// news: some have counts and times in them.
func (t told) tell(log *zap.Logger, now []gpreempt.Warning) {
	holds := map[string]bool{}
	for _, w := range now {
		holds[w.Code] = true
		if _, known := t[w.Code]; known {
			continue
		}
		t[w.Code] = w
		level := zapcore.WarnLevel
		if w.Severity == gpreempt.SeverityError {
			level = zapcore.ErrorLevel
		}
		log.Log(level, "a warning holds", logkey.Code(w.Code), logkey.Severity(w.Severity), logkey.Text(w.Text), logkey.Remedy(w.Remedy))
	}
	for _, code := range slices.Sorted(maps.Keys(t)) {
		if !holds[code] {
			log.Info("a warning is over", logkey.Code(code), logkey.Severity(t[code].Severity))
			delete(t, code)
		}
	}
}
