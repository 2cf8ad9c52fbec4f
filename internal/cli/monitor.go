package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

// rateWindow is the time over which shares and rates are measured.
const rateWindow = 10 * time.Second

// Bounds of what a monitor keeps.
const (
	keptQuiet       = 1000 // announcements, for percentiles and the sparkline
	keptPreemptions = 50
	keptCalls       = 1000 // leases without an answer yet
)

// reading is what the daemon answers at one time.
type reading struct {
	status  *gpreemptv1.GetStatusResponse
	gpus    []*gpreemptv1.Gpu
	targets []*gpreemptv1.Target
	queues  []*gpreemptv1.Queue
	leases  []*gpreemptv1.Lease
}

// usage of a target at one time.
type used struct {
	at        time.Duration // the daemon's clock
	suspended time.Duration
	suspends  uint64
}

// suspension is a suspend of a target.
type suspension struct {
	event *gpreemptv1.Event
	comm  string
	why   string // cause and lease
}

// entry is a change of a target into a state. Readings and events come apart: a cause that is kept by its state
// fits the state of every reading.
type entry struct {
	target string
	state  gpreemptv1.TargetState
}

// monitor is what gpctl top and gpctl web show of a daemon: the last reading, and what its events
// add. It does no input or output.
type monitor struct {
	now    reading
	lost   string // why there is no newer reading
	usage  map[string][]used
	causes map[entry]string  // of the last change of each target into each state
	whys   map[string]string // of the suspend in progress of each target: cause and lease
	calls  map[string]time.Duration
	quiet  []time.Duration // newest last
	last   []suspension    // newest first
}

func newMonitor() monitor {
	return monitor{usage: map[string][]used{}, causes: map[entry]string{}, whys: map[string]string{}, calls: map[string]time.Duration{}}
}

// read replaces the reading.
func (m *monitor) read(r reading) {
	if !proto.Equal(r.status.GetStartedAt(), m.now.status.GetStartedAt()) {
		// The clock and the counts of another daemon begin again.
		clear(m.usage)
		clear(m.calls)
	}
	m.now, m.lost = r, ""
	clock := r.status.GetClock().AsDuration()
	living := map[string]bool{}
	for _, t := range r.targets {
		id := t.GetTargetId()
		living[id] = true
		m.usage[id] = append(m.usage[id], used{clock, t.GetSuspendedTotal().AsDuration(), t.GetSuspends()})
		for len(m.usage[id]) > 2 && clock-m.usage[id][1].at >= rateWindow {
			m.usage[id] = m.usage[id][1:]
		}
	}
	gone := func(id string) bool { return !living[id] }
	maps.DeleteFunc(m.usage, func(id string, _ []used) bool { return gone(id) })
	maps.DeleteFunc(m.causes, func(e entry, _ string) bool { return gone(e.target) })
	maps.DeleteFunc(m.whys, func(id, _ string) bool { return gone(id) })
}

// event adds a change of state.
func (m *monitor) event(e *gpreemptv1.Event) {
	id, clock := e.GetLeaseId(), e.GetClock().AsDuration()
	switch e.GetKind() {
	case gpreemptv1.EventKind_EVENT_KIND_LEASE:
		called, known := m.calls[id]
		switch {
		case e.GetFromLease() == gpreemptv1.LeaseState_LEASE_STATE_UNSPECIFIED:
			if len(m.calls) == keptCalls {
				clear(m.calls)
			}
			called, known = clock-e.GetTook().AsDuration(), true
			m.calls[id] = called
		case e.GetToLease() == gpreemptv1.LeaseState_LEASE_STATE_ENDED:
			delete(m.calls, id)
			known = false
		}
		if known && e.GetToLease() == gpreemptv1.LeaseState_LEASE_STATE_HELD && e.GetFromLease() != e.GetToLease() {
			delete(m.calls, id)
			m.quiet = append(m.quiet, clock-called)
			m.quiet = m.quiet[max(0, len(m.quiet)-keptQuiet):]
		}
	case gpreemptv1.EventKind_EVENT_KIND_TARGET:
		m.target(e)
	default:
	}
}

// target adds a change of a target. A suspend has two: its beginning has the cause, its end has
// "done" and the time that it took.
func (m *monitor) target(e *gpreemptv1.Event) {
	id, to := e.GetTargetId(), e.GetToTarget()
	done := e.GetCause() == "done"
	m.causes[entry{id, to}] = e.GetCause()
	if done {
		m.causes[entry{id, to}] = m.causes[entry{id, e.GetFromTarget()}]
	}
	switch to {
	case gpreemptv1.TargetState_TARGET_STATE_GONE:
		maps.DeleteFunc(m.causes, func(e entry, _ string) bool { return e.target == id })
		delete(m.whys, id)
	case gpreemptv1.TargetState_TARGET_STATE_SUSPENDING:
		m.whys[id] = strings.TrimSpace(e.GetCause() + " " + e.GetLeaseId())
	case gpreemptv1.TargetState_TARGET_STATE_SUSPENDED:
		if e.GetFromTarget() == to {
			return
		}
		one := suspension{event: e, why: strings.TrimSpace(e.GetCause() + " " + e.GetLeaseId())}
		if why, known := m.whys[id]; known && done {
			one.why = why
		}
		delete(m.whys, id)
		for _, t := range m.now.targets {
			if t.GetTargetId() == id {
				one.comm = t.GetComm()
			}
		}
		m.last = slices.Insert(m.last, 0, one)
		m.last = m.last[:min(len(m.last), keptPreemptions)]
	default:
	}
}

