package events

import (
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// shadowRows bounds the rows of the report of a shadow policy; later ones are counted together.
const shadowRows = 256

// ShadowRow is what a shadow policy would have done to one process for one owner of leases.
type ShadowRow struct {
	// Target is zero in the row of those for which there was no room.
	Target gpreempt.ProcessKey
	scheduler.Shadowed
	// Suspends is how often it would have been suspended, Total for how long together, and Longest
	// the longest of them; what lasts is in it.
	Suspends       uint64
	Total, Longest time.Duration
	// since is when the one that lasts began, if lasts.
	since scheduler.Time
	lasts bool
}

// until returns a row with what lasts, as it would be if that ended at a time.
func (r ShadowRow) until(at scheduler.Time) ShadowRow {
	if r.lasts {
		r.Total += at - r.since
		r.Longest = max(r.Longest, at-r.since)
		r.lasts = false
	}
	return r
}

// shadowReport is what the present shadow policy, or the last one, would have done.
type shadowReport struct {
	from, to scheduler.Time // to is 0 while it is in force
	rows     []ShadowRow    // in the order of their first suspension
}

func (s *shadowReport) record(r scheduler.Record) {
	switch {
	case r.Kind == scheduler.RecordPolicy && r.On:
		*s = shadowReport{from: r.At}
	case r.Kind == scheduler.RecordPolicy && s.to == 0:
		s.to = r.At
		s.end(gpreempt.ProcessKey{}, r.At)
	case r.Kind == scheduler.RecordTarget && r.ToTarget == scheduler.TargetLeft, r.Kind == scheduler.RecordShadow && r.ToTarget != scheduler.TargetSuspended:
		s.end(r.Target, r.At)
	case r.Kind == scheduler.RecordShadow:
		row := s.row(r.Target, *r.Shadow)
		row.Suspends++
		row.since, row.lasts = r.At, row.Target == r.Target
	}
}

// end ends what lasts of a target, or of all for the zero key.
func (s *shadowReport) end(target gpreempt.ProcessKey, at scheduler.Time) {
	for n, row := range s.rows {
		if target.IsZero() || row.Target == target {
			s.rows[n] = row.until(at)
		}
	}
}

// row returns the row of a target, or a new one.
func (s *shadowReport) row(target gpreempt.ProcessKey, of scheduler.Shadowed) *ShadowRow {
	for n := range s.rows {
		if row := &s.rows[n]; row.Target == target && row.Shadowed == of || row.Target.IsZero() {
			return row
		}
	}
	if len(s.rows) == shadowRows {
		target, of = gpreempt.ProcessKey{}, scheduler.Shadowed{}
	}
	s.rows = append(s.rows, ShadowRow{Target: target, Shadowed: of})
	return &s.rows[len(s.rows)-1]
}

// Shadow returns what the present shadow policy, or the last one, would have done, and for how long it has been in
// force.
func (l *Log) Shadow(now scheduler.Time) (rows []ShadowRow, lasted time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &l.counters.report
	if s.to != 0 {
		now = s.to
	}
	for _, row := range s.rows {
		rows = append(rows, row.until(now))
	}
	return rows, now - s.from
}
