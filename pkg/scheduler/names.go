package scheduler

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// String returns the state.
func (s TargetState) String() string {
	return gpreempt.Word(s, "state", "none", "running", "suspending", "suspended", "resuming", "quarantined", "gone")
}

// String returns the state.
func (s LeaseState) String() string {
	return gpreempt.Word(s, "state", "none", "requested", "quiescing", "held", "ended")
}

// String returns the end.
func (e LeaseEnd) String() string {
	return gpreempt.Word(e, "end", "none", "completed", "expired", "disconnected", "client-died", "idle", "released")
}

// String returns the reason.
func (r QuiesceReason) String() string {
	return gpreempt.Word(r, "reason", "none", "done", "nothing-to-do", "max-wait", "deferred", "not-awaited", "share-floor", "unsafe", "shadow", "draining", "ended", "hold", "stuck", "drm-queues", "queue-reset", "cannot-suspend")
}

// String returns the outcome.
func (o Outcome) String() string {
	return gpreempt.Word(o, "outcome", "ok", "gone", "failed", "hardware", "replaced", "resisted", "drm-queues")
}
