package inventory

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// hqdsAge is how long a reading is cached at least, and hqdsShare how many times as long as it took:
// it makes thousands of register reads under a lock of the driver.
const (
	hqdsAge   = 100 * time.Millisecond
	hqdsShare = 10
)

// HQDs is one reading of the hardware slots.
type HQDs struct {
	// Slots are in the driver's order.
	Slots []debugfs.Slot
	// Owners are the queues at that time; Matches has, for each slot, the queue that it
	// holds.
	Owners  []gpreempt.QueueEntry
	Matches []debugfs.SlotMatch
	// Stopped are GPUs whose registers cannot be read.
	Stopped []gpreempt.GPUID
	// Warnings are about lines that were not understood.
	Warnings []debugfs.Warning
	// ReadAt is when they were read, and Took how long that took.
	ReadAt time.Time
	Took   time.Duration
}

// hqdReader makes one reading at a time.
type hqdReader struct {
	// turn holds a token while hqds is read, and while last is used.
	turn chan struct{}
	last *HQDs
}

// HQDs reads the hardware slots, or returns a recent reading that
// began after notBefore. The result is shared and must not be changed. The error is a
// *gpreempt.Error, or the cause of ctx.
func (o *Observer) HQDs(ctx context.Context, notBefore time.Time) (*HQDs, error) {
	select {
	case o.hqds.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if last := o.hqds.last; last != nil && o.cfg.Now().Sub(last.ReadAt) < max(hqdsAge, hqdsShare*last.Took) && !last.ReadAt.Add(-last.Took).Before(notBefore) {
		<-o.hqds.turn
		return last, nil
	}
	var got *HQDs
	var err error
	ended := make(chan struct{})
	go func() { // a GPU that hangs may block it
		defer close(ended)
		got, err = o.readHQDs()
		o.hqds.last = got
		<-o.hqds.turn
	}()
	select {
	case <-ended:
		return got, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (o *Observer) readHQDs() (*HQDs, error) {
	began := o.cfg.Now()
	if !o.cfg.Intervals().Debugfs {
		return nil, hqdsError(errOff)
	}
	text, err := o.dump(debugfs.HQDs)
	var d debugfs.HQDDump
	if err == nil {
		d, err = debugfs.ParseHQDs(text)
	}
	o.noteReading(hqds, began, 0, err)
	if err != nil {
		return nil, hqdsError(err)
	}
	h := o.match(d)
	h.ReadAt = o.cfg.Now()
	h.Took = h.ReadAt.Sub(began)
	return h, nil
}

func hqdsError(err error) error {
	e := &gpreempt.Error{
		Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonHQDsUnreadable,
		Message: fmt.Sprintf("cannot read the hardware slots: %v", err), Next: "run gpctl doctor",
	}
	switch {
	case errors.Is(err, errOff):
		e.Next = "set discovery.debugfs: true"
	case errors.Is(err, fs.ErrNotExist):
		e.Next = "mount -t debugfs none /sys/kernel/debug, where the kernel has CONFIG_DEBUG_FS"
	case errors.Is(err, fs.ErrPermission):
		e.Next = "run gpreemptd as root outside of containers; kernel lockdown may forbid it"
	}
	return e
}

// match joins the slots with the queues that exist.
func (o *Observer) match(d debugfs.HQDDump) *HQDs {
	h := &HQDs{Slots: d.Slots(), Warnings: d.Warnings}
	h.Owners, _ = o.cfg.Inventory.Queues()
	h.Matches = debugfs.MatchSlots(h.Slots, h.Owners)
	for _, node := range d.Nodes {
		if node.Stopped {
			h.Stopped = append(h.Stopped, node.GPU)
		}
	}
	return h
}
