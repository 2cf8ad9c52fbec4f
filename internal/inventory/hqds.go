package inventory

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// hqdsAge is how long a reading is cached: it makes thousands of register reads under a
// lock of the driver.
const hqdsAge = time.Second

// HQDs is one reading of the hardware slots.
type HQDs struct {
	// Slots are in the driver's order.
	Slots []debugfs.Slot
	// Owners are the queues at that time; Matches has, for each slot, the queue that it
	// holds.
	Owners  []debugfs.Owner
	Matches []debugfs.SlotMatch
	// Stopped are GPUs whose registers cannot be read.
	Stopped []gpreempt.GPUID
	// Warnings are about lines that were not understood.
	Warnings []debugfs.Warning
	// ReadAt is when they were read, and Took how long that took.
	ReadAt time.Time
	Took   time.Duration
}

// hqdReader shares one reading of hqds among concurrent callers.
type hqdReader struct {
	observer *Observer

	mu sync.Mutex // guards what follows
	// running is the reading in progress, nil for none.
	running *hqdReading
	last    *HQDs
}

// hqdReading is a reading in progress; ended is closed when got and err are set.
type hqdReading struct {
	began time.Time
	ended chan struct{}
	got   *HQDs
	err   error
}

// HQDs reads the hardware slots, or returns a reading of less than a second ago that
// began after notBefore. The result is shared and must not be changed. The error is a
// *gpreempt.Error, or the cause of ctx.
func (o *Observer) HQDs(ctx context.Context, notBefore time.Time) (*HQDs, error) {
	r := &o.hqds
	for {
		r.mu.Lock()
		if r.last != nil && o.cfg.Now().Sub(r.last.ReadAt) < hqdsAge && !r.last.ReadAt.Add(-r.last.Took).Before(notBefore) {
			defer r.mu.Unlock()
			return r.last, nil
		}
		reading := r.running
		if reading == nil {
			reading = &hqdReading{began: o.cfg.Now(), ended: make(chan struct{})}
			r.running = reading
			go r.read(reading)
		}
		r.mu.Unlock()
		select {
		case <-reading.ended:
			if !reading.began.Before(notBefore) {
				return reading.got, reading.err
			}
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// read runs in a goroutine: a GPU that hangs may block it.
func (r *hqdReader) read(reading *hqdReading) {
	o := r.observer
	began := reading.began
	text, err := readFile(o.cfg.Root, debugfs.HQDs)
	var d debugfs.HQDDump
	if err == nil {
		d, err = debugfs.ParseHQDs(text)
	}
	o.noteReading(hqds, began, 0, err)
	if err != nil {
		reading.err = hqdsError(err)
	} else {
		reading.got = o.match(d)
		reading.got.ReadAt = o.cfg.Now()
		reading.got.Took = reading.got.ReadAt.Sub(began)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running, r.last = nil, reading.got
	close(reading.ended)
}

func hqdsError(err error) error {
	e := &gpreempt.Error{
		Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonHQDsUnreadable,
		Message: fmt.Sprintf("cannot read the hardware slots: %v", err), Next: "run gpctl doctor",
	}
	switch {
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
	queues, _ := o.cfg.Inventory.Queues()
	for _, q := range queues {
		h.Owners = append(h.Owners, debugfs.Owner{Process: q.Process, ID: q.ID, GPU: q.GPU, RingBytes: q.RingBytes, Info: q.Info})
	}
	h.Matches = debugfs.MatchSlots(h.Slots, h.Owners)
	for _, node := range d.Nodes {
		if node.Stopped {
			h.Stopped = append(h.Stopped, node.GPU)
		}
	}
	return h
}
