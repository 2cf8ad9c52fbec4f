package daemon

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// warnings are the current warnings by the part that raised them.
type warnings struct {
	mu      sync.Mutex // guards all below
	current map[string][]gpreempt.Warning
	changed func() // nil, or what is called once at the next change
}

// wake has the next change call changed.
func (w *warnings) wake(changed func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changed = changed
}

// set replaces the warnings of a part; without warnings it clears them.
func (w *warnings) set(part string, now ...gpreempt.Warning) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if slices.Equal(w.current[part], now) {
		return
	}
	if w.current == nil {
		w.current = map[string][]gpreempt.Warning{}
	}
	if w.changed != nil {
		w.changed()
	}
	if len(now) == 0 {
		delete(w.current, part)
		return
	}
	w.current[part] = now
}

// list returns all warnings in a fixed order.
func (w *warnings) list() []gpreempt.Warning {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []gpreempt.Warning
	for _, part := range slices.Sorted(maps.Keys(w.current)) {
		all = append(all, w.current[part]...)
	}
	return all
}

// about returns the warning about what texts say, the first few of them; none without any.
func about(kind *gpreempt.WarningKind, before string, texts []string) []gpreempt.Warning {
	const most = 5
	if len(texts) == 0 {
		return nil
	}
	if more := len(texts) - most; more > 0 {
		texts = append(slices.Clip(texts[:most]), fmt.Sprintf("%d more", more))
	}
	return []gpreempt.Warning{kind.Warn(before + strings.Join(texts, "; "))}
}

// jobsBelowFloor returns the warning about the jobs that run for less than the share floor.
func jobsBelowFloor(jobs []scheduler.JobInfo, floor float64) []gpreempt.Warning {
	var slow []string
	for _, j := range jobs {
		if j.Slow {
			slow = append(slow, fmt.Sprintf("%s: %d processes, %.1f%% of the last %v", j.Name, j.Targets, 100*j.Ran, j.Over.Round(time.Second)))
		}
	}
	return about(gpreempt.WarnJobSlow, fmt.Sprintf("all processes of a job ran together for less than the share floor of %.0f%%: ", 100*floor), slow)
}

// offlineOwners returns the warning about the offline targets whose work is announced; by says
// what has classified a target.
func offlineOwners(all []scheduler.TargetInfo, by func(gpreempt.ProcessKey) string) []gpreempt.Warning {
	var offline []string
	for _, t := range all {
		if t.Class == gpreempt.Offline && len(t.Owners) > 0 {
			offline = append(offline, fmt.Sprintf("process %d by %s, announced by process %d", t.Key.PID, by(t.Key), t.Owners[0].PID))
		}
	}
	return about(gpreempt.WarnOwnerOffline, "offline: ", offline)
}

// cannotSuspend returns the warning about the targets that cannot be suspended; why says why a
// target cannot, "" when that is not known.
func cannotSuspend(all []scheduler.TargetInfo, why func(gpreempt.ProcessKey) string) []gpreempt.Warning {
	var texts []string
	for _, t := range all {
		if t.CannotSuspend {
			texts = append(texts, strings.TrimSuffix(fmt.Sprintf("process %d: %s", t.Key.PID, why(t.Key)), ": "))
		}
	}
	count := "1 target: "
	if len(texts) != 1 {
		count = fmt.Sprintf("%d targets: ", len(texts))
	}
	return about(gpreempt.WarnCannotSuspend, count, texts)
}

// stuck returns the warning about the targets whose own calls hold up an action on them.
func stuck(all []scheduler.TargetInfo) []gpreempt.Warning {
	var texts []string
	for _, t := range all {
		if t.Stuck {
			texts = append(texts, fmt.Sprintf("process %d", t.Key.PID))
		}
	}
	return about(gpreempt.WarnStuck, "their own calls hold their locks in the driver: ", texts)
}

// reported are the warnings that have been logged as raised, by code. One goroutine uses
// it.
type reported map[string]gpreempt.Warning

// log logs which warnings were raised and cleared. A changed text is not logged, because
// some texts have counts and times.
func (r reported) log(logger *zap.Logger, now []gpreempt.Warning) {
	current := map[string]bool{}
	for _, w := range now {
		current[w.Code] = true
		if _, known := r[w.Code]; known {
			continue
		}
		r[w.Code] = w
		level := zapcore.WarnLevel
		if w.Severity == gpreempt.SeverityError {
			level = zapcore.ErrorLevel
		}
		logger.Log(level, "warning raised", log.Code(w.Code), log.Severity(w.Severity), log.Text(w.Text), log.Remedy(w.Remedy))
	}
	for _, code := range slices.Sorted(maps.Keys(r)) {
		if !current[code] {
			logger.Info("warning cleared", log.Code(code), log.Severity(r[code].Severity))
			delete(r, code)
		}
	}
}
