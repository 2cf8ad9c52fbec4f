package daemon

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// reader is whoever reads the log: not before he is let.
type reader struct {
	let  chan struct{}
	text bytes.Buffer
}

func (r *reader) Write(p []byte) (int, error) {
	<-r.let
	return r.text.Write(p)
}

// said returns level, message and number of lost lines of each line.
func (r *reader) said(t *testing.T) (all []string) {
	t.Helper()
	for line := range bytes.Lines(r.text.Bytes()) {
		var l struct {
			Level, Msg string
			Time       time.Time
			Lost       int
		}
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		if l.Time.IsZero() {
			t.Errorf("no time in %s", line)
		}
		all = append(all, fmt.Sprint(l.Level, " ", l.Msg, " ", l.Lost))
	}
	return all
}

func TestLogIsWrittenLineByLineToItsEnd(t *testing.T) {
	r := &reader{let: make(chan struct{})}
	close(r.let)
	level := zap.NewAtomicLevel()
	logs, queue := jsonLog(r)
	log := logs(level)
	log.Info("one")
	log.Debug("too fine")
	level.SetLevel(zapcore.DebugLevel)
	log.Debug("two")
	queue.Close()
	if diff := cmp.Diff([]string{"info one 0", "debug two 0"}, r.said(t)); diff != "" {
		t.Error(diff)
	}
}

func TestReaderWhoStopsReadingLosesLinesAndHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{let: make(chan struct{})}
		logs, queue := jsonLog(r)
		log := logs(zap.NewAtomicLevel())
		const lost = 17
		log.Info("first")
		synctest.Wait() // it is being written
		for range logKept + lost {
			log.Info("line")
		}
		began := time.Now()
		queue.Close()
		if took := time.Since(began); took != logPatience {
			t.Errorf("Close took %v, want %v", took, logPatience)
		}
		close(r.let)
		synctest.Wait()
		want := []string{"info first 0", fmt.Sprint("warn log lines are lost: whoever reads them is too slow ", lost)}
		for range logKept {
			want = append(want, "info line 0")
		}
		if diff := cmp.Diff(want, r.said(t)); diff != "" {
			t.Error(diff)
		}
	})
}

func TestChangesAreLoggedAsLoudlyAsSomebodyMustAct(t *testing.T) {
	target := gpreempt.ProcessKey{PID: 100, Start: 1}
	for _, tc := range []struct {
		record scheduler.Record
		want   string
	}{
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, ToTarget: scheduler.TargetSuspended, Cause: scheduler.CauseDone}, "debug target changed"},
		{scheduler.Record{Kind: scheduler.RecordLease, Lease: 1, ToLease: scheduler.LeaseHeld}, "debug lease changed"},
		{scheduler.Record{Kind: scheduler.RecordPolicy}, "info policy changed"},
		{scheduler.Record{Kind: scheduler.RecordDrain, On: true}, "info drain began"},
		{scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 1, Cause: scheduler.CauseCooledDown}, "info breaker closed"},
		{scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 1, On: true, Cause: scheduler.CauseStuck}, "warn breaker opened"},
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, ToTarget: scheduler.TargetQuarantined, Cause: scheduler.CauseQuarantine}, "warn target changed"},
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, ToTarget: scheduler.TargetResuming, Cause: scheduler.CauseHardware}, "warn target changed"},
	} {
		r := &reader{let: make(chan struct{})}
		close(r.let)
		logs, queue := jsonLog(r)
		log := logs(zap.NewAtomicLevelAt(zapcore.DebugLevel))
		(&daemon{changes: log}).logRecord(tc.record)
		queue.Close()
		if diff := cmp.Diff([]string{tc.want + " 0"}, r.said(t)); diff != "" {
			t.Errorf("%v: %s", tc.record, diff)
		}
	}
}

// BenchmarkChanges reports what the lines of an announcement that suspends one target, and
// its Complete, cost the scheduler's loop: left out, and written.
func BenchmarkChanges(b *testing.B) {
	target := gpreempt.ProcessKey{PID: 4711, Start: 123456}
	var changes []scheduler.Record
	for range 4 {
		changes = append(changes,
			scheduler.Record{Kind: scheduler.RecordLease, Lease: 1, FromLease: scheduler.LeaseQuiescing, ToLease: scheduler.LeaseHeld, Cause: scheduler.CauseQuiet, Took: time.Millisecond},
			scheduler.Record{Kind: scheduler.RecordTarget, Target: target, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetSuspended, Lease: 1, Cause: scheduler.CauseDone, Took: time.Millisecond})
	}
	for _, level := range []zapcore.Level{zapcore.InfoLevel, zapcore.DebugLevel} {
		b.Run(level.String(), func(b *testing.B) {
			logs, queue := jsonLog(io.Discard)
			defer queue.Close()
			d := &daemon{changes: logs(level), epoch: 1}
			for b.Loop() {
				for _, r := range changes {
					d.logRecord(r)
				}
			}
		})
	}
}
