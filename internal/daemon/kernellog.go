package daemon

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// kernelLog is the device of the kernel log.
const kernelLog = "/dev/kmsg"

// kernelLogRetry is the time between two attempts to read it.
const kernelLogRetry = time.Minute

// watchKernelLog opens the breaker of a GPU that the kernel log reports, and notices queues that
// the driver has reset.
func (d *daemon) watchKernelLog(ctx context.Context) {
	if d.backend.simulated != "" {
		return
	}
	for {
		ended := make(chan error, 1)
		host, _, _ := safety.Read(d.opts.Host.files(), nil) // what cannot be read is unknown
		go func() { ended <- d.kernelLog.Watch(ctx, host.Driver) }()
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

// resetShown is for how long a warning shows that a queue was reset.
const resetShown = time.Hour

// resets are the last queues that the driver has reset, by GPU.
type resets struct {
	mu   sync.Mutex // guards last
	last map[gpreempt.GPUID]lastReset
}

type lastReset struct {
	at   time.Time
	text string
}

// alarm opens the breaker. An alarm that is doubted does so once: repeated lines of a driver
// that prints them about GPUs that work would keep it open, and a GPU that fails has lines of
// other patterns too. The kernel log calls it by one goroutine at a time.
func (d *daemon) alarm(a safety.Alarm) {
	if a.Doubt != "" {
		text := fmt.Sprintf("GPU %s: pattern %s (%s)", a.GPU, a.Pattern, a.Doubt)
		if slices.Contains(d.doubted, text) {
			return
		}
		d.doubted = append(d.doubted, text)
		d.warnings.set("doubted", about(gpreempt.WarnFailureDoubted, "alarms of ", slices.Clone(d.doubted))...)
	}
	d.log.Error("the kernel log reports a GPU failure", log.GPU(a.GPU), log.Pattern(a.Pattern),
		log.Text(a.Line), log.Issue(a.Issue))
	var ev scheduler.Event = scheduler.Alarm{GPU: a.GPU, Unmap: a.Pattern == safety.PatternPreemptionFailed || a.Pattern == safety.PatternQueueReset}
	if a.Reset != nil {
		if reset, here := d.reset(a.GPU, *a.Reset); here {
			ev = reset
		}
	}
	d.runner.Post(ev)
}

// reset returns whose queue was reset; false if the line is about another partition.
func (d *daemon) reset(id gpreempt.GPUID, r safety.Reset) (ev scheduler.QueueReset, here bool) {
	gpus := d.inventory.GPUs()
	at := slices.IndexFunc(gpus, func(g gpreempt.GPU) bool { return g.ID == id })
	if at < 0 {
		return ev, false
	}
	queues, _ := d.inventory.Queues()
	ev = scheduler.QueueReset{GPU: id}
	ev.Process, ev.Suspects = r.Suspects(gpus[at], queues, func(pid int32) uint32 { return discovery.PASID(d.backend.root, pid) })
	if len(ev.Suspects) == 0 && !ev.Process.IsZero() {
		return ev, false
	}
	text := fmt.Sprintf("GPU %v: a queue of process %d", id, ev.Process.PID)
	switch {
	case ev.Process.IsZero():
		text = fmt.Sprintf("GPU %v: a queue of a process that is not known", id)
	case len(ev.Suspects) > 1:
		text += fmt.Sprintf(", or of one of the %d others that may have a ring at the same address", len(ev.Suspects)-1)
	}
	d.resets.mu.Lock()
	defer d.resets.mu.Unlock()
	if d.resets.last == nil {
		d.resets.last = map[gpreempt.GPUID]lastReset{}
	}
	d.resets.last[id] = lastReset{time.Now(), text}
	return ev, true
}

// resetWarning returns the warning about the queues that were reset in the last hour.
func (d *daemon) resetWarning() []gpreempt.Warning {
	d.resets.mu.Lock()
	defer d.resets.mu.Unlock()
	var texts []string
	for _, id := range slices.Sorted(maps.Keys(d.resets.last)) {
		if last := d.resets.last[id]; time.Since(last.at) < resetShown {
			texts = append(texts, last.text)
		}
	}
	return about(gpreempt.WarnQueueReset, "the driver has reset ", texts)
}

// post sends the result of an action to the scheduler. Before a good result of a suspend it reads
// what the driver printed meanwhile: the driver returns success also when it has reset a queue, or
// when MES has not removed one.
func (d *daemon) post(ev scheduler.Event) {
	if s, ok := ev.(scheduler.Suspended); ok && s.Result == "" {
		d.kernelLog.CatchUp()
	}
	d.runner.Post(ev)
}
