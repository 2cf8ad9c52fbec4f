// Package log writes the daemon's log: to journald with fields, as text on a terminal,
// or as lines of JSON. It names the fields, limits lines that repeat, and never blocks
// the goroutine that logs.
package log

import (
	"io"
	"os"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Log is the daemon's log. Its methods are safe for concurrent use.
type Log struct {
	level   zap.AtomicLevel
	changes *zap.Logger
	audit   *zap.Logger
	limited *zap.Logger
	repeats repeats
	queue   *queue // nil for Of
	close   sync.Once
}

// Open returns a log that writes to journald if stderr is the stream that systemd
// connected to journald, and else to stderr: as text if that is a terminal, as JSON if
// not. The caller closes it last.
func Open(stderr *os.File) *Log {
	if isJournal, err := journal.StderrIsJournalStream(); isJournal && err == nil {
		return openJournald(journal.Send)
	}
	if isTerminal(stderr) {
		return openStream(stderr, textEncoder())
	}
	return openStream(stderr, jsonEncoder())
}

// Of returns a log that writes all its lines to one logger, whose level it does not
// change.
func Of(logger *zap.Logger) *Log {
	l := &Log{level: zap.NewAtomicLevel(), changes: logger, audit: logger}
	l.limited = l.repeats.limit(logger)
	return l
}

func newLog(q *queue, core func(zapcore.LevelEnabler) zapcore.Core) *Log {
	l := &Log{level: zap.NewAtomicLevel(), queue: q}
	l.changes, l.audit = zap.New(core(l.level)), zap.New(core(zapcore.DebugLevel))
	l.limited = l.repeats.limit(l.changes)
	return l
}

// openStream returns a log of one line per event.
func openStream(w io.Writer, encoder zapcore.Encoder) *Log {
	q := newQueue(func(lines int64) {
		e := zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(), Message: linesLost}
		if line, err := encoder.Clone().EncodeEntry(e, []zapcore.Field{Lost(lines)}); err == nil {
			_, _ = w.Write(line.Bytes()) // an error of the log cannot be logged
		}
	})
	return newLog(q, func(level zapcore.LevelEnabler) zapcore.Core {
		return zapcore.NewCore(encoder, zapcore.AddSync(printableLines{queued{q, w}}), level)
	})
}

func jsonEncoder() zapcore.Encoder {
	cfg := zap.NewProductionEncoderConfig()
	cfg.TimeKey = "time"
	cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	return zapcore.NewJSONEncoder(cfg)
}

func textEncoder() zapcore.Encoder {
	cfg := zap.NewDevelopmentEncoderConfig()
	cfg.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
	cfg.ConsoleSeparator = "  "
	return zapcore.NewConsoleEncoder(cfg)
}

// isTerminal reports whether a file is a character device, as terminals are.
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Logger returns the logger of most lines. It holds back lines that repeat.
func (l *Log) Logger() *zap.Logger { return l.limited }

// Changes returns the logger of state changes, which writes every line.
func (l *Log) Changes() *zap.Logger { return l.changes }

// Audit returns the logger of the audit log, which writes every line at every level.
func (l *Log) Audit() *zap.Logger { return l.audit }

// Level returns the least severe level that is written.
func (l *Log) Level() zapcore.Level { return l.level.Level() }

// SetLevel sets the least severe level that is written: debug, info, warn or error. Any
// other text changes nothing; the config has been validated.
func (l *Log) SetLevel(level string) {
	if parsed, err := zapcore.ParseLevel(level); err == nil {
		l.level.SetLevel(parsed)
	}
}

// EndRepeats writes the lines that are held back, and from then on holds none back.
func (l *Log) EndRepeats() { l.repeats.close() }

// Close ends repeats and waits a short time until the queued lines are written. A second
// call does nothing.
func (l *Log) Close() {
	l.close.Do(func() {
		l.repeats.close()
		if l.queue != nil {
			l.queue.Close()
		}
	})
}
