package inventory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxDump is the largest size of a file of debugfs, in bytes. The MQDs of a full host,
// 4096 queues on 8 XCCs each, take less.
const maxDump = 512 << 20

// dump is one reading of mqds.
type dump struct {
	began time.Time
	took  time.Duration
	mqds  debugfs.MQDDump
	err   error
}

// readMQDs starts a reading when it is due, in a goroutine: the driver locks each process
// while it dumps the queues, and waits for locks that others hold. No suspension waits
// for the goroutine.
func (o *Observer) readMQDs(ctx context.Context, every Intervals, due time.Time) {
	now := o.cfg.Now()
	switch {
	case every.MQDs == 0:
		o.cfg.Warn(mqds)
		o.update(mqds, func(s *Source) { s.Available, s.Note = false, "discovery.mqds_interval is 0s" })
		return
	case o.reading:
		o.warnHang(now)
		return
	case now.Before(due):
		return
	case o.cfg.Busy() && now.Sub(due) < mqdsDelay*every.MQDs:
		return
	}
	o.reading, o.began = true, now
	go func() {
		d := dump{began: now}
		var text []byte
		if text, d.err = readFile(o.cfg.Root, debugfs.MQDs); d.err == nil {
			d.mqds, d.err = debugfs.ParseMQDs(text)
		}
		d.took = o.cfg.Now().Sub(d.began)
		select {
		case o.dumps <- d:
		case <-ctx.Done():
		}
	}()
}

// hangs is how long a reading may take before a warning says that it hangs.
const hangs = 10 * time.Second

// warnHang warns about a reading that takes too long.
func (o *Observer) warnHang(now time.Time) {
	if now.Sub(o.began) < hangs {
		return
	}
	o.update(mqds, func(s *Source) { s.Available, s.Note = false, "a read has taken more than 10s so far" })
	o.cfg.Warn(mqds, gpreempt.WarnMQDsHangs.Warn("the driver has not returned its queues for more than 10 s: it may wait for a GPU that hangs"))
}

// readFile reads a whole file of debugfs, whose size is unknown before.
func readFile(root fs.FS, path string) ([]byte, error) {
	file, err := root.Open(path)
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return nil, fmt.Errorf("%s /%s: %w", e.Op, path, e.Err)
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxDump+1))
	if err == nil && len(text) > maxDump {
		err = fmt.Errorf("%s is larger than %d MiB", path, maxDump>>20)
	}
	return text, err
}

// applyDump updates the inventory from a reading, and returns the time to wait before the
// next one.
func (o *Observer) applyDump(d dump) time.Duration {
	o.reading = false
	every := o.cfg.Intervals().MQDs
	o.mqdsPace.Set(every, max(mqdsLongest*every, mqdsShare*d.took))
	if d.err != nil {
		pause := o.mqdsPace.Next(false, d.took)
		o.noteReading(mqds, d.began, pause, d.err)
		o.cfg.Warn(mqds, unreadable(d.err))
		return pause
	}
	changed := false
	for _, proc := range o.cfg.Inventory.Processes() {
		if len(proc.Queues) == 0 {
			continue
		}
		if o.bornSince(proc.Key, d.began) {
			changed = true
			continue
		}
		dumps := []debugfs.MQD{} // not nil: mqds was read
		for _, p := range d.mqds.Processes {
			if p.PID == proc.Key.PID {
				dumps = slices.Concat(dumps, p.Queues)
			}
		}
		if o.describe(proc, dumps) {
			changed = true
			o.cfg.Described(proc)
		}
	}
	var warnings []gpreempt.Warning
	for _, w := range d.mqds.Warnings {
		o.cfg.Log.Debug("the driver's mqds has an unexpected line", log.Line(w.Line), log.Text(w.Text))
	}
	if len(d.mqds.Warnings) > 0 {
		w := d.mqds.Warnings[0]
		warnings = append(warnings, gpreempt.WarnMQDsOdd.Warn(fmt.Sprintf("line %d of mqds: %s (%d such lines)", w.Line, w.Text, len(d.mqds.Warnings))))
	}
	o.cfg.Warn(mqds, warnings...)
	pause := o.mqdsPace.Next(changed, d.took)
	o.noteReading(mqds, d.began, pause, nil)
	return pause
}

// bornSince reports whether a process has queues that may be younger than a dump: then
// the dump may be of an earlier process or queue, and only the next one counts.
func (o *Observer) bornSince(key gpreempt.ProcessKey, began time.Time) bool {
	return slices.ContainsFunc(o.cfg.Inventory.QueuesOf(key), func(q gpreempt.QueueEntry) bool { return !q.FirstSeen.Before(began) })
}

// unreadable returns the warning for mqds that cannot be read.
func unreadable(err error) gpreempt.Warning {
	code := gpreempt.WarnMQDsUnreadable
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = gpreempt.WarnDebugfsMissing
	case errors.Is(err, fs.ErrPermission):
		code = gpreempt.WarnDebugfsDenied
	}
	return code.Warn("cannot read the queues' MQDs: ring addresses and queue priorities are known only for targets that dbgtrap is attached to: " + err.Error())
}
