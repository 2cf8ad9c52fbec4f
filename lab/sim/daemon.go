package sim

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
	"github.com/gpreempt/gpreempt/pkg/scheduler/parking"
)

// daemon is GPreempt: the core of the daemon, with the clients before it and the processes
// behind it. A client announces when a request arrives, with the time on its CPU as the eta,
// begins with the answer, and completes at the end.
type daemon struct {
	unwilling
	engine *engine
	core   *scheduler.Core
	leases map[scheduler.LeaseID]*lease
	last   scheduler.LeaseID
	tick   event
	// parking is that of idle jobs; worked is what each process had done at the last look at it.
	parking parking.Parking
	worked  map[*process]float64
	// todo are actions that are not carried out yet; stepping: some are being carried out.
	todo     []order
	stepping bool
}

// lease is the lease of a claim.
type lease struct {
	id       scheduler.LeaseID
	claim    *claim
	answered bool
	renewal  *event
	// preemptions that it has caused.
	preemptions int
}

// order is what a run needs of an action, which is large.
type order struct {
	kind   scheduler.ActionKind
	target gpreempt.ProcessKey
	seq    uint64
	lease  scheduler.LeaseID
	quiet  bool // of an answer
}

// cause is the lease of the last suspension of a process, and how often that caused one.
type cause struct {
	lease scheduler.LeaseID
	times int
}

// unlimited are limits that no scenario reaches.
const unlimited = 1 << 30

func newDaemon(e *engine) *daemon {
	d := &daemon{
		engine: e, leases: map[scheduler.LeaseID]*lease{},
		core: scheduler.New(e.scheme.Policy, scheduler.Limits{LeasesPerClient: unlimited, LeasesPerUser: unlimited, LeasesTotal: unlimited}),
	}
	d.tick.do = func() { d.step(scheduler.Tick{}) }
	return d
}

// gpuID returns the GPU of the daemon for one of the scenario.
func gpuID(g *gpu) gpreempt.GPUID { return gpreempt.GPUID(g.index + 1) }

