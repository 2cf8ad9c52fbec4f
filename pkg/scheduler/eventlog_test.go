package scheduler_test

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// EventTypes are the events by the name they have in an event log.
var EventTypes = func() map[string]reflect.Type {
	types := map[string]reflect.Type{}
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
		scheduler.Stopped{},
	} {
		types[reflect.TypeOf(ev).Name()] = reflect.TypeOf(ev)
	}
	return types
}()

type eventLine struct {
	At    scheduler.Time  `json:"at"`
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

// MarshalEvent writes an event and its time as one line of JSON, for a log that
// can be replayed.
func MarshalEvent(now scheduler.Time, ev scheduler.Event) ([]byte, error) {
	data, err := json.Marshal(ev)
	if err != nil {
		return nil, fmt.Errorf("event %T: %w", ev, err)
	}
	return json.Marshal(eventLine{now, reflect.TypeOf(ev).Name(), data})
}

// UnmarshalEvent reads what MarshalEvent writes.
func UnmarshalEvent(line []byte) (scheduler.Time, scheduler.Event, error) {
	var l eventLine
	if err := json.Unmarshal(line, &l); err != nil {
		return 0, nil, fmt.Errorf("event log: %w", err)
	}
	t, ok := EventTypes[l.Event]
	if !ok {
		return 0, nil, fmt.Errorf("event log: %q is no event of this version", l.Event)
	}
	ev := reflect.New(t)
	if err := json.Unmarshal(l.Data, ev.Interface()); err != nil {
		return 0, nil, fmt.Errorf("event log: %s: %w", l.Event, err)
	}
	return l.At, ev.Elem().Interface().(scheduler.Event), nil
}
