package server

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// worded puts the refusal of the scheduler into words.
func worded(err error) error {
	r, ok := errors.AsType[*scheduler.Refusal](err)
	if !ok {
		return err
	}
	value, limit := durationText(time.Duration(r.Value)), durationText(time.Duration(r.Limit))
	invalid := func(message, next string) error {
		return refusal(gpreempt.CodeInvalidArgument, r.Reason, message, next)
	}
	exhausted := func(message, next string) error {
		return refusal(gpreempt.CodeResourceExhausted, r.Reason, message, next)
	}
	switch r.Reason {
	case gpreempt.ReasonRequestIDTooLong:
		return invalid(fmt.Sprintf("request_id has %d bytes", r.Value), fmt.Sprintf("use at most %d", r.Limit))
	case gpreempt.ReasonPriorityRange:
		return priorityRange(uint32(r.Value))
	case gpreempt.ReasonTTLRange:
		return invalid(fmt.Sprintf("ttl %v is out of range", value), fmt.Sprintf("use more than 0 and at most %v", limit))
	case gpreempt.ReasonDurationRange:
		return invalid(fmt.Sprintf("%s %v is out of range", r.What, value), fmt.Sprintf("use 0 to %v", limit))
	case gpreempt.ReasonUnknownGPU:
		return unknownGPU(r.What)
	case gpreempt.ReasonRequestIDReused:
		return refusal(gpreempt.CodeAlreadyExists, r.Reason,
			fmt.Sprintf("request_id %q was used by another announcement of this client", r.What),
			"use a new id for each announcement and the same one only to retry it unchanged")
	case gpreempt.ReasonLeasesPerClient:
		return exhausted(fmt.Sprintf("this client holds %d leases, which is its limit", r.Value), "complete some")
	case gpreempt.ReasonLeasesPerUser:
		return exhausted(fmt.Sprintf("the processes of this user hold %d leases together, which is their limit", r.Value),
			"complete some, or raise limits.leases_per_user")
	case gpreempt.ReasonLeasesTotal:
		return exhausted(fmt.Sprintf("%d leases of %s are live on this host, which is the limit", r.Value, r.What),
			"see their owners with gpctl lease list")
	case gpreempt.ReasonForeignLease:
		return refusal(gpreempt.CodePermissionDenied, r.Reason, "the lease belongs to another process",
			"only the process that announced it may complete or renew it; an admin may use gpctl lease release")
	case gpreempt.ReasonUnknownLease:
		return refusal(gpreempt.CodeNotFound, r.Reason, "no such lease",
			"it ended long ago or belongs to an earlier run of the daemon: announce again")
	case gpreempt.ReasonShuttingDown:
		return errShuttingDown
	default:
		return err
	}
}

// durationText returns a duration as people write it: 2h0m0s is 2h.
func durationText(d time.Duration) string {
	return strings.NewReplacer("h0m0s", "h", "m0s", "m").Replace(d.String())
}

// unknownGPU is the error for a GPU that is not on this host.
func unknownGPU(name string) error {
	return refusal(gpreempt.CodeInvalidArgument, gpreempt.ReasonUnknownGPU,
		fmt.Sprintf("GPU %s is not on this host", name), "gpctl gpu list shows those that are")
}

// unknownTarget is the error for a process that owns no queues.
func unknownTarget(key gpreempt.ProcessKey) error {
	return refusal(gpreempt.CodeNotFound, gpreempt.ReasonUnknownTarget,
		fmt.Sprintf("process %v owns no GPU queues, or has exited", key), "gpctl target list shows those that do")
}