func gpuIDs(gpus []*gpu) []gpreempt.GPUID {
	var ids []gpreempt.GPUID
	for _, g := range gpus {
		ids = append(ids, gpuID(g))
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

func (d *daemon) start() {
	for _, g := range d.engine.gpus {
		d.step(scheduler.GPUAdded{GPU: gpuID(g)})
	}
	for _, p := range d.engine.procs {
		p.moved = func(resume bool, seq uint64, took time.Duration) {
			if resume {
				d.step(scheduler.Resumed{Target: p.key, Seq: seq, Took: took})
			} else {
				d.step(scheduler.Suspended{Target: p.key, Seq: seq, Took: took})
			}
		}
		d.step(scheduler.TargetSeen{
			Target: p.key, Job: p.job.Name, Class: gpreempt.Offline, Priority: gpreempt.Priority(p.job.Priority),
			GPUs: gpuIDs(p.gpus), Queues: uint64(p.queues),
		})
	}
	d.startBudget()
}

// step has the core handle an event, and carries out its actions. Actions whose result is known
// at once, such as an Attach, are answered after the others.
func (d *daemon) step(ev scheduler.Event) {
	actions := d.core.Step(d.engine.now, ev)
	for i := range actions {
		a := &actions[i]
		o := order{a.Kind, a.Target, a.Seq, a.Lease, a.Answer.Quiesced}
		if a.Kind == scheduler.ActRecord {
			if r := &a.Record; r.Kind != scheduler.RecordTarget || r.ToTarget != scheduler.TargetSuspending || r.Lease == 0 {
				continue
			}
			o.target, o.lease = a.Record.Target, a.Record.Lease
		}
		d.todo = append(d.todo, o)
	}
	if d.stepping {
		return
	}
	d.stepping = true
	for i := 0; i < len(d.todo); i++ { //nolint:intrange // an action may append more
		d.act(d.todo[i])
	}
	d.todo = d.todo[:0]
	d.stepping = false
	if at, ok := d.core.NextDeadline(); ok {
		if d.tick.place == 0 || d.tick.at != at {
			d.engine.events.set(&d.tick, max(at, d.engine.now))
		}
	} else {
		d.engine.events.clear(&d.tick)
	}
}

func (d *daemon) act(o order) {
	switch o.kind {
	case scheduler.ActRecord:
		d.caused(o.target, o.lease)
	case scheduler.ActAttach:
		d.step(scheduler.Attached{Target: o.target, ReportsBirths: true})
	case scheduler.ActDetach:
		d.step(scheduler.Detached{Target: o.target})
	case scheduler.ActSuspend:
		d.process(o.target).move(false, o.seq)
	case scheduler.ActResume:
		d.process(o.target).move(true, o.seq)
	case scheduler.ActKill: // no simulated job resists
	case scheduler.ActInspect:
		// A call that takes long waits for cycles of the GPU, not for the job.
		d.step(scheduler.Inspected{Target: o.target, Seq: o.seq})
	case scheduler.ActAnswer:
		if l := d.leases[o.lease]; l != nil {
			if !o.quiet {
				d.engine.out.NotQuiet += len(l.claim.requests)
			}
			d.engine.after(d.engine.o.Costs.Notify, func() { d.answer(l) })
		}
	}
}

// process returns a process by its key.
func (d *daemon) process(key gpreempt.ProcessKey) *process {
	return d.engine.procs[key.PID-firstPID]
}

// caused counts a suspension for the requests that it is for.
func (d *daemon) caused(key gpreempt.ProcessKey, id scheduler.LeaseID) {
	c := &d.process(key).cause
	if c.lease != id {
		*c = cause{lease: id}
	}
	c.times++
	// Several processes that are suspended at once are one preemption.
	if l := d.leases[id]; l != nil && c.times > l.preemptions {
		l.preemptions = c.times
		for _, r := range l.claim.requests {
			r.preemptions++
		}
	}
}

func (d *daemon) announced(c *claim) {
	d.last++
	l := &lease{id: d.last, claim: c}
	c.lease = l
	d.leases[l.id] = l
	d.engine.after(d.engine.o.Costs.Notify, func() { d.request(l) })
}

// request is the announcement as it arrives at the daemon.
func (d *daemon) request(l *lease) {
	e, s := d.engine, l.claim.service
	if at, ok := d.core.NextDeadline(); ok && at <= e.now {
		d.step(scheduler.Tick{})
	}
	req := scheduler.LeaseRequested{
		Lease: l.id, Client: scheduler.ClientID{PID: int32(s.index + 1)}, User: "simulated", GPUs: gpuIDs(l.claim.gpus), Priority: gpreempt.Priority(s.Priority),
		TTL: scheduler.PolicyDefault, MaxWait: scheduler.PolicyDefault, ETA: max(e.o.ETA, l.claim.readyAt-e.now),
	}
	if _, err := d.core.Admit(&req); err != nil {
		// The client runs unprotected, as with a daemon that refuses.
		e.out.Unprotected += len(l.claim.requests)
		e.after(e.o.Costs.Notify, func() { d.answer(l) })
		return
	}
	d.step(req)
	d.renew(l, req.TTL)
}

// renew keeps the lease alive, as the client does.
func (d *daemon) renew(l *lease, ttl time.Duration) {
	l.renewal = d.engine.after(ttl/2, func() {
		d.step(scheduler.LeaseRenewed{Lease: l.id, TTL: ttl})
		d.renew(l, ttl)
	})
}

func (d *daemon) answer(l *lease) {
	l.answered = true
	l.claim.answered = d.engine.now
	if l.claim.asked {
		l.claim.grant()
	}
}

func (d *daemon) ready(c *claim) {
	if c.lease.answered {
		c.grant()
	}
}

func (d *daemon) released(c *claim) {
	l := c.lease
	d.engine.after(d.engine.o.Costs.Notify, func() {
		if l.renewal != nil {
			d.engine.events.clear(l.renewal)
		}
		delete(d.leases, l.id)
		d.step(scheduler.LeaseFinished{Lease: l.id, End: scheduler.EndCompleted})
	})
}
