package scheduler

import (
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The promises of the package comment, held against a core in its world after every move.

// step has the core handle an event that the situation has taken in, and checks what it does.
func (x *explored) step(ev Event) error {
	for g := range x.units {
		x.charge(&x.units[g])
	}
	x.credit, x.creditAt = x.credits(), x.now
	x.passTime()
	if x.bug != nil && x.bug.event != nil {
		ev = x.bug.event(ev)
	}
	clear(x.core.actions[:cap(x.core.actions)]) // Step has cleared what it returned last, and an image has not
	actions := x.core.Step(x.now, ev)
	if x.bug != nil && x.bug.actions != nil {
		actions = x.bug.actions(slices.Clone(actions))
	}
	if x.bug != nil && x.bug.after != nil {
		x.bug.after(x.core)
	}
	for i := range actions {
		if err := x.take(&actions[i]); err != nil {
			return err
		}
	}
	x.noteCover()
	if err := x.checkLeases(); err != nil {
		return err
	}
	return x.checkModel()
}

// noteCover notes which jobs a lease covers at this time.
func (x *explored) noteCover() {
	for g := range x.units {
		if x.covers(uint8(g)) {
			x.units[g].coveredUntil = x.now
		}
	}
}

func (x *explored) passTime() {
	for c := range x.leases {
		if l := &x.leases[c]; l.live && x.now >= l.created+leaseTTL {
			l.live = false
		}
	}
	for i := range x.places {
		if p := &x.processes[i]; x.inspected(i) && x.now >= p.inspectAt+InspectTime {
			p.inspect = 0
			x.openBreakers(i)
		}
	}
}

// inspected reports whether the core waits for the answer to an Inspect.
func (x *explored) inspected(i int) bool {
	t := x.core.targets[procKey(uint8(i)+1)]
	return t != nil && x.processes[i].inspect != 0 && !t.flight.is(ActAttach) && t.flight.inspection == x.processes[i].inspect
}

// answerInspect is the answer to an Inspect: the call waits for the process itself, or not.
func (x *explored) answerInspect(i int, stuck bool) error {
	p := &x.processes[i]
	ev := Inspected{Target: procKey(uint8(i) + 1), Seq: p.inspect, Stuck: stuck}
	x.passTime() // what is due comes before the answer
	if x.inspected(i) {
		if closes := slices.Max(x.breakers[:]); stuck && x.now < closes {
			x.quarantined[i] = max(x.quarantined[i], closes)
		} else if stuck {
			x.quarantined[i] = x.now + QuarantineTime
		} else {
			x.openBreakers(i)
		}
	}
	p.inspect = 0
	return x.step(ev)
}

func (x *explored) openBreakers(i int) {
	for _, id := range x.places[i].gpus {
		x.breakers[id-1] = x.now + BreakerTime
	}
}

// takeResult takes in the result of an action before the core does.
func (x *explored) takeResult(i int, kind ActionKind, result Cause) {
	t := x.core.targets[procKey(uint8(i)+1)]
	if result == CauseHardware {
		x.openBreakers(i)
	}
	x.resisted[i] = x.resisted[i] || result == gpreempt.ReasonResisted
	if kind == ActSuspend && result == "" && x.processes[i].doubted == 0 {
		x.resisted[i] = false
	}
	acts := t != nil && (kind == ActSuspend || kind == ActResume || kind == ActDetach && t.state == TargetResuming)
	if acts && (result == CauseFailed || result == CauseHardware || result == gpreempt.ReasonResisted && x.onResist == (gpreempt.Resistance{})) {
		x.quarantined[i] = x.now + QuarantineTime
	}
}

// doubt notes an alarm of a GPU: what a suspend there in flight returns is not trusted.
func (x *explored) doubt(gpu uint8) {
	for i := range x.places {
		if p := &x.processes[i]; p.flight == ActSuspend && slices.Contains(x.places[i].gpus, gpreempt.GPUID(gpu)+1) {
			p.doubted |= 1 << gpu
		}
	}
}

// disbelieve takes in the good result of a suspend that counts as failed.
func (x *explored) disbelieve(i int) {
	p := &x.processes[i]
	if p.doubted == 0 || x.core.targets[procKey(uint8(i)+1)] == nil {
		return
	}
	x.quarantined[i] = x.now + QuarantineTime
	for gpu := range x.breakers {
		if p.doubted>>gpu&1 != 0 {
			x.breakers[gpu] = x.now + BreakerTime
		}
	}
}

func (x *explored) takePolicy(n uint8) {
	for g := range x.units {
		x.charge(&x.units[g])
	}
	x.credit, x.creditAt = x.credits(), x.now
	x.policy = n
	for i := range x.credit {
		x.credit[i] = min(x.credit[i], x.policies[n].maxCredit())
	}
	if p := x.policies[n]; p.ShareFloor > 0 {
		for g := range x.units {
			x.units[g].budget = min(x.units[g].budget, p.ShareWindow/2)
		}
	}
}

// take takes in an action.
func (x *explored) take(a *Action) error {
	switch a.Kind {
	case ActRecord:
		x.takeRecord(&a.Record)
		return nil
	case ActAnswer:
		return x.takeAnswer(a)
	}
	i := int(a.Target.PID) - 1
	p, t := &x.processes[i], x.core.targets[a.Target]
	if a.Kind == ActInspect {
		p.inspect, p.inspectAt = a.Seq, x.now
		return nil
	}
	switch {
	case a.Kind == ActKill && (x.onResist.KillAfter == 0 || !x.resisted[i] || p.unmanaged || x.draining || x.policies[x.policy].Shadow || x.now < x.held[i]):
		return fmt.Errorf("rule 9: process %d is killed, and has not resisted, or must not be suspended", i+1)
	case a.Kind == ActKill:
		p.die()
		return nil
	case a.Kind != ActAttach && a.Kind != ActDetach && a.Kind != ActSuspend && a.Kind != ActResume:
		return fmt.Errorf("the explorer has no model of action %d", a.Kind)
	case a.Kind == ActDetach && t == nil && p.flight != ActRecord:
		p.thenDetach = true
		return nil
	case p.flight != ActRecord:
		return fmt.Errorf("rule 4: process %d gets a second action while one is in flight", i+1)
	case a.Kind == ActAttach && p.session:
		return fmt.Errorf("process %d is attached twice", i+1)
	case (a.Kind == ActSuspend || a.Kind == ActResume) && !p.session:
		return fmt.Errorf("process %d gets an action without a session", i+1)
	}
	p.flight, p.seq, p.done = a.Kind, a.Seq, false
	if a.Kind != ActSuspend {
		return nil
	}
	g := x.places[i].unit
	if !x.covers(g) && !(x.units[g].away && x.now < x.lingersUntil(g)) && !x.pinned(g) && !x.usedUp(g) {
		return fmt.Errorf("rule 1: process %d is suspended and nothing asks for it", i+1)
	}
	return x.mayBeSuspended(i)
}

func (x *explored) takeRecord(r *Record) {
	switch r.Kind {
	case RecordLease:
		if c := x.holder(r.Lease); c >= 0 && (r.ToLease == LeaseQuiescing || r.ToLease == LeaseHeld) {
			x.leases[c].started = true
		}
	case RecordTarget:
		i := r.Target.PID - 1
		x.processes[i].away = r.ToTarget == TargetSuspending || r.ToTarget == TargetSuspended || r.ToTarget == TargetResuming
		n := x.places[i].unit
		g, away := &x.units[n], false
		for i, at := range x.places {
			away = away || at.unit == n && x.processes[i].away
		}
		if away && !g.away {
			g.awaySince = x.now
		}
		g.away = away
		if r.ToTarget == TargetSuspending && r.Cause == CauseShareCap {
			g.capped = x.usedUp(n)
		} else if r.ToTarget == TargetResuming || !away {
			g.capped = false
		}
	default:
	}
}

// pinned reports whether a pin has a job suspended.
func (x *explored) pinned(g uint8) bool {
	for i, at := range x.places {
		if at.unit == g && x.now < x.parked[i] {
			return true
		}
	}
	return false
}

func (x *explored) lingersUntil(g uint8) Time {
	if x.policies[x.policy].Linger == 0 {
		return 0
	}
	return x.units[g].coveredUntil + x.policies[x.policy].Linger
}

// mayBeSuspended returns why a process has to run, whatever leases there are.
func (x *explored) mayBeSuspended(i int) error {
	switch at := x.places[i]; {
	case x.processes[i].unmanaged:
		return fmt.Errorf("rule 3: process %d is suspended and unmanaged", i+1)
	case x.now < x.quarantined[i]:
		return fmt.Errorf("rule 7: process %d is suspended in its quarantine", i+1)
	case x.now < x.held[i]:
		return fmt.Errorf("process %d is suspended although an admin holds it", i+1)
	case slices.ContainsFunc(at.gpus, func(id gpreempt.GPUID) bool { return x.now < x.breakers[id-1] }):
		return fmt.Errorf("rule 7: process %d is suspended behind an open breaker", i+1)
	case x.draining:
		return fmt.Errorf("rule 8: process %d is suspended while the host is drained", i+1)
	case x.policies[x.policy].Shadow:
		return fmt.Errorf("rule 8: process %d is suspended under a shadow policy", i+1)
	}
	return nil
}

func (x *explored) holder(id LeaseID) int {
	return slices.IndexFunc(x.leases[:], func(l modelLease) bool { return l.id == id })
}

func (x *explored) takeAnswer(a *Action) error {
	c := x.holder(a.Lease)
	if c < 0 || x.leases[c].answered {
		return fmt.Errorf("rule 6: lease of client %d is answered twice", c+1)
	}
	l := &x.leases[c]
	l.answered = true
	if !a.Answer.Quiesced {
		return nil
	}
	for i, at := range x.places {
		p, o := &x.processes[i], offers[l.offer]
		if p.alive && !p.unmanaged && x.outranks(c, at.unit) && p.running() > p.born-p.reported && !p.lostUnnoticed() &&
			slices.ContainsFunc(at.gpus, func(id gpreempt.GPUID) bool { return slices.Contains(o.gpus, id) }) {
			return fmt.Errorf("rule 5: client %d has the answer that its GPUs are quiet, and process %d runs on them", c+1, i+1)
		}
	}
	return nil
}

func (x *explored) checkLeases() error {
	for c := range x.leases {
		l := &x.leases[c]
		_, kept := x.core.leases[l.id]
		switch {
		case l.live && !kept:
			return fmt.Errorf("rule 6: the lease of client %d has ended and nothing ended it", c+1)
		case !l.live && kept:
			return fmt.Errorf("rule 2: the lease of client %d has not ended", c+1)
		case !l.answered && l.id != 0 && (!l.live || x.now >= l.created+leaseWait):
			return fmt.Errorf("rule 5: the announcement of client %d is not answered", c+1)
		}
		if l.live {
			again := x.core.leases[l.id].req
			if id, err := x.core.Admit(&again); err != nil || id != l.id {
				return fmt.Errorf("rule 6: a retry of client %d gets lease %d, want %d: %w", c+1, id, l.id, err)
			}
		}
	}
	return nil
}

// checkModel compares the core with what the driver does, and lets the daemon die.
func (x *explored) checkModel() error {
	for i := range x.places {
		p, t := &x.processes[i], x.core.targets[procKey(uint8(i)+1)]
		switch {
		case t == nil && p.alive:
			return fmt.Errorf("process %d is alive, and the core has forgotten it", i+1)
		case t != nil:
			if err := x.checkProcess(i, p, t); err != nil {
				return err
			}
		}
		orphan := *p
		if x.bug != nil && x.bug.death != nil {
			x.bug.death(&orphan)
		} else {
			orphan.daemonDies()
		}
		if orphan.suspended > 0 && !orphan.knownGap() {
			return fmt.Errorf("process %d stays suspended when the daemon dies now", i+1)
		}
	}
	for g := range x.units {
		if err := x.checkUnit(uint8(g)); err != nil {
			return err
		}
	}
	return nil
}

func (x *explored) checkProcess(i int, p *modelProcess, t *target) error {
	late := x.core.now < x.now
	switch t.state {
	case TargetRunning, TargetQuarantined:
		if p.alive && p.suspended > 0 {
			return fmt.Errorf("process %d counts as running, and the driver has it suspended", i+1)
		}
		if !late && t.state == TargetRunning && x.now < x.quarantined[i] {
			return fmt.Errorf("rule 7: process %d failed and is not in quarantine", i+1)
		}
	case TargetSuspending, TargetResuming:
		if p.flight == ActRecord && !(t.flight.is(ActRecord) && t.timer.index != 0) {
			return fmt.Errorf("process %d is %v for ever: nothing is in flight", i+1, t.state)
		}
	case TargetSuspended:
		if late {
			return nil
		}
		if p.alive && p.running() > p.born-p.reported && !p.lostUnnoticed() {
			return fmt.Errorf("process %d counts as suspended, and %d of its queues run", i+1, p.running())
		}
		if p.born > 0 && t.again != "" {
			return fmt.Errorf("rule 4: process %d has a new queue that nothing suspends", i+1)
		}
		if err := x.checkDeadline(i); err != nil {
			return err
		}
		return x.mayBeSuspended(i)
	default:
	}
	return nil
}

// checkDeadline checks that the core looks again at a suspended process in time.
func (x *explored) checkDeadline(i int) error {
	n := x.places[i].unit
	g, policy := x.units[n], x.policies[x.policy]
	due, armed := x.core.NextDeadline()
	ends := func(at Time) bool { return x.now < at && armed && due <= at }
	if !x.covers(n) && !ends(x.lingersUntil(n)) && !x.pinned(n) && !(x.usedUp(n) && ends(x.now+policy.ShareWindow)) {
		return fmt.Errorf("rule 1: process %d stays suspended, and no lease covers it", i+1)
	}
	if !ends(g.awaySince + policy.MaxSuspend) {
		return fmt.Errorf("rule 2: process %d stays suspended for longer than max_suspend", i+1)
	}
	if x.charge(&g); policy.ShareFloor > 0 && !ends(x.now+g.budget) {
		return fmt.Errorf("rule 2: process %d stays suspended when its share budget is used up", i+1)
	}
	return nil
}

// checkUnit checks that a job is not torn, and that it is off the GPUs when it should be.
func (x *explored) checkUnit(n uint8) error {
	if x.core.now < x.now {
		return nil
	}
	suspended, running, blocked := 0, 0, x.draining || x.policies[x.policy].Shadow || x.policies[x.policy].ShareFloor > 0
	for i, at := range x.places {
		t := x.core.targets[procKey(uint8(i)+1)]
		if at.unit != n || t == nil || x.processes[i].unmanaged {
			continue
		}
		switch t.state {
		case TargetSuspended:
			suspended++
		case TargetRunning:
			running++
		default:
			blocked = true
		}
		blocked = blocked || !t.ready() || x.mayBeSuspended(i) != nil || x.now < t.job.runUntil
	}
	switch {
	case suspended > 0 && running > 0:
		return fmt.Errorf("job %d is torn: %d of its processes are suspended and %d run", n+1, suspended, running)
	case running > 0 && !blocked && (x.covers(n) || x.usedUp(n)):
		return fmt.Errorf("job %d runs although a lease covers it, or its share is used up, and nothing prevents its suspension", n+1)
	}
	return nil
}

// outranks reports whether the lease of a client outranks a job, which is not its own.
func (x *explored) outranks(client int, g uint8) bool {
	priority := offers[x.leases[client].offer].priority
	for i, at := range x.places {
		if at.unit == g && client == 0 && slices.Contains(at.kin, x.owner) {
			return false
		}
		if at.unit == g && !x.processes[i].unmanaged && x.core.targets[procKey(uint8(i)+1)] != nil && at.priority >= priority {
			return false
		}
	}
	return true
}

// checkDeep is for states that are new: what costs too much after every move.
func (x *explored) checkDeep() error {
	if x.core.now < x.now {
		return nil
	}
	if err := x.core.CheckInvariants(); err != nil {
		return fmt.Errorf("the core itself: %w", err)
	}
	return nil
}
