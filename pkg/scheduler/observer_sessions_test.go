package scheduler_test

import (
	"errors"
	"fmt"
	"math"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// What the observer knows of the sessions of mechanisms with processes.

func (o *Observer) session(key gpreempt.ProcessKey) *seenSession {
	s := o.sessions[key]
	if s == nil {
		s = &seenSession{since: o.now}
		o.sessions[key] = s
	}
	return s
}

// ready reports whether a mechanism can suspend the target.
func (o *Observer) ready(t *seenTarget) bool {
	s := o.session(t.Target)
	return s.attached && !s.failed && s.flight == scheduler.ActRecord
}

// mayAttach reports whether a process may have a mechanism attached.
func (o *Observer) mayAttach(key gpreempt.ProcessKey) bool {
	t := o.Targets[key]
	return t != nil && !o.left[key] && t.Class == gpreempt.Offline && !o.policy.Shadow && !o.stopped
}

// wanted reports whether a process is to have a mechanism attached now: a lease asks for
// it, or it has had queues for attach_after.
func (o *Observer) wanted(key gpreempt.ProcessKey) bool {
	if !o.mayAttach(key) {
		return false
	}
	t := o.Targets[key]
	if o.policy.AttachAfter == 0 || t.OnResist != (gpreempt.Resistance{}) || o.pinned(t, scheduler.CauseByHand) || t.hadQueues && o.now >= t.queuesSince+o.policy.AttachAfter {
		return true
	}
	for _, l := range o.leases {
		if l.live && o.covers(l, t) {
			return true
		}
	}
	return false
}

// lateAttach reports whether it is time to ask what an Attach waits for.
func (s *seenSession) lateAttach(now scheduler.Time) bool {
	return s.flight == scheduler.ActAttach && s.asked == 0 && now >= s.askAt
}

// takeAttachInspected notes what an Attach waits for.
func (o *Observer) takeAttachInspected(ev scheduler.Inspected) {
	s := o.sessions[ev.Target]
	if s == nil || s.flight != scheduler.ActAttach || s.asked == 0 || s.asked != ev.Seq {
		return
	}
	s.asked, s.askAt = 0, math.MaxInt64
	if ev.Stuck {
		s.askAt = o.now + scheduler.StuckAfter
		o.Counts["StuckAttaches"]++
	}
}

func (o *Observer) takeAttached(ev scheduler.Attached) {
	s := o.session(ev.Target)
	if s.flight != scheduler.ActAttach {
		return
	}
	s.flight, s.since = scheduler.ActRecord, o.now
	if ev.Result != "" {
		o.Counts["AttachFailures"]++
		o.takeRefusal(o.Targets[ev.Target], s, ev.Result)
		o.openBreakers(o.Targets[ev.Target], ev.Result, ev.FailedGPUs)
		return
	}
	s.attached, s.failed, s.births, s.refuses = true, false, ev.ReportsBirths, false
}

func (o *Observer) takeDetached(ev scheduler.Detached) {
	s := o.session(ev.Target)
	if s.flight != scheduler.ActDetach {
		return
	}
	s.flight, s.since = scheduler.ActRecord, o.now
	t := o.Targets[ev.Target]
	o.openBreakers(t, ev.Result, ev.FailedGPUs)
	if ev.Result == "" || ev.Result == scheduler.CauseGone {
		s.attached, s.failed, s.births = false, false, false
	} else {
		s.failed, s.refuses = true, true
		o.Counts["DetachFailures"]++
	}
	if t != nil && t.Detaching {
		t.Detaching = false
		o.takeOutcome(t, scheduler.ActDetach, ev.Result, ev.FailedGPUs)
	}
}

// takeSessionAction checks an Attach or a Detach; t is nil once the process has left.
func (o *Observer) takeSessionAction(kind scheduler.ActionKind, key gpreempt.ProcessKey, t *seenTarget) error {
	s := o.session(key)
	switch {
	case s.flight != scheduler.ActRecord:
		return errors.New("an Attach or a Detach is still in flight")
	case kind == scheduler.ActAttach && s.attached:
		return errors.New("attached twice")
	case kind == scheduler.ActAttach && !o.wanted(key) && !(o.mayAttach(key) && o.policy.ShareCap < 1): // its share may be used up
		return errors.New("it is not to be attached to")
	case kind == scheduler.ActDetach && !s.attached:
		return errors.New("nothing is attached")
	case kind == scheduler.ActDetach && o.mayAttach(key) && !s.failed:
		return errors.New("the session is good, and needed")
	case kind == scheduler.ActDetach && t != nil && !o.left[key] && (t.state == scheduler.TargetSuspending || t.state == scheduler.TargetSuspended || t.Flight != 0):
		return fmt.Errorf("detached in state %v", t.state)
	}
	s.flight = kind
	if kind == scheduler.ActAttach {
		o.Counts["Attaches"]++
		s.askAt, s.asked = o.now+scheduler.StuckAfter, 0
		return nil
	}
	o.Counts["Detaches"]++
	if t != nil && t.state == scheduler.TargetResuming {
		t.Detaching, t.waitsForRetry = true, false
		t.begin(o.now)
	}
	return nil
}

// checkSessions checks that what is missing is tried again within a bound.
func (o *Observer) checkSessions() error {
	for key, s := range o.sessions {
		t := o.Targets[key]
		overdue := s.flight == scheduler.ActRecord && o.now >= s.since+scheduler.RetryAction.Last
		wanted := o.wanted(key)
		if wanted && !s.isDue {
			s.dueSince = o.now
		}
		s.isDue = wanted
		switch {
		case s.lateAttach(o.now):
			return fmt.Errorf("target %v: nobody asks what its Attach waits for", key)
		case overdue && !s.attached && wanted && o.now >= s.dueSince+scheduler.RetryAction.Last:
			return fmt.Errorf("target %v: the Attach is due since %v and is not tried again", key, s.dueSince)
		case overdue && s.attached && !o.mayAttach(key) && t != nil && !Away(t.state):
			return fmt.Errorf("target %v: it may not be attached to, and is not detached", key)
		case overdue && s.attached && t == nil:
			return fmt.Errorf("process %v left and is not detached", key)
		case t == nil && !s.attached && s.flight == scheduler.ActRecord:
			delete(o.sessions, key)
		}
	}
	return nil
}

// takeRefusal takes in a failure to attach to a process or to suspend it; t may be nil.
func (o *Observer) takeRefusal(t *seenTarget, s *seenSession, result scheduler.Cause) {
	s.refuses = result != scheduler.CauseReplaced && result != scheduler.CauseGone
	if t != nil && result == gpreempt.ReasonResisted && (t.refusals == 0 || o.now >= t.refusedAt+scheduler.RefusalTime) {
		t.refusals++
		t.refusedAt = o.now
		o.Counts["Refusals"]++
	}
}
