package scheduler

import (
	"fmt"
	"strconv"
	"strings"
)

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

// String returns the action as one line of text.
func (a Action) String() string {
	var b strings.Builder
	switch a.Kind {
	case ActSuspend:
		fmt.Fprintf(&b, "suspend target=%v seq=%d", a.Target, a.Seq)
	case ActResume:
		fmt.Fprintf(&b, "resume target=%v seq=%d", a.Target, a.Seq)
	case ActAttach:
		fmt.Fprintf(&b, "attach target=%v", a.Target)
	case ActDetach:
		fmt.Fprintf(&b, "detach target=%v", a.Target)
	case ActAnswer:
		fmt.Fprintf(&b, "answer lease=%d quiesced=%v reason=%v suspended=%d waited=%v",
			a.Lease, a.Answer.Quiesced, a.Answer.Reason, a.Answer.Suspended, a.Answer.Waited)
	case ActRecord:
		b.WriteString(a.Record.String())
	}
	return b.String()
}

// String returns the record as one line of text.
func (r Record) String() string {
	var b strings.Builder
	switch r.Kind {
	case RecordTarget:
		fmt.Fprintf(&b, "record target=%v %v->%v", r.Target, r.FromTarget, r.ToTarget)
	case RecordShadow:
		fmt.Fprintf(&b, "record shadow target=%v %v->%v", r.Target, r.FromTarget, r.ToTarget)
	case RecordLease:
		fmt.Fprintf(&b, "record lease=%d %v->%v", r.Lease, r.FromLease, r.ToLease)
		if r.End != EndNone {
			fmt.Fprintf(&b, " end=%v", r.End)
		}
	case RecordBreaker:
		fmt.Fprintf(&b, "record breaker gpu=%v open=%v", r.GPU, r.On)
	case RecordPolicy:
		b.WriteString("record policy")
	case RecordDrain:
		fmt.Fprintf(&b, "record drain on=%v", r.On)
	default:
		b.WriteString("record")
	}
	if r.Cause != "" {
		fmt.Fprintf(&b, " cause=%s", r.Cause)
	}
	if r.Kind != RecordLease && r.Lease != 0 {
		fmt.Fprintf(&b, " lease=%d", r.Lease)
	}
	if r.Took != 0 {
		fmt.Fprintf(&b, " took=%v", r.Took)
	}
	return b.String()
}
