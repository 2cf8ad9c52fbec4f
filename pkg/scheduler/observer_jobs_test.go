package scheduler_test

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// seenJobs measures the progress of jobs in the simplest way: it keeps every stretch of time
// in which all processes of a job ran.
type seenJobs map[string]*seenJob

type seenJob struct {
	targets  int
	window   time.Duration
	since    scheduler.Time
	ran      [][2]scheduler.Time // within the window
	total    time.Duration
	together bool
	at       scheduler.Time
}

// watch takes in the state after a step.
func (jobs seenJobs) watch(o *Observer) {
	window := max(time.Minute, 6*o.policy.ShareWindow)
	targets, together := map[string]int{}, map[string]bool{}
	for _, t := range o.Targets {
		if t.Class != gpreempt.Offline || t.Job == "" || t.state == scheduler.TargetNone {
			continue
		}
		if targets[t.Job]++; targets[t.Job] == 1 {
			together[t.Job] = true
		}
		together[t.Job] = together[t.Job] && !Away(t.state)
	}
	for name, n := range targets {
		j := jobs[name]
		if j == nil || j.window != window {
			j = &seenJob{window: window, since: o.now, at: o.now}
			jobs[name] = j
		}
		if j.together && o.now > j.at {
			j.ran = append(j.ran, [2]scheduler.Time{j.at, o.now})
			j.total += o.now - j.at
		}
		for len(j.ran) > 0 && j.ran[0][1] < o.now-window {
			j.ran = j.ran[1:]
		}
		j.targets, j.together, j.at = n, together[name], o.now
	}
	maps.DeleteFunc(jobs, func(name string, _ *seenJob) bool { return targets[name] == 0 })
}

// checkJobs compares the jobs of a core with those that were seen.
func (o *Observer) checkJobs(got []scheduler.JobInfo) error {
	names := slices.Sorted(maps.Keys(o.jobs))
	if len(got) != len(names) {
		return fmt.Errorf("at %v: readers see jobs %+v of %v", o.now, got, names)
	}
	for i, info := range got {
		j := o.jobs[names[i]]
		age := o.now - j.since
		longest := min(age, j.window)
		if info.Over > longest || info.Over < min(age, j.window*11/12-time.Nanosecond) {
			return fmt.Errorf("at %v: the progress of %+v is measured over %v, and the job is %v old", o.now, info, info.Over, age)
		}
		var ran time.Duration
		for _, stretch := range j.ran {
			ran += max(0, stretch[1]-max(stretch[0], o.now-info.Over))
		}
		share := 0.0
		if info.Over > 0 {
			share = float64(ran) / float64(info.Over)
		}
		slow := age >= j.window && !o.policy.Shadow && share < 0.8*o.policy.ShareFloor
		if info.Name != names[i] || info.Targets != j.targets || math.Abs(info.Ran-share) > 1e-9 || info.Slow != slow && math.Abs(share-0.8*o.policy.ShareFloor) > 1e-9 {
			return fmt.Errorf("at %v: readers see job %+v, and it has %d targets that ran together %v of the time, slow %v", o.now, info, j.targets, share, slow)
		}
		if info.Slow {
			o.Counts["SlowJobs"]++
		}
		if info.Over > 0 && ran < info.Over {
			o.Counts["AwayJobs"]++
		}
	}
	return nil
}
