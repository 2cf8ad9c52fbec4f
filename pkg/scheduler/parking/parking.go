// Package parking keeps hardware slots for compute queues free: it decides which idle offline jobs
// are suspended although no lease asks for it. It takes what is known of their queues and returns
// pins for the scheduler, without I/O, goroutines or a clock.
package parking

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// AfterIdle is how long a job has had no work, and no other queues, before it may be parked. No job
// is parked more often than that.
const AfterIdle = time.Second

// Budget divides the slots for compute queues of every GPU, in percent. When more queues are mapped
// than it permits, idle offline jobs are parked, the lowest priority first, until the rest fits. The
// zero value parks nothing.
type Budget struct {
	// Online is what offline queues leave free for the queues of all others.
	Online int
	// Offline is the most that queues of offline targets may take.
	Offline int
	// Spare is what all queues together leave free, for those that are created next.
	Spare int
}

// On reports whether the budget parks anything.
func (b Budget) On() bool { return b != Budget{} }

// Validate checks the shares.
func (b Budget) Validate() error {
	switch {
	case !b.On():
		return nil
	case b.Online < 0 || b.Offline < 0 || b.Spare < 0:
		return fmt.Errorf("online %d, offline %d, spare %d: a share is at least 0 percent", b.Online, b.Offline, b.Spare)
	case b.Online+b.Offline+b.Spare != 100:
		return errors.New("online, offline and spare are percent of the same slots: their sum must be 100")
	}
	return nil
}

// Load is what is known of the compute queues of a target.
type Load struct {
	// Queues is their number on each GPU.
	Queues map[gpreempt.GPUID]int
	// Busy: one has work, or did some since the last look, or that is not known.
	Busy bool
}

// Look is what there is at a time.
type Look struct {
	Now    scheduler.Time
	Policy scheduler.Policy
	Budget Budget
	// Slots is how many compute queues fit each GPU at once; a GPU without is not looked at.
	Slots map[gpreempt.GPUID]int
	// Targets are all, as Core.Targets returns them. One without a Load is busy.
	Targets []scheduler.TargetInfo
	Loads   map[gpreempt.ProcessKey]Load
}

// Parking remembers what each target did. The zero value has seen nothing.
type Parking struct {
	seen map[gpreempt.ProcessKey]history
}

// history is that of a target: since when it is idle, when it was parked, and resumed, last.
type history struct {
	load                Load
	idle, parked, freed scheduler.Time
}

// member is a target of a job.
type member struct {
	scheduler.TargetInfo
	history
}

func (m *member) offline() bool { return m.Class == gpreempt.Offline }

// job is what is parked together: a job, or a target without one.
type job struct {
	members  []*member
	priority gpreempt.Priority
	parked   bool
	wanted   bool
}

func (j *job) any(is func(*member) bool) bool { return slices.ContainsFunc(j.members, is) }

// use is a number of queues, and how many of them are of offline targets.
type use struct{ all, offline int }

func (u *use) add(m *member, n int) {
	u.all += n
	if m.offline() {
		u.offline += n
	}
}

// slots are those of a GPU: the queues that the budget permits, those of all targets, and those
// without the parked ones.
type slots struct{ permitted, queues, mapped use }

func (s *slots) tooMany(u use) bool {
	return u.all > s.permitted.all || u.offline > s.permitted.offline
}

// gpus are the slots of the GPUs where they are known.
type gpus map[gpreempt.GPUID]*slots

// each calls do for the GPUs that a target has queues on.
func (g gpus) each(m *member, do func(s *slots, queues int)) {
	for id, n := range m.load.Queues {
		if s := g[id]; s != nil && n > 0 {
			do(s, n)
		}
	}
}

