package spans

import (
	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// RecordOf returns the record that an event of the API was made from; the caller maps
// its lease ID to a number. An event without the target, lease or GPU that it must have
// is a RecordNone.
func RecordOf(e *gpreemptv1.Event, lease scheduler.LeaseID) scheduler.Record {
	r := scheduler.Record{
		At: max(0, e.GetClock().AsDuration()), Kind: scheduler.RecordKind(e.GetKind()), Lease: lease,
		FromTarget: scheduler.TargetState(e.GetFromTarget()), ToTarget: scheduler.TargetState(e.GetToTarget()),
		FromLease: scheduler.LeaseState(e.GetFromLease()), ToLease: scheduler.LeaseState(e.GetToLease()),
		End: scheduler.LeaseEnd(e.GetEnd()), GPU: gpreempt.GPUID(e.GetGpuId()), Cause: scheduler.Cause(e.GetCause()), Took: e.GetTook().AsDuration(),
		// The event has the record's flag in its text only.
		On: e.GetCause() != string(scheduler.CauseCooledDown),
	}
	r.Target, _ = gpreempt.ParseProcessKey(e.GetTargetId()) // the zero key for no target
	if r.Kind == scheduler.RecordTarget && r.Target.IsZero() || r.Kind == scheduler.RecordLease && r.Lease == 0 ||
		r.Kind == scheduler.RecordBreaker && r.GPU == 0 {
		r.Kind = scheduler.RecordNone
	}
	return r
}
