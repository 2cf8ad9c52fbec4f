package scheduler

import (
	"fmt"
	"strings"
)

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
	case ActKill:
		fmt.Fprintf(&b, "kill target=%v", a.Target)
	case ActInspect:
		fmt.Fprintf(&b, "inspect target=%v seq=%d", a.Target, a.Seq)
	case ActAnswer:
		fmt.Fprintf(&b, "answer lease=%d quiesced=%v reason=%v suspended=%d waited=%v",
			a.Lease, a.Answer.Quiesced, a.Answer.Reason, a.Answer.Suspended, a.Answer.Waited)
		if a.Answer.CannotSuspend > 0 {
			fmt.Fprintf(&b, " cannot-suspend=%d", a.Answer.CannotSuspend)
		}
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
	case RecordReset:
		fmt.Fprintf(&b, "record reset gpu=%v target=%v class=%v suspects=%d", r.GPU, r.Target, r.Class, r.Suspects)
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
