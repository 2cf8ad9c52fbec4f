package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxLogLine bounds a line of an event log, in bytes.
const maxLogLine = 1 << 20

// logLine is a line of gpctl events export, or of gpctl events -o json. Keys that a replay does
// not need are ignored.
type logLine struct {
	Format int `json:"format"`
	Status *struct {
		Backend string `json:"backend"`
	} `json:"status"`
	Policy *struct {
		Preset string `json:"preset"`
	} `json:"policy"`
	GPU *struct {
		ID gpreempt.GPUID `json:"gpu_id"`
	} `json:"gpu"`
	Lease *struct {
		ID       string            `json:"lease_id"`
		Priority gpreempt.Priority `json:"priority"`
	} `json:"lease"`
	Target *loggedTarget `json:"target"`
	Event  *loggedEvent  `json:"event"`
}

type loggedTarget struct {
	ID       string            `json:"target_id"`
	Class    string            `json:"class"`
	Priority gpreempt.Priority `json:"priority"`
	GPUs     []gpreempt.GPUID  `json:"gpu_ids"`
	Job      *struct {
		Name string `json:"name"`
	} `json:"job"`
}

type loggedEvent struct {
	Revision   uint64           `json:"revision,string"`
	Kind       string           `json:"kind"`
	Target     string           `json:"target_id"`
	FromTarget string           `json:"from_target"`
	ToTarget   string           `json:"to_target"`
	Lease      string           `json:"lease_id"`
	FromLease  string           `json:"from_lease"`
	ToLease    string           `json:"to_lease"`
	Cause      string           `json:"cause"`
	Clock      string           `json:"clock"`
	GPUs       []gpreempt.GPUID `json:"gpu_ids"`
}

// recording is a sim.Recording in the making, with what the log does not say.
type recording struct {
	sim.Recording
	Backend string // of the daemon, "" when unknown
	Policy  string // that was in force, "" when unknown
	Events  int

	begin, now time.Duration // of the daemon's clock
	revision   uint64
	gpus       map[gpreempt.GPUID]bool
	targets    map[string]*recordedTarget
	leases     map[string]*recordedLease
	order      []*recordedLease
	priorities map[string]gpreempt.Priority // of leases

	missing           uint64 // revisions
	clipped           int    // leases
	byHand            int    // suspensions
	assumedPriority   int    // leases
	unknown, inferred int    // targets
}

type recordedTarget struct {
	key         gpreempt.ProcessKey
	info        *loggedTarget
	from, until time.Duration
	gone        bool
	since       time.Duration // of the suspend or resume that is on its way
	state       string
	suspends    []time.Duration
	resumes     []time.Duration
	causes      map[gpreempt.GPUID]bool // GPUs of leases that it was suspended for
}

type recordedLease struct {
	id              string
	gpus            []gpreempt.GPUID
	at, answer, end time.Duration
	answered, ended bool
}

