package scheduler

import (
	"maps"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// jobCells is the number of parts of the window in which the progress of a job is measured.
const jobCells = 12

// progress is that of the offline targets with one TargetSeen.Job.
type progress struct {
	name    string
	members int
	away    int // members that are away
	parts   []*job

	// ran is the time in which all members ran, in the cells of a sliding window; the cell
	// of a time is its number of cell lengths, modulo jobCells.
	ran    [jobCells]time.Duration
	window time.Duration
	since  Time // the measurement began
	at     Time // ran is counted up to here
}

// JobInfo is a job as readers see it.
type JobInfo struct {
	Name    string
	Targets int
	// Ran is the share of the time Over, which ends now, in which all targets of the job ran.
	// Over is at most the window of the measurement: a minute, or six times the policy's
	// ShareWindow if that is longer. It is 0 for a new job.
	Ran  float64
	Over time.Duration
	// Slow: in a whole window it ran less than four fifths of the share floor, which is less
	// than the floor permits to borrow within the window.
	Slow bool
}

func jobWindow(p Policy) time.Duration { return max(time.Minute, 6*p.ShareWindow) }

// progressOf returns that of the name of a target; nil if it has none, or is not offline.
func (c *Core) progressOf(t *target) *progress {
	if t.Class != gpreempt.Offline || t.Job == "" {
		return nil
	}
	p := c.progress[t.Job]
	if p == nil {
		p = &progress{name: t.Job}
		p.restart(c.now, jobWindow(c.policy))
		c.progress[p.name] = p
	}
	return p
}

// forget removes one that has no members.
func (c *Core) forget(p *progress) {
	if p != nil && p.members == 0 {
		delete(c.progress, p.name)
	}
}

// part returns the job with some owners, nil without one; p may be nil.
func (p *progress) part(owners []gpreempt.ProcessKey) *job {
	if p != nil {
		for _, j := range p.parts {
			if slices.Equal(j.owners, owners) {
				return j
			}
		}
	}
	return nil
}

// add counts members that come or leave, and those that are away; p may be nil.
func (p *progress) add(now Time, members, away int) {
	if p != nil {
		p.charge(now)
		p.members += members
		p.away += away
	}
}

// restart begins the measurement again.
func (p *progress) restart(now Time, window time.Duration) {
	p.window, p.since, p.at = window, now, now
	clear(p.ran[:])
}

// begin returns when the window that ends now began.
func (p *progress) begin(now Time) Time {
	cell := p.window / jobCells
	return max(p.since, (now/cell-jobCells+1)*cell)
}

// charge counts the time since the last charge.
func (p *progress) charge(now Time) {
	cell := p.window / jobCells
	if begin := p.begin(now); p.at < begin {
		p.at = begin
		p.ran[p.at/cell%jobCells] = 0
	}
	for p.at < now {
		next := min(now, (p.at/cell+1)*cell)
		if p.away == 0 {
			p.ran[p.at/cell%jobCells] += next - p.at
		}
		if p.at = next; p.at%cell == 0 {
			p.ran[p.at/cell%jobCells] = 0
		}
	}
}

func (c *Core) jobInfo(p *progress) JobInfo {
	now := *p
	now.charge(c.now)
	info := JobInfo{Name: p.name, Targets: p.members, Over: c.now - p.begin(c.now)}
	if info.Over > 0 {
		var ran time.Duration
		for _, d := range now.ran {
			ran += d
		}
		info.Ran = float64(ran) / float64(info.Over)
	}
	// The floor permits (1-floor)*T + floor*(1-floor)*ShareWindow away, and T is at least
	// five and a half ShareWindows: what is left is more than 0.8 of the floor.
	info.Slow = c.now-p.since >= p.window && !c.policy.Shadow && info.Ran < 0.8*c.policy.ShareFloor
	return info
}

// Jobs returns every job, by name.
func (c *Core) Jobs() []JobInfo {
	infos := make([]JobInfo, 0, len(c.progress))
	for _, name := range slices.Sorted(maps.Keys(c.progress)) {
		infos = append(infos, c.jobInfo(c.progress[name]))
	}
	return infos
}
