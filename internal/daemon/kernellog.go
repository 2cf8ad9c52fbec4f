package daemon

import (
	"context"
	"time"

	"github.com/gpreempt/gpreempt/internal/breaker"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// kernelLog is where the kernel tells of GPUs in trouble.
const kernelLog = "/dev/kmsg"

// kernelLogAgain is how long after it could not be read it is tried again.
const kernelLogAgain = time.Minute

// watchKernelLog opens the breaker of a GPU the kernel complains of.
func (d *daemon) watchKernelLog(ctx context.Context) {
	if d.backend.simulated != "" {
		return
	}
	for {
		works := time.AfterFunc(time.Second, func() { d.warnings.set("kmsg") })
		err := breaker.Watch(ctx, kernelLog, d.inventory.GPUs, d.alarm)
		works.Stop()
		if err == nil {
			return
		}
		d.warnings.set("kmsg", gpreempt.WarnKernelLogUnreadable.Warn(err.Error()))
		select {
		case <-ctx.Done():
			return
		case <-time.After(kernelLogAgain):
		}
	}
}

func (d *daemon) alarm(a breaker.Alarm) {
	d.log.Error("the kernel tells of a GPU in trouble", logkey.GPU(a.GPU), logkey.Pattern(a.Pattern),
		logkey.Text(a.Line), logkey.Issue(a.Issue))
	d.runner.Post(scheduler.Alarm{GPU: a.GPU})
}
