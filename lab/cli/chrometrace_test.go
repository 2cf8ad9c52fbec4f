package cli

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/jsonschema-go/jsonschema"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// eventOf converts a record like the daemon.
func eventOf(revision uint64, r scheduler.Record) *gpreemptv1.Event {
	e := &gpreemptv1.Event{
		Revision: revision, Kind: gpreemptv1.EventKind(r.Kind),
		FromTarget: gpreemptv1.TargetState(r.FromTarget), ToTarget: gpreemptv1.TargetState(r.ToTarget),
		FromLease: gpreemptv1.LeaseState(r.FromLease), ToLease: gpreemptv1.LeaseState(r.ToLease),
		End: gpreemptv1.LeaseEnd(r.End), GpuId: uint32(r.GPU), Cause: string(r.Cause), Clock: durationpb.New(r.At),
	}
	if !r.Target.IsZero() {
		e.TargetId = r.Target.String()
	}
	if r.Lease != 0 {
		e.LeaseId = fmt.Sprintf("k3-%d", r.Lease)
	}
	if r.Took != 0 {
		e.Took = durationpb.New(r.Took)
	}
	return e
}

// history is a scheduler and its records.
type history struct {
	core   *scheduler.Core
	events []*gpreemptv1.Event
}

func (h *history) step(now time.Duration, ev scheduler.Event) (seqs []uint64) {
	for _, a := range h.core.Step(now, ev) {
		switch a.Kind {
		case scheduler.ActRecord:
			h.events = append(h.events, eventOf(uint64(len(h.events)+1), a.Record))
		case scheduler.ActSuspend, scheduler.ActResume:
			seqs = append(seqs, a.Seq)
		case scheduler.ActAnswer, scheduler.ActAttach, scheduler.ActDetach, scheduler.ActInspect:
		}
	}
	return seqs
}

const us = time.Microsecond

// preemption is one lease that suspends two targets of a GPU, while another continues.
func preemption() []*gpreemptv1.Event {
	policy := scheduler.DefaultPolicy()
	policy.Linger, policy.ShareFloor, policy.AttachAfter = 0, 0, 0
	h := &history{core: scheduler.New(policy, scheduler.Limits{LeasesPerClient: 8, LeasesPerUser: 8, LeasesTotal: 8})}
	train, eval := gpreempt.ProcessKey{PID: 4242, Start: 1001}, gpreempt.ProcessKey{PID: 4243, Start: 1002}
	h.step(0, scheduler.GPUAdded{GPU: 34535})
	h.step(10*us, scheduler.TargetSeen{Target: train, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{34535}, Queues: 1})
	h.step(20*us, scheduler.TargetSeen{Target: eval, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{34535}, Queues: 1})
	h.step(30*us, scheduler.TargetSeen{
		Target: gpreempt.ProcessKey{PID: 5001, Start: 2000}, Class: gpreempt.Online, Priority: 11, GPUs: []gpreempt.GPUID{34535}, Queues: 1,
	})
	for _, target := range []gpreempt.ProcessKey{train, eval} {
		h.step(40*us, scheduler.Attached{Target: target})
	}
	suspends := h.step(1000*us, scheduler.LeaseRequested{
		Lease: 1, Client: scheduler.ClientID{PID: 7}, GPUs: []gpreempt.GPUID{34535}, Priority: 11, TTL: time.Second, MaxWait: 20 * time.Millisecond,
	})
	h.step(1850*us, scheduler.Suspended{Target: train, Seq: suspends[0], Took: 840 * us})
	h.step(2100*us, scheduler.Suspended{Target: eval, Seq: suspends[1], Took: 1090*us + 500})
	resumes := h.step(9000*us, scheduler.LeaseFinished{Lease: 1, End: scheduler.EndCompleted})
	h.step(9420*us, scheduler.Resumed{Target: train, Seq: resumes[0], Took: 410 * us})
	h.step(9600*us, scheduler.Resumed{Target: eval, Seq: resumes[1], Took: 590 * us})
	return h.events
}

// written is a trace as parsed by a viewer.
type written struct {
	TraceEvents []writtenEvent `json:"traceEvents"`
}