// readRecording reads an event log. Errors name the line.
func readRecording(r io.Reader) (*recording, error) {
	rec := &recording{
		gpus: map[gpreempt.GPUID]bool{}, targets: map[string]*recordedTarget{}, leases: map[string]*recordedLease{},
		priorities: map[string]gpreempt.Priority{},
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLogLine)
	n := 0
	for lines.Scan() {
		n++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var l logLine
		err := json.Unmarshal(lines.Bytes(), &l)
		if err == nil {
			err = rec.add(l)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", n+1, err)
	}
	if rec.Events == 0 {
		return nil, errors.New("it has no event: write it by gpctl events export")
	}
	rec.finish()
	return rec, nil
}

func (r *recording) add(l logLine) error {
	switch {
	case l.Format > term.ExportFormat:
		return fmt.Errorf("the format is %d and this gplab reads %d: use the gplab that wrote it", l.Format, term.ExportFormat)
	case l.Status != nil:
		r.Backend = l.Status.Backend
	case l.Policy != nil:
		r.Policy = l.Policy.Preset
	case l.GPU != nil:
		r.gpus[l.GPU.ID] = true
	case l.Lease != nil:
		r.priorities[l.Lease.ID] = l.Lease.Priority
	case l.Target != nil:
		t, err := r.target(l.Target.ID)
		if err != nil {
			return err
		}
		t.info = l.Target
	case l.Event != nil:
		return r.event(l.Event)
	}
	return nil
}

func (r *recording) target(id string) (*recordedTarget, error) {
	if t := r.targets[id]; t != nil {
		return t, nil
	}
	key, err := gpreempt.ParseProcessKey(id)
	if err != nil {
		return nil, err
	}
	t := &recordedTarget{key: key, from: r.begin, causes: map[gpreempt.GPUID]bool{}}
	r.targets[id] = t
	return t, nil
}

func (r *recording) event(e *loggedEvent) error {
	clock, err := time.ParseDuration(cmp.Or(e.Clock, "0s"))
	if err != nil || clock < 0 {
		return fmt.Errorf("%q is not a clock", e.Clock)
	}
	if r.Events == 0 {
		if e.Kind == kindAdmin {
			return nil // may be older than the log, which begins with the first other event
		}
		r.begin, r.now = clock, clock
		for _, t := range r.targets {
			t.from = clock
		}
	}
	if e.Revision <= r.revision || clock < r.now {
		return fmt.Errorf("revision %d follows %d: the log is of two runs of the daemon; cut it there", e.Revision, r.revision)
	}
	if r.Events > 0 {
		r.missing += e.Revision - r.revision - 1
	}
	r.revision, r.now = e.Revision, clock
	r.Events++
	switch e.Kind {
	case kindLease:
		r.lease(e)
	case kindTarget:
		return r.moved(e)
	}
	return nil
}

// The words of the API that the log has.
const (
	kindLease  = "EVENT_KIND_LEASE"
	kindTarget = "EVENT_KIND_TARGET"
	kindAdmin  = "EVENT_KIND_ADMIN"

	leaseNone  = "LEASE_STATE_UNSPECIFIED"
	leaseHeld  = "LEASE_STATE_HELD"
	leaseEnded = "LEASE_STATE_ENDED"

	targetNone       = "TARGET_STATE_UNSPECIFIED"
	targetRunning    = "TARGET_STATE_RUNNING"
	targetSuspending = "TARGET_STATE_SUSPENDING"
	targetSuspended  = "TARGET_STATE_SUSPENDED"
	targetResuming   = "TARGET_STATE_RESUMING"
	targetGone       = "TARGET_STATE_GONE"

	classOffline = "CLASS_OFFLINE"

	causeByHand = "by-hand"
)

func (r *recording) lease(e *loggedEvent) {
	l := r.leases[e.Lease]
	if l == nil {
		l = &recordedLease{id: e.Lease, at: r.now}
		r.leases[e.Lease] = l
		switch {
		case e.FromLease != leaseNone && e.FromLease != "":
			r.clipped++
			l.ended = true
		default:
			l.gpus = sorted(e.GPUs)
			r.order = append(r.order, l)
			for _, id := range l.gpus {
				r.gpus[id] = true
			}
			return
		}
	}
	if !l.answered && (e.FromLease == e.ToLease || e.ToLease == leaseHeld || e.ToLease == leaseEnded) {
		l.answered, l.answer = true, r.now
	}
	if e.ToLease == leaseEnded {
		if !l.ended {
			l.ended, l.end = true, r.now
		}
	}
}

func sorted(ids []gpreempt.GPUID) []gpreempt.GPUID {
	return slices.Compact(slices.Sorted(slices.Values(ids)))
}

func (r *recording) moved(e *loggedEvent) error {
	t, err := r.target(e.Target)
	if err != nil {
		return err
	}
	switch {
	case e.FromTarget == targetNone || e.FromTarget == "":
		t.from, t.gone = r.now, false
	case e.ToTarget == targetGone:
		t.until, t.gone = r.now, true
	case e.ToTarget == targetSuspending || e.ToTarget == targetResuming:
		t.since, t.state = r.now, e.ToTarget
		if e.Cause == causeByHand {
			r.byHand++
		}
		if l := r.leases[e.Lease]; l != nil {
			for _, id := range l.gpus {
				t.causes[id] = true
			}
		}
	case e.FromTarget == targetSuspending && e.ToTarget == targetSuspended && t.state == targetSuspending:
		t.suspends = append(t.suspends, r.now-t.since)
		t.state = ""
	case e.FromTarget == targetResuming && e.ToTarget == targetRunning && t.state == targetResuming:
		t.resumes = append(t.resumes, r.now-t.since)
		t.state = ""
	}
	return nil
}

// finish makes the recording, with times from its beginning.
func (r *recording) finish() {
	r.Length = max(r.now-r.begin, time.Millisecond)
	for _, id := range slices.Sorted(maps.Keys(r.targets)) {
		r.addTarget(r.targets[id])
	}
	for _, l := range r.order {
		if !l.answered {
			l.answer = r.now
		}
		if !l.ended {
			l.end = r.now
		}
		p, known := r.priorities[l.id]
		if !known {
			p = gpreempt.PriorityHigh
			r.assumedPriority++
		}
		r.Leases = append(r.Leases, sim.RecordedLease{
			GPUs: l.gpus, Priority: min(p, gpreempt.MaxPriority), At: l.at - r.begin, Work: max(0, l.end-l.answer),
		})
	}
	r.GPUs = slices.Sorted(maps.Keys(r.gpus))
	r.leases, r.order, r.targets = nil, nil, nil
}

func (r *recording) addTarget(t *recordedTarget) {
	out := sim.RecordedTarget{Key: t.key, From: max(0, t.from-r.begin), Until: r.Length, Suspends: t.suspends, Resumes: t.resumes}
	if t.gone {
		out.Until = max(out.From, t.until-r.begin)
	}
	switch {
	case t.info != nil && t.info.Class == classOffline:
		out.Priority, out.GPUs = min(t.info.Priority, gpreempt.MaxPriority), sorted(t.info.GPUs)
		if t.info.Job != nil {
			out.Job = t.info.Job.Name
		}
	case t.info != nil:
		return
	case len(t.causes) > 0:
		r.inferred++
		out.GPUs = slices.Sorted(maps.Keys(t.causes))
	default:
		r.unknown++
		return
	}
	for _, id := range out.GPUs {
		r.gpus[id] = true
	}
	r.Targets = append(r.Targets, out)
}

// limits returns what the log does not say, and what is assumed instead, in sentences.
func (r *recording) limits() []string {
	all := []string{
		"The log does not say the eta, max_wait and client of an announcement: those of the policy, and none, are assumed.",
		"Work is assumed to last as long as it did, from the answer on: with GPUs that were not quiet it would have been shorter or longer.",
	}
	count := func(n int, format string) {
		if n > 0 {
			all = append(all, fmt.Sprintf(format, n))
		}
	}
	count(int(min(r.missing, 1<<30)), "Events missing in the log: %d. What they said is not replayed.")
	count(r.clipped, "Leases that began before the log: %d. They are not replayed.")
	count(r.byHand, "Suspensions by order of an admin: %d. They are not replayed.")
	count(r.assumedPriority, "Leases whose priority is not known: %d. 11, the default, is assumed.")
	count(r.inferred, "Targets that left before the export: %d. Their GPUs are assumed to be those of the leases that suspended them, and their priority 0.")
	count(r.unknown, "Targets that left before the export and were never suspended: %d. They are left out.")
	suspended := slices.ContainsFunc(r.Targets, func(t sim.RecordedTarget) bool { return len(t.Suspends) > 0 })
	if !suspended {
		all = append(all, "No target was suspended: how long that takes is assumed (--cost).")
	}
	return all
}
