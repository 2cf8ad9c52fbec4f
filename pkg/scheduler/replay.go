package scheduler

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
)

// eventTypes are the events by the name they have in an event log.
var eventTypes = func() map[string]reflect.Type {
	types := map[string]reflect.Type{}
	for _, ev := range []Event{
		Tick{},
		GPUAdded{},
		TargetSeen{},
		TargetGone{},
		LeaseRequested{},
		LeaseRenewed{},
		LeaseFinished{},
		ClientGone{},
		ClientBacklog{},
		Attached{},
		Detached{},
		Lost{},
		QueueBorn{},
		Suspended{},
		Resumed{},
		Alarm{},
		Hold{},
		PolicyChanged{},
		Drain{},
		Stopped{},
	} {
		types[reflect.TypeOf(ev).Name()] = reflect.TypeOf(ev)
	}
	return types
}()

type eventLine struct {
	At    Time            `json:"at"`
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

// MarshalEvent writes an event and its time as one line of JSON, for a log that
// can be replayed.
func MarshalEvent(now Time, ev Event) ([]byte, error) {
	data, err := json.Marshal(ev)
	if err != nil {
		return nil, fmt.Errorf("event %T: %w", ev, err)
	}
	return json.Marshal(eventLine{now, reflect.TypeOf(ev).Name(), data})
}

// UnmarshalEvent reads what MarshalEvent writes.
func UnmarshalEvent(line []byte) (Time, Event, error) {
	var l eventLine
	if err := json.Unmarshal(line, &l); err != nil {
		return 0, nil, fmt.Errorf("event log: %w", err)
	}
	t, ok := eventTypes[l.Event]
	if !ok {
		return 0, nil, fmt.Errorf("event log: %q is no event of this version", l.Event)
	}
	ev := reflect.New(t)
	if err := json.Unmarshal(l.Data, ev.Interface()); err != nil {
		return 0, nil, fmt.Errorf("event log: %s: %w", l.Event, err)
	}
	return l.At, ev.Elem().Interface().(Event), nil
}

// String writes an action as one line of text: what scenario tests compare and
// replays are checked by.
func (a Action) String() string {
	var b strings.Builder
	switch a.Kind {
	case ActSuspend:
		fmt.Fprintf(&b, "suspend target=%v seq=%d", a.Target, a.Seq)
	case ActResume:
		fmt.Fprintf(&b, "resume target=%v seq=%d", a.Target, a.Seq)
	case ActAttach:
		fmt.Fprintf(&b, "attach target=%v", a.Target)
	case ActDetach:
		fmt.Fprintf(&b, "detach target=%v", a.Target)
	case ActAnswer:
		fmt.Fprintf(&b, "answer lease=%d quiesced=%v reason=%v suspended=%d waited=%v",
			a.Lease, a.Answer.Quiesced, a.Answer.Reason, a.Answer.Suspended, a.Answer.Waited)
	case ActRecord:
		b.WriteString(a.Record.String())
	}
	return b.String()
}

// String writes the record as one line of text.
func (r Record) String() string {
	var b strings.Builder
	switch r.Kind {
	case RecordTarget:
		fmt.Fprintf(&b, "record target=%v %v->%v", r.Target, r.FromTarget, r.ToTarget)
	case RecordShadow:
		fmt.Fprintf(&b, "record shadow target=%v %v->%v", r.Target, r.FromTarget, r.ToTarget)
	case RecordLease:
		fmt.Fprintf(&b, "record lease=%d %v->%v", r.Lease, r.FromLease, r.ToLease)
		if r.End != EndNone {
			fmt.Fprintf(&b, " end=%v", r.End)
		}
	case RecordBreaker:
		fmt.Fprintf(&b, "record breaker gpu=%v open=%v", r.GPU, r.On)
	case RecordPolicy:
		b.WriteString("record policy")
	case RecordDrain:
		fmt.Fprintf(&b, "record drain on=%v", r.On)
	default:
		b.WriteString("record")
	}
	if r.Cause != "" {
		fmt.Fprintf(&b, " cause=%s", r.Cause)
	}
	if r.Kind != RecordLease && r.Lease != 0 {
		fmt.Fprintf(&b, " lease=%d", r.Lease)
	}
	if r.Took != 0 {
		fmt.Fprintf(&b, " took=%v", r.Took)
	}
	return b.String()
}
