package scheduler

import (
	"errors"
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// What the observer knows of the sessions of mechanisms with processes.

func (o *observer) session(key gpreempt.ProcessKey) *seenSession {
	s := o.sessions[key]
	if s == nil {
		s = &seenSession{since: o.now}
		o.sessions[key] = s
	}
	return s
}

// ready reports whether a mechanism can suspend the target.
func (o *observer) ready(t *seenTarget) bool {
	s := o.session(t.Target)
	return s.attached && !s.failed && s.flight == ActRecord
}

// wanted reports whether a process is to have a mechanism attached.
func (o *observer) wanted(key gpreempt.ProcessKey) bool {
	t := o.targets[key]
	return t != nil && !o.left[key] && t.Class == gpreempt.Offline && !o.stopped
}

func (o *observer) takeAttached(ev Attached) {
	s := o.session(ev.Target)
	if s.flight != ActAttach {
		return
	}
	s.flight, s.since = ActRecord, o.now
	if ev.Result != OutcomeOK {
		o.counts["AttachFailures"]++
		o.openBreakers(o.targets[ev.Target], ev.Result, ev.FailedGPUs)
		return
	}
	s.attached, s.failed, s.births = true, false, ev.ReportsBirths
}

func (o *observer) takeDetached(ev Detached) {
	s := o.session(ev.Target)
	if s.flight != ActDetach {
		return
	}
	s.flight, s.since = ActRecord, o.now
	t := o.targets[ev.Target]
	o.openBreakers(t, ev.Result, ev.FailedGPUs)
	if ev.Result == OutcomeOK || ev.Result == OutcomeGone {
		s.attached, s.failed, s.births = false, false, false
	} else {
		s.failed = true
		o.counts["DetachFailures"]++
	}
	if t != nil && t.detaching {
		t.detaching, t.stuck = false, false
		o.takeOutcome(t, ActDetach, ev.Result, ev.FailedGPUs)
	}
}

// takeSessionAction checks an Attach or a Detach; t is nil once the process has left.
func (o *observer) takeSessionAction(kind ActionKind, key gpreempt.ProcessKey, t *seenTarget) error {
	s := o.session(key)
	switch {
	case s.flight != ActRecord:
		return errors.New("an Attach or a Detach is still in flight")
	case kind == ActAttach && s.attached:
		return errors.New("attached twice")
	case kind == ActAttach && !o.wanted(key):
		return errors.New("it is not to be attached to")
	case kind == ActDetach && !s.attached:
		return errors.New("nothing is attached")
	case kind == ActDetach && o.wanted(key) && !s.failed:
		return errors.New("the session is good, and needed")
	case kind == ActDetach && t != nil && !o.left[key] && (t.state == TargetSuspending || t.state == TargetSuspended || t.flight != 0):
		return fmt.Errorf("detached in state %v", t.state)
	}
	s.flight = kind
	if kind == ActAttach {
		o.counts["Attaches"]++
		return nil
	}
	o.counts["Detaches"]++
	if t != nil && t.state == TargetResuming {
		t.detaching, t.waitsForRetry, t.sentAt, t.stuck = true, false, o.now, false
	}
	return nil
}

// checkSessions checks that what is missing is tried again within a bound.
func (o *observer) checkSessions() error {
	for key, s := range o.sessions {
		t := o.targets[key]
		overdue := s.flight == ActRecord && o.now >= s.since+RetryAction.Last
		switch {
		case overdue && !s.attached && o.wanted(key):
			return fmt.Errorf("target %v: the Attach failed at %v and is not tried again", key, s.since)
		case overdue && s.attached && t == nil:
			return fmt.Errorf("process %v left and is not detached", key)
		case t == nil && !s.attached && s.flight == ActRecord:
			delete(o.sessions, key)
		}
	}
	return nil
}
