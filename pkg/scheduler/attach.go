package scheduler

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// attachState is where the session of a mechanism with a process stands.
type attachState uint8

const (
	// detached ends with an Attach action.
	detached attachState = iota
	// attaching ends with the Attached event.
	attaching
	// attached ends with a Detach action.
	attached
	// detaching ends with the Detached event.
	detaching
)

// attachment is what the core knows of the session of a mechanism with a process. It
// outlives the target until the session is released.
type attachment struct {
	key    gpreempt.ProcessKey
	target *target // nil once the process has left
	state  attachState
	// failure is why the session can no longer suspend, or why it could not be released:
	// it is detached. OutcomeOK while nothing failed.
	failure Outcome
	// reportsBirths: QueueBorn tells of new queues, and TargetSeen does not.
	reportsBirths bool
	// dirty: it is on the list that settle goes through.
	dirty bool

	// retryAt is when the next Attach or Detach may be sent: after sessions that failed
	// and after releases that failed.
	retryAt           Time
	sessions, release Backoff
	timer             timer
}

// attachmentOf returns the attachment of a target, and makes one if the target has none.
func (c *Core) attachmentOf(t *target) *attachment {
	a := c.attachments[t.key]
	if a == nil {
		a = &attachment{key: t.key}
		a.timer.owner = a
		c.attachments[t.key] = a
	}
	a.target = t
	return a
}

func (c *Core) markAttachment(a *attachment) {
	if !a.dirty {
		a.dirty = true
		c.dirtyAttachments = append(c.dirtyAttachments, a)
	}
}

// wantsSession reports whether the target is to have a mechanism attached.
func (c *Core) wantsSession(a *attachment) bool {
	return a.target != nil && a.target.class == gpreempt.Offline && !c.stopping
}

// mustDetach reports whether the session is to be released rather than used.
func (c *Core) mustDetach(a *attachment) bool {
	return a.state == attached && (a.failure != OutcomeOK || !c.wantsSession(a))
}

// settleAttachment sends the Attach or Detach that is missing. A target that is away is
// resumed first.
func (c *Core) settleAttachment(a *attachment) {
	var kind ActionKind
	switch {
	case a.state == detached && c.wantsSession(a):
		kind = ActAttach
	case a.state == detached && a.target == nil:
		c.timers.clear(&a.timer)
		delete(c.attachments, a.key)
		return
	case c.mustDetach(a) && (a.target == nil || !a.target.isAway()):
		kind = ActDetach
	default:
		c.timers.clear(&a.timer)
		return
	}
	if c.now < a.retryAt {
		c.timers.set(&a.timer, a.retryAt)
		return
	}
	c.timers.clear(&a.timer)
	if kind == ActAttach {
		a.state = attaching
	} else {
		a.state = detaching
	}
	c.emit(kind).Target = a.key
}

func (a *attachment) fire(c *Core) { c.markAttachment(a) }

func (c *Core) attached(ev Attached) {
	a := c.attachments[ev.Target]
	if a == nil || a.state != attaching {
		return
	}
	c.markAttachment(a)
	if ev.Result != OutcomeOK {
		a.state = detached
		c.openBreakers(ev.Result, ev.FailedGPUs, a.target)
		a.retryAt = a.sessions.Fail(c.now, RetryAction)
		return
	}
	a.state, a.failure, a.reportsBirths = attached, OutcomeOK, ev.ReportsBirths
	if a.target != nil {
		c.mark(a.target.gang)
	}
}

// sessionLost handles a session that ended by itself. The queues that it had suspended
// run, or the Detach that follows resumes them.
func (c *Core) sessionLost(ev Lost) {
	a := c.attachments[ev.Target]
	if a == nil || a.state != attached {
		return
	}
	c.openBreakers(ev.Result, ev.FailedGPUs, a.target)
	c.failAttachment(a, ev.Result)
}

// failAttachment ends the use of a session that failed.
func (c *Core) failAttachment(a *attachment, failure Outcome) {
	a.failure = failure
	c.markAttachment(a)
	if a.target != nil {
		c.mark(a.target.gang)
	}
}

// detached takes in the result of a Detach, which resumes as well: for a target in
// Resuming it is the result of that.
func (c *Core) detached(ev Detached) {
	a := c.attachments[ev.Target]
	if a == nil || a.state != detaching {
		return
	}
	c.markAttachment(a)
	c.openBreakers(ev.Result, ev.FailedGPUs, a.target)
	if ev.Result == OutcomeOK || ev.Result == OutcomeGone {
		a.state, a.reportsBirths = detached, false
		if a.failure != OutcomeOK {
			a.retryAt = a.sessions.Fail(c.now, RetryAction)
		}
		a.release = Backoff{}
		a.failure = OutcomeOK
	} else {
		a.state, a.failure = attached, ev.Result
		a.retryAt = a.release.Fail(c.now, RetryAction)
	}
	if t := a.target; t != nil {
		c.mark(t.gang)
		if t.state == TargetResuming && t.seq == 0 {
			c.resumeResult(t, ev.Result, ev.FailedGPUs, ev.Took)
		}
	}
}

// queueBorn takes in a birth that the mechanism reported.
func (c *Core) queueBorn(key gpreempt.ProcessKey) {
	t := c.targets[key]
	if t == nil || !t.attachment.reportsBirths {
		return
	}
	t.queues++
	c.mark(t.gang)
}

// openBreakers opens the breakers of the GPUs that reported an error; those of the
// target when it is not known which they are.
func (c *Core) openBreakers(result Outcome, gpus []gpreempt.GPUID, t *target) {
	if result != OutcomeHardware {
		return
	}
	if len(gpus) == 0 && t != nil {
		gpus = t.gpus
	}
	for _, id := range gpus {
		c.openBreaker(c.gpu(id), CauseHardware)
	}
}
