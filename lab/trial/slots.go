package trial

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// probeSlots suspends the offline targets by hand and reads the hardware slots before, during and
// after. It adds them to a repeat as a sample at a time, unless the daemon finds no slot of the
// targets, or they do not stay suspended: then nothing is known, and the repeat says why.
func (d *daemon) probeSlots(ctx context.Context, targets []*gpreemptv1.Target, at time.Duration, r *evidence.Repeat) (err error) {
	policy, err := d.admin.GetPolicy(ctx, &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		return err
	}
	longest := min(policy.GetPolicy().GetMaxSuspend().AsDuration(), slotTime)
	// The daemon may just have found the queues with which it matches slots.
	before, failed := d.settledSlots(ctx, targets, time.Now().Add(longest), func(n int) bool { return n > 0 })
	switch {
	case failed != nil:
		r.SlotsUnread = "the daemon did not read them: " + client.FromStatus(failed).Error()
		return ctx.Err()
	case before == 0:
		r.SlotsUnread = "the daemon has matched none with a queue of the jobs: gpctl queue find shows why"
		return ctx.Err()
	}
	defer func() {
		for _, t := range targets {
			_, resumeErr := d.admin.ResumeTarget(context.WithoutCancel(ctx), &gpreemptv1.ResumeTargetRequest{TargetId: t.GetTargetId()})
			if resumeErr != nil && !isUnknownTarget(resumeErr) && err == nil {
				err = resumeErr
			}
		}
	}()
	for _, t := range targets {
		if _, failed := d.admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: t.GetTargetId(), Ttl: durationpb.New(longest)}); failed != nil {
			r.SlotsUnread = fmt.Sprintf("%s (%d) could not be suspended for it: %v", t.GetComm(), t.GetPid(), client.FromStatus(failed))
			return ctx.Err()
		}
	}
	for end := time.Now().Add(longest / 4); ; {
		all, err := d.suspendedFor(ctx, targets, 0)
		switch {
		case err != nil:
			return err
		case !all && time.Now().After(end):
			r.SlotsUnread = fmt.Sprintf("not all jobs were suspended within %v when it was ordered", longest/4)
			return nil
		case !all:
			if err := sleep(ctx, pollTime); err != nil {
				return err
			}
			continue
		}
		break
	}
	began := time.Now()
	during, failed := d.settledSlots(ctx, targets, began.Add(longest/2-slotAge), func(n int) bool { return n == 0 })
	// It counts only if the targets were suspended before and after the reading.
	all, err := d.suspendedFor(ctx, targets, time.Since(began))
	switch {
	case err != nil:
		return err
	case failed != nil:
		r.SlotsUnread = "the daemon did not read them while the jobs were suspended: " + client.FromStatus(failed).Error()
		return ctx.Err()
	case !all:
		r.SlotsUnread = "the jobs were resumed while they were read"
		return ctx.Err()
	}
	values := map[string]float64{evidence.HQDsActive: float64(before), evidence.HQDsSuspended: float64(during)}
	r.Samples = append(r.Samples, evidence.Sample{At: ms(at), Values: values})
	for _, t := range targets {
		if _, err := d.admin.ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: t.GetTargetId()}); err != nil && !isUnknownTarget(err) {
			return err
		}
	}
	if after, failed := d.settledSlots(ctx, targets, time.Now().Add(longest-slotAge), func(n int) bool { return n >= before }); failed == nil {
		values[evidence.HQDsAfter] = float64(after)
	}
	return ctx.Err()
}

// settledSlots returns the number of live slots of the targets after slotSettle, and reads them
// again until settled accepts the number or the time until has come.
func (d *daemon) settledSlots(ctx context.Context, targets []*gpreemptv1.Target, until time.Time, settled func(int) bool) (n int, err error) {
	for {
		if err := sleep(ctx, slotSettle); err != nil {
			return 0, err
		}
		if n, err = d.slots(ctx, targets, time.Now()); err != nil || settled(n) || time.Now().After(until) {
			return n, err
		}
	}
}

// slots returns the number of live compute slots with queues of the targets, read after a time.
func (d *daemon) slots(ctx context.Context, targets []*gpreemptv1.Target, after time.Time) (n int, err error) {
	for {
		resp, err := d.admin.ListHqds(ctx, &gpreemptv1.ListHqdsRequest{})
		if err != nil {
			return 0, err
		}
		if resp.GetReadAt().AsTime().Before(after) {
			if err := sleep(ctx, pollTime); err != nil {
				return 0, err
			}
			continue
		}
		for _, h := range resp.GetHqds() {
			if h.GetState() == gpreemptv1.HqdState_HQD_STATE_LIVE &&
				slices.ContainsFunc(targets, func(t *gpreemptv1.Target) bool { return t.GetTargetId() == h.GetTargetId() }) {
				n++
			}
		}
		return n, nil
	}
}
