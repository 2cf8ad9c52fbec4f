package daemon

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/internal/logkey"
)

const (
	// repeatTime is how often the log says the same of the same in the long run, and
	// repeatBurst how often at once: what differs between the first few may matter.
	repeatTime  = 10 * time.Second
	repeatBurst = 5
	// repeatsKept bounds what is remembered of such lines.
	repeatsKept = 512
)

// line is one that is to be written, and where.
type line struct {
	to     zapcore.Core
	entry  zapcore.Entry
	fields []zapcore.Field
}

// repeated is what is remembered of lines that say the same of the same.
type repeated struct {
	until time.Time // when one more may be written
	left  int       // may be written before that
	held  uint64    // that came since the last that was written
	last  line      // of those
}

// repeatedLines decides which lines are written. Of lines that say the same of the same
// repeatBurst are, and one more for each repeatTime; the rest is held back, and the last
// of those is written with how many there were before it. Its zero value is ready. Not safe
// for concurrent use.
type repeatedLines struct {
	of    map[string]*repeated
	order []string // the keys of of, by until
}

// add takes a line that says what key tells, and gives those that are to be written now.
func (r *repeatedLines) add(now time.Time, key string, l line) []line {
	write := r.due(now)
	if known := r.of[key]; known != nil {
		if known.left > 0 {
			known.left--
			return append(write, l)
		}
		known.held++
		known.last = l
		return write
	}
	if len(r.order) == repeatsKept { // the oldest makes room
		write = append(write, r.forget()...)
	}
	if r.of == nil {
		r.of = map[string]*repeated{}
	}
	r.of[key] = &repeated{left: repeatBurst - 1}
	r.wait(now, key)
	return append(write, l)
}

// due returns the lines whose time is over.
func (r *repeatedLines) due(now time.Time) (write []line) {
	for len(r.order) > 0 && !now.Before(r.of[r.order[0]].until) {
		key := r.order[0]
		of := r.of[key]
		if of.held > 0 {
			write = append(write, r.forget()...)
			r.of[key] = &repeated{}
			r.wait(now, key)
			continue
		}
		r.order = slices.Delete(r.order, 0, 1)
		if of.left++; of.left == repeatBurst {
			delete(r.of, key)
		} else {
			r.wait(now, key)
		}
	}
	return write
}

// next returns when due is to be asked; no time when nothing is remembered.
func (r *repeatedLines) next() time.Time {
	if len(r.order) == 0 {
		return time.Time{}
	}
	return r.of[r.order[0]].until
}

// rest returns the lines that are held back.
func (r *repeatedLines) rest() (write []line) {
	for len(r.order) > 0 {
		write = append(write, r.forget()...)
	}
	return write
}

func (r *repeatedLines) wait(now time.Time, key string) {
	r.of[key].until = now.Add(repeatTime)
	r.order = append(r.order, key)
}

// forget takes out the oldest and returns the line that stands for those it held.
func (r *repeatedLines) forget() []line {
	oldest := r.of[r.order[0]]
	delete(r.of, r.order[0])
	r.order = slices.Delete(r.order, 0, 1)
	if oldest.held == 0 {
		return nil
	}
	l := oldest.last
	if oldest.held > 1 {
		l.fields = append(slices.Clip(l.fields), logkey.Repeated(oldest.held-1))
	}
	return []line{l}
}

// repeats keeps whatever goes wrong again and again from filling the log. It reports what
// it left out, which zap's own sampler does not; nor does that know targets apart.
// Its methods are safe for concurrent use.
type repeats struct {
	mu    sync.Mutex // guards all below, and that lines are written in order
	lines repeatedLines
	timer *time.Timer // runs while there are lines to remember
	ended bool
}

// limit returns a logger whose lines of Info and above are held back when they repeat.
// Those of Debug are for who wants to see all. The caller closes r last.
func (r *repeats) limit(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core { return &repeatCore{Core: c, repeats: r} }))
}

// close writes what is held back. From then on nothing is.
func (r *repeats) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	if r.timer != nil {
		r.timer.Stop()
	}
	_ = writeLines(r.lines.rest())
}

func (r *repeats) add(key string, l line) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return writeLines([]line{l})
	}
	write := r.lines.add(l.entry.Time, key, l)
	r.wakeLocked(l.entry.Time)
	return writeLines(write)
}

// wake writes what waited for its time.
func (r *repeats) wake() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	now := time.Now()
	write := r.lines.due(now)
	r.timer = nil
	r.wakeLocked(now)
	_ = writeLines(write)
}

// wakeLocked sees to it that wake is called.
func (r *repeats) wakeLocked(now time.Time) {
	if at := r.lines.next(); !at.IsZero() && r.timer == nil {
		r.timer = time.AfterFunc(at.Sub(now), r.wake)
	}
}

func writeLines(lines []line) error {
	var first error
	for _, l := range lines {
		if err := l.to.Write(l.entry, l.fields); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// repeatCore is a core behind repeats.
type repeatCore struct {
	zapcore.Core
	repeats *repeats
	subject string // what the fields so far say lines are about
}

// With returns a core that adds fields to each line.
func (c *repeatCore) With(fields []zapcore.Field) zapcore.Core {
	return &repeatCore{Core: c.Core.With(fields), repeats: c.repeats, subject: c.subject + subject(fields)}
}

// Check adds the core to those that write an event that is loud enough.
func (c *repeatCore) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

// Write writes the line, or holds it back.
func (c *repeatCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if e.Level < zapcore.InfoLevel {
		return c.Core.Write(e, fields)
	}
	key := fmt.Sprintf("%d %s %s%s%s", e.Level, e.LoggerName, e.Message, c.subject, subject(fields))
	return c.repeats.add(key, line{c.Core, e, slices.Clone(fields)})
}

// subject returns what the fields of a line say it is about.
func subject(fields []zapcore.Field) string {
	var about strings.Builder
	for _, f := range fields {
		if !logkey.Subject(f.Key) {
			continue
		}
		m := zapcore.NewMapObjectEncoder()
		f.AddTo(m)
		fmt.Fprintf(&about, " %s=%q", f.Key, fmt.Sprint(m.Fields[f.Key]))
	}
	return about.String()
}
