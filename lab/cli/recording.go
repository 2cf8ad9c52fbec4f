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

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/lab/spans"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// maxLogLine bounds a line of an event log, in bytes.
const maxLogLine = 1 << 20

// logLine is a line of gpctl events export, or of gpctl events -o json: one message of the API by
// its name, besides the version of the format.
type logLine struct {
	Format                                    int
	Status, Policy, GPU, Lease, Target, Event json.RawMessage
}

// recording is a sim.Recording in the making, with what the log does not say.
type recording struct {
	sim.Recording
	Backend string // of the daemon, "" when unknown
	Policy  string // that was in force, "" when unknown
	Events  int

	begin, now time.Duration // of the daemon's clock
	revision   uint64
	builder    spans.Builder
	ended      []spans.Span // by the last event
	leases     []spans.Span // each whole, in the order of their ends
	targets    map[string]*recordedTarget
	gpus       map[gpreempt.GPUID]bool
	priorities map[string]gpreempt.Priority // of leases

	missing           uint64 // revisions
	clipped           int    // leases
	byHand            int    // suspensions
	assumedPriority   int    // leases
	unknown, inferred int    // targets
}

// recordedTarget is a target in the making; its times are of the daemon's clock.
type recordedTarget struct {
	sim.RecordedTarget
	about  *gpreemptv1.Target // nil without a line about it
	lived  bool
	causes map[gpreempt.GPUID]bool // GPUs of leases that it was suspended for
}

// readRecording reads an event log. Errors name the line.
func readRecording(r io.Reader) (*recording, error) {
	rec := &recording{gpus: map[gpreempt.GPUID]bool{}, targets: map[string]*recordedTarget{}, priorities: map[string]gpreempt.Priority{}}
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
			err = rec.add(&l)
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

// add adds a line. Fields that this gplab does not know are ignored.
func (r *recording) add(l *logLine) error {
	switch {
	case l.Format > term.ExportFormat:
		return fmt.Errorf("the format is %d and this gplab reads %d: use the gplab that wrote it", l.Format, term.ExportFormat)
	case l.Status != nil:
		m := &gpreemptv1.GetStatusResponse{}
		err := decode(l.Status, m)
		r.Backend = m.GetBackend()
		return err
	case l.Policy != nil:
		m := &gpreemptv1.Policy{}
		err := decode(l.Policy, m)
		r.Policy = m.GetPreset()
		return err
	case l.GPU != nil:
		m := &gpreemptv1.Gpu{}
		err := decode(l.GPU, m)
		r.gpus[gpreempt.GPUID(m.GetGpuId())] = true
		return err
	case l.Lease != nil:
		m := &gpreemptv1.Lease{}
		err := decode(l.Lease, m)
		r.priorities[m.GetLeaseId()] = gpreempt.Priority(min(m.GetPriority(), uint32(gpreempt.MaxPriority)))
		return err
	case l.Target != nil:
		m := &gpreemptv1.Target{}
		if err := decode(l.Target, m); err != nil {
			return err
		}
		t, err := r.target(m.GetTargetId())
		if err == nil {
			t.about = m
		}
		return err
	case l.Event != nil:
		m := &gpreemptv1.Event{}
		if err := decode(l.Event, m); err != nil {
			return err
		}
		return r.event(m)
	}
	return nil
}

func decode(raw json.RawMessage, m proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(raw, m)
}

func (r *recording) target(id string) (*recordedTarget, error) {
	if t := r.targets[id]; t != nil {
		return t, nil
	}
	key, err := gpreempt.ParseProcessKey(id)
	if err != nil {
		return nil, err
	}
	t := &recordedTarget{RecordedTarget: sim.RecordedTarget{Key: key}, causes: map[gpreempt.GPUID]bool{}}
	r.targets[id] = t
	return t, nil
}

func (r *recording) event(e *gpreemptv1.Event) error {
	clock := e.GetClock().AsDuration()
	if clock < 0 {
		return fmt.Errorf("%v is not a clock", clock)
	}
	if r.Events == 0 {
		if e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_ADMIN {
			return nil // may be older than the log, which begins with the first other event
		}
		r.begin, r.now = clock, clock
	}
	if e.GetRevision() <= r.revision || clock < r.now {
		return fmt.Errorf("revision %d follows %d: the log is of two runs of the daemon; cut it there", e.GetRevision(), r.revision)
	}
	if r.Events > 0 {
		r.missing += e.GetRevision() - r.revision - 1
	}
	if e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_TARGET {
		if _, err := r.target(e.GetTargetId()); err != nil {
			return err
		}
	}
	r.revision, r.now = e.GetRevision(), clock
	r.Events++
	r.ended = r.builder.Add(e, r.ended[:0])
	for i := range r.ended {
		r.span(&r.ended[i])
	}
	return nil
}

// span adds a span, in the order of their ends.
func (r *recording) span(s *spans.Span) {
	switch {
	case s.Kind == spans.Lease:
		r.leases = append(r.leases, *s)
	case s.Target != "":
		t := r.targets[s.Target]
		if !t.lived {
			t.lived, t.From = true, s.Begin
		}
		t.Until = s.End
		if s.Kind == spans.Suspending && s.Cause == string(scheduler.CauseByHand) {
			r.byHand++
		}
		switch took := s.End - s.Begin; {
		case s.Open || s.Clipped || !s.Done():
		case s.Kind == spans.Suspending:
			t.Suspends = append(t.Suspends, took)
		case s.Kind == spans.Resuming:
			t.Resumes = append(t.Resumes, took)
		}
		for _, id := range s.GPUs {
			t.causes[gpreempt.GPUID(id)] = true
		}
	}
}

func ids(of []uint32) (list []gpreempt.GPUID) {
	for _, id := range of {
		list = append(list, gpreempt.GPUID(id))
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// finish makes the recording, with times from its beginning.
func (r *recording) finish() {
	r.Length = max(r.now-r.begin, time.Millisecond)
	for _, s := range r.builder.Open(r.now, nil) {
		r.span(&s)
	}
	for _, id := range slices.Sorted(maps.Keys(r.targets)) {
		r.addTarget(r.targets[id])
	}
	slices.SortFunc(r.leases, func(a, b spans.Span) int { return cmp.Or(cmp.Compare(a.Begin, b.Begin), cmp.Compare(a.Seq, b.Seq)) })
	for _, s := range r.leases {
		r.addLease(&s)
	}
	r.GPUs = slices.Sorted(maps.Keys(r.gpus))
	r.leases, r.targets = nil, nil
}

func (r *recording) addLease(s *spans.Span) {
	if s.Clipped {
		r.clipped++
		return
	}
	p, known := r.priorities[s.Lease]
	if !known {
		p = gpreempt.PriorityHigh
		r.assumedPriority++
	}
	out := sim.RecordedLease{GPUs: ids(s.GPUs), Priority: p, At: s.Begin - r.begin, Work: s.End - s.Answered}
	for _, id := range out.GPUs {
		r.gpus[id] = true
	}
	r.Leases = append(r.Leases, out)
}

func (r *recording) addTarget(t *recordedTarget) {
	out := t.RecordedTarget
	if out.From, out.Until = out.From-r.begin, out.Until-r.begin; !t.lived {
		out.From, out.Until = 0, r.Length
	}
	switch {
	case t.about.GetClass() == gpreemptv1.Class_CLASS_OFFLINE:
		out.Priority, out.GPUs = gpreempt.Priority(min(t.about.GetPriority(), uint32(gpreempt.MaxPriority))), ids(t.about.GetGpuIds())
		out.Job = t.about.GetJob().GetName()
	case t.about != nil:
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