// rates returns the share of the last rateWindow in which a target was suspended, and its suspends
// a second; not ok before there are two readings.
func (m *monitor) rates(id string) (share, rate float64, ok bool) {
	list := m.usage[id]
	if len(list) < 2 {
		return 0, 0, false
	}
	first, last := list[0], list[len(list)-1]
	took := last.at - first.at
	if took <= 0 {
		return 0, 0, false
	}
	return min(1, float64(last.suspended-first.suspended)/float64(took)), float64(last.suspends-first.suspends) / took.Seconds(), true
}

// backlog returns the work that the GPU has not read from a target's queues; not ok when it is
// known of none of them, or counted in different units.
func (m *monitor) backlog(id string) (sum uint64, text string) {
	unit, known := "", false
	for _, q := range m.now.queues {
		if q.GetTargetId() != id || q.Backlog == nil {
			continue
		}
		if known && q.GetBacklogUnit() != unit {
			return 0, "-"
		}
		unit, known = q.GetBacklogUnit(), true
		sum += q.GetBacklog()
	}
	if !known {
		return 0, "-"
	}
	return sum, fmt.Sprintf("%d %s", sum, unit)
}

// modelOf returns "simulated" or "emulated" when no hardware is involved, else "".
func modelOf(st *gpreemptv1.GetStatusResponse) string {
	if model, _, _ := strings.Cut(st.GetBackend(), " "); model == "simulated" || model == "emulated" {
		return model
	}
	return ""
}

// readAll asks the daemon for everything that is shown.
func readAll(ctx context.Context, admin term.AdminClient) (r reading, err error) {
	if r.status, err = admin.GetStatus(ctx, &gpreemptv1.GetStatusRequest{}); err != nil {
		return r, err
	}
	gpus, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return r, err
	}
	targets, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
	if err != nil {
		return r, err
	}
	queues, err := admin.ListQueues(ctx, &gpreemptv1.ListQueuesRequest{Backlog: true})
	if err != nil {
		return r, err
	}
	leases, err := admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
	r.gpus, r.targets, r.queues, r.leases = gpus.GetGpus(), targets.GetTargets(), queues.GetQueues(), leases.GetLeases()
	return r, err
}

// suspendedOn returns the largest share of the last rateWindow in which a target on the GPU was
// suspended.
func (m *monitor) suspendedOn(gpu uint32) float64 {
	most := 0.0
	for _, t := range m.now.targets {
		if slices.Contains(t.GetGpuIds(), gpu) {
			share, _, _ := m.rates(t.GetTargetId())
			most = max(most, share)
		}
	}
	return most
}

// follow reads the daemon and then follows its events, again after every failure and pause, until
// ctx ends. begin gets the reading, event each change of state that is newer, the first time with history
// also those that the daemon has kept, and lost the failure that ends them.
func follow(ctx context.Context, a *term.App, admin term.AdminClient, history bool, pause time.Duration, begin func(reading), event func(*gpreemptv1.Event), lost func(error)) {
	for {
		err := followOnce(ctx, admin, history, func(r reading) {
			history = false
			begin(r)
		}, event)
		if err != nil {
			lost(a.FromDaemon(ctx, err))
		}
		if a.Sleep(ctx, pause) != nil {
			return
		}
	}
}

// watchAfter asks for the events after a revision, with history for all that the daemon has kept.
func watchAfter(at uint64, history bool) *gpreemptv1.WatchEventsRequest {
	if history {
		at = 0
	}
	return &gpreemptv1.WatchEventsRequest{AfterRevision: at, FromStart: at == 0}
}

func followOnce(ctx context.Context, admin term.AdminClient, history bool, begin func(reading), event func(*gpreemptv1.Event)) error {
	r, err := readAll(ctx, admin)
	if err != nil {
		return err
	}
	begin(r)
	at := r.status.GetEventRevision()
	stream, err := admin.WatchEvents(ctx, watchAfter(at, history))
	if err != nil {
		return err
	}
	return term.Each(stream, func(m *gpreemptv1.WatchEventsResponse) error {
		event(m.GetEvent())
		return ctx.Err()
	})
}
