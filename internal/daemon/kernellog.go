package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
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
		host, _, _ := safety.Read(d.opts.Host.files(), nil) // what cannot be read is unknown
		go func() { ended <- safety.WatchKernelLog(ctx, kernelLog, host.Driver, d.inventory.GPUs, d.alarm) }()
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

// doubted identifies alarms that are doubted together.
type doubted struct {
	gpu            gpreempt.GPUID
	pattern, doubt string
}

// alarm opens the breaker. An alarm that is doubted does so once: repeated lines of a driver
// that prints them about GPUs that work would keep it open, and a GPU that fails has lines of
// other patterns too.
func (d *daemon) alarm(a safety.Alarm) {
	if a.Doubt != "" {
		if d.doubt(doubted{a.GPU, a.Pattern, a.Doubt}) > 1 {
			return
		}
	}
	d.log.Error("the kernel log reports a GPU failure", log.GPU(a.GPU), log.Pattern(a.Pattern),
		log.Text(a.Line), log.Issue(a.Issue))
	d.runner.Post(scheduler.Alarm{GPU: a.GPU})
}

// doubt counts a doubted alarm, renews the warning about them, and returns the count.
func (d *daemon) doubt(a doubted) int {
	if d.doubted == nil {
		d.doubted = map[doubted]int{}
	}
	d.doubted[a]++
	var now []gpreempt.Warning
	for _, a := range slices.SortedFunc(maps.Keys(d.doubted), func(a, b doubted) int {
		return cmp.Or(cmp.Compare(a.gpu, b.gpu), cmp.Compare(a.pattern, b.pattern))
	}) {
		now = append(now, gpreempt.WarnFailureDoubted.Warn(fmt.Sprintf("GPU %s: %d alarms of pattern %s (%s)", a.gpu, d.doubted[a], a.pattern, a.doubt)))
	}
	d.warnings.set("doubted", now...)
	return d.doubted[a]
}