// Step returns the pins to post. Parked jobs, and those that a lease suspends, count as if they ran,
// so that a decision does not depend on its own effect.
func (p *Parking) Step(l Look) (pins []scheduler.Pin) {
	jobs := p.jobs(l)
	g := gpus{}
	for id, n := range l.Slots {
		if n > 0 {
			g[id] = &slots{permitted: use{n * (100 - l.Budget.Spare) / 100, n * l.Budget.Offline / 100}}
		}
	}
	var idle []*job
	for _, j := range jobs {
		for _, m := range j.members {
			g.each(m, func(s *slots, n int) {
				s.queues.add(m, n)
				if !j.unmapped(m) {
					s.mapped.add(m, n)
				}
			})
		}
		if l.Budget.On() && j.mayPark(l) && j.left(l) > spare(l.Policy)/8 && !(j.parked && l.Now >= j.turnEnds(l)) {
			idle = append(idle, j)
		}
	}
	slices.SortStableFunc(idle, func(a, b *job) int {
		if a.parked != b.parked {
			return map[bool]int{true: -1, false: 1}[a.parked]
		}
		return cmp.Compare(a.priority, b.priority)
	})
	for _, j := range idle {
		if j.wanted = j.any(g.crowded); j.wanted {
			for _, m := range j.members {
				g.each(m, func(s *slots, n int) { s.queues.add(m, -n) })
			}
		}
	}
	for _, j := range jobs {
		pin := scheduler.Pin{Cause: scheduler.CauseHQDRoom}
		switch {
		case j.wanted && !j.parked:
			pin.Cause, pin.For = scheduler.CauseHQDBudget, l.Policy.MaxSuspend
		case j.wanted || !j.parked:
			continue
		case !l.Budget.On():
		case j.any((*member).busy):
			pin.Cause = scheduler.CauseHQDBusy
		case j.mayPark(l) && j.left(l) > 0 && !g.fits(j):
			continue // what is parked in its place has to be suspended first
		}
		for _, m := range j.members {
			pin.Target = m.Key
			pins = append(pins, pin)
			if pin.For > 0 {
				m.history.parked = l.Now
			} else {
				m.freed = l.Now
			}
			p.seen[m.Key] = m.history
		}
	}
	return pins
}

func (m *member) busy() bool { return m.load.Busy }

// jobs returns what there is, in the order of the targets, and remembers what they did.
func (p *Parking) jobs(l Look) (jobs []*job) {
	seen, named := map[gpreempt.ProcessKey]history{}, map[string]*job{}
	for _, info := range l.Targets {
		load, known := l.Loads[info.Key]
		load.Busy = load.Busy || !known
		h, before := p.seen[info.Key]
		if !before || load.Busy || !maps.Equal(load.Queues, h.load.Queues) {
			h.idle = l.Now
		}
		h.load = load
		seen[info.Key] = h
		j := named[info.Job.Name]
		if j == nil {
			j = &job{}
			jobs = append(jobs, j)
		}
		if info.Job.Name != "" {
			named[info.Job.Name] = j
		}
		j.members = append(j.members, &member{info, h})
		j.priority = max(j.priority, info.Priority)
		j.parked = j.parked || info.Pin == scheduler.CauseHQDBudget
	}
	p.seen = seen
	return jobs
}

// mayPark reports whether nothing is known that forbids to park the job: every member can be
// suspended and has been idle for long enough.
func (j *job) mayPark(l Look) bool {
	return !j.any(func(m *member) bool {
		rested := j.parked || l.Now >= max(m.idle, m.parked)+AfterIdle && (m.freed == 0 || l.Now >= m.freed+l.Policy.MinRun)
		return !m.offline() || !m.Ready || m.CannotSuspend || m.Pin == scheduler.CauseHold || m.Pin == scheduler.CauseByHand || m.load.Busy || !rested
	})
}

// turnEnds returns when another job is to take the place of a parked one: a while before
// max_suspend ends its suspension.
func (j *job) turnEnds(l Look) (at scheduler.Time) {
	for _, m := range j.members {
		at = max(at, m.parked+l.Policy.MaxSuspend-l.Policy.MaxSuspend/8)
	}
	return at
}

// spare is the part of the share budget that parking may use up: half of it is left for leases.
func spare(p scheduler.Policy) time.Duration { return p.MaxBudget() / 2 }

// left returns how much of it the job has left.
func (j *job) left(l Look) time.Duration {
	left := scheduler.Never
	for _, m := range j.members {
		if l.Policy.ShareFloor > 0 {
			left = min(left, m.BudgetLeft-spare(l.Policy))
		}
	}
	return left
}

// crowded reports whether the target has queues on a GPU with too many.
func (g gpus) crowded(m *member) (is bool) {
	g.each(m, func(s *slots, _ int) { is = is || s.tooMany(s.queues) })
	return is
}

// unmapped reports whether the target is off the GPUs because it is parked. One that a lease
// suspends counts as mapped: it returns when the lease ends.
func (j *job) unmapped(m *member) bool {
	return j.parked && m.State == scheduler.TargetSuspended
}

// fits reports whether a parked job can return now, and counts it as mapped then.
func (g gpus) fits(j *job) bool {
	fits := true
	count := func(sign int) {
		for _, m := range j.members {
			if j.unmapped(m) {
				g.each(m, func(s *slots, n int) {
					s.mapped.add(m, sign*n)
					fits = fits && !s.tooMany(s.mapped)
				})
			}
		}
	}
	if count(1); !fits {
		count(-1)
	}
	return fits
}