type writtenEvent struct {
	Name string         `json:"name"`
	PH   string         `json:"ph"`
	TS   json.Number    `json:"ts"`
	Dur  json.Number    `json:"dur"`
	PID  int            `json:"pid"`
	TID  int            `json:"tid"`
	ID   uint64         `json:"id"`
	Args map[string]any `json:"args"`
}

// nanos parses microseconds with three decimals.
func nanos(n json.Number) time.Duration {
	d, err := time.ParseDuration(n.String() + "us")
	if err != nil {
		panic(err)
	}
	return d
}

func (e writtenEvent) begin() time.Duration { return nanos(e.TS) }
func (e writtenEvent) end() time.Duration   { return nanos(e.TS) + nanos(e.Dur) }

func writeTrace(t rapid.TB, in traceInput) []byte {
	t.Helper()
	var out bytes.Buffer
	trace := chromeTrace{Unit: "ms", Other: map[string]string{"backend": "simulated"}, Events: traceOf(in)}
	if err := trace.write(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// traceSchema is the format as a schema.
func traceSchema(t testing.TB) *jsonschema.Resolved {
	t.Helper()
	text, err := os.ReadFile("testdata/trace-event-format.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema jsonschema.Schema
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	resolved, err := schema.Resolve(nil)
	if err != nil {
		t.Fatal(err)
	}
	return resolved
}

// checkTrace checks a trace against the schema, and the rules that a schema cannot express.
func checkTrace(t rapid.TB, schema *jsonschema.Resolved, text []byte) written {
	t.Helper()
	var decoded any
	if err := json.Unmarshal(text, &decoded); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	if err := schema.Validate(decoded); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	var w written
	if err := json.Unmarshal(text, &w); err != nil {
		t.Fatal(err)
	}
	type track struct{ pid, tid int }
	var last time.Duration
	open := map[track][]writtenEvent{}
	groups, rows := map[int]bool{}, map[track]bool{}
	arrows := map[uint64]int{}
	for _, e := range w.TraceEvents {
		if e.PH == "M" {
			switch e.Name {
			case "process_name":
				groups[e.PID] = true
			case "thread_name":
				rows[track{e.PID, e.TID}] = true
			}
			continue
		}
		at := track{e.PID, e.TID}
		if !groups[e.PID] || !rows[at] {
			t.Fatalf("%v is on a track without a name", e)
		}
		if e.begin() < last {
			t.Fatalf("%v is out of order", e)
		}
		last = e.begin()
		switch e.PH {
		case "s":
			arrows[e.ID]++
		case "f":
			arrows[e.ID]--
		}
		if e.PH != "X" {
			continue
		}
		for n := len(open[at]); n > 0 && open[at][n-1].end() <= e.begin(); n-- {
			open[at] = open[at][:n-1]
		}
		if n := len(open[at]); n > 0 && open[at][n-1].end() < e.end() {
			t.Fatalf("%v outlasts what it is in, %v", e, open[at][n-1])
		}
		open[at] = append(open[at], e)
	}
	for id, n := range arrows {
		if n != 0 {
			t.Fatalf("arrow %d has one end", id)
		}
	}
	return w
}

// checkLeases checks the suspends of a trace of the scheduler's events, in their order.
func checkLeases(t testing.TB, w written) {
	t.Helper()
	leases := map[any]writtenEvent{}
	for _, e := range w.TraceEvents {
		if e.PH == "X" && e.Name == "lease" {
			leases[e.Args["lease_id"]] = e
		}
	}
	for _, e := range w.TraceEvents {
		if e.Name != "suspend" || e.Args["lease_id"] == nil || e.Args["clipped"] != nil {
			continue
		}
		lease, ok := leases[e.Args["lease_id"]]
		if !ok || e.Args["cause"] == "new-queue" {
			continue
		}
		// A lease may end while something is still being suspended for it.
		if e.begin() < lease.begin() || e.begin() > lease.end() {
			t.Fatalf("%v does not begin within its lease, %v", e, lease)
		}
	}
}

func TestTraceOfOnePreemption(t *testing.T) {
	text := writeTrace(t, traceInput{
		events: preemption(), now: 12 * time.Millisecond, comms: map[string]string{"4242@1001": "python3", "5001@2000": "tritonserver"},
	})
	w := checkTrace(t, traceSchema(t), text)
	checkLeases(t, w)
	const golden = "testdata/preemption.trace.json"
	if *update {
		if err := os.WriteFile(golden, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Errorf("trace (-want +got; -update writes it):\n%s", diff)
	}
	var lease writtenEvent
	for _, e := range w.TraceEvents {
		if e.PH == "X" && e.Name == "lease" {
			lease = e
		}
	}
	for _, e := range w.TraceEvents {
		if e.Name == "suspend" && (e.begin() < lease.begin() || e.end() > lease.end()) {
			t.Errorf("%v is not within the lease", e)
		}
	}
}

// stages returns the spans and instants of a trace as "name [begin end]", with what marks them.
func stages(w written) []string {
	var all []string
	for _, e := range w.TraceEvents {
		mark := ""
		for _, key := range []string{"clipped", "open"} {
			if e.Args[key] != nil {
				mark += " " + key
			}
		}
		switch e.PH {
		case "X":
			all = append(all, fmt.Sprintf("%s %v-%v%s", e.Name, e.begin(), e.end(), mark))
		case "i":
			all = append(all, fmt.Sprintf("%s at %v%s", e.Name, e.begin(), mark))
		}
	}
	return all
}

func TestTraceMarksClippedAndOpenSpans(t *testing.T) {
	events := preemption()
	schema := traceSchema(t)
	at := func(from, to int, in traceInput) []string {
		in.events = events[from:to]
		return stages(checkTrace(t, schema, writeTrace(t, in)))
	}
	suspended := slices.IndexFunc(events, func(e *gpreemptv1.Event) bool { return e.GetToLease() == gpreemptv1.LeaseState_LEASE_STATE_HELD })
	for _, tc := range []struct {
		name string
		got  []string
		want []string
	}{
		{
			"the kept events are from quiet GPUs to the end of the lease",
			at(suspended, suspended+2, traceInput{now: 20 * time.Millisecond}),
			[]string{"lease 2.1ms-9ms clipped", "quiescing 2.1ms-2.1ms clipped", "online 2.1ms-9ms"},
		},
		{
			"the export is during the lease",
			at(3, suspended+1, traceInput{now: 5 * time.Millisecond, lease: "k3-1"}),
			[]string{
				"lease 1ms-5ms open", "requested 1ms-1ms", "quiescing 1ms-2.1ms", "suspend 1ms-1.85ms", "suspend 1ms-2.1ms",
				"suspended 1.85ms-5ms open", "suspended 2.1ms-5ms open", "answered at 2.1ms", "online 2.1ms-5ms open",
			},
		},
		{
			"only the last 500µs",
			at(0, len(events), traceInput{now: 10 * time.Millisecond, since: 500 * us}),
			[]string{
				"running 30µs-10ms open", "resume 9ms-9.6ms", "running 9.42ms-10ms open", "running 9.6ms-10ms open",
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			slices.Sort(tc.got)
			slices.Sort(tc.want)
			if diff := cmp.Diff(tc.want, tc.got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// eventNamed decodes an event of the log that the scheduler's tests replay.
func eventNamed(name string, data []byte) (scheduler.Event, error) {
	for _, ev := range []scheduler.Event{
		scheduler.Tick{},
		scheduler.GPUAdded{},
		scheduler.TargetSeen{},
		scheduler.TargetGone{},
		scheduler.LeaseRequested{},
		scheduler.LeaseRenewed{},
		scheduler.LeaseFinished{},
		scheduler.ClientGone{},
		scheduler.ClientBacklog{},
		scheduler.Attached{},
		scheduler.Detached{},
		scheduler.Lost{},
		scheduler.Running{},
		scheduler.Suspended{},
		scheduler.Resumed{},
		scheduler.Inspected{},
		scheduler.Alarm{},
		scheduler.QueueReset{},
		scheduler.Pin{},
		scheduler.PolicyChanged{},
		scheduler.Drain{},
	} {
		if t := reflect.TypeOf(ev); t.Name() == name {
			decoded := reflect.New(t)
			err := json.Unmarshal(data, decoded.Interface())
			return decoded.Elem().Interface().(scheduler.Event), err
		}
	}
	return nil, fmt.Errorf("no event %q", name)
}

// A long history of the scheduler, from its start and from later on.
func TestTraceOfAReplayedHistory(t *testing.T) {
	file, err := os.Open("../../pkg/scheduler/testdata/replay.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	h := &history{core: scheduler.New(scheduler.DefaultPolicy(), scheduler.Limits{LeasesPerClient: 64, LeasesPerUser: 64, LeasesTotal: 64})}
	var now time.Duration
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var line struct {
			At    time.Duration
			Event string
			Data  json.RawMessage
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		ev, err := eventNamed(line.Event, line.Data)
		if err != nil {
			t.Fatal(err)
		}
		h.step(line.At, ev)
		now = max(now, line.At)
	}
	schema := traceSchema(t)
	for from := 0; from < len(h.events); from += 1 + len(h.events)/20 {
		w := checkTrace(t, schema, writeTrace(t, traceInput{events: h.events[from:], now: now}))
		checkLeases(t, w)
		if from > 0 {
			continue
		}
		names := map[string]int{}
		for _, e := range w.TraceEvents {
			names[e.Name]++
		}
		for _, name := range []string{"lease", "answered", "suspend", "suspended", "resume", "decided"} {
			if names[name] == 0 {
				t.Errorf("no %s in the history, which has %v", name, names)
			}
		}
	}
}

// anyEvents are events in any order, of states that do not follow each other.
func anyEvents(t *rapid.T) []*gpreemptv1.Event {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) *gpreemptv1.Event {
		e := &gpreemptv1.Event{
			Revision: rapid.Uint64().Draw(t, "revision"), Kind: gpreemptv1.EventKind(rapid.Int32Range(-1, 9).Draw(t, "kind")),
			TargetId:   rapid.SampledFrom([]string{"", "1@1", "2@1", "1@2", "x"}).Draw(t, "target"),
			LeaseId:    rapid.SampledFrom([]string{"", "a", "b", "<c>"}).Draw(t, "lease"),
			FromTarget: gpreemptv1.TargetState(rapid.Int32Range(-1, 8).Draw(t, "from")), ToTarget: gpreemptv1.TargetState(rapid.Int32Range(-1, 8).Draw(t, "to")),
			FromLease: gpreemptv1.LeaseState(rapid.Int32Range(-1, 6).Draw(t, "from")), ToLease: gpreemptv1.LeaseState(rapid.Int32Range(-1, 6).Draw(t, "to")),
			End: gpreemptv1.LeaseEnd(rapid.Int32Range(-1, 9).Draw(t, "end")), GpuId: rapid.Uint32().Draw(t, "gpu"),
			Cause: rapid.SampledFrom([]string{"", "lease", "cooled-down", "\xff\x1b"}).Draw(t, "cause"), Message: rapid.String().Draw(t, "message"),
		}
		if rapid.Bool().Draw(t, "timed") {
			e.Clock = &durationpb.Duration{Seconds: rapid.Int64().Draw(t, "seconds"), Nanos: rapid.Int32().Draw(t, "nanos")}
			e.Took = &durationpb.Duration{Seconds: rapid.Int64().Draw(t, "seconds"), Nanos: rapid.Int32().Draw(t, "nanos")}
		}
		return e
	}), 0, 40).Draw(t, "events")
}

func anyTrace(schema *jsonschema.Resolved) func(*rapid.T) {
	return func(t *rapid.T) {
		in := traceInput{
			events: anyEvents(t), now: time.Duration(rapid.Int64().Draw(t, "now")),
			since: time.Duration(rapid.Int64Min(0).Draw(t, "since")), lease: rapid.SampledFrom([]string{"", "a"}).Draw(t, "only"),
			comms: map[string]string{"1@1": rapid.String().Draw(t, "comm")},
		}
		checkTrace(t, schema, writeTrace(t, in))
	}
}

func TestTraceOfAnyEventsIsValid(t *testing.T) { rapid.Check(t, anyTrace(traceSchema(t))) }

func FuzzTrace(f *testing.F) { f.Fuzz(rapid.MakeFuzz(anyTrace(traceSchema(f)))) }
