package daemon

import (
	"bytes"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const (
	// logKept bounds the lines that wait for whoever reads the log.
	logKept = 4096
	// logPatience is how long the end of the daemon waits for them to be read.
	logPatience = time.Second
)

// newLogger writes one line of JSON per event to w, for systemd's journal to pick
// up.
func newLogger(level zapcore.LevelEnabler, w io.Writer) *zap.Logger {
	cfg := zap.NewProductionEncoderConfig()
	cfg.TimeKey = "time"
	cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	return zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(cfg), zapcore.AddSync(w), level))
}

// logQueue passes lines on from a goroutine of its own. State changes are logged
// under the scheduler's lock, and a reader of the log who has stopped reading
// must not hold up a resume: when he is too far behind, lines are lost, and then
// that is what the log says.
type logQueue struct {
	to    io.Writer
	lines chan []byte
	lost  atomic.Int64
	stop  chan struct{}
	done  chan struct{}
}

func newLogQueue(to io.Writer) *logQueue {
	q := &logQueue{to: to, lines: make(chan []byte, logKept), stop: make(chan struct{}), done: make(chan struct{})}
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
		_, _ = fmt.Fprintf(q.to, `{"level":"warn","time":%q,"msg":"log lines are lost: whoever reads them is too slow","lines":%d}`+"\n",
			time.Now().Format(time.RFC3339Nano), n)
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

// logRecord writes a state change: what a person may have to act on at Warn,
// what an admin asked for at Info, the daily work at Debug.
func (d *daemon) logRecord(r scheduler.Record) {
	level := zapcore.DebugLevel
	switch {
	case r.Kind == scheduler.RecordBreaker && r.On, r.ToTarget == scheduler.TargetQuarantined,
		r.Cause == scheduler.CauseFailed, r.Cause == scheduler.CauseHardware:
		level = zapcore.WarnLevel
	case r.Kind == scheduler.RecordPolicy, r.Kind == scheduler.RecordDrain, r.Kind == scheduler.RecordBreaker:
		level = zapcore.InfoLevel
	}
	if entry := d.log.Check(level, "state changed"); entry != nil {
		entry.Write(zap.Stringer("change", r))
	}
}
