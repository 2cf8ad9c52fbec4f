package scheduler_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// What the observer holds against a core: the promises of the package comment,
// after every step and for every Suspend.

// justified says why a Suspend may not be: rules 1, 3, 7 and 8.
func (o *Observer) justified(t *seenTarget, why scheduler.Record) error {
	if err := o.eligible(t); err != nil {
		return err
	}
	if o.now < t.runsUntil {
		return fmt.Errorf("it must run until %v", t.runsUntil)
	}
	if o.pinned(t, scheduler.CauseByHand) {
		o.Counts["ByHand"]++
		return nil
	}
	if o.outranked(t) {
		return nil
	}
	if o.now < o.lingersUntil(t) && (again(why.Cause) || len(o.job(t)) > 1) {
		return nil // only to keep whole what is suspended already
	}
	if o.pinned(t, scheduler.CauseHQDBudget) {
		o.Counts["Parked"]++
		return nil
	}
	if o.cappedUntil(t) > o.now && (why.Cause == scheduler.CauseShareCap || again(why.Cause)) {
		o.Counts["Capped"]++
		return nil
	}
	return fmt.Errorf("rule 1: nothing asks for it, and the cause is %q", why.Cause)
}

// cappedUntil is the latest time until which the share cap can have t's job suspended.
func (o *Observer) cappedUntil(t *seenTarget) (until scheduler.Time) {
	queues := false
	for _, m := range o.job(t) {
		until, queues = max(until, m.capUntil), queues || len(m.GPUs) > 0
	}
	if !queues || o.policy.ShareCap == 1 {
		return 0
	}
	return until
}

// longestCap is how long a job earns the share of a whole window, when it has run for MinRun too long.
func longestCap(p scheduler.Policy) time.Duration {
	return time.Duration((1-p.ShareCap)*float64(p.ShareWindow)+float64(p.MinRun)*(1-p.ShareCap)/p.ShareCap) + time.Microsecond
}

// again reports whether a cause is that of another Suspend of what is suspended.
func again(c scheduler.Cause) bool {
	return c == scheduler.CauseNewQueue || c == scheduler.CauseResumedByAnother || c == scheduler.CauseLapsed
}

// eligible returns why a target must run, for any lease or pin.
func (o *Observer) eligible(t *seenTarget) error {
	switch {
	case o.draining:
		return errors.New("rule 8: draining")
	case o.policy.Shadow:
		return errors.New("the policy is shadow")
	}
	for _, m := range o.job(t) {
		switch {
		case m.Class != gpreempt.Offline:
			return fmt.Errorf("rule 3: class %v", m.Class)
		case !o.ready(m):
			return errors.New("no mechanism is attached")
		case o.now < m.quarantinedUntil:
			return fmt.Errorf("rule 7: quarantine of %v until %v", m.Target, m.quarantinedUntil)
		case o.held(m):
			return fmt.Errorf("an admin holds %v running until %v", m.Target, m.pinUntil)
		}
		for _, id := range m.GPUs {
			if o.now < o.breaker[id] {
				return fmt.Errorf("rule 7: the breaker of GPU %v is open until %v", id, o.breaker[id])
			}
		}
	}
	return nil
}

// job is what is suspended together with t, t included, by key.
func (o *Observer) job(t *seenTarget) []*seenTarget {
	if t.Job == "" || t.Class != gpreempt.Offline {
		return []*seenTarget{t}
	}
	var members []*seenTarget
	for _, m := range o.Targets {
		if m.Class == gpreempt.Offline && m.Job == t.Job && !o.left[m.Target] && slices.Equal(o.ownersOf(m.TargetSeen), o.ownersOf(t.TargetSeen)) {
			members = append(members, m)
		}
	}
	slices.SortFunc(members, func(a, b *seenTarget) int { return a.Target.Compare(b.Target) })
	return members
}

// asked reports whether a lease or a pin asks to suspend the target.
func (o *Observer) asked(t *seenTarget) bool {
	return o.outranked(t) || o.pinned(t, scheduler.CauseByHand) || o.pinned(t, scheduler.CauseHQDBudget)
}

func (o *Observer) outranked(t *seenTarget) bool {
	for _, l := range o.leases {
		if l.live && (l.state == scheduler.LeaseQuiescing || l.state == scheduler.LeaseHeld) && o.covers(l, t) {
			return true
		}
	}
	return false
}

// covers reports whether a lease is about t: it outranks the job on one of its GPUs, and t
// is not its owner's.
func (o *Observer) covers(l *seenLease, t *seenTarget) bool {
	switch {
	case t.Class != gpreempt.Offline:
		return false
	case o.owns(l, t):
		o.Counts["Spared"]++
		return false
	}
	shared := false
	for _, m := range o.job(t) {
		if m.Priority >= l.Priority {
			return false
		}
		shared = shared || slices.ContainsFunc(m.GPUs, func(id gpreempt.GPUID) bool { return slices.Contains(l.GPUs, id) })
	}
	return shared
}

