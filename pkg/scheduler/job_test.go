package scheduler_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// ranks is a job of eight processes with a GPU each, and an online process on each GPU that
// needs it half of the time, at times of its own.
type ranks struct {
	*punctual
	jobs     func(rank int) string
	next     [8]scheduler.Time
	lease    [8]scheduler.LeaseID
	quiesced int
	answered int
}

func newRanks(p scheduler.Policy, jobs func(rank int) string) (*ranks, error) {
	r := &ranks{punctual: newPunctual(p, Seeded(1)), jobs: jobs}
	r.cost = func(scheduler.ActionKind) time.Duration { return 500 * time.Microsecond }
	r.fail = func() bool { return false }
	follow := r.Taken
	r.Taken = func(now scheduler.Time, ev scheduler.Event, actions []scheduler.Action) {
		follow(now, ev, actions)
		for _, a := range actions {
			if a.Kind == scheduler.ActAnswer {
				r.answered++
				if a.Answer.Quiesced {
					r.quiesced++
				}
			}
		}
	}
	for i := range r.next {
		gpu := gpreempt.GPUID(i + 1)
		err := r.Step(scheduler.TargetSeen{
			Target: gpreempt.ProcessKey{PID: int32(100 + i), Start: 1}, Job: jobs(i), Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{gpu}, Queues: 1,
		})
		if err != nil {
			return nil, err
		}
		r.next[i] = r.some(100)
	}
	return r, nil
}

// some is up to n milliseconds.
func (r *ranks) some(n int) time.Duration { return time.Duration(r.Roll(n*1000)) * time.Microsecond }

// serve lets time pass and has the online processes work.
func (r *ranks) serve(until scheduler.Time) error {
	for {
		i := 0
		for k := range r.next {
			if r.next[k] < r.next[i] {
				i = k
			}
		}
		if r.next[i] > until {
			return r.run(until)
		}
		if err := r.run(r.next[i]); err != nil {
			return err
		}
		if id := r.lease[i]; id != 0 {
			r.lease[i] = 0
			if err := r.Step(scheduler.LeaseFinished{Lease: id, End: scheduler.EndCompleted}); err != nil {
				return err
			}
		} else {
			client := scheduler.ClientID{PID: int32(i + 1)}
			err := r.Request(scheduler.LeaseRequested{
				Client: client, User: scheduler.UserID(fmt.Sprint(client)), GPUs: []gpreempt.GPUID{gpreempt.GPUID(i + 1)}, Priority: gpreempt.PriorityHigh,
				TTL: time.Second, MaxWait: scheduler.PolicyDefault,
			})
			if err != nil {
				return err
			}
			r.lease[i] = r.LastID
		}
		r.next[i] = r.Now + 30*time.Millisecond + r.some(40)
	}
}

// TestRanksOnEightGPUsProgressTogether has uncorrelated leases that take half of the time on
// each GPU. The job runs as a whole for at least the share floor.
func TestRanksOnEightGPUsProgressTogether(t *testing.T) {
	t.Parallel()
	const least, most = 0.10, 0.13
	p := scheduler.DefaultPolicy()
	p.ShareWindow = 10 * time.Second // progress is of a minute then
	r, err := newRanks(p, func(int) string { return "torch-1" })
	if err == nil { // the first seconds use what the share floor permits to borrow
		err = r.serve(20 * time.Second)
	}
	before := r.Observer.jobs["torch-1"].total
	for now := 21 * time.Second; err == nil && now <= 140*time.Second; now += time.Second {
		if err = r.serve(now); err != nil || now < 80*time.Second {
			continue
		}
		// Within a minute the share may vary by what was borrowed a little earlier.
		job := r.Core.Jobs()[0]
		if job.Name != "torch-1" || job.Targets != 8 || job.Over < 55*time.Second || job.Ran < least-0.005 || job.Ran > most || job.Slow {
			t.Fatalf("at %v: %+v; it should run %.0f%% to %.0f%% of the time", now, job, 100*least, 100*most)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	share := float64(r.Observer.jobs["torch-1"].total-before) / float64(120*time.Second)
	if share < least-0.0005 { // a suspension may have begun within the stretch and ended after it
		t.Errorf("together %.2f%% of the time, want %.1f%%", 100*share, 100*least)
	}
	each := time.Duration(0)
	for _, info := range r.Core.Targets() {
		each += info.SuspendedTotal / 8
	}
	t.Logf("simulated: all ranks together %.2f%% of the time, each %.1f%%; %d of %d announcements quiesced",
		100*share, 100-100*float64(each)/float64(r.Now), r.quiesced, r.answered)
}

// TestShareFloorHoldsForJobs storms a job on two GPUs with leases. As in TestShareFloorHolds,
// since the job began the time in which not all of it ran is at most
//
//	(1-f)*T + f*(1-f)*W + f*D
//
// where D is at most a suspend and a resume.
func TestShareFloorHoldsForJobs(t *testing.T) {
	t.Parallel()
	checked, tight := 0, 0
	for seed := range uint64(24) {
		roll := Seeded(seed)
		pick := func(from ...time.Duration) time.Duration { return from[roll(len(from))] }
		p := scheduler.DefaultPolicy()
		p.ShareFloor = []float64{0.01, 0.1, 0.25, 0.5, 0.75, 0.95}[roll(6)]
		p.ShareWindow = pick(100*time.Millisecond, 333*time.Millisecond, 2*time.Second)
		p.MaxSuspend = pick(10*time.Millisecond, 100*time.Millisecond, 2*time.Second, time.Minute)
		p.MinRun = pick(time.Millisecond, 20*time.Millisecond)
		p.Linger = pick(0, scheduler.LingerLearned, 20*time.Millisecond)
		slowest := pick(0, 400*time.Microsecond, 5*time.Millisecond)
		m := newPunctual(p, roll)
		m.cost = func(scheduler.ActionKind) time.Duration { return slowest/4 + slowest*time.Duration(roll(16))/16 }
		m.fail = func() bool { return false }
		f := p.ShareFloor
		m.check = func(c *scheduler.Core) error {
			j := m.Observer.jobs["job"]
			if j == nil {
				return nil
			}
			checked++
			age := m.Now - j.since
			bound := (1-f)*float64(age) + f*(1-f)*float64(p.ShareWindow) + f*2*1.25*float64(slowest) + 2e-6*float64(age) + float64(10*checked)
			away := float64(age - j.total)
			if away > bound {
				return fmt.Errorf("not all of the job ran for %v in its first %v, with a floor of %v at most %v", time.Duration(away), age, f, time.Duration(bound))
			}
			if away > 0.95*bound {
				tight++
			}
			return c.CheckInvariants()
		}
		if err := storm(m, "job", 400, pick(time.Millisecond, 10*time.Millisecond, 50*time.Millisecond)); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	t.Logf("checked %d times, %d of them close to the bound", checked, tight)
	if checked < 20_000 || tight < 1000 {
		t.Error("the storm is too mild to prove anything")
	}
}
