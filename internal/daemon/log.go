package daemon

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/server"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// logKept bounds the lines that wait for whoever reads the log.
	logKept = 4096
	// logPatience is how long the end of the daemon waits for them to be read.
	logPatience = time.Second
)

// linesLost says that the queue was full.
const linesLost = "log lines are lost: whoever reads them is too slow"

// openLog opens the daemon's log: journald with fields where standard error leads there,
// else lines on standard error. What it gives makes loggers, each for events of a level
// and above; the caller closes their queue last.
func openLog() (func(zapcore.LevelEnabler) *zap.Logger, *logQueue) {
	if isJournal(os.Getenv("JOURNAL_STREAM"), os.Stderr) {
		return journaldLog(journaldSocket)
	}
	return jsonLog(os.Stderr)
}

// jsonLog is openLog for one line of JSON per event to w.
func jsonLog(w io.Writer) (func(zapcore.LevelEnabler) *zap.Logger, *logQueue) {
	cfg := zap.NewProductionEncoderConfig()
	cfg.TimeKey = "time"
	cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	q := newLogQueue(w, func(lines int64) []byte {
		return fmt.Appendf(nil, `{"level":"warn","time":%q,"msg":%q,"lost":%d}`+"\n", time.Now().Format(time.RFC3339Nano), linesLost, lines)
	})
	return func(level zapcore.LevelEnabler) *zap.Logger {
		return zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(cfg), zapcore.AddSync(q), level))
	}, q
}

// logQueue passes lines on from a goroutine of its own. State changes are logged
// under the scheduler's lock, and a reader of the log who has stopped reading
// must not hold up a resume: when he is too far behind, lines are lost, and then
// that is what the log says.
type logQueue struct {
	to    io.Writer
	gap   func(lines int64) []byte // the line that says so many are lost
	lines chan []byte
	lost  atomic.Int64
	stop  chan struct{}
	done  chan struct{}
}

func newLogQueue(to io.Writer, gap func(int64) []byte) *logQueue {
	q := &logQueue{to: to, gap: gap, lines: make(chan []byte, logKept), stop: make(chan struct{}), done: make(chan struct{})}
	go q.run()
	return q
}

// Write takes one line. It does not block.
func (q *logQueue) Write(line []byte) (int, error) {
	select {
	case q.lines <- bytes.Clone(line):
	default:
		q.lost.Add(1)
	}
	return len(line), nil
}

func (q *logQueue) run() {
	defer close(q.done)
	for {
		select {
		case line := <-q.lines:
			q.pass(line)
		case <-q.stop:
			for {
				select {
				case line := <-q.lines:
					q.pass(line)
				default:
					return
				}
			}
		}
	}
}

// pass writes a line. That it cannot be written cannot be told either.
func (q *logQueue) pass(line []byte) {
	_, _ = q.to.Write(line)
	if n := q.lost.Swap(0); n > 0 {
		_, _ = q.to.Write(q.gap(n))
	}
}

// Close passes on what waits, for a while, and returns.
func (q *logQueue) Close() {
	close(q.stop)
	patience := time.NewTimer(logPatience)
	defer patience.Stop()
	select {
	case <-q.done:
	case <-patience.C:
	}
}

// logRecord writes a state change, in one line: what a person may have to act on at
// Warn, what somebody did to a target or to all at Info, the daily work at Debug. There
// are eight lines of that to an announcement that suspends one process, and a server may announce thousands of
// times a second; who wants to see it has the event stream.
func (d *daemon) logRecord(r scheduler.Record) {
	level := zapcore.DebugLevel
	switch {
	case r.Kind == scheduler.RecordBreaker && r.On, r.ToTarget == scheduler.TargetQuarantined,
		r.Cause == scheduler.CauseFailed, r.Cause == scheduler.CauseHardware:
		level = zapcore.WarnLevel
	case r.Kind == scheduler.RecordPolicy, r.Kind == scheduler.RecordDrain, r.Kind == scheduler.RecordBreaker,
		judgedAnew(r), r.Cause == scheduler.CauseQuarantineOver:
		level = zapcore.InfoLevel
	}
	if entry := d.changes.Check(level, changed(r)); entry != nil {
		entry.Write(d.about(r)...)
	}
}

// judgedAnew tells that the class or the priority of a target changed, and its state
// did not.
func judgedAnew(r scheduler.Record) bool {
	return r.Kind == scheduler.RecordTarget && r.Cause == scheduler.CauseClass && r.FromTarget == r.ToTarget
}

// changed returns the message of a state change.
func changed(r scheduler.Record) string {
	switch {
	case judgedAnew(r):
		return "target judged anew"
	case r.Kind == scheduler.RecordTarget:
		return "target changed"
	case r.Kind == scheduler.RecordShadow:
		return "target would have changed"
	case r.Kind == scheduler.RecordLease && r.FromLease == r.ToLease:
		return "lease answered"
	case r.Kind == scheduler.RecordLease:
		return "lease changed"
	case r.Kind == scheduler.RecordBreaker && r.On:
		return "breaker opened"
	case r.Kind == scheduler.RecordBreaker:
		return "breaker closed"
	case r.Kind == scheduler.RecordDrain && r.On:
		return "drain began"
	case r.Kind == scheduler.RecordDrain:
		return "drain ended"
	case r.Kind == scheduler.RecordPolicy:
		return "policy changed"
	}
	return "state changed"
}

// about returns what a state change is about, and what changed.
func (d *daemon) about(r scheduler.Record) []zap.Field {
	fields := make([]zap.Field, 0, 8)
	switch r.Kind {
	case scheduler.RecordTarget, scheduler.RecordShadow:
		fields = append(fields, logkey.Target(r.Target))
		if judgedAnew(r) || r.Cause == scheduler.CauseSeen {
			fields = append(fields, logkey.Class(r.Class))
		}
		if !judgedAnew(r) {
			fields = append(fields, logkey.From(r.FromTarget.String()), logkey.To(r.ToTarget.String()))
		}
	case scheduler.RecordLease:
		fields = append(fields, d.lease(r), logkey.From(r.FromLease.String()), logkey.To(r.ToLease.String()))
		if r.End != scheduler.EndNone {
			fields = append(fields, logkey.End(r.End))
		}
	case scheduler.RecordBreaker:
		fields = append(fields, logkey.GPU(r.GPU))
	case scheduler.RecordNone, scheduler.RecordPolicy, scheduler.RecordDrain:
	}
	if r.Lease != 0 && r.Kind != scheduler.RecordLease {
		fields = append(fields, d.lease(r))
	}
	if r.Cause != "" {
		fields = append(fields, logkey.Cause(string(r.Cause)))
	}
	if r.Took != 0 {
		fields = append(fields, logkey.Took(r.Took))
	}
	return fields
}

func (d *daemon) lease(r scheduler.Record) zap.Field {
	return logkey.Lease(server.LeaseID(d.epoch, r.Lease))
}