// ownerOffline reports whether an offline target on the lease's GPUs is its owner's.
func (o *Observer) ownerOffline(l *seenLease) bool {
	for _, t := range o.Targets {
		for _, m := range o.job(t) {
			if t.Class == gpreempt.Offline && o.owns(l, t) && slices.ContainsFunc(m.GPUs, func(id gpreempt.GPUID) bool { return slices.Contains(l.GPUs, id) }) {
				return true
			}
		}
	}
	return false
}

// Away reports whether a target in the state is off the GPUs, or on its way.
func Away(s scheduler.TargetState) bool {
	return s == scheduler.TargetSuspending || s == scheduler.TargetSuspended || s == scheduler.TargetResuming
}

func (o *Observer) checkEnds() error {
	for id, end := range o.ends {
		return fmt.Errorf("rule 2: lease %d should have ended (%v)", id, end)
	}
	for key := range o.left {
		return fmt.Errorf("target %v left and no record says so", key)
	}
	return nil
}

func (o *Observer) checkTargets() error {
	if o.policy.ShareFloor > 0 {
		o.calmAt = max(o.calmAt, o.now+o.policy.MinRun)
	}
	for _, t := range o.Targets {
		if err := o.checkTarget(t); err != nil {
			return fmt.Errorf("target %v, %v: %w", t.Target, t.state, err)
		}
	}
	for _, t := range o.Targets {
		leased := o.outranked(t)
		if t.leased && !leased {
			t.lingerUntil = o.now + longestLinger(o.policy)
		}
		t.leased = leased
	}
	return nil
}

func (o *Observer) checkTarget(t *seenTarget) error {
	if o.overdue(t) {
		return fmt.Errorf("nobody asks what the action sent at %v waits for", t.sentAt)
	}
	inFlight := t.Flight != 0
	switch t.state {
	case scheduler.TargetSuspending:
		if !inFlight || t.kind != scheduler.ActSuspend {
			return errors.New("no suspend is in flight")
		}
	case scheduler.TargetResuming:
		if (!inFlight || t.kind != scheduler.ActResume) && !t.waitsForRetry && !t.Detaching {
			return errors.New("no resume is in flight")
		}
		if t.waitsForRetry && o.now >= t.failedAt+scheduler.RetryAction.Last {
			return fmt.Errorf("the resume failed at %v and is not tried again", t.failedAt)
		}
	default:
		if inFlight {
			return fmt.Errorf("action %d is in flight", t.Flight)
		}
	}
	switch t.state {
	case scheduler.TargetSuspended:
		return o.checkSuspended(t)
	case scheduler.TargetQuarantined:
		if o.now >= t.quarantinedUntil {
			return errors.New("the quarantine is over")
		}
	case scheduler.TargetRunning:
		if o.now < t.quarantinedUntil {
			return errors.New("rule 7: it should be in quarantine")
		}
		return o.checkRunning(t)
	}
	return nil
}

func (o *Observer) checkSuspended(t *seenTarget) error {
	if err := o.eligible(t); err != nil {
		return err
	}
	if t.again != "" {
		return fmt.Errorf("rule 4: it runs: %q", t.again)
	}
	for _, m := range o.job(t) {
		if !Away(m.state) {
			return fmt.Errorf("its job is torn: %v is %v", m.Target, m.state)
		}
		if o.now >= m.awaySince+o.policy.MaxSuspend {
			return fmt.Errorf("rule 2: %v is away since %v, longer than max_suspend %v", m.Target, m.awaySince, o.policy.MaxSuspend)
		}
	}
	if o.asked(t) || o.now < o.cappedUntil(t) {
		return nil
	}
	if until := o.lingersUntil(t); o.now >= until {
		return fmt.Errorf("rule 1: no lease asks for it, and the linger is over at %v", until)
	}
	o.Counts["Lingered"]++
	return nil
}

// lingersUntil is the latest end of the linger of t's job.
func (o *Observer) lingersUntil(t *seenTarget) scheduler.Time {
	until := t.lingerUntil
	for _, m := range o.job(t) {
		until = max(until, m.lingerUntil)
		if m.leased && !o.outranked(m) {
			until = max(until, o.now+longestLinger(o.policy)) // the end of the lease is news of this step
		}
	}
	return until
}

// checkRunning returns an error for a target that should be suspended: only where no
// guarantee of running time can apply.
func (o *Observer) checkRunning(t *seenTarget) error {
	if blocked := o.eligible(t); !o.asked(t) || blocked != nil || o.policy.ShareFloor > 0 || o.now < max(o.calmAt, t.calmAt) {
		return nil //nolint:nilerr // what blocks it is why it may run
	}
	for _, m := range o.job(t) {
		if m.state != scheduler.TargetRunning || o.now < m.ranSince+o.policy.MinRun || o.now < m.runsUntil {
			return nil
		}
	}
	return errors.New("it runs although a lease or a pin asks for it")
}

