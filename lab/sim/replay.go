package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Recording is what a daemon's event log says about a stretch of time: who announced work on which
// GPUs, and which targets were there. Times are from its beginning.
type Recording struct {
	Length  time.Duration
	GPUs    []gpreempt.GPUID
	Targets []RecordedTarget
	Leases  []RecordedLease // in the order of At
}

// MaxRecording bounds a recording.
const MaxRecording = 31 * 24 * time.Hour

// RecordedTarget is a process that was offline.
type RecordedTarget struct {
	Key      gpreempt.ProcessKey
	Job      string
	Priority gpreempt.Priority
	GPUs     []gpreempt.GPUID // ascending
	// From and Until bound its life within the recording.
	From, Until time.Duration
	// Suspends and Resumes are how long each took. A replay uses them in this order, and again
	// from the first.
	Suspends, Resumes []time.Duration
}

// RecordedLease is an announcement.
type RecordedLease struct {
	GPUs     []gpreempt.GPUID // ascending
	Priority gpreempt.Priority
	// At is when it was announced, and Work how long it lasted after its answer.
	At, Work time.Duration
}

// Replay runs the announcements of a recording through the daemon's core with another policy, in
// virtual time. Clients announce when they did and work as long as they did from the answer on. A
// target whose recording has no suspend or resume takes those of costs.
//
// Of a request, At, Total, Announce, Service and Preemptions are set; the offline work is the time
// in which a GPU has an offline target that runs, in GPU seconds. NotQuiet requests were answered
// before their GPUs were quiet.
func Replay(rec Recording, policy scheduler.Policy, costs Costs) (evidence.Repeat, error) {
	r, err := replay(rec, policy, costs)
	if err != nil {
		return evidence.Repeat{}, err
	}
	return r.out, nil
}

func replay(rec Recording, policy scheduler.Policy, costs Costs) (*replayer, error) {
	if err := errors.Join(policy.Validate(), costs.check(), rec.check()); err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	r := &replayer{
		rec: rec, costs: costs, leases: map[scheduler.LeaseID]*replayedLease{}, protection: make([]protection, len(rec.Leases)),
		targets: map[gpreempt.ProcessKey]*replayedTarget{}, gpus: map[gpreempt.GPUID]*replayedGPU{},
		core: scheduler.New(policy, scheduler.Limits{LeasesPerClient: unlimited, LeasesPerUser: unlimited, LeasesTotal: unlimited}),
	}
	r.tick.do = func() { r.step(scheduler.Tick{}) }
	r.out.Seconds, r.out.WorkUnit = rec.Length.Seconds(), WorkUnit
	r.run()
	return r, nil
}

// offlineAlone returns the time in which a GPU has an offline target, in GPU seconds.
func (rec *Recording) offlineAlone() float64 {
	policy := scheduler.DefaultPolicy()
	idle := *rec
	idle.Leases = nil
	alone, err := Replay(idle, policy, Costs{})
	if err != nil {
		return 0
	}
	return alone.Work
}

func (rec *Recording) check() error {
	switch {
	case rec.Length <= 0:
		return errors.New("the recording has no length")
	case rec.Length > MaxRecording:
		return fmt.Errorf("the recording lasts %v: use at most %v of it", rec.Length, MaxRecording)
	}
	for i, l := range rec.Leases {
		if l.At < 0 || l.Work < 0 || i > 0 && l.At < rec.Leases[i-1].At {
			return fmt.Errorf("lease %d is announced at %v and lasts %v: sort leases by time, and use no negative times", i, l.At, l.Work)
		}
	}
	for _, t := range rec.Targets {
		if t.From < 0 || t.Until < t.From {
			return fmt.Errorf("target %v lives from %v to %v", t.Key, t.From, t.Until)
		}
	}
	return nil
}

// replayer is one replay.
type replayer struct {
	rec   Recording
	costs Costs
	core  *scheduler.Core

	now    time.Duration
	events eventQueue
	tick   event
	// todo are actions that are not carried out yet; stepping while the core is.
	todo     []scheduler.Action
	stepping bool

	leases  map[scheduler.LeaseID]*replayedLease
	targets map[gpreempt.ProcessKey]*replayedTarget
	gpus    map[gpreempt.GPUID]*replayedGPU
	present []*replayedTarget // in the order in which they appeared
	working []*replayedLease  // leases that are answered and have not ended
	over    bool              // offline work does not count any more
	out     evidence.Repeat
	// protection is that of each request.
	protection []protection
}

// protection is what a request got.
type protection struct {
	// quiet: it was answered with quiet GPUs.
	quiet bool
	// disturbed is how long offline work that it outranks ran on its GPUs while it worked.
	disturbed time.Duration
}

