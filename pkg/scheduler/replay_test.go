package scheduler_test

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var update = flag.Bool("update", false, "rewrite testdata/replay.jsonl and testdata/replay.golden")

// history runs a world for some steps and returns its events as lines of a log, and
// what the core did about each.
func history(t *testing.T, seed uint64, steps int) (log []byte, did string) {
	t.Helper()
	var lines bytes.Buffer
	var actions strings.Builder
	w := NewWorld(scheduler.DefaultPolicy(), Seeded(seed), checked())
	w.Calm = true
	w.Taken = func(now scheduler.Time, ev scheduler.Event, acts []scheduler.Action) {
		line, err := MarshalEvent(now, ev)
		if err != nil {
			t.Fatal(err)
		}
		lines.Write(append(line, '\n'))
		render(&actions, acts)
	}
	for id := range gpreempt.GPUID(4) {
		if err := w.Step(scheduler.GPUAdded{GPU: id + 1}); err != nil {
			t.Fatal(err)
		}
	}
	for w.Observer.Counts["Steps"] < steps {
		if err := w.Any(); err != nil {
			t.Fatal(err)
		}
	}
	return lines.Bytes(), actions.String()
}

func render(b *strings.Builder, actions []scheduler.Action) {
	b.WriteString("-\n")
	for _, a := range actions {
		fmt.Fprintf(b, "%v %v\n", a.Record.At, a)
	}
}

