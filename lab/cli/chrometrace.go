package cli

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/spans"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
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
	// leases are the ids by number, from 1.
	leases  []string
	numbers map[string]scheduler.LeaseID
	// lanes and rows are the tracks of leases and of targets.
	lanes map[scheduler.LeaseID]int
	rows  map[gpreempt.ProcessKey]int
	out   []traceEvent
}

// traceOf makes a trace of events. It is valid for any events in any order.
func traceOf(in traceInput) []traceEvent {
	m := traceMaker{
		traceInput: in, numbers: map[string]scheduler.LeaseID{}, lanes: map[scheduler.LeaseID]int{}, rows: map[gpreempt.ProcessKey]int{},
	}
	var builder spans.Builder
	var all []spans.Span
	var records []scheduler.Record
	for _, e := range in.events {
		r := m.record(e)
		records = append(records, r)
		all = builder.Add(r, all)
	}
	all = builder.Open(m.now, all)
	all = slices.DeleteFunc(all, func(s spans.Span) bool { return !m.wanted(s.End, s.Lease) })
	slices.SortFunc(all, func(a, b spans.Span) int { return cmp.Or(cmp.Compare(a.Begin, b.Begin), cmp.Compare(a.Seq, b.Seq)) })
	m.layOut(all)
	for _, s := range all {
		m.span(s)
	}
	for i, e := range in.events {
		m.instant(e, records[i])
	}
	// A nested span follows the outer one, which a stable sort preserves.
	slices.SortStableFunc(m.out, func(a, b traceEvent) int { return cmp.Compare(*a.TS, *b.TS) })
	return append(m.names(), m.out...)
}

// wanted reports whether something that ended at a time, for a lease or none, is selected.
func (m *traceMaker) wanted(end time.Duration, lease scheduler.LeaseID) bool {
	return (m.since == 0 || end >= m.now-m.since) && (m.lease == "" || m.leaseID(lease) == m.lease)
}

func (m *traceMaker) leaseID(id scheduler.LeaseID) string {
	if id == 0 {
		return ""
	}
	return m.leases[id-1]
}

// record returns the record of an event, and numbers its lease.
func (m *traceMaker) record(e *gpreemptv1.Event) scheduler.Record {
	id := e.GetLeaseId()
	if id != "" && m.numbers[id] == 0 {
		m.leases = append(m.leases, id)
		m.numbers[id] = scheduler.LeaseID(len(m.leases))
	}
	r := spans.RecordOf(e, m.numbers[id])
	if r.Kind == scheduler.RecordLease && r.ToLease == scheduler.LeaseEnded {
		delete(m.numbers, id) // the same id would be another lease, which needs a track of its own
	}
	return r
}

// layOut assigns a track to each target, and to each lease the first free one: leases
// overlap, and the spans of a track must not.
func (m *traceMaker) layOut(all []spans.Span) {
	var free []time.Duration // when the last lease ends, by lane
	for _, s := range all {
		if _, known := m.rows[s.Target]; !known && !s.Target.IsZero() {
			m.rows[s.Target] = len(m.rows) + 1
		}
		if s.Kind != spans.Lease {
			continue
		}
		lane := slices.IndexFunc(free, func(end time.Duration) bool { return end <= s.Begin })
		if lane < 0 {
			lane = len(free)
			free = append(free, 0)
		}
		free[lane] = s.End
		m.lanes[s.Lease] = lane + 1
	}
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
	note("lease_id", m.leaseID(s.Lease))
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
				Name: "answered", Phase: "i", Cat: "lease", PID: groupLeases, TID: m.lanes[s.Lease], Scope: "t",
				Args: map[string]any{"lease_id": m.leaseID(s.Lease), "answer": s.Ended, "waited_us": traceTime(s.End - s.Begin)},
			}, s.End)
		}
		return
	case s.Kind == spans.BreakerOpen:
		e.Cat, e.PID, e.TID = "breaker", groupGPUs, int(s.GPU)
		args["gpu_id"] = uint32(s.GPU)
	case s.Kind < spans.Running:
		e.Cat, e.PID, e.TID = "lease", groupLeases, m.lanes[s.Lease]
	default:
		e.Cat, e.PID, e.TID = "target", groupTargets, m.rows[s.Target]
		args["target_id"] = s.Target.String()
	}
	m.emit(e, s.Begin)
	// An arrow from the lease to the target that it suspends.
	if lane := m.lanes[s.Lease]; s.Kind == spans.Suspending && !s.Clipped && lane != 0 {
		arrow := traceEvent{Name: "decided", Cat: "lease", ID: s.Seq}
		from, to := arrow, arrow
		from.Phase, from.PID, from.TID = "s", groupLeases, lane
		to.Phase, to.Bind, to.PID, to.TID = "f", "e", e.PID, e.TID
		m.emit(from, s.Begin)
		m.emit(to, s.Begin)
	}
}

// instant writes an event without duration.
func (m *traceMaker) instant(e *gpreemptv1.Event, r scheduler.Record) {
	i := traceEvent{Phase: "i", Cat: "daemon", PID: groupDaemon, TID: 1, Scope: "t", Args: map[string]any{"revision": e.GetRevision()}}
	switch e.GetKind() {
	case gpreemptv1.EventKind_EVENT_KIND_TARGET:
		if r.FromTarget != r.ToTarget {
			return
		}
		i.Name, i.Cat, i.PID, i.TID = term.Or(e.GetCause(), "changed"), "target", groupTargets, m.rows[r.Target]
	case gpreemptv1.EventKind_EVENT_KIND_SHADOW:
		i.Name, i.Cat, i.PID, i.TID = "would run", "target", groupTargets, m.rows[r.Target]
		if r.ToTarget == scheduler.TargetSuspended {
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
	if m.wanted(r.At, r.Lease) && (i.PID != groupTargets || i.TID != 0) {
		m.emit(i, r.At)
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
	lanes := 0
	for _, lane := range m.lanes {
		lanes = max(lanes, lane)
	}
	for lane := range lanes {
		title(track{groupLeases, lane + 1}, fmt.Sprintf("lane %d", lane+1))
	}
	targets := make([]gpreempt.ProcessKey, len(m.rows))
	for key, row := range m.rows {
		targets[row-1] = key
	}
	for i, key := range targets {
		name := fmt.Sprint(key.PID)
		if comm := m.comms[key.String()]; comm != "" {
			name += " " + term.Printable(comm)
		}
		title(track{groupTargets, i + 1}, name)
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