type replayedLease struct {
	*RecordedLease
	index    int // in the results
	answered bool
	// disturbing is the number of targets that disturb it, since when there are any.
	disturbing int
	since      time.Duration
}

// outranks reports whether the lease is to suspend the target.
func (l *replayedLease) outranks(t *replayedTarget) bool {
	return t.Priority < l.Priority && slices.ContainsFunc(t.GPUs, func(id gpreempt.GPUID) bool { return slices.Contains(l.GPUs, id) })
}

type replayedTarget struct {
	*RecordedTarget
	running           bool
	suspends, resumes int
	// cause is the lease that it was last suspended for, and times how often.
	cause scheduler.LeaseID
	times int
}

// replayedGPU counts the offline targets that run on a GPU.
type replayedGPU struct {
	running int
	since   time.Duration
}

func (r *replayer) run() {
	for _, id := range r.rec.GPUs {
		r.step(scheduler.GPUAdded{GPU: id})
	}
	for i := range r.rec.Targets {
		t := &replayedTarget{RecordedTarget: &r.rec.Targets[i]}
		r.at(t.From, func() { r.appear(t) })
		if t.Until < r.rec.Length {
			r.at(t.Until, func() {
				r.step(scheduler.TargetGone{Target: t.Key})
				r.setRunning(t, false)
				r.present = slices.DeleteFunc(r.present, func(other *replayedTarget) bool { return other == t })
			})
		}
	}
	r.at(r.rec.Length, r.count)
	r.announceFrom(0)
	for !r.over || len(r.leases) > 0 {
		ev := r.events.pop()
		if ev == nil {
			break
		}
		r.now = ev.at
		ev.do()
	}
}

func (r *replayer) at(t time.Duration, do func()) { r.events.set(&event{do: do}, max(t, r.now)) }

// appear has the core know a target, which runs.
func (r *replayer) appear(t *replayedTarget) {
	r.targets[t.Key] = t
	r.present = append(r.present, t)
	r.setRunning(t, true)
	r.step(scheduler.TargetSeen{Target: t.Key, Job: t.Job, Class: gpreempt.Offline, Priority: t.Priority, GPUs: t.GPUs, Queues: 1})
}

// announceFrom has the clients announce, from the nth lease on.
func (r *replayer) announceFrom(n int) {
	if n >= len(r.rec.Leases) {
		return
	}
	r.at(r.rec.Leases[n].At, func() {
		r.announce(n)
		r.announceFrom(n + 1)
	})
}

func (r *replayer) announce(n int) {
	l := &replayedLease{RecordedLease: &r.rec.Leases[n], index: n}
	id := scheduler.LeaseID(n + 1)
	r.leases[id] = l
	r.out.Requests = append(r.out.Requests, evidence.Request{At: ms(r.now)})
	req := scheduler.LeaseRequested{
		Lease: id, Client: scheduler.ClientID{PID: 1}, User: "recorded", GPUs: l.GPUs, Priority: l.Priority,
		TTL: scheduler.PolicyDefault, MaxWait: scheduler.PolicyDefault,
	}
	if _, err := r.core.Admit(&req); err != nil { // as a client whose announcement is refused
		r.answer(id, scheduler.Answer{})
		return
	}
	// The log has the end of the lease; renewals before it need not be replayed.
	req.TTL = 1000 * time.Hour
	r.step(req)
}

func (r *replayer) answer(id scheduler.LeaseID, a scheduler.Answer) {
	l := r.leases[id]
	if l == nil || l.answered {
		return
	}
	l.answered = true
	r.protection[l.index].quiet = a.Quiesced
	r.working = append(r.working, l)
	for _, t := range r.present {
		if t.running && l.outranks(t) {
			r.disturb(l, 1)
		}
	}
	q := &r.out.Requests[l.index]
	q.Announce, q.Service = ms(a.Waited), ms(l.Work)
	q.Total = q.Announce + q.Service
	if !a.Quiesced {
		r.out.NotQuiet++
	}
	r.at(r.now+l.Work, func() {
		delete(r.leases, id)
		r.disturb(l, -l.disturbing)
		r.working = slices.DeleteFunc(r.working, func(other *replayedLease) bool { return other == l })
		r.step(scheduler.LeaseFinished{Lease: id, End: scheduler.EndCompleted})
	})
}

// disturb changes the number of targets that disturb a lease.
func (r *replayer) disturb(l *replayedLease, by int) {
	if l.disturbing > 0 {
		r.protection[l.index].disturbed += r.now - l.since
	}
	l.disturbing += by
	l.since = r.now
}

