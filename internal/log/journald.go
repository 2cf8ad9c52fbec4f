package log

import (
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap/zapcore"
)

const (
	// journaldSocket is the socket on which journald receives entries with fields.
	journaldSocket = "/run/systemd/journal/socket"
	// journaldName is the daemon's syslog identifier.
	journaldName = "gpreemptd"
	// fieldPrefix distinguishes our fields from those of other programs.
	fieldPrefix = "GPREEMPT_"
	// fieldMax bounds a field, in bytes, so that a whole entry fits into a datagram
	// (net.core.wmem_default, 208 KiB).
	fieldMax = 16 << 10
)

// isJournal reports whether a file is the stream to journald that systemd opened for this
// service. JOURNAL_STREAM has its device and inode.
func isJournal(stream string, f *os.File) bool {
	info, err := f.Stat()
	if err != nil {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stream == fmt.Sprintf("%d:%d", stat.Dev, stat.Ino)
}

// openJournald returns a log of one entry per event to journald's socket, with a field
// of the entry for each field of the event.
func openJournald(socket string) *Log {
	q := newQueue(journald(socket), func(lines int64) []byte {
		e := zapcore.Entry{Level: zapcore.WarnLevel, Message: linesLost}
		return journaldEntry(e, []zapcore.Field{Lost(lines)})
	})
	return newLog(q, func(level zapcore.LevelEnabler) zapcore.Core {
		return &journaldCore{LevelEnabler: level, queue: q}
	})
}

// journald is the path of journald's socket.
type journald string

// Write sends one entry. It connects for each entry, because journald may have been
// restarted.
func (j journald) Write(entry []byte) (int, error) {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: string(j), Net: "unixgram"})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	return conn.Write(entry)
}

// journaldCore makes entries of events.
type journaldCore struct {
	zapcore.LevelEnabler
	queue  *queue
	fields []zapcore.Field
}

// With returns a core that adds fields to each entry.
func (c *journaldCore) With(fields []zapcore.Field) zapcore.Core {
	return &journaldCore{LevelEnabler: c.LevelEnabler, queue: c.queue, fields: slices.Concat(c.fields, fields)}
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
	_, err := c.queue.Write(journaldEntry(e, slices.Concat(c.fields, fields)))
	return err
}

// Sync does nothing: Close of the queue writes what is queued.
func (c *journaldCore) Sync() error { return nil }

// journaldEntry returns an entry in journald's native form
// (https://systemd.io/JOURNAL_NATIVE_PROTOCOL). MESSAGE contains all fields as one line of
// text, because journalctl shows nothing else by default. The fields are for filters. Each value
// is one line without commands of a terminal: a program that forwards or prints fields may
// not escape them.
func journaldEntry(e zapcore.Entry, fields []zapcore.Field) []byte {
	var typed, shown []string // NAME and value in turn; the part of MESSAGE about them
	add := func(name, value string) { typed = append(typed, name, value) }
	for _, f := range fields {
		m := zapcore.NewMapObjectEncoder()
		f.AddTo(m)
		for _, key := range slices.Sorted(maps.Keys(m.Fields)) {
			value := fieldText(m.Fields[key])
			add(fieldPrefix+fieldName(key), printable(value[:min(len(value), fieldMax)]))
			shown = append(shown, quoted(key)+"="+quoted(value[:min(len(value), fieldMax)]))
		}
	}
	message := printable(e.Message)
	if len(shown) > 0 {
		message += ": " + strings.Join(shown, ", ")
	}
	if e.LoggerName != "" {
		add(fieldPrefix+"LOGGER", e.LoggerName)
	}
	var entry []byte
	entry = appendField(entry, "MESSAGE", message)
	entry = appendField(entry, "PRIORITY", priority(e.Level))
	entry = appendField(entry, "SYSLOG_IDENTIFIER", journaldName)
	for i := 0; i < len(typed); i += 2 {
		entry = appendField(entry, typed[i], typed[i+1])
	}
	return entry
}

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

// appendField writes NAME=value. The value is one line.
func appendField(entry []byte, name, value string) []byte {
	value = strings.ToValidUTF8(value[:min(len(value), fieldMax)], "") // no rune is cut
	return append(append(append(append(entry, name...), '='), value...), '\n')
}

// priority returns the syslog priority of a level.
func priority(l zapcore.Level) string {
	switch {
	case l <= zapcore.DebugLevel:
		return "7"
	case l == zapcore.InfoLevel:
		return "6"
	case l == zapcore.WarnLevel:
		return "4"
	case l == zapcore.ErrorLevel:
		return "3"
	}
	return "2"
}
