package scheduler_test

import (
	"errors"
	"fmt"

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

// wanted reports whether a process is to have a mechanism attached.
func (o *Observer) wanted(key gpreempt.ProcessKey) bool {
	t := o.Targets[key]
	return t != nil && !o.left[key] && t.Class == gpreempt.Offline && !o.stopped
}

func (o *Observer) takeAttached(ev scheduler.Attached) {
	s := o.session(ev.Target)
	if s.flight != scheduler.ActAttach {
		return
	}
	s.flight, s.since = scheduler.ActRecord, o.now
	if ev.Result != scheduler.OutcomeOK {
		o.Counts["AttachFailures"]++
		o.openBreakers(o.Targets[ev.Target], ev.Result, ev.FailedGPUs)
		return
	}
	s.attached, s.failed, s.births = true, false, ev.ReportsBirths
}

func (o *Observer) takeDetached(ev scheduler.Detached) {
	s := o.session(ev.Target)
	if s.flight != scheduler.ActDetach {
		return
	}
	s.flight, s.since = scheduler.ActRecord, o.now
	t := o.Targets[ev.Target]
	o.openBreakers(t, ev.Result, ev.FailedGPUs)
	if ev.Result == scheduler.OutcomeOK || ev.Result == scheduler.OutcomeGone {
		s.attached, s.failed, s.births = false, false, false
	} else {
		s.failed = true
		o.Counts["DetachFailures"]++
	}
	if t != nil && t.Detaching {
		t.Detaching, t.stuck = false, false
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
	case kind == scheduler.ActAttach && !o.wanted(key):
		return errors.New("it is not to be attached to")
	case kind == scheduler.ActDetach && !s.attached:
		return errors.New("nothing is attached")
	case kind == scheduler.ActDetach && o.wanted(key) && !s.failed:
		return errors.New("the session is good, and needed")
	case kind == scheduler.ActDetach && t != nil && !o.left[key] && (t.state == scheduler.TargetSuspending || t.state == scheduler.TargetSuspended || t.Flight != 0):
		return fmt.Errorf("detached in state %v", t.state)
	}
	s.flight = kind
	if kind == scheduler.ActAttach {
		o.Counts["Attaches"]++
		return nil
	}
	o.Counts["Detaches"]++
	if t != nil && t.state == scheduler.TargetResuming {
		t.Detaching, t.waitsForRetry, t.sentAt, t.stuck = true, false, o.now, false
	}
	return nil
}

// checkSessions checks that what is missing is tried again within a bound.
func (o *Observer) checkSessions() error {
	for key, s := range o.sessions {
		t := o.Targets[key]
		overdue := s.flight == scheduler.ActRecord && o.now >= s.since+scheduler.RetryAction.Last
		switch {
		case overdue && !s.attached && o.wanted(key):
			return fmt.Errorf("target %v: the Attach failed at %v and is not tried again", key, s.since)
		case overdue && s.attached && t == nil:
			return fmt.Errorf("process %v left and is not detached", key)
		case t == nil && !s.attached && s.flight == scheduler.ActRecord:
			delete(o.sessions, key)
		}
	}
	return nil
}