func (o *Observer) checkLeases() error {
	for id, l := range o.leases {
		if err := o.checkLease(id, l); err != nil {
			return fmt.Errorf("lease %d, %v: %w", id, l.state, err)
		}
		if !l.live {
			delete(o.leases, id)
		}
	}
	return nil
}

func (o *Observer) checkLease(id scheduler.LeaseID, l *seenLease) error {
	answer, now := o.answers[id]
	switch {
	case !l.live:
		if !l.answered || l.state != scheduler.LeaseEnded {
			return errors.New("it ended without an answer or a record")
		}
		if now && answer.Reason != scheduler.CauseEnded {
			return fmt.Errorf("it ended, the answer says %v", answer.Reason)
		}
		return nil
	case !l.answered && o.now >= l.created+l.MaxWait:
		return errors.New("rule 5: no answer by max_wait")
	case l.state == scheduler.LeaseWaiting && o.now >= l.created+l.ETA:
		return errors.New("it should have started")
	}
	quiet, suspended, refusing := true, 0, 0
	for _, t := range o.Targets {
		if !o.covers(l, t) {
			continue
		}
		whole := true
		for _, m := range o.job(t) {
			whole = whole && m.state == scheduler.TargetSuspended && m.again == ""
		}
		quiet = quiet && whole
		if o.mayAttach(t.Target) && o.session(t.Target).refuses && !whole {
			refusing++
		}
		if whole {
			suspended++
		}
	}
	if l.state != scheduler.LeaseWaiting && !l.answered && o.wasReset(l) {
		return errors.New("rule 7: a queue was reset on its GPUs, and it got no answer")
	}
	if quiet && l.state == scheduler.LeaseQuiescing {
		return errors.New("all is quiet and it does not know")
	}
	if quiet && l.state == scheduler.LeaseHeld && !l.answered {
		return errors.New("all is quiet and it got no answer")
	}
	if !now {
		return nil
	}
	if started := l.state != scheduler.LeaseWaiting; started && answer.CannotSuspend < refusing || answer.Quiesced && answer.CannotSuspend > 0 {
		return fmt.Errorf("the answer says that %d targets cannot be suspended, and the last attempt failed for %d", answer.CannotSuspend, refusing)
	}
	return o.checkAnswer(l, answer, quiet, suspended)
}

func (o *Observer) checkAnswer(l *seenLease, a scheduler.Answer, quiet bool, suspended int) error {
	wrong := fmt.Errorf("the answer is %v, %v, %d suspended, and the GPUs are quiet: %v, %d suspended", a.Quiesced, a.Reason, a.Suspended, quiet, suspended)
	started := l.state != scheduler.LeaseWaiting
	ok := false
	if a.OwnerOffline != o.ownerOffline(l) {
		return fmt.Errorf("the answer says that its owner is offline: %v", a.OwnerOffline)
	}
	switch a.Reason {
	case scheduler.CauseDone:
		o.Counts["Quiesced"]++
		ok = quiet && suspended > 0
	case scheduler.CauseNothingToDo:
		ok = quiet && suspended == 0
	case scheduler.CauseMaxWait:
		o.Counts["MaxWaits"]++
		ok = !quiet && started && o.now >= l.created+l.MaxWait && l.MaxWait > 0
	case scheduler.CauseNotAwaited:
		ok = !quiet && started && l.MaxWait == 0
	case scheduler.CauseDeferred:
		o.Counts["Deferred"]++
		ok = !started && o.now >= l.created+l.MaxWait
	case scheduler.CauseShareFloor, scheduler.CauseUnsafe, scheduler.CauseHold, scheduler.CauseStuck:
		ok = !quiet && started
	case gpreempt.ReasonCannotSuspend, gpreempt.ReasonResisted, gpreempt.ReasonDRMQueues:
		o.Counts["CannotSuspend"]++
		ok = !quiet && started && a.CannotSuspend > 0
	case scheduler.CauseReset:
		o.Counts["ResetAnswers"]++
		ok = started && o.wasReset(l)
	case scheduler.CauseShadow:
		ok = !quiet && started && o.policy.Shadow
	case scheduler.CauseDrain:
		ok = !quiet && started && o.draining
	}
	if !ok || a.Quiesced != (a.Reason == scheduler.CauseDone || a.Reason == scheduler.CauseNothingToDo) || started && a.Suspended != suspended {
		return wrong
	}
	return nil
}

// wasReset reports whether a lease is about a GPU that a queue did not leave in this step.
func (o *Observer) wasReset(l *seenLease) bool {
	return slices.ContainsFunc(l.GPUs, func(id gpreempt.GPUID) bool { return o.reset[id] })
}

func (o *Observer) checkBreakers() error {
	for _, id := range slices.Sorted(maps.Keys(o.breaker)) {
		if open := o.now < o.breaker[id]; open != o.shown[id] {
			return fmt.Errorf("rule 7: the breaker of GPU %v is open until %v, the records say open=%v", id, o.breaker[id], o.shown[id])
		}
	}
	return nil
}
