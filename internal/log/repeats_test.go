package log

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// seen returns the lines of an observed log: the time since began, and all fields.
func seen(logs *observer.ObservedLogs, began time.Time) (all []string) {
	for _, e := range logs.All() {
		all = append(all, fmt.Sprintln(e.Time.Sub(began), e.Message, e.ContextMap()))
	}
	return all
}

// observed returns a logger behind repeats.
func observed() (*zap.Logger, *repeats, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.DebugLevel)
	again := &repeats{}
	return again.limit(zap.New(core)), again, logs
}

func TestFirstRepeatsAreWrittenAndLaterOnesCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, again, logs := observed()
		defer again.close()
		began := time.Now()
		for range repeatBurst - 1 {
			log.Warn("it fails", Socket("/run/a"))
		}
		for n := range 25 { // one a second
			log.Warn("it fails", Socket("/run/a"), Line(n))
			time.Sleep(time.Second)
		}
		time.Sleep(time.Hour) // it is over
		log.Warn("it fails", Socket("/run/a"), Line(99))
		want := slices.Repeat([]string{"0s it fails map[socket:/run/a]\n"}, repeatBurst-1)
		want = append(want, []string{
			"0s it fails map[line:0 socket:/run/a]\n",
			"9s it fails map[line:9 repeated:8 socket:/run/a]\n",
			"19s it fails map[line:19 repeated:9 socket:/run/a]\n",
			"24s it fails map[line:24 repeated:4 socket:/run/a]\n",
			"1h0m25s it fails map[line:99 socket:/run/a]\n",
		}...)
		if diff := cmp.Diff(want, seen(logs, began)); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
	})
}

func TestRepeatsAreDistinguishedByTheirSubject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, again, logs := observed()
		began := time.Now()
		one, other := gpreempt.ProcessKey{PID: 1, Start: 1}, gpreempt.ProcessKey{PID: 2, Start: 1}
		for range repeatBurst + 2 {
			log.Warn("it fails", Target(one), Err(errors.New("this time so")))
			log.With(Target(other)).Warn("it fails", Err(errors.New("so")))
			log.Error("it fails", Target(one))
			log.Named("part").With(Target(one)).Warn("it fails")
			log.Named("part").With(Target(other)).Warn("it fails")
			log.Debug("it is tried", Target(one))
		}
		again.close()
		log.Info("at the end each is written")
		log.Info("at the end each is written")
		said := func(fields string) []string {
			return []string{
				"0s it fails map[error:this time so " + fields + "target:1@1]\n", "0s it fails map[error:so " + fields + "target:2@1]\n",
				"0s it fails map[" + fields + "target:1@1]\n", "0s it fails map[" + fields + "target:1@1]\n", "0s it fails map[" + fields + "target:2@1]\n",
			}
		}
		tried := "0s it is tried map[target:1@1]\n"
		want := slices.Repeat(append(said(""), tried), repeatBurst)
		want = append(want, tried, tried)
		want = append(want, said("repeated:1 ")...)
		want = append(want, "0s at the end each is written map[]\n", "0s at the end each is written map[]\n")
		if diff := cmp.Diff(want, seen(logs, began)); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
	})
}

func TestMemoryOfRepeatsIsBoundedAndNoneIsLost(t *testing.T) {
	var lines repeatedLines
	now := time.Unix(1, 0)
	of := func(n int) (string, line) {
		return fmt.Sprint(n), line{entry: zapcore.Entry{Time: now, Message: fmt.Sprint(n)}}
	}
	const kinds, each = 3 * repeatsKept, repeatBurst + 2
	given := 0
	for n := range kinds {
		for range each {
			key, l := of(n)
			for _, l := range lines.add(now, key, l) {
				given++
				for _, f := range l.fields {
					given += int(f.Integer)
				}
			}
			now = now.Add(time.Microsecond)
		}
		if len(lines.of) > repeatsKept || len(lines.order) != len(lines.of) {
			t.Fatalf("%d lines are remembered in %d places", len(lines.of), len(lines.order))
		}
	}
	for _, l := range lines.rest() {
		given += 1 + int(l.fields[0].Integer)
	}
	if given != each*kinds {
		t.Errorf("%d lines are accounted for, want %d", given, each*kinds)
	}
	if at := lines.next(); !at.IsZero() {
		t.Errorf("something waits until %v", at)
	}
}

func TestRepeatsAreWrittenAtTheirTimeAndForgotten(t *testing.T) {
	var lines repeatedLines
	now := time.Unix(1, 0)
	for range repeatBurst {
		if got := lines.add(now, "k", line{}); len(got) != 1 {
			t.Errorf("%v at once, want the line", got)
		}
	}
	lines.add(now, "k", line{})
	if got := lines.due(now.Add(repeatTime - 1)); got != nil {
		t.Errorf("%v before its time", got)
	}
	if got := lines.due(now.Add(repeatTime)); len(got) != 1 {
		t.Errorf("%v at its time, want the one that was held back", got)
	}
	for n := range repeatBurst {
		if got := lines.due(now.Add(time.Duration(2+n) * repeatTime)); got != nil || len(lines.of) != 1 && n < repeatBurst-1 {
			t.Errorf("%v after quiet, and %d are remembered", got, len(lines.of))
		}
	}
	if len(lines.of) != 0 || !lines.next().IsZero() {
		t.Errorf("%d are remembered", len(lines.of))
	}
}
