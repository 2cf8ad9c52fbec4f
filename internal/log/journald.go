package log

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"go.uber.org/zap/zapcore"
)

const (
	// journaldName is the daemon's syslog identifier.
	journaldName = "gpreemptd"
	// fieldPrefix distinguishes our fields from those of other programs.
	fieldPrefix = "GPREEMPT_"
	// fieldMax bounds a field, in bytes, so that a whole entry fits into a datagram
	// (net.core.wmem_default, 208 KiB).
	fieldMax = 16 << 10
)

// sender is journal.Send: it may wait for a journald that does not read.
type sender func(message string, priority journal.Priority, fields map[string]string) error

// openJournald returns a log of one entry per event, with a field of the entry for each field of
// the event.
func openJournald(send sender) *Log {
	q := newQueue(func(lines int64) {
		message, fields := journaldEntry(zapcore.Entry{Message: linesLost}, []zapcore.Field{Lost(lines)})
		_ = send(message, journal.PriWarning, fields) // an error of the log cannot be logged
	})
	return newLog(q, func(level zapcore.LevelEnabler) zapcore.Core {
		return &journaldCore{LevelEnabler: level, queue: q, send: send}
	})
}

// journaldCore makes entries of events.
type journaldCore struct {
	zapcore.LevelEnabler
	queue  *queue
	send   sender
	fields []zapcore.Field
}

// With returns a core that adds fields to each entry.
func (c *journaldCore) With(fields []zapcore.Field) zapcore.Core {
	with := *c
	with.fields = slices.Concat(c.fields, fields)
	return &with
}

// Check adds the core to checked if it writes events of this level.
func (c *journaldCore) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return checked.AddCore(e, c)
	}
	return checked
}

// Write queues the entry.
func (c *journaldCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	message, values := journaldEntry(e, slices.Concat(c.fields, fields))
	c.queue.put(func() { _ = c.send(message, priority(e.Level), values) }) // an error of the log cannot be logged
	return nil
}

// Sync does nothing: Close of the queue writes what is queued.
func (c *journaldCore) Sync() error { return nil }

// journaldEntry returns message and fields of an entry. The message contains all fields as one line of
// text, because journalctl shows nothing else by default. The fields are for filters. Each value
// is one line without commands of a terminal: a program that forwards or prints fields may
// not escape them.
func journaldEntry(e zapcore.Entry, from []zapcore.Field) (message string, fields map[string]string) {
	fields = map[string]string{"SYSLOG_IDENTIFIER": journaldName}
	var shown []string
	for _, f := range from {
		m := zapcore.NewMapObjectEncoder()
		f.AddTo(m)
		for _, key := range slices.Sorted(maps.Keys(m.Fields)) {
			value := fieldText(m.Fields[key])
			value = value[:min(len(value), fieldMax)]
			fields[fieldPrefix+fieldName(key)] = bounded(printable(value))
			shown = append(shown, quoted(key)+"="+quoted(value))
		}
	}
	message = printable(e.Message)
	if len(shown) > 0 {
		message += ": " + strings.Join(shown, ", ")
	}
	if e.LoggerName != "" {
		fields[fieldPrefix+"LOGGER"] = e.LoggerName
	}
	return bounded(message), fields
}

// bounded returns at most fieldMax bytes of a text, and no part of a rune.
func bounded(text string) string { return strings.ToValidUTF8(text[:min(len(text), fieldMax)], "") }

func fieldText(value any) string {
	if t, ok := value.(time.Time); ok {
		return t.Format(time.RFC3339Nano)
	}
	return fmt.Sprint(value)
}

// fieldName returns a key in the characters that journald accepts: A to Z, 0 to 9 and _.
func fieldName(key string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToUpper(key))
}

// priority returns the syslog priority of a level.
func priority(l zapcore.Level) journal.Priority {
	switch {
	case l <= zapcore.DebugLevel:
		return journal.PriDebug
	case l == zapcore.InfoLevel:
		return journal.PriInfo
	case l == zapcore.WarnLevel:
		return journal.PriWarning
	case l == zapcore.ErrorLevel:
		return journal.PriErr
	}
	return journal.PriCrit
}
