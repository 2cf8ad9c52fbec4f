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
			"10s it fails map[line:10 repeated:9 socket:/run/a]\n",
			"20s it fails map[line:20 repeated:9 socket:/run/a]\n",
			"1h0m25s it fails map[line:99 repeated:4 socket:/run/a]\n",
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
		rest := said("repeated:1 ")
		rest[3], rest[4] = rest[4], rest[3] // of one time, by level, logger, message and subject
		want = append(want, rest...)
		want = append(want, "0s at the end each is written map[]\n", "0s at the end each is written map[]\n")
		if diff := cmp.Diff(want, seen(logs, began)); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
	})
}

func TestMemoryOfRepeatsIsBoundedAndNoneIsLost(t *testing.T) {
	log, again, logs := observed()
	const kinds, each = 3 * repeatsKept, repeatBurst + 2
	for n := range kinds {
		for range each {
			log.Warn(fmt.Sprint(n))
		}
		if len(again.of) > repeatsKept {
			t.Fatalf("%d lines are remembered", len(again.of))
		}
	}
	again.close()
	given := 0
	for _, e := range logs.All() {
		left, _ := e.ContextMap()["repeated"].(uint64)
		given += 1 + int(left)
	}
	if given != each*kinds {
		t.Errorf("%d lines are accounted for, want %d", given, each*kinds)
	}
}