// step has the core handle an event, and carries out its actions in their order.
func (r *replayer) step(ev scheduler.Event) {
	r.todo = append(r.todo, r.core.Step(r.now, ev)...)
	if r.stepping {
		return
	}
	r.stepping = true
	for i := 0; i < len(r.todo); i++ { //nolint:intrange // an action may append more
		r.act(r.todo[i])
	}
	r.todo = r.todo[:0]
	r.stepping = false
	if at, ok := r.core.NextDeadline(); !ok {
		r.events.clear(&r.tick)
	} else if r.tick.place == 0 || r.tick.at != at {
		r.events.set(&r.tick, max(at, r.now))
	}
}

func (r *replayer) act(a scheduler.Action) {
	switch a.Kind {
	case scheduler.ActRecord:
		r.record(a.Record)
	case scheduler.ActAttach:
		r.step(scheduler.Attached{Target: a.Target, ReportsBirths: true})
	case scheduler.ActDetach:
		r.step(scheduler.Detached{Target: a.Target})
	case scheduler.ActKill: // no replayed job resists
	case scheduler.ActInspect:
		r.step(scheduler.Inspected{Target: a.Target, Seq: a.Seq})
	case scheduler.ActSuspend:
		t := r.targets[a.Target]
		took := recorded(t.Suspends, t.suspends, r.costs.Suspend)
		t.suspends++
		r.out.Suspends = append(r.out.Suspends, evidence.Timed{At: ms(r.now), MS: ms(took)})
		r.at(r.now+took, func() { r.step(scheduler.Suspended{Target: a.Target, Seq: a.Seq, Took: took}) })
	case scheduler.ActResume:
		t := r.targets[a.Target]
		took := recorded(t.Resumes, t.resumes, r.costs.Resume)
		t.resumes++
		r.out.Resumes = append(r.out.Resumes, evidence.Timed{At: ms(r.now), MS: ms(took)})
		r.at(r.now+took, func() { r.step(scheduler.Resumed{Target: a.Target, Seq: a.Seq, Took: took}) })
	case scheduler.ActAnswer:
		r.answer(a.Lease, a.Answer)
	}
}

// recorded returns the nth duration, or def if there is none at all.
func recorded(all []time.Duration, n int, def time.Duration) time.Duration {
	if len(all) == 0 {
		return def
	}
	return all[n%len(all)]
}

// record follows the state of a target.
func (r *replayer) record(rec scheduler.Record) {
	t := r.targets[rec.Target]
	if rec.Kind != scheduler.RecordTarget || t == nil || rec.FromTarget == rec.ToTarget {
		return
	}
	switch rec.ToTarget {
	case scheduler.TargetSuspending:
		r.caused(t, rec.Lease)
	case scheduler.TargetSuspended:
		r.setRunning(t, false)
	case scheduler.TargetRunning, scheduler.TargetQuarantined:
		r.setRunning(t, true)
	default:
	}
}

// caused counts a preemption for the request that it is for. Several targets that are suspended
// for it are one.
func (r *replayer) caused(t *replayedTarget, id scheduler.LeaseID) {
	l := r.leases[id]
	if l == nil {
		return
	}
	if t.cause != id {
		t.cause, t.times = id, 0
	}
	t.times++
	q := &r.out.Requests[l.index]
	q.Preemptions = max(q.Preemptions, t.times)
}

func (r *replayer) setRunning(t *replayedTarget, running bool) {
	if t.running == running {
		return
	}
	t.running = running
	for _, l := range r.working {
		switch {
		case !l.outranks(t):
		case running:
			r.disturb(l, 1)
		default:
			r.disturb(l, -1)
		}
	}
	for _, id := range t.GPUs {
		g := r.gpus[id]
		if g == nil {
			g = &replayedGPU{}
			r.gpus[id] = g
		}
		if running {
			if g.running++; g.running == 1 {
				g.since = r.now
			}
		} else if g.running--; g.running == 0 {
			r.worked(r.now - g.since)
		}
	}
}

func (r *replayer) worked(d time.Duration) {
	if !r.over {
		r.out.Work += d.Seconds()
	}
}

// count takes down the offline work at the end.
func (r *replayer) count() {
	ids := make([]gpreempt.GPUID, 0, len(r.gpus))
	for id := range r.gpus {
		ids = append(ids, id)
	}
	slices.Sort(ids) // the sum of floats depends on the order
	for _, id := range ids {
		if g := r.gpus[id]; g.running > 0 {
			r.worked(r.now - g.since)
			g.since = r.now
		}
	}
	r.over = true
}
