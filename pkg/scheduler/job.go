package scheduler

import (
	"maps"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// jobCells is the number of parts of the window in which the progress of a job is measured.
const jobCells = 12

// job is the offline targets with one TargetSeen.Job.
type job struct {
	name    string
	members int
	away    int     // members that are away
	gangs   []*gang // of its members, one for each set of owners

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

// joinJob makes the target a member of the job that it names.
func (c *Core) joinJob(t *target) {
	name := ""
	if t.class == gpreempt.Offline {
		name = t.jobName
	}
	if t.job != nil && t.job.name == name {
		return
	}
	c.leaveJob(t)
	if name == "" {
		return
	}
	j := c.jobs[name]
	if j == nil {
		j = &job{name: name}
		j.restart(c.now, jobWindow(c.policy))
		c.jobs[name] = j
	}
	j.charge(c.now)
	j.members++
	if t.isAway() {
		j.away++
	}
	t.job = j
}

func (c *Core) leaveJob(t *target) {
	j := t.job
	if j == nil {
		return
	}
	j.charge(c.now)
	j.members--
	if t.isAway() {
		j.away--
	}
	if j.members == 0 {
		delete(c.jobs, j.name)
	}
	t.job = nil
}

// gangOf returns the gang with some owners, nil without one.
func (j *job) gangOf(owners []gpreempt.ProcessKey) *gang {
	for _, g := range j.gangs {
		if slices.Equal(g.owners, owners) {
			return g
		}
	}
	return nil
}

// moved counts a member that left the GPUs, or returned; j may be nil.
func (j *job) moved(now Time, by int) {
	if j != nil {
		j.charge(now)
		j.away += by
	}
}

// restart begins the measurement again.
func (j *job) restart(now Time, window time.Duration) {
	j.window, j.since, j.at = window, now, now
	clear(j.ran[:])
}

// begin returns when the window that ends now began.
func (j *job) begin(now Time) Time {
	cell := j.window / jobCells
	return max(j.since, (now/cell-jobCells+1)*cell)
}

// charge counts the time since the last charge.
func (j *job) charge(now Time) {
	cell := j.window / jobCells
	if begin := j.begin(now); j.at < begin {
		j.at = begin
		j.ran[j.at/cell%jobCells] = 0
	}
	for j.at < now {
		next := min(now, (j.at/cell+1)*cell)
		if j.away == 0 {
			j.ran[j.at/cell%jobCells] += next - j.at
		}
		if j.at = next; j.at%cell == 0 {
			j.ran[j.at/cell%jobCells] = 0
		}
	}
}

func (c *Core) jobInfo(j *job) JobInfo {
	now := *j
	now.charge(c.now)
	info := JobInfo{Name: j.name, Targets: j.members, Over: c.now - j.begin(c.now)}
	if info.Over > 0 {
		var ran time.Duration
		for _, d := range now.ran {
			ran += d
		}
		info.Ran = float64(ran) / float64(info.Over)
	}
	// The floor permits (1-floor)*T + floor*(1-floor)*ShareWindow away, and T is at least
	// five and a half ShareWindows: what is left is more than 0.8 of the floor.
	info.Slow = c.now-j.since >= j.window && !c.policy.Shadow && info.Ran < 0.8*c.policy.ShareFloor
	return info
}

// Jobs returns every job, by name.
func (c *Core) Jobs() []JobInfo {
	infos := make([]JobInfo, 0, len(c.jobs))
	for _, name := range slices.Sorted(maps.Keys(c.jobs)) {
		infos = append(infos, c.jobInfo(c.jobs[name]))
	}
	return infos
}
