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
