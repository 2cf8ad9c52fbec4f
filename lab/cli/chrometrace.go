package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/spans"
)

// The processes of a trace, which viewers show as groups of tracks in this order.
const (
	groupDaemon = 1 + iota
	groupLeases
	groupTargets
	groupGPUs
)

var groupNames = map[int]string{groupDaemon: "gpreemptd", groupLeases: "Leases", groupTargets: "Targets", groupGPUs: "GPUs"}

// traceTime is a time or a duration of a trace: microseconds, with three decimals.
type traceTime time.Duration

// MarshalJSON writes it as a number.
func (m traceTime) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%d.%03d", m/1000, m%1000), nil
}

// traceEvent is an entry of Chrome's Trace Event Format.
type traceEvent struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"`
	Cat   string         `json:"cat,omitempty"`
	TS    *traceTime     `json:"ts,omitempty"`
	Dur   *traceTime     `json:"dur,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	ID    uint64         `json:"id,omitempty"`
	Scope string         `json:"s,omitempty"`
	Bind  string         `json:"bp,omitempty"`
	Args  map[string]any `json:"args,omitempty"`
}

// chromeTrace is its JSON Object Format.
type chromeTrace struct {
	Unit   string            `json:"displayTimeUnit"`
	Other  map[string]string `json:"otherData"`
	Events []traceEvent      `json:"traceEvents"`
}

// write writes one event per line.
func (c *chromeTrace) write(w io.Writer) error {
	other, err := term.Marshal(c.Other)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "{\"displayTimeUnit\":%q,\"otherData\":%s,\"traceEvents\":[", c.Unit, other); err != nil {
		return err
	}
	for i, e := range c.Events {
		line, err := term.Marshal(e)
		if err != nil {
			return err
		}
		before := ",\n"
		if i == 0 {
			before = "\n"
		}
		if _, err := fmt.Fprintf(w, "%s%s", before, line); err != nil {
			return err
		}
	}
	_, err = io.WriteString(w, "\n]}\n")
	return err
}

// traceInput is the source of a trace.
type traceInput struct {
	// events are all that the daemon keeps, in order.
	events []*gpreemptv1.Event
	// now is the daemon's clock at the export. comms are the names of targets by id.
	now   time.Duration
	comms map[string]string
	// since, unless 0, omits what ended longer before now. lease, unless "", omits what
	// does not concern that lease.
	since time.Duration
	lease string
}

// traceMaker makes a trace. Times are from the daemon's clock.
type traceMaker struct {
	traceInput
	// lanes are the tracks of leases, by the number of their spans, and free has when the last lease
	// of each track ends. rows are the tracks of targets.
	lanes map[uint64]int
	free  []time.Duration
	rows  map[string]int
	out   []traceEvent
}

// traceOf makes a trace of events. It is valid for any events in any order.
func traceOf(in traceInput) []traceEvent {
	m := traceMaker{traceInput: in, lanes: map[uint64]int{}, rows: map[string]int{}}
	var builder spans.Builder
	var all []spans.Span
	for _, e := range in.events {
		all = builder.Add(e, all)
	}
	all = builder.Open(m.now, all)
	all = slices.DeleteFunc(all, func(s spans.Span) bool { return !m.wanted(s.End, s.Lease) })
	slices.SortFunc(all, func(a, b spans.Span) int { return cmp.Or(cmp.Compare(a.Begin, b.Begin), cmp.Compare(a.Seq, b.Seq)) })
	for _, s := range all {
		m.layOut(s)
		m.span(s)
	}
	for _, e := range in.events {
		m.instant(e)
	}
	// A nested span follows the outer one, which a stable sort preserves.
	slices.SortStableFunc(m.out, func(a, b traceEvent) int { return cmp.Compare(*a.TS, *b.TS) })
	return append(m.names(), m.out...)
}

// wanted reports whether something that ended at a time, for a lease or none, is selected.
func (m *traceMaker) wanted(end time.Duration, lease string) bool {
	return (m.since == 0 || end >= m.now-m.since) && (m.lease == "" || lease == m.lease)
}

// layOut assigns a track to each target, and to each lease the first free one: leases
// overlap, and the spans of a track must not.
func (m *traceMaker) layOut(s spans.Span) {
	if s.Target != "" && m.rows[s.Target] == 0 {
		m.rows[s.Target] = len(m.rows) + 1
	}
	if s.Kind != spans.Lease {
		return
	}
	lane := slices.IndexFunc(m.free, func(end time.Duration) bool { return end <= s.Begin })
	if lane < 0 {
		lane = len(m.free)
		m.free = append(m.free, 0)
	}
	m.free[lane] = s.End
	m.lanes[s.Whole] = lane + 1
}

func at(t time.Duration) *traceTime { return new(traceTime(t)) }

func (m *traceMaker) emit(e traceEvent, t time.Duration) {
	e.TS = at(t)
	m.out = append(m.out, e)
}

// span writes a span with its arrow or answer.
func (m *traceMaker) span(s spans.Span) {
	args := map[string]any{}
	note := func(key, value string) {
		if value != "" {
			args[key] = value
		}
	}
	note("lease_id", s.Lease)
	note("cause", s.Cause)
	note("ended", s.Ended)
	if s.Took > 0 {
		args["mechanism_us"] = traceTime(s.Took)
	}
	if s.Clipped {
		args["clipped"] = "began before the oldest event that is kept"
	}
	if s.Open {
		args["open"] = "had not ended at the export"
	}
	e := traceEvent{Name: s.Kind.String(), Phase: "X", Dur: at(s.End - s.Begin), Args: args}
	switch {
	case s.Kind == spans.Announce: // overlaps others
		if !s.Open {
			m.emit(traceEvent{
				Name: "answered", Phase: "i", Cat: "lease", PID: groupLeases, TID: m.lanes[s.Whole], Scope: "t",
				Args: map[string]any{"lease_id": s.Lease, "answer": s.Ended, "waited_us": traceTime(s.End - s.Begin)},
			}, s.End)
		}
		return
	case s.Kind == spans.BreakerOpen:
		e.Cat, e.PID, e.TID = "breaker", groupGPUs, int(s.GPU)
		args["gpu_id"] = s.GPU
	case s.Kind < spans.Running:
		e.Cat, e.PID, e.TID = "lease", groupLeases, m.lanes[s.Whole]
	default:
		e.Cat, e.PID, e.TID = "target", groupTargets, m.rows[s.Target]
		args["target_id"] = s.Target
	}
	m.emit(e, s.Begin)
	// An arrow from the lease to the target that it suspends.
	if lane := m.lanes[s.Whole]; s.Kind == spans.Suspending && !s.Clipped && lane != 0 {
		arrow := traceEvent{Name: "decided", Cat: "lease", ID: s.Seq}
		from, to := arrow, arrow
		from.Phase, from.PID, from.TID = "s", groupLeases, lane
		to.Phase, to.Bind, to.PID, to.TID = "f", "e", e.PID, e.TID
		m.emit(from, s.Begin)
		m.emit(to, s.Begin)
	}
}

// instant writes an event without duration.
func (m *traceMaker) instant(e *gpreemptv1.Event) {
	i := traceEvent{Phase: "i", Cat: "daemon", PID: groupDaemon, TID: 1, Scope: "t", Args: map[string]any{"revision": e.GetRevision()}}
	switch e.GetKind() {
	case gpreemptv1.EventKind_EVENT_KIND_TARGET:
		if e.GetFromTarget() != e.GetToTarget() {
			return
		}
		i.Name, i.Cat, i.PID, i.TID = term.Or(e.GetCause(), "changed"), "target", groupTargets, m.rows[e.GetTargetId()]
	case gpreemptv1.EventKind_EVENT_KIND_SHADOW:
		i.Name, i.Cat, i.PID, i.TID = "would run", "target", groupTargets, m.rows[e.GetTargetId()]
		if e.GetToTarget() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
			i.Name = "would be suspended"
		}
		i.Args["cause"] = e.GetCause()
	case gpreemptv1.EventKind_EVENT_KIND_RESET:
		i.Name = fmt.Sprintf("queue reset on GPU %d: %s", e.GetGpuId(), e.GetMessage())
	case gpreemptv1.EventKind_EVENT_KIND_POLICY:
		i.Name = "policy changed"
	case gpreemptv1.EventKind_EVENT_KIND_DRAIN, gpreemptv1.EventKind_EVENT_KIND_ADMIN:
		i.Name = term.Or(e.GetMessage(), "admin")
	default:
		return
	}
	if at := max(0, e.GetClock().AsDuration()); m.wanted(at, e.GetLeaseId()) && (i.PID != groupTargets || i.TID != 0) {
		m.emit(i, at)
	}
}

// names returns the names of all tracks in use.
func (m *traceMaker) names() []traceEvent {
	type track struct{ group, row int }
	used := map[track]bool{}
	for _, e := range m.out {
		used[track{e.PID, 0}], used[track{e.PID, e.TID}] = true, true
	}
	var events []traceEvent
	meta := func(name string, t track, key string, value any) {
		events = append(events, traceEvent{Name: name, Phase: "M", PID: t.group, TID: t.row, Args: map[string]any{key: value}})
	}
	title := func(t track, name string) {
		if used[t] {
			meta("thread_name", t, "name", name)
			meta("thread_sort_index", t, "sort_index", t.row)
		}
	}
	for group := groupDaemon; group <= groupGPUs; group++ {
		if used[track{group, 0}] {
			meta("process_name", track{group, 0}, "name", groupNames[group])
			meta("process_sort_index", track{group, 0}, "sort_index", group)
		}
	}
	title(track{groupDaemon, 1}, "changes")
	for lane := range m.free {
		title(track{groupLeases, lane + 1}, fmt.Sprintf("lane %d", lane+1))
	}
	for _, id := range slices.SortedFunc(maps.Keys(m.rows), func(a, b string) int { return cmp.Compare(m.rows[a], m.rows[b]) }) {
		name, _, _ := strings.Cut(id, "@")
		if comm := m.comms[id]; comm != "" {
			name += " " + comm
		}
		title(track{groupTargets, m.rows[id]}, term.Printable(name))
	}
	var gpus []int
	for t := range used {
		if t.group == groupGPUs && t.row != 0 {
			gpus = append(gpus, t.row)
		}
	}
	slices.Sort(gpus)
	for _, gpu := range gpus {
		title(track{groupGPUs, gpu}, fmt.Sprintf("GPU %d", gpu))
	}
	return events
}
