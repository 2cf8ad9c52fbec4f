package log

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/time/rate"
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
	rate *rate.Limiter
	held uint64 // lines held back since the last that was written
	last line   // the last of those
}

// repeats keeps a fault that persists from filling the log. Of lines with the same message and
// subject it writes repeatBurst, and one more in each repeatTime, with the number of those between,
// which are held back. At the end it writes the last one that was. Unlike zap's sampler it says how
// many lines it left out, and distinguishes lines by their subject. The zero value is ready to use,
// by several goroutines at once.
type repeats struct {
	mu    sync.Mutex // guards all below, and that lines are written in order
	of    map[string]*repeated
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
	_ = writeLines(r.restLocked()) // an error of the log cannot be logged
}

// add writes a line, or holds it back. key identifies its message and subject.
func (r *repeats) add(key string, l line) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return writeLines([]line{l})
	}
	known := r.of[key]
	var write []line
	if known == nil {
		if len(r.of) == repeatsKept {
			write = r.restLocked()
		}
		if r.of == nil {
			r.of = map[string]*repeated{}
		}
		known = &repeated{rate: rate.NewLimiter(rate.Every(repeatTime), repeatBurst)}
		r.of[key] = known
	}
	if !known.rate.AllowN(l.entry.Time, 1) {
		known.held++
		known.last = l
		return nil
	}
	write = append(write, l.counting(known.held))
	known.held = 0
	return writeLines(write)
}

// restLocked forgets all lines, and returns the last of each kind of which some are held back.
func (r *repeats) restLocked() (write []line) {
	for _, key := range slices.Sorted(maps.Keys(r.of)) {
		if known := r.of[key]; known.held > 0 {
			write = append(write, known.last.counting(known.held-1))
		}
	}
	clear(r.of)
	slices.SortStableFunc(write, func(a, b line) int { return a.entry.Time.Compare(b.entry.Time) })
	return write
}

// counting returns the line with the number of those like it that were left out before.
func (l line) counting(left uint64) line {
	if left > 0 {
		l.fields = append(slices.Clip(l.fields), Repeated(left))
	}
	return l
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