// replay feeds a log to a fresh core.
func replay(t *testing.T, log []byte) string {
	t.Helper()
	var did strings.Builder
	core := scheduler.New(scheduler.DefaultPolicy(), WorldLimits)
	lines := bufio.NewScanner(bytes.NewReader(log))
	for lines.Scan() {
		now, ev, err := UnmarshalEvent(lines.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		render(&did, core.Step(now, ev))
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return did.String()
}

// TestReplayIsExact: a log of events is all it takes to have the same decisions
// again, byte for byte, in another core.
func TestReplayIsExact(t *testing.T) {
	t.Parallel()
	for seed := range uint64(3) {
		log, did := history(t, 1000+seed, 2000)
		for range 2 {
			if diff := cmp.Diff(did, replay(t, log)); diff != "" {
				t.Fatalf("seed %d: the replay differs (-first +replay):\n%s", seed, diff)
			}
		}
	}
}

// TestReplayGolden replays a log that is kept: decisions do not change by
// accident. When they change on purpose, -update writes what they are now; the
// log is written anew only when it is missing.
func TestReplayGolden(t *testing.T) {
	const logFile, goldenFile = "testdata/replay.jsonl", "testdata/replay.golden"
	if *update {
		if _, err := os.Stat(logFile); err != nil {
			log, _ := history(t, 10, 600)
			if err := os.WriteFile(logFile, log, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	log, err := os.ReadFile(logFile)
	if err != nil {
		t.Fatal(err)
	}
	did := replay(t, log)
	if *update {
		if err := os.WriteFile(goldenFile, []byte(did), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(goldenFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), did); diff != "" {
		t.Errorf("the decisions changed (-golden +now); if on purpose, run with -update:\n%s", diff)
	}
}

// oneOfEach has every field of every event set.
var oneOfEach = []scheduler.Event{
	scheduler.Tick{},
	scheduler.GPUAdded{GPU: 7},
	scheduler.TargetSeen{
		Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Job: "j", Class: gpreempt.Offline, Priority: 3,
		GPUs: []gpreempt.GPUID{4, 5}, Kin: []gpreempt.ProcessKey{{PID: 7, Start: 8}}, Comm: "c", By: "b", Queues: 6, OnResist: gpreempt.Resistance{Stop: true, KillAfter: 1},
	},
	scheduler.TargetGone{Target: gpreempt.ProcessKey{PID: 1, Start: 2}},
	scheduler.LeaseRequested{
		Lease: 1, Client: scheduler.ClientID{PID: 2}, User: "u", RequestID: "r", GPUs: []gpreempt.GPUID{3}, Priority: 4, TTL: 5, MaxWait: 6, ETA: 7,
		Owner: gpreempt.ProcessKey{PID: 13, Start: 14}, OnIdle: true, Arrived: 12, Label: "l", Trace: &scheduler.TraceContext{Parent: "p", State: "s"},
	},
	scheduler.LeaseRenewed{Lease: 1, TTL: 2},
	scheduler.LeaseFinished{Lease: 1, End: scheduler.EndIdle},
	scheduler.ClientGone{Client: scheduler.ClientID{PID: 1}, End: scheduler.EndClientDied},
	scheduler.ClientBacklog{Client: scheduler.ClientID{PID: 1}, Busy: true},
	scheduler.Attached{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Result: scheduler.CauseHardware, FailedGPUs: []gpreempt.GPUID{4}, ReportsBirths: true},
	scheduler.Detached{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Seq: 3, Result: scheduler.CauseHardware, FailedGPUs: []gpreempt.GPUID{4}, Took: 5},
	scheduler.Lost{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Result: scheduler.CauseHardware, FailedGPUs: []gpreempt.GPUID{4}},
	scheduler.Running{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Cause: scheduler.CauseLapsed, Suspended: 3},
	scheduler.Suspended{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Seq: 3, Result: scheduler.CauseHardware, FailedGPUs: []gpreempt.GPUID{4}, Took: 5},
	scheduler.Resumed{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Seq: 3, Result: scheduler.CauseFailed, FailedGPUs: []gpreempt.GPUID{4}, Took: 5},
	scheduler.Inspected{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Seq: 3, Stuck: true},
	scheduler.Alarm{GPU: 1, Unmap: true},
	scheduler.QueueReset{GPU: 1, Process: gpreempt.ProcessKey{PID: 1, Start: 2}, Suspects: []gpreempt.ProcessKey{{PID: 1, Start: 2}}},
	scheduler.Pin{Target: gpreempt.ProcessKey{PID: 1, Start: 2}, Cause: scheduler.CauseHold, For: time.Second},
	scheduler.PolicyChanged{Policy: scheduler.DefaultPolicy()},
	scheduler.Drain{On: true},
	scheduler.Stopped{},
}

func TestEveryEventSurvivesTheLog(t *testing.T) {
	if got, want := len(oneOfEach), len(EventTypes); got != want {
		t.Errorf("%d events here, the log knows %d", got, want)
	}
	for _, ev := range oneOfEach {
		for i := range reflect.TypeOf(ev).NumField() {
			if reflect.ValueOf(ev).Field(i).IsZero() {
				t.Errorf("%T.%s is not set here", ev, reflect.TypeOf(ev).Field(i).Name)
			}
		}
		line, err := MarshalEvent(42, ev)
		if err != nil {
			t.Fatal(err)
		}
		now, got, err := UnmarshalEvent(line)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(ev, got); diff != "" || now != 42 {
			t.Errorf("%s at %v (-in +out):\n%s", line, now, diff)
		}
	}
}

func TestUnmarshalEventRefusesNonsense(t *testing.T) {
	for _, line := range []string{
		``, `x`, `null`, `{}`, `[]`, `{"at":1,"event":"Tick"}`, `{"at":1,"event":"Tock","data":{}}`,
		`{"at":"1s","event":"Tick","data":{}}`, `{"at":1,"event":"Tick","data":[]}`, `{"at":1,"event":"GPUAdded","data":{"gpu":-1}}`,
		`{"at":1,"event":"LeaseRequested","data":{"priority":256}}`,
	} {
		if now, ev, err := UnmarshalEvent([]byte(line)); err == nil || ev != nil || now != 0 {
			t.Errorf("%s: %v, %v, error %v", line, now, ev, err)
		}
	}
}

func FuzzUnmarshalEvent(f *testing.F) {
	for _, ev := range oneOfEach {
		line, err := MarshalEvent(time.Second, ev)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(line)
	}
	f.Add([]byte(`{"at":1,"event":"Tock","data":{}}`))
	f.Add([]byte(`{"at":1,"event":"Tick","data":null}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		now, ev, err := UnmarshalEvent(line)
		if (err == nil) != (ev != nil) {
			t.Fatalf("event %v and error %v", ev, err)
		}
		if err != nil {
			return
		}
		again, err := MarshalEvent(now, ev)
		if err != nil {
			t.Fatal(err)
		}
		at, same, err := UnmarshalEvent(again)
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		if third, err := MarshalEvent(at, same); err != nil || !bytes.Equal(again, third) {
			t.Fatalf("%s comes back as %s, %v", again, third, err)
		}
	})
}

// FuzzHistory lets the fuzzer choose what happens: every byte is a choice.
func FuzzHistory(f *testing.F) {
	for seed := range uint64(4) {
		roll, script := Seeded(seed), make([]byte, 600)
		for i := range script {
			script[i] = byte(roll(256))
		}
		f.Add(script)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		w := NewWorld(scheduler.DefaultPolicy(), func(n int) int {
			if len(script) == 0 {
				return 0
			}
			choice := int(script[0]) % n
			script = script[1:]
			return choice
		}, checked())
		for id := range gpreempt.GPUID(4) {
			if err := w.Step(scheduler.GPUAdded{GPU: id + 1}); err != nil {
				t.Fatal(err)
			}
		}
		for len(script) > 0 {
			if err := w.Any(); err != nil {
				t.Fatal(err)
			}
		}
		if err := finish(w); err != nil {
			t.Fatal(err)
		}
	})
}
