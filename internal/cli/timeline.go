package cli

import (
	"maps"
	"slices"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// Size and bounds of a timeline.
const (
	columnTime    = 100 * time.Millisecond
	columnCount   = 600
	columnMargin  = 2   // columns that late events may still change
	keptTargets   = 256 // targets with a track
	columnFigures = 3
)

// level is a state that a track counts the time of; levels of different tracks share numbers.
type level uint8

// The levels of a GPU, which are those of its leases together: one that is waiting does not hide
// another that has the GPU quiet.
const (
	levelWaiting level = iota
	levelQuiet
	levelNone level = 0xff
)

// The levels of a target.
const (
	levelChanging level = iota
	levelSuspended
	levelQuarantined
)

// levelAway is the time without a connection to the daemon.
const levelAway level = 0

// column is the time that a track spent in each level, in one column of time.
type column struct {
	index int64
	spent [columnFigures]time.Duration
	begun int // leases
}

// track counts the time of one GPU, target or connection.
type track struct {
	level   level
	since   time.Duration
	columns [columnCount]column
}

// at returns the column of an index, empty if an older one had its place.
func (t *track) at(index int64) *column {
	c := &t.columns[index%columnCount]
	if c.index != index {
		*c = column{index: index}
	}
	return c
}

// set ends the present level, and begins another.
func (t *track) set(now time.Duration, to level) {
	now = max(now, t.since)
	if t.level != levelNone {
		for from := max(t.since, now-columnCount*columnTime); from < now; {
			c := t.at(int64(from / columnTime))
			end := min(now, time.Duration(c.index+1)*columnTime)
			c.spent[t.level] += end - from
			from = end
		}
	}
	t.level, t.since = to, now
}

// figures returns, for each column from first to last, the percentage of its time in each of the
// first n levels, rounded up; nil when all are 0.
func (t *track) figures(first, last int64, n int) []int {
	list := make([]int, 0, max(0, int(last-first+1)*n))
	some := false
	for i := first; i <= last; i++ {
		var c column
		if kept := t.columns[i%columnCount]; kept.index == i {
			c = kept
		}
		for _, spent := range c.spent[:n] {
			share := int((100*spent + columnTime - 1) / columnTime)
			some = some || share > 0
			list = append(list, share)
		}
	}
	if !some {
		return nil
	}
	return list
}

// begun returns the number of leases that began in each column; nil when all are 0.
func (t *track) begun(first, last int64) []int {
	list := make([]int, 0, max(0, int(last-first+1)))
	some := false
	for i := first; i <= last; i++ {
		n := 0
		if c := t.columns[i%columnCount]; c.index == i {
			n = c.begun
		}
		some = some || n > 0
		list = append(list, n)
	}
	if !some {
		return nil
	}
	return list
}

// openLease is a lease that has not ended.
type openLease struct {
	gpus  []uint32
	level level
}

// targetTrack is the track of a target, which stays until its columns are too old.
type targetTrack struct {
	track
	about *gpreemptv1.Target // nil until a reading has it
	gone  bool
}

// timeline has the last minute of leases on GPUs and of suspended targets, in columns. Its clock
// begins with it; base is that of the daemon, whose clock begins with each daemon.
type timeline struct {
	base    time.Duration
	gpus    map[uint32]*track
	targets map[string]*targetTrack
	leases  map[string]openLease
	away    track
}

func newTimeline() *timeline {
	return &timeline{gpus: map[uint32]*track{}, targets: map[string]*targetTrack{}, leases: map[string]openLease{}, away: track{level: levelNone}}
}

// begin takes over the state in a reading, now: the events that follow change it.
func (l *timeline) begin(now time.Duration, r reading) {
	l.base = now - r.status.GetClock().AsDuration()
	l.away.set(now, levelNone)
	l.forget(now)
	for _, g := range r.gpus {
		if l.gpus[g.GetGpuId()] == nil {
			l.gpus[g.GetGpuId()] = &track{level: levelNone, since: now}
		}
	}
	for _, lease := range r.leases {
		l.leases[lease.GetLeaseId()] = openLease{lease.GetGpuIds(), leaseLevel(lease.GetState())}
	}
	l.setGPUs(now)
	for _, t := range r.targets {
		l.setTarget(now, t.GetTargetId(), t.GetState())
	}
	l.describe(r)
}

// end notes that the daemon is away: nothing is known of leases and targets.
func (l *timeline) end(now time.Duration) {
	l.forget(now)
	l.setGPUs(now)
	l.away.set(now, levelAway)
}

// forget ends the states of leases and targets, which a reading begins again.
func (l *timeline) forget(now time.Duration) {
	clear(l.leases)
	for _, t := range l.targets {
		t.set(now, levelNone)
		t.gone = true
	}
}

// describe takes over names and GPUs of targets.
func (l *timeline) describe(r reading) {
	for _, t := range r.targets {
		if known := l.targets[t.GetTargetId()]; known != nil {
			known.about = t
		}
	}
}

// event adds a change of state.
func (l *timeline) event(e *gpreemptv1.Event) {
	now := l.base + e.GetClock().AsDuration()
	switch e.GetKind() {
	case gpreemptv1.EventKind_EVENT_KIND_LEASE:
		id := e.GetLeaseId()
		lease, known := l.leases[id]
		if !known {
			if e.GetFromLease() != gpreemptv1.LeaseState_LEASE_STATE_UNSPECIFIED {
				return
			}
			lease.gpus = e.GetGpuIds()
			for _, gpu := range lease.gpus {
				if t := l.gpus[gpu]; t != nil {
					t.at(int64(now/columnTime)).begun++
				}
			}
		}
		if lease.level = leaseLevel(e.GetToLease()); lease.level == levelNone || len(lease.gpus) == 0 {
			delete(l.leases, id)
		} else {
			l.leases[id] = lease
		}
		l.setGPUs(now, lease.gpus...)
	case gpreemptv1.EventKind_EVENT_KIND_TARGET:
		l.setTarget(now, e.GetTargetId(), e.GetToTarget())
	default:
	}
}

// setGPUs sets the level of GPUs, or of all, by their leases.
func (l *timeline) setGPUs(now time.Duration, some ...uint32) {
	for id, t := range l.gpus {
		if len(some) > 0 && !slices.Contains(some, id) {
			continue
		}
		to := levelNone
		for _, lease := range l.leases {
			if slices.Contains(lease.gpus, id) && (to == levelNone || lease.level > to) {
				to = lease.level
			}
		}
		t.set(now, to)
	}
}

func (l *timeline) setTarget(now time.Duration, id string, state gpreemptv1.TargetState) {
	t := l.targets[id]
	if t == nil {
		if l.prune(now); len(l.targets) >= keptTargets {
			return
		}
		t = &targetTrack{track: track{level: levelNone, since: now}}
		l.targets[id] = t
	}
	t.set(now, targetLevel(state))
	t.gone = state == gpreemptv1.TargetState_TARGET_STATE_GONE
}

// prune forgets targets that are gone, and whose columns are too old.
func (l *timeline) prune(now time.Duration) {
	maps.DeleteFunc(l.targets, func(_ string, t *targetTrack) bool { return t.gone && now-t.since > columnCount*columnTime })
}

// advance adds the time until now to all tracks, and returns the newest column that is complete.
func (l *timeline) advance(now time.Duration) int64 {
	l.prune(now)
	for _, t := range l.gpus {
		t.set(now, t.level)
	}
	for _, t := range l.targets {
		if !t.gone {
			t.set(now, t.level)
		}
	}
	l.away.set(now, l.away.level)
	return int64(now/columnTime) - columnMargin
}

func leaseLevel(s gpreemptv1.LeaseState) level {
	switch s {
	case gpreemptv1.LeaseState_LEASE_STATE_REQUESTED, gpreemptv1.LeaseState_LEASE_STATE_QUIESCING:
		return levelWaiting
	case gpreemptv1.LeaseState_LEASE_STATE_HELD:
		return levelQuiet
	default:
		return levelNone
	}
}

func targetLevel(s gpreemptv1.TargetState) level {
	switch s {
	case gpreemptv1.TargetState_TARGET_STATE_SUSPENDING, gpreemptv1.TargetState_TARGET_STATE_RESUMING:
		return levelChanging
	case gpreemptv1.TargetState_TARGET_STATE_SUSPENDED:
		return levelSuspended
	case gpreemptv1.TargetState_TARGET_STATE_QUARANTINED:
		return levelQuarantined
	default:
		return levelNone
	}
}
