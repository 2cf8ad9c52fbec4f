package scheduler

import "strconv"

// word returns the name of an enum value.
func word[T ~uint8](v T, names ...string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return strconv.Itoa(int(v))
}

// String returns the state.
func (s TargetState) String() string {
	return word(s, "none", "running", "suspending", "suspended", "resuming", "quarantined", "gone")
}

// String returns the state.
func (s LeaseState) String() string {
	return word(s, "none", "requested", "quiescing", "held", "ended")
}

// String returns the end.
func (e LeaseEnd) String() string {
	return word(e, "none", "completed", "expired", "disconnected", "client-died", "idle", "released")
}

// String returns the reason.
func (r QuiesceReason) String() string {
	return word(r, "none", "done", "nothing-to-do", "max-wait", "deferred", "not-awaited", "share-floor", "unsafe", "shadow", "draining", "ended", "hold")
}

// String returns the outcome.
func (o Outcome) String() string {
	return word(o, "ok", "gone", "failed", "hardware", "replaced", "debugged")
}

// String returns the choice as the config file does.
func (w SuspendWhen) String() string { return word(w, "unset", "at-once", "eta", "slack") }

// String returns the choice as the config file does.
func (l Linger) String() string { return word(l, "unset", "none", "fixed", "adaptive") }

// String returns the scope as the config file does.
func (g GangScope) String() string { return word(g, "unset", "process", "job") }
