package log

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// repeatTime is the interval at which one more of the lines that repeat is written,
	// after the first repeatBurst: the first few may differ in something that matters.
	repeatTime  = 10 * time.Second
	repeatBurst = 5
	// repeatsKept bounds the number of different lines that are remembered.
	repeatsKept = 512
)

// line is a line of the log and the core that writes it.
type line struct {
	to     zapcore.Core
	entry  zapcore.Entry
	fields []zapcore.Field
}

// repeated is the state of lines with the same message and the same subject.
type repeated struct {
	until time.Time // when one more line may be written
	left  int       // how many may be written before
	held  uint64    // lines held back since the last that was written
	last  line      // the last of those
}

// repeatedLines decides which lines are written. Of lines with the same message and
// subject it writes repeatBurst, and one more in each repeatTime. The others are held
// back; the last of them is written with the number of those before it. The zero value
// is ready to use. Not safe for concurrent use.
type repeatedLines struct {
	of    map[string]*repeated
	order []string // the keys of the map, by until
}

// add adds a line. key identifies its message and subject. It returns the lines to write
// now.
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
	if len(r.order) == repeatsKept { // forget the oldest
		write = append(write, r.forget()...)
	}
	if r.of == nil {
		r.of = map[string]*repeated{}
	}
	r.of[key] = &repeated{left: repeatBurst - 1}
	r.wait(now, key)
	return append(write, l)
}

// due returns the lines held back whose time has come.
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

// next returns when to call due; the zero time if no line is remembered.
func (r *repeatedLines) next() time.Time {
	if len(r.order) == 0 {
		return time.Time{}
	}
	return r.of[r.order[0]].until
}

// rest removes all lines that are held back and returns them.
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

// forget removes the oldest and returns the last line that it held back, with the number
// of those before.
func (r *repeatedLines) forget() []line {
	oldest := r.of[r.order[0]]
	delete(r.of, r.order[0])
	r.order = slices.Delete(r.order, 0, 1)
	if oldest.held == 0 {
		return nil
	}
	l := oldest.last
	if oldest.held > 1 {
		l.fields = append(slices.Clip(l.fields), Repeated(oldest.held-1))
	}
	return []line{l}
}

// repeats keeps a fault that persists from filling the log. Unlike zap's sampler it
// writes how many lines it left out, and distinguishes lines by their subject. Its
// methods are safe for concurrent use.
type repeats struct {
	mu    sync.Mutex // guards all below, and that lines are written in order
	lines repeatedLines
	timer *time.Timer // runs while lines are remembered
	ended bool
}

// limit returns a logger whose lines at Info and above are held back when they repeat;
// lines at Debug never are. The caller closes r last.
func (r *repeats) limit(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core { return &repeatCore{Core: c, repeats: r} }))
}

// close writes the lines that are held back. Later lines are written at once.
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

// wake writes the lines whose time has come.
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

// wakeLocked starts the timer of the next wake.
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

// repeatCore is a core that passes its lines through repeats.
type repeatCore struct {
	zapcore.Core
	repeats *repeats
	subject string // of the fields that With added
}

// With returns a core that adds fields to each line.
func (c *repeatCore) With(fields []zapcore.Field) zapcore.Core {
	return &repeatCore{Core: c.Core.With(fields), repeats: c.repeats, subject: c.subject + subject(fields)}
}

// Check adds the core to checked if it writes events of this level.
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

// subject returns the fields of a line that name its subject, as text.
func subject(fields []zapcore.Field) string {
	var about strings.Builder
	for _, f := range fields {
		if !Subject(f.Key) {
			continue
		}
		m := zapcore.NewMapObjectEncoder()
		f.AddTo(m)
		fmt.Fprintf(&about, " %s=%q", f.Key, fmt.Sprint(m.Fields[f.Key]))
	}
	return about.String()
}
