package log

import (
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Records writes the state changes of the scheduler.
type Records struct {
	// Log is a logger that holds no lines back.
	Log *zap.Logger
	// LeaseID returns the lease ID that clients know.
	LeaseID func(scheduler.LeaseID) string
}

// Write writes a state change in one line: at Warn if the operator may have to act, at
// Info if an admin acted or the class of a target changed, and at Debug the daily work.
// An announcement that suspends one process is eight lines at Debug, and a server may
// announce thousands of times a second; the event stream has all of them as well.
func (rs Records) Write(r scheduler.Record) {
	level := zapcore.DebugLevel
	switch {
	case r.Kind == scheduler.RecordBreaker && r.On, r.Kind == scheduler.RecordReset, r.ToTarget == scheduler.TargetQuarantined,
		r.Failed(),
		r.Kind == scheduler.RecordTarget && (r.Cause == scheduler.CauseStuck || r.Cause == scheduler.CauseKilled):
		level = zapcore.WarnLevel
	case r.Kind == scheduler.RecordPolicy, r.Kind == scheduler.RecordDrain, r.Kind == scheduler.RecordBreaker,
		reclassified(r), r.Cause == scheduler.CauseQuarantineOver:
		level = zapcore.InfoLevel
	}
	if entry := rs.Log.Check(level, changeMessage(r)); entry != nil {
		entry.Write(rs.fields(r)...)
	}
}

// reclassified reports whether the class or the priority of a target changed, and not
// its state.
func reclassified(r scheduler.Record) bool {
	return r.Kind == scheduler.RecordTarget && r.Cause == scheduler.CauseClass && r.FromTarget == r.ToTarget
}

// changeMessage returns the message of a state change.
func changeMessage(r scheduler.Record) string {
	switch {
	case reclassified(r):
		return "target reclassified"
	case r.Kind == scheduler.RecordTarget:
		return "target changed"
	case r.Kind == scheduler.RecordShadow:
		return "target would have changed"
	case r.Kind == scheduler.RecordLease && r.FromLease == r.ToLease:
		return "lease answered"
	case r.Kind == scheduler.RecordLease:
		return "lease changed"
	case r.Kind == scheduler.RecordBreaker && r.On:
		return "breaker opened"
	case r.Kind == scheduler.RecordBreaker:
		return "breaker closed"
	case r.Kind == scheduler.RecordReset:
		return "queue reset by the driver"
	case r.Kind == scheduler.RecordDrain && r.On:
		return "drain began"
	case r.Kind == scheduler.RecordDrain:
		return "drain ended"
	case r.Kind == scheduler.RecordPolicy:
		return "policy changed"
	}
	return "state changed"
}

// fields returns the subject of a state change, and what changed.
func (rs Records) fields(r scheduler.Record) []zap.Field {
	fields := make([]zap.Field, 0, 8)
	switch r.Kind {
	case scheduler.RecordTarget, scheduler.RecordShadow:
		fields = append(fields, Target(r.Target))
		if reclassified(r) || r.Cause == scheduler.CauseSeen {
			fields = append(fields, Class(r.Class))
		}
		if !reclassified(r) {
			fields = append(fields, From(r.FromTarget.String()), To(r.ToTarget.String()))
		}
	case scheduler.RecordLease:
		fields = append(fields, rs.lease(r), From(r.FromLease.String()), To(r.ToLease.String()))
		if r.End != scheduler.EndNone {
			fields = append(fields, End(r.End))
		}
	case scheduler.RecordBreaker:
		fields = append(fields, GPU(r.GPU))
	case scheduler.RecordReset:
		fields = append(fields, GPU(r.GPU), Suspects(r.Suspects))
		if !r.Target.IsZero() {
			fields = append(fields, Target(r.Target), Class(r.Class))
		}
	case scheduler.RecordNone, scheduler.RecordPolicy, scheduler.RecordDrain:
	}
	if r.Lease != 0 && r.Kind != scheduler.RecordLease {
		fields = append(fields, rs.lease(r))
	}
	if r.Cause != "" {
		fields = append(fields, Cause(string(r.Cause)))
	}
	if r.Took != 0 {
		fields = append(fields, Took(r.Took))
	}
	return fields
}

func (rs Records) lease(r scheduler.Record) zap.Field { return Lease(rs.LeaseID(r.Lease)) }
