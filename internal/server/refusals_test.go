package server

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestRefusalsOfTheSchedulerAreInWords(t *testing.T) {
	for _, tc := range []struct {
		refusal scheduler.Refusal
		want    gpreempt.Error
	}{
		{scheduler.Refusal{Reason: gpreempt.ReasonRequestIDTooLong, Value: 65, Limit: 64}, gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Message: "request_id has 65 bytes", Next: "use at most 64"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonPriorityRange, Value: 16, Limit: 15}, gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Message: "priority 16 is out of range", Next: "use 0 to 15"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonTTLRange, Value: 0, Limit: int64(time.Minute)}, gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Message: "ttl 0s is out of range", Next: "use more than 0 and at most 1m"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonDurationRange, What: "eta", Value: -1, Limit: int64(time.Minute)}, gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Message: "eta -1ns is out of range", Next: "use 0 to 1m"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonUnknownGPU, What: "7"}, gpreempt.Error{Code: gpreempt.CodeInvalidArgument, Message: "GPU 7 is not on this host", Next: "gpctl gpu list shows those that are"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonRequestIDReused, What: "a"}, gpreempt.Error{Code: gpreempt.CodeAlreadyExists, Message: `request_id "a" was used by another announcement of this client`, Next: "use a new id for each announcement and the same one only to retry it unchanged"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonLeasesPerClient, Value: 3}, gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Message: "this client holds 3 leases, which is its limit", Next: "complete some"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonLeasesPerUser, Value: 5}, gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Message: "the processes of this user hold 5 leases together, which is their limit", Next: "complete some, or raise limits.leases_per_user"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonLeasesTotal, What: "admins", Value: 8}, gpreempt.Error{Code: gpreempt.CodeResourceExhausted, Message: "8 leases of admins are live on this host, which is the limit", Next: "see their owners with gpctl lease list"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonForeignLease}, gpreempt.Error{Code: gpreempt.CodePermissionDenied, Message: "the lease belongs to another process", Next: "only the process that announced it may complete or renew it; an admin may use gpctl lease release"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonUnknownLease}, gpreempt.Error{Code: gpreempt.CodeNotFound, Message: "no such lease", Next: "it ended long ago or belongs to an earlier run of the daemon: announce again"}},
		{scheduler.Refusal{Reason: gpreempt.ReasonShuttingDown}, gpreempt.Error{Code: gpreempt.CodeUnavailable, Message: "the daemon is shutting down", Next: "continue without a lease, and announce again when the daemon is back"}},
	} {
		tc.want.Reason = tc.refusal.Reason
		got, ok := errors.AsType[*gpreempt.Error](worded(&tc.refusal))
		if !ok {
			t.Fatalf("%s has no words", tc.refusal.Reason)
		}
		if diff := cmp.Diff(&tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.refusal.Reason, diff)
		}
	}
	if other := errors.New("another"); !errors.Is(worded(other), other) || worded(nil) != nil {
		t.Error("what is no refusal is changed")
	}
}
