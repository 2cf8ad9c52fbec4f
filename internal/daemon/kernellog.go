package daemon

import (
	"context"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// kernelLog is the device of the kernel log.
const kernelLog = "/dev/kmsg"

// kernelLogRetry is the time between two attempts to read it.
const kernelLogRetry = time.Minute

// watchKernelLog opens the breaker of a GPU that the kernel log reports.
func (d *daemon) watchKernelLog(ctx context.Context) {
	if d.backend.simulated != "" {
		return
	}
	for {
		ended := make(chan error, 1)
		go func() { ended <- safety.WatchKernelLog(ctx, kernelLog, d.inventory.GPUs, d.alarm) }()
		var err error
		select {
		case err = <-ended:
		case <-time.After(time.Second): // it can be read
			d.warnings.set("kmsg")
			err = <-ended
		}
		if err == nil {
			return
		}
		d.warnings.set("kmsg", gpreempt.WarnKernelLogUnreadable.Warn(err.Error()))
		select {
		case <-ctx.Done():
			return
		case <-time.After(kernelLogRetry):
		}
	}
}

func (d *daemon) alarm(a safety.Alarm) {
	d.log.Error("the kernel log reports a GPU failure", log.GPU(a.GPU), log.Pattern(a.Pattern),
		log.Text(a.Line), log.Issue(a.Issue))
	d.runner.Post(scheduler.Alarm{GPU: a.GPU})
}
